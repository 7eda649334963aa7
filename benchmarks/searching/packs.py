"""Models with seeds to search, to train on and to judge by, and one file of them for a machine without the data."""

from __future__ import annotations

import lzma
import pickle
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from searching.rows import TARGET, _pack, _seeds
from themis.data.hashes import seed_hashes
from themis.data.seeds import Seeds, read_seeds
from themis.experiments.retraining.grading import with_settled_oracle
from themis.runs.parts import Parts, choose_part
from themis.runs.source import Origin
from themis.target.target import Target

SEEDS = {"dave2-udacity": (900, 450), "resnet56-cifar10": (3_000, 1_500)}
"""Test seeds and training inputs at most; of others these:"""
USUAL = (4_000, 2_000)
SHARES = (0.4, 0.0, 0.6)
"""Of the test seeds: searched, and judged on. What is trained on besides comes from the training data."""

FILTERS = [{"id": lzma.FILTER_DELTA, "dist": 1}, {"id": lzma.FILTER_LZMA2, "preset": 1}]
"""Pixels by how far they are from their neighbours: it halves pictures."""


@dataclass(frozen=True)
class Held:
    """A model, test seeds, and inputs of the training data none of which is among them."""

    target: Target
    test: Seeds
    train: Seeds

    def settled(self, oracle: str | None, seeds: Seeds) -> Target:
        """The target with its oracle, or another, fixed by seeds' clean outputs."""
        return with_settled_oracle(self.target if oracle is None else replace(self.target, oracle=oracle), seeds)

    def parts(self, share: float) -> Parts:
        """Search, train and judge seeds; a share of each."""
        part = choose_part(seed_hashes(self.test), SHARES, 0)
        search, judge = (torch.from_numpy(np.flatnonzero(part == k)) for k in (0, 2))
        some = (self.test[search], self.train, self.test[judge])
        return Parts(*(read_seeds(each, max(1, round(len(each) * share))) for each in some))


def hold(model: str, device: str) -> Held:
    """A model of the zoo with its data."""
    n_test, n_train = SEEDS.get(model, USUAL)
    origin = Origin(zoo=model, device=device)
    target, test = origin.target(), read_seeds(origin.read(), n_test)
    train = read_seeds(origin.read_train(), n_train + n_test)
    if not isinstance(target, Target):
        raise SystemExit(f"{model} must be a PyTorch model to be retrained")
    is_new = ~np.isin(seed_hashes(train), seed_hashes(test))  # tables repeat rows
    return Held(target, test, read_seeds(train[torch.from_numpy(np.flatnonzero(is_new))], n_train))


def write_pack(path: Path, models: list[str]) -> None:
    """Keep models in one file; pictures as whole numbers where they are 255ths."""
    kept = {}
    for model in models:
        held = hold(model, "cpu")
        how = {name: getattr(held.target, name) for name in TARGET}
        kept[model] = {"target": how, "test": _pack(held.test), "train": _pack(held.train)}
    with lzma.open(path, "wb", filters=FILTERS) as file:
        pickle.dump(kept, file)


@cache
def _read(path: str) -> dict[str, dict[str, Any]]:
    with lzma.open(path, "rb") as file:
        kept: dict[str, dict[str, Any]] = pickle.load(file)
        return kept


def read_pack(path: str, model: str, device: str) -> Held:
    """A model out of a packed file."""
    kept = _read(path)
    if model not in kept:
        raise SystemExit(f"{path} must hold {model}, it has {', '.join(kept)}: pack it too")
    target = Target(**kept[model]["target"])
    target.module.to(torch.device(device))
    return Held(target, *(_seeds(*kept[model][name]) for name in ("test", "train")))
