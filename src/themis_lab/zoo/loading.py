"""Targets and data of the zoo's entries, and whether they reach their published accuracy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from themis.data import Seeds
from themis.data.datasets import data_folder
from themis.errors import DataError, UsageError, nearest, warn
from themis.target.activations import Granularity
from themis.target.loaders import Trust, load_weights
from themis.target.target import Target
from themis_lab.zoo.entry import Entry
from themis_lab.zoo.splits import SplitName
from themis_lab.zoo.table import ZOO

RANDOM_SEED = 0
"""Seed of random weights, so that they are the same in every process."""
BATCH = 100


@dataclass(frozen=True)
class MeasuredFigure:
    """The accuracy or error of an entry on its test data."""

    entry: Entry
    measured: float
    n_inputs: int

    @property
    def agrees(self) -> bool | None:
        """Whether it agrees with the published figure within its tolerance; None if there is none."""
        stated = self.entry.stated
        return None if stated is None else abs(self.measured - stated.value) <= stated.tolerance + 1e-9


def choose_entry(name: str) -> Entry:
    """The entry called `name`."""
    if name not in ZOO:
        raise UsageError(f"the zoo has no model {name!r}: {nearest(name, ZOO)}")
    return ZOO[name]


def folder_of(entry: Entry) -> Path:
    """The folder with an entry's files, under THEMIS_DATA."""
    return data_folder() / entry.folder


def find_weights(name: str) -> Path | None:
    """An entry's weights file, if there is one."""
    entry = choose_entry(name)
    if callable(entry.weights):
        return entry.weights()
    if not os.environ.get("THEMIS_DATA"):
        return None
    return min((file for file in folder_of(entry).glob(entry.weights) if file.is_file()), default=None)


def load(
    name: str,
    weights: str | Path | None = None,
    *,
    layers: str | Sequence[str] = "auto",
    neurons: Granularity = "element",
    oracle: str = "auto",
    trust: Trust | None = None,
) -> Target:
    """The target of an entry, with the given weights, those under THEMIS_DATA or, with a warning, random ones."""
    entry = choose_entry(name)
    file = find_weights(name) if weights is None else Path(weights)
    module = build(entry)
    if file is None:
        warn(
            f"{name} has random weights, because there is no file of trained weights ({entry.source}): results say "
            "nothing about a trained model"
        )
    else:
        load_weights(module, file, trust)
    if oracle == "auto":  # a net with random weights may answer nothing correctly
        oracle = "changed" if file is None and entry.metric == "accuracy" else entry.oracle
    preprocess = entry.normalise if entry.fit is None else entry.fit(folder_of(entry))
    return Target(module, entry.bounds, preprocess, layers, neurons, oracle)


def build(entry: Entry, random_seed: int = RANDOM_SEED) -> nn.Module:
    """The net in evaluation mode, with weights drawn from `random_seed`; torch's global generator is not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random_seed)
        return entry.build().eval()


def move(module: nn.Module, device: str | None) -> None:
    """Move a net to a device, if one is given."""
    try:
        module.to(device)
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"--device must be available, but {device!r} is not: {reason}") from error


def data(name: str, split: SplitName = "test") -> Seeds:
    """The data of an entry, read from THEMIS_DATA."""
    entry = choose_entry(name)
    seeds = entry.read(folder_of(entry), split)
    if not seeds.has_labels:
        raise DataError(
            f"the data of {name} must have labels, but there are none in {folder_of(entry)}: add the file of labels"
        )
    return seeds


def verify(name: str, weights: str | Path | None = None, *, device: str | None = None) -> MeasuredFigure:
    """Measure an entry on its test data: accuracy, or mean squared error."""
    entry = choose_entry(name)
    target = load(name, weights)
    move(target.module, device)
    return measure(entry, target, data(name))


def measure(entry: Entry, target: Target, seeds: Seeds) -> MeasuredFigure:
    """Measure an entry on labelled data."""
    assert seeds.labels is not None  # the zoo's data has them
    total = 0.0
    with target.opened(), torch.no_grad():
        for start in range(0, len(seeds), BATCH):
            rows = torch.arange(start, min(start + BATCH, len(seeds)))
            outputs, labels = target.forward(seeds.take(rows).to(target.device)).cpu(), seeds.labels[rows]
            if entry.metric == "mse":
                total += float((outputs.squeeze(1).double() - labels).square().sum())
            else:
                total += int((outputs.argmax(1) == labels).sum())
    return MeasuredFigure(entry, total / len(seeds), len(seeds))


class Collection:
    """The loader `zoo`: the models that `--zoo NAME` and `--model zoo:NAME` name, with their data and weights."""

    names = tuple(ZOO)
    load = staticmethod(load)
    data = staticmethod(data)
    find_weights = staticmethod(find_weights)

    def __call__(self, name: str) -> Target:
        return load(name)


collection = Collection()
