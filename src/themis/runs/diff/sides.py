"""The two sides of a difference: each a run, its model and data, and what both have in common."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from themis.data.seeds import Seeds
from themis.errors import DataError, ModelError, UsageError
from themis.measure.tests import Bools, Floats, Ints
from themis.runs.analysis.bench import TestBench
from themis.runs.analysis.shrink import read_faults
from themis.runs.faults import Fault
from themis.runs.replay import Replayer, RunSource, live_handle
from themis.runs.run import Run, name_of
from themis.runs.store.reader import Reader
from themis.target.fingerprint import hash_seeds

STEP = 1000
"""Seeds whose inputs are compared at a time."""


@dataclass(frozen=True)
class Side:
    """One of the two runs. `remedy` says how its model is named where it is not the one that was tested."""

    name: str
    source: Run | Replayer
    remedy: str = "pass themis.runs.replay.Replayer(Reader(run), target=..., data=...) in place of the folder"

    def facts(self) -> dict[str, Any]:
        """What the campaign had come to."""
        if isinstance(self.source, Run):
            rounds, settings = self.source.rounds, self.source.start.settings
            policy = name_of(settings.policy)
        else:
            rounds, policy = self.source.run.rounds(), self.source.run.record["settings"]["policy"]
        if not rounds:
            raise UsageError(f"{self.name} must have finished a round, it has none: wait for it, or resume it")
        last = rounds[-1]
        return {
            "run": self.name,
            "policy": policy,
            "perturbation": self.perturbation,
            "model_sha256": self.model,
            "tests": last.tests,
            "passes": last.passes,
            "seconds": last.seconds,
            "faults": last.faults,
            "distinct_faults": last.distinct_faults,
            "failing_seeds": last.failing_seeds,
            "coverage": last.coverage.sampled,
        }

    @property
    def perturbation(self) -> str:
        if isinstance(self.source, Run):
            return self.source.start.perturbation
        return str(self.source.run.record["perturbation"])

    @property
    def theta(self) -> list[tuple[str, float, float]]:
        """Names and bounds of theta."""
        if isinstance(self.source, Run):
            return [(each.name, each.low, each.high) for each in self.source.start.theta]
        return [(each["name"], each["low"], each["high"]) for each in self.source.run.record["theta"]]

    @property
    def model(self) -> str:
        """Hash of the model that was tested."""
        if isinstance(self.source, Run):
            return live_handle(self.source).calculator.target.fingerprint()
        return str(self.source.run.record["environment"]["model_sha256"])

    @property
    def data(self) -> str:
        """Hash of the data that was tested."""
        if isinstance(self.source, Run):
            return hash_seeds(live_handle(self.source).seeds)
        return str(self.source.run.record["environment"]["data_sha256"])

    def words(self) -> dict[str, Any] | None:
        """How the model is made, but for its weights, which have a hash; None where the run does not know."""
        origin = self.source.origin if isinstance(self.source, Replayer) else None
        if origin is None:
            return None
        names = ("model", "zoo", "bounds", "mean", "std", "oracle")
        folder = os.path.realpath(origin.folder) if origin.folder and ":" in origin.model else None
        return {**{name: getattr(origin, name) for name in names}, "folder": folder}

    def faults(self) -> list[Fault]:
        """One fault for each seed and wrong outcome."""
        return self.source.faults.distinct() if isinstance(self.source, Run) else list(read_faults(self.source))

    def make(self) -> None:
        """Make target, data and perturbation of a folder's run; refuse a model that is not the one tested."""
        made = self.source
        if isinstance(made, Run):
            return
        with _imported_from(None if made.origin is None else made.origin.folder):
            found = made.target.fingerprint()
            _ = made.seeds, made.perturbation
        if found != self.model:
            raise ModelError(
                f"the model of {self.name} must be the one that was tested, its hash is {found[:12]}..., the run's was "
                f"{self.model[:12]}...: {self.remedy}"
            )


@contextmanager
def side(source: RunSource, name: str = "", remedy: str = "") -> Iterator[Side]:
    """A side from a run, a folder or what replays one."""
    how = {"remedy": remedy} if remedy else {}
    if isinstance(source, str | Path):
        with closing(Reader(source)) as run:
            yield Side(name or str(source), Replayer(run), **how)
    elif isinstance(source, Reader):
        yield Side(name or str(source.path), Replayer(source), **how)
    else:
        yield Side(name or ("the run" if isinstance(source, Run) else str(source.run.path)), source, **how)


def is_same_model(one: Side, other: Side) -> bool:
    """Whether both runs tested one model: the same hash, and made the same way as far as both know."""
    words = (one.words(), other.words())
    return one.model == other.model and (None in words or words[0] == words[1])


def check_perturbations(one: Side, other: Side) -> None:
    """Refuse runs whose tests cannot be run on the other's model: another perturbation, or no common theta."""
    names = [[name for name, _, _ in each.theta] for each in (one, other)]
    if names[0] != names[1] or _kind(one) != _kind(other):
        raise UsageError(
            f"both runs must have one perturbation, {one.name} has {one.perturbation!r}, {other.name} "
            f"{other.perturbation!r}: run one of them again with the other's"
        )
    low, high = common_box(one, other)
    apart = [name for name, a, b in zip(names[0], low, high, strict=True) if a > b]
    if apart:
        raise UsageError(
            f"both runs must have theta in common, their ranges of {apart[0]} do not meet: run one of them again with "
            "the other's magnitude"
        )


def _kind(side: Side) -> str:
    """A perturbation without the ranges that stand in its name."""
    if isinstance(side.source, Run):
        return live_handle(side.source).calculator.perturbation.code
    return str(side.source.run.record["perturbation_code"])


def common_box(one: Side, other: Side) -> tuple[Floats, Floats]:
    """Bounds of the theta that both campaigns could draw."""
    low, high = (
        np.array([[each[k] for each in side.theta] for side in (one, other)], dtype=np.float32) for k in (1, 2)
    )
    return low.max(0), high.min(0)


@dataclass(frozen=True)
class Common:
    """Seeds that both runs tested: their ids, and where they stand in each."""

    seed_id: Ints
    one: Ints
    other: Ints
    n_unlike: int
    """Seeds with one number but other inputs or labels, which were left out."""

    def __getitem__(self, rows: Bools) -> Common:
        return replace(self, seed_id=self.seed_id[rows], one=self.one[rows], other=self.other[rows])


def common_seeds(one: Side, other: Side, benches: tuple[TestBench, TestBench]) -> Common:
    """Seeds with the same number, input and label in both."""
    first, second = (bench.seeds for bench in benches)
    seed_id, a, b = np.intersect1d(first.seed_id.numpy(), second.seed_id.numpy(), return_indices=True)
    found = Common(seed_id, a, b, 0)
    if one.data != other.data:
        is_alike = _are_alike(first, second, a, b)
        found = replace(found[is_alike], n_unlike=int((~is_alike).sum()))
    if not len(found.seed_id):
        raise DataError(
            f"both runs must have tested some of the same inputs, {one.name} and {other.name} share none of "
            f"{len(first):,} and {len(second):,}: run one of them again on the other's data"
        )
    return found


def _are_alike(first: Seeds, second: Seeds, a: Ints, b: Ints) -> Bools:
    is_alike = np.zeros(len(a), dtype=bool)
    if first.shape[1:] != second.shape[1:]:
        return is_alike
    for start in range(0, len(a), STEP):
        at = slice(start, start + STEP)
        left, right = torch.from_numpy(a[at]), torch.from_numpy(b[at])
        same = (first.take(left) == second.take(right)).flatten(1).all(1)
        if first.labels is not None and second.labels is not None:
            same &= (first.labels[left] == second.labels[right]).reshape(len(left), -1).all(1)
        is_alike[at] = same.numpy()
    return is_alike


@contextmanager
def _imported_from(folder: str | None) -> Iterator[None]:
    """Modules are looked up in this folder, also where another version of them has been imported from elsewhere."""
    if folder is None or not os.path.isdir(folder):
        yield
        return
    home, path, modules = Path(folder).resolve(), list(sys.path), dict(sys.modules)
    for name, module in modules.items():
        if _is_elsewhere(name.partition(".")[0], getattr(module, "__file__", None), home):
            del sys.modules[name]
    sys.path[:] = [str(home), *(each for each in path if each != str(home))]
    try:
        yield
    finally:
        sys.path[:] = path
        sys.modules.update(modules)


def _is_elsewhere(top: str, file: str | None, home: Path) -> bool:
    is_here = (home / f"{top}.py").is_file() or (home / top / "__init__.py").is_file()
    return is_here and file is not None and top != "themis" and not Path(file).resolve().is_relative_to(home)
