"""What policies are compared on: rows of a model, its data and a perturbation, and how they are made."""

from __future__ import annotations

import gzip
import pickle
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from themis.criteria.criterion import Criterion
from themis.criteria.fitting import fit_to
from themis.criteria.names import PAPER, choose_criterion
from themis.data.seeds import Seeds, read_seeds
from themis.oracle import choose_oracle
from themis.runs.source import Origin
from themis.target.target import AnyTarget, Target

SIX = "rotate + shift + brightness + contrast + gaussian_blur"
TRAIN_INPUTS = 10_000
"""Training inputs that a criterion learns from, a fixed random sample."""
BATCH = 256
TARGET = ("module", "bounds", "preprocess", "layers", "neurons", "oracle")
"""What a target is made again from."""


@dataclass(frozen=True)
class Row:
    """One setting of the comparison. `model` is a name of the zoo or `module:factory`; the zoo's has its own data."""

    name: str
    model: str
    perturbation: str
    magnitude: float | None = None
    data: str = ""

    @staticmethod
    def of(text: str) -> Row:
        """A row of the user's own: `MODEL|DATA|PERTURBATION|MAGNITUDE`; DATA and MAGNITUDE may be empty."""
        parts = [each.strip() for each in text.split("|")]
        if len(parts) != 4 or not parts[0] or not parts[2]:
            raise SystemExit(f"--holdout must be MODEL|DATA|PERTURBATION|MAGNITUDE, got {text!r}")
        model, data, perturbation, magnitude = parts
        name = " ".join(each for each in (model, data, perturbation, magnitude) if each)
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


@dataclass(frozen=True)
class Bench:
    """A model, the seeds that it answers rightly, and what criteria learn from."""

    target: AnyTarget
    seeds: Seeds
    train: Seeds | None


@cache
def make_bench(model: str, data: str, n_seeds: int, device: str, packed: str | None) -> Bench:
    """The bench of a row's model: out of a packed file that has it, else from its origin."""
    if packed is not None and (model, data) in (kept := _read_pack(packed)):
        return _unpack(kept[model, data], n_seeds, device)
    is_own = ":" in model or "." in model
    origin = Origin(model=model if is_own else "", zoo=None if is_own else model, data=data, device=device)
    target, train = origin.target(), origin.read_train()
    seeds = right_seeds(target, read_seeds(origin.read()), n_seeds)
    return Bench(target, seeds, None if train is None else read_seeds(train, TRAIN_INPUTS))


@cache
def fitted(name: str, bench: tuple[Any, ...]) -> Criterion:
    """A criterion of the paper at its settings, fitted once; `bench` is what makes the bench."""
    made = make_bench(*bench)
    return fit_to(choose_criterion(PAPER[name]), made.target, made.seeds if made.train is None else made.train)


def right_seeds(target: AnyTarget, everything: Seeds, n: int) -> Seeds:
    """A fixed random sample of the seeds that the model answers as it should, by the task's oracle."""
    outputs = []
    with target.opened(), torch.no_grad():
        for first in range(0, len(everything), BATCH):
            rows = torch.arange(first, min(first + BATCH, len(everything)))
            outputs.append(target.forward(everything.take(rows).to(target.device)).float())
    clean, labels = torch.cat(outputs), everything.labels
    labels = None if labels is None else labels.to(clean.device)
    is_usable = choose_oracle(target.oracle).settle(clean, labels).check(clean, labels)
    return read_seeds(everything[is_usable.cpu().nonzero().squeeze(1)], n)


# One file for a machine without the data folder


def write_pack(path: Path, benches: list[tuple[Any, ...]]) -> None:
    """Keep benches in one file; pictures as whole numbers where they are 255ths, so that it stays small."""
    kept = {}
    for what in dict.fromkeys(benches):
        bench = make_bench(*what)
        train = None if bench.train is None else _pack(bench.train)
        if not isinstance(bench.target, Target):
            raise SystemExit(f"--pack must be of PyTorch models, {what[0]} is none: leave it out")
        how = {name: getattr(bench.target, name) for name in TARGET}
        kept[what[0], what[1]] = {"target": how, "seeds": _pack(bench.seeds), "train": train}
    with gzip.open(path, "wb", compresslevel=3) as file:
        pickle.dump(kept, file)


@cache
def _read_pack(path: str) -> dict[tuple[str, str], dict[str, Any]]:
    with gzip.open(path, "rb") as file:
        kept: dict[tuple[str, str], dict[str, Any]] = pickle.load(file)
        return kept


def _unpack(kept: dict[str, Any], n_seeds: int, device: str) -> Bench:
    target = Target(**kept["target"])
    target.module.to(torch.device(device))
    train = None if kept["train"] is None else _seeds(*kept["train"])
    return Bench(target, read_seeds(_seeds(*kept["seeds"]), n_seeds), train)


def _pack(seeds: Seeds) -> tuple[Any, ...]:
    inputs = seeds.take(torch.arange(len(seeds)))
    whole = (inputs * 255).round().to(torch.uint8)
    features = seeds.features if inputs.ndim == 2 else None
    return whole if torch.equal(whole.float() / 255, inputs) else inputs, seeds.labels, seeds.seed_id, features


def _seeds(inputs: Tensor, labels: Tensor | None, seed_id: Tensor, features: Any) -> Seeds:
    seeds = Seeds(inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs, labels, seed_id)
    return seeds if features is None else seeds.with_features(features)
