"""The rows on which policies are compared: a model, its data and a perturbation, and how they are loaded."""

from __future__ import annotations

import gzip
import pickle
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from themis.data.seeds import Seeds, read_seeds
from themis.oracle import choose_oracle
from themis.runs.source import Origin
from themis.target.target import AnyTarget, Target
from themis_lab.criteria import PAPER, Criterion, choose_criterion, fit_to

SIX = "rotate + shift + brightness + contrast + gaussian_blur(sigma=0:0.02)"
TRAIN_INPUTS = 10_000
"""Training inputs that a criterion learns from, a fixed random sample."""
BATCH = 256
TARGET = ("module", "bounds", "preprocess", "layers", "neurons", "oracle")
"""Attributes from which a target is restored."""


@dataclass(frozen=True)
class Row:
    """One setting of the comparison. `model` is a name in the zoo, which implies the data, or `module:factory`."""

    name: str
    model: str
    perturbation: str
    magnitude: float | None = None
    data: str = ""

    @staticmethod
    def of(text: str) -> Row:
        """A user's row: `MODEL|DATA|PERTURBATION|MAGNITUDE`; DATA and MAGNITUDE may be empty."""
        parts = [part.strip() for part in text.split("|")]
        if len(parts) != 4 or not parts[0] or not parts[2]:
            raise SystemExit(f"--holdout must be MODEL|DATA|PERTURBATION|MAGNITUDE, got {text!r}")
        model, data, perturbation, magnitude = parts
        name = " ".join(filter(None, (model, data, perturbation, magnitude)))
        return Row(name, model, perturbation, float(magnitude) if magnitude else None, data)


ROWS = (
    Row("resnet56 gaussian 0.02", "resnet56-cifar10", "gaussian", 0.02),
    Row("resnet56 gaussian 0.04", "resnet56-cifar10", "gaussian", 0.04),
    Row("resnet56 fgsm 1/255", "resnet56-cifar10", "fgsm", 1 / 255),
    Row("resnet56 six, quarter range", "resnet56-cifar10", SIX, 0.25),
    Row("resnet56 six, half range", "resnet56-cifar10", SIX, 0.5),
    Row("resnet56 six, full range", "resnet56-cifar10", SIX, 1.0),
    Row("resnet56 rain", "resnet56-cifar10", "rain"),
    Row("resnet56 fog", "resnet56-cifar10", "fog"),
    Row("lenet5 gaussian 0.3", "lenet5-mnist", "gaussian", 0.3),
    Row("lenet5 gaussian 0.6", "lenet5-mnist", "gaussian", 0.6),
    Row("lenet5 six, half range", "lenet5-mnist", SIX, 0.5),
    Row("pdf edit", "mlp-pdf", "edit"),
    Row("pdf table_noise", "mlp-pdf", "table_noise"),
)
"""six: rotation, shift (two dimensions), brightness, contrast and blur, one after the other."""

ATTACK_ROWS = (
    Row("lenet1 cw", "lenet1-mnist", "cw"),
    Row("pdf cw", "mlp-pdf", "cw"),
    Row("drebin cw", "mlp-drebin", "cw"),
    Row("lenet1 pgd 8/255", "lenet1-mnist", "pgd"),
    Row("lenet5 pgd 0.1", "lenet5-mnist", "pgd", 0.1),
    Row("pdf pgd 8/255", "mlp-pdf", "pgd"),
    Row("drebin pgd 8/255", "mlp-drebin", "pgd"),
    Row("resnet56 pgd 1/255", "resnet56-cifar10", "pgd", 1 / 255),
    Row("resnet56 cw", "resnet56-cifar10", "cw"),
)
"""Attacks that cost 30 (PGD) or 303 (CW) passes per test, so that campaigns have few tests; for `--tests`."""


@dataclass(frozen=True)
class SearchedModel:
    """A model, the seeds that it answers correctly, and the data that criteria are fitted to."""

    target: AnyTarget
    seeds: Seeds
    train: Seeds | None


@cache
def make_bench(model: str, data: str, n_seeds: int, device: str, packed: str | None) -> SearchedModel:
    """The model of a row with its data, from a packed file if that has it, otherwise from its origin."""
    if packed is not None and (model, data) in (kept := _read_pack(packed)):
        return _unpack(kept[model, data], n_seeds, device)
    is_own = ":" in model or "." in model
    origin = Origin(model=model if is_own else "", zoo=None if is_own else model, data=data, device=device)
    target, train = origin.target(), origin.read_train()
    seeds = correct_seeds(target, read_seeds(origin.read()), n_seeds)
    return SearchedModel(target, seeds, None if train is None else read_seeds(train, TRAIN_INPUTS))


@cache
def fitted(name: str, bench: tuple[Any, ...]) -> Criterion:
    """A criterion of the paper with its settings, fitted once; `bench` holds the arguments of `make_bench`."""
    model = make_bench(*bench)
    return fit_to(choose_criterion(PAPER[name]), model.target, model.seeds if model.train is None else model.train)


def correct_seeds(target: AnyTarget, seeds: Seeds, n: int) -> Seeds:
    """A fixed random sample of the seeds that the model answers correctly according to its oracle."""
    outputs = []
    with target.opened(), torch.no_grad():
        for first in range(0, len(seeds), BATCH):
            rows = torch.arange(first, min(first + BATCH, len(seeds)))
            outputs.append(target.forward(seeds.take(rows).to(target.device)).float())
    clean, labels = torch.cat(outputs), seeds.labels
    labels = None if labels is None else labels.to(clean.device)
    is_usable = choose_oracle(target.oracle).settle(clean, labels).check(clean, labels)
    return read_seeds(seeds[is_usable.cpu().nonzero().squeeze(1)], n)


# A file for machines without the data folder


def write_pack(path: Path, benches: list[tuple[Any, ...]]) -> None:
    """Write models to one file; pictures are stored as bytes if their values are multiples of 1/255."""
    packed = {}
    for arguments in dict.fromkeys(benches):
        bench = make_bench(*arguments)
        train = None if bench.train is None else _pack(bench.train)
        if not isinstance(bench.target, Target):
            raise SystemExit(f"--pack supports PyTorch models only, {arguments[0]} is not one: leave it out")
        target = {name: getattr(bench.target, name) for name in TARGET}
        packed[arguments[0], arguments[1]] = {"target": target, "seeds": _pack(bench.seeds), "train": train}
    with gzip.open(path, "wb", compresslevel=3) as file:
        pickle.dump(packed, file)


@cache
def _read_pack(path: str) -> dict[tuple[str, str], dict[str, Any]]:
    with gzip.open(path, "rb") as file:
        packed: dict[tuple[str, str], dict[str, Any]] = pickle.load(file)
        return packed


def _unpack(kept: dict[str, Any], n_seeds: int, device: str) -> SearchedModel:
    target = Target(**kept["target"])
    target.module.to(torch.device(device))
    train = None if kept["train"] is None else _seeds(*kept["train"])
    return SearchedModel(target, read_seeds(_seeds(*kept["seeds"]), n_seeds), train)


def _pack(seeds: Seeds) -> tuple[Any, ...]:
    inputs = seeds.take(torch.arange(len(seeds)))
    pixels = (inputs * 255).round().to(torch.uint8)
    features = seeds.features if inputs.ndim == 2 else None
    return pixels if torch.equal(pixels.float() / 255, inputs) else inputs, seeds.labels, seeds.seed_id, features


def _seeds(inputs: Tensor, labels: Tensor | None, seed_id: Tensor, features: Any) -> Seeds:
    seeds = Seeds(inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs, labels, seed_id)
    return seeds if features is None else seeds.with_features(features)
