"""The two runs that are compared, each with its model and data, and the perturbation that they share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from themis.errors import ModelError, UsageError
from themis.measure.tests import Floats
from themis.runs.analysis.shrink import read_faults
from themis.runs.fault import Fault
from themis.runs.replay import Replayer, RunSource, live_handle
from themis.runs.run import Run
from themis.runs.store.reader import Reader
from themis.runs.trust import Trusted
from themis.settings import policy_name
from themis.target.fingerprint import hash_seeds


@dataclass(frozen=True)
class Side:
    """One of the two runs. `remedy` says how to name its model if it is not the one that was tested."""

    name: str
    source: Run | Replayer
    remedy: str = "pass themis.runs.replay.Replayer(Reader(run), target=..., data=...) instead of the folder"

    def facts(self) -> dict[str, Any]:
        """What the campaign achieved."""
        if isinstance(self.source, Run):
            rounds, settings = self.source.rounds, self.source.start.settings
            policy = policy_name(settings.policy)
        else:
            rounds, policy = self.source.run.rounds(), self.source.run.record["settings"]["policy"]
        if not rounds:
            raise UsageError(f"{self.name} must have finished a round, but it has none: wait for it, or resume it")
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
    def perturbation_code(self) -> str:
        """The perturbation without the ranges that are part of its name."""
        if isinstance(self.source, Run):
            return live_handle(self.source).calculator.perturbation.code
        return str(self.source.run.record["perturbation_code"])

    @property
    def theta(self) -> list[tuple[str, float, float]]:
        """Names and bounds of theta."""
        if isinstance(self.source, Run):
            return [(theta.name, theta.low, theta.high) for theta in self.source.start.theta]
        return [(theta["name"], theta["low"], theta["high"]) for theta in self.source.run.record["theta"]]

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

    def recipe(self) -> dict[str, Any] | None:
        """How the model is created, except for its weights, which have a hash; None if the run does not record it."""
        origin = self.source.origin if isinstance(self.source, Replayer) else None
        if origin is None:
            return None
        names = ("model", "zoo", "bounds", "mean", "std", "oracle")
        folder = os.path.realpath(origin.folder) if origin.folder and ":" in origin.model else None
        return {**{name: getattr(origin, name) for name in names}, "folder": folder}

    def faults(self) -> list[Fault]:
        """One fault per seed and wrong outcome."""
        return self.source.faults.distinct() if isinstance(self.source, Run) else list(read_faults(self.source))

    def check_model(self) -> None:
        """Create target, data and perturbation of a stored run; refuse a model that is not the one that was tested."""
        source = self.source
        if isinstance(source, Run):
            return
        with nullcontext() if source.origin is None else source.origin.imported_anew():
            fingerprint = source.target.fingerprint()
            _ = source.seeds, source.perturbation
        if fingerprint != self.model:
            raise ModelError(
                f"the model of {self.name} must be the same as in the run, but its hash is {fingerprint[:12]}... and "
                f"was {self.model[:12]}...: {self.remedy}"
            )


@contextmanager
def open_side(source: RunSource, name: str = "", remedy: str = "", trust: Trusted = False) -> Iterator[Side]:
    """A side from a run, a run folder, or the replayer of one; `trust` applies to folders."""
    options = {"remedy": remedy} if remedy else {}
    if isinstance(source, str | Path):
        with closing(Reader(source)) as run:
            yield Side(name or str(source), Replayer(run, trust=trust), **options)
    elif isinstance(source, Reader):
        yield Side(name or str(source.path), Replayer(source, trust=trust), **options)
    else:
        yield Side(name or ("the run" if isinstance(source, Run) else str(source.run.path)), source, **options)


def is_same_model(first: Side, second: Side) -> bool:
    """Whether both runs tested one model: the same hash, and created in the same way as far as both record it."""
    recipes = (first.recipe(), second.recipe())
    return first.model == second.model and (None in recipes or recipes[0] == recipes[1])


def check_perturbations(first: Side, second: Side) -> None:
    """Refuse runs whose tests cannot be run on the other's model: other perturbations, or no common theta."""
    names = [[name for name, _, _ in side.theta] for side in (first, second)]
    if names[0] != names[1] or first.perturbation_code != second.perturbation_code:
        raise UsageError(
            f"both runs must have the same perturbation, but {first.name} has {first.perturbation!r} and {second.name} "
            f"has {second.perturbation!r}: run one of them again with the other's perturbation"
        )
    low, high = common_box(first, second)
    disjoint = [name for name, a, b in zip(names[0], low, high, strict=True) if a > b]
    if disjoint:
        raise UsageError(
            f"both runs must have theta in common, but their ranges of {disjoint[0]} do not overlap: run one of them "
            "again with the other's magnitude"
        )


def common_box(first: Side, second: Side) -> tuple[Floats, Floats]:
    """Bounds of the theta that both campaigns could draw."""
    low, high = (
        np.array([[theta[k] for theta in side.theta] for side in (first, second)], dtype=np.float32) for k in (1, 2)
    )
    return low.max(0), high.min(0)
