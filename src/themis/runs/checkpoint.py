"""The saved progress of a campaign, typed: the part of its last checkpoint that readers of a run folder need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from time import sleep
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from themis.errors import StoreError
from themis.reading import check_form
from themis.runs.fault import MAX_TESTS
from themis.runs.run import Seconds
from themis.runs.store.schema import PROGRESS

if TYPE_CHECKING:
    from torch import Tensor

    from themis.runs.store.reader import Reader
    from themis.runs.store.writer import Checkpoint

STREAMS = ("uniform", "search")
N_ATTEMPTS, PAUSE = 3, 0.05


@dataclass(frozen=True)
class SavedMoments:
    """The sensitivity sums of one stream, per neuron; the sums are relative to `shift`."""

    count: int
    shift: NDArray[np.float64]
    sums: NDArray[np.float64]

    @property
    def totals(self) -> NDArray[np.float64]:
        """The sum of the sensitivities of each neuron."""
        return self.shift * self.count + self.sums


@dataclass(frozen=True)
class SavedProgress:
    """What a campaign had counted and measured when its last checkpoint was written."""

    tests: int
    rounds: int
    chunk: int
    """Tests per forward pass."""
    seconds: Seconds
    counts: dict[str, int]
    """Totals over all tests: tests, dropped, faults, uniform_tests and raised."""
    kinds: dict[str, dict[str, int]]
    """Tests and faults by kind of proposal."""
    near_ties: list[int]
    uniform_tests_by_seed: NDArray[np.int64]
    uniform_faults_by_seed: NDArray[np.int64]
    uniform_times_seen: NDArray[np.int64]
    """For each distinct fault of the uniform stream, how often it was found."""
    moments: dict[str, SavedMoments]
    """By stream."""


def read_progress(run: Reader) -> SavedProgress | None:
    """The progress at the last checkpoint; None before the first one, or if its file was removed."""
    for _ in range(N_ATTEMPTS):  # a campaign may replace the checkpoint before its file is opened
        try:
            checkpoint = run.checkpoint()
        except StoreError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            sleep(PAUSE)
            continue
        return None if checkpoint is None else parse_progress(checkpoint, _count_neurons(run))
    return None


def _count_neurons(run: Reader) -> int | None:
    return int(run.record["start"]["n_neurons"]) if "start" in run.record else None


def parse_progress(checkpoint: Checkpoint, n_neurons: int | None = None) -> SavedProgress:
    """Validate the arrays and values of a stored checkpoint and give them names and types.

    n_neurons: the number of neurons that the moments must be of, if it is known.
    """
    try:
        check_form(checkpoint.values, PROGRESS, "its values")
        return _parse(checkpoint, n_neurons)
    except ValueError as error:
        raise StoreError(
            f"the checkpoint of a run must hold the progress of its campaign, but {error}: restore the run folder from "
            "a copy"
        ) from error


def _parse(checkpoint: Checkpoint, n_neurons: int | None) -> SavedProgress:
    arrays, values = checkpoint.arrays, checkpoint.values
    tally = values["tally"]
    progress = SavedProgress(
        tests=checkpoint.tests,
        rounds=checkpoint.rounds,
        chunk=values["chunk"],
        seconds=Seconds(**{field.name: float(values["seconds"][field.name]) for field in fields(Seconds)}),
        counts=tally["counts"],
        kinds=tally["kinds"],
        near_ties=_counts(arrays, "/tally/near_ties").tolist(),
        uniform_tests_by_seed=_counts(arrays, "/tally/uniform_tests_by_seed"),
        uniform_faults_by_seed=_counts(arrays, "/tally/uniform_faults_by_seed"),
        uniform_times_seen=_counts(arrays, "/tally/uniform_times_seen", least=1),
        moments={stream: _parse_moments(stream, arrays, n_neurons) for stream in STREAMS},
    )
    tests, faults = progress.uniform_tests_by_seed, progress.uniform_faults_by_seed
    if tests.shape != faults.shape:
        raise ValueError("its uniform tests and faults are of different seeds")
    if bool((faults > tests).any()):
        raise ValueError("a seed has more uniform faults than uniform tests")
    if progress.counts["tests"] != progress.tests or int(tests.sum()) > progress.counts["uniform_tests"]:
        raise ValueError("its counts of tests contradict each other")
    if progress.counts["uniform_tests"] > progress.tests or int(progress.uniform_times_seen.sum()) > progress.tests:
        raise ValueError("its counts of uniform tests are larger than the number of tests")
    return progress


def _array(arrays: Mapping[str, Tensor], name: str, n_dimensions: int) -> NDArray[Any]:
    if name not in arrays:
        raise ValueError(f"its array {name!r} is missing")
    if arrays[name].ndim != n_dimensions:
        raise ValueError(f"its array {name} has the wrong shape {list(arrays[name].shape)}")
    return np.asarray(arrays[name].numpy())


def _counts(arrays: Mapping[str, Tensor], name: str, n_dimensions: int = 1, least: int = 0) -> NDArray[np.int64]:
    counts = _array(arrays, name, n_dimensions)
    if counts.dtype != np.int64 or bool(((counts < least) | (counts > MAX_TESTS)).any()):
        raise ValueError(f"its array {name} must hold whole numbers from {least}")
    return counts


def _parse_moments(stream: str, arrays: Mapping[str, Tensor], n_neurons: int | None) -> SavedMoments:
    count = int(_counts(arrays, f"/moments/{stream}/count", 0))
    shift, sums = (_array(arrays, f"/moments/{stream}/{name}", 1) for name in ("shift", "sums"))
    if shift.shape != sums.shape or n_neurons not in (None, len(shift)):
        raise ValueError(f"the moments of its {stream} stream are of different neurons")
    if shift.dtype.kind != "f" or sums.dtype.kind != "f":
        raise ValueError(f"the moments of its {stream} stream must be numbers")
    return SavedMoments(count, shift.astype(np.float64), sums.astype(np.float64))
