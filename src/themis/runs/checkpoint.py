"""The saved progress of a campaign, typed: the part of its last checkpoint that readers of a run folder need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from time import sleep
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from themis.errors import StoreError
from themis.runs.run import Seconds

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
        return None if checkpoint is None else parse_progress(checkpoint)
    return None


def parse_progress(checkpoint: Checkpoint) -> SavedProgress:
    """Validate the arrays and values of a stored checkpoint and give them names and types."""
    try:
        progress = _parse(checkpoint.tests, checkpoint.rounds, checkpoint.arrays, checkpoint.values)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise StoreError(
            f"the checkpoint of a run must hold the progress of its campaign, but {reason}: restore the run folder "
            "from a copy"
        ) from error
    return progress


def _parse(tests: int, rounds: int, arrays: Mapping[str, Tensor], values: dict[str, Any]) -> SavedProgress:
    tally = values["tally"]
    progress = SavedProgress(
        tests=tests,
        rounds=rounds,
        chunk=int(values["chunk"]),
        seconds=Seconds(**{field.name: float(values["seconds"][field.name]) for field in fields(Seconds)}),
        counts={name: int(n) for name, n in tally["counts"].items()},
        kinds={kind: dict(counts) for kind, counts in tally["kinds"].items()},
        near_ties=arrays["/tally/near_ties"].tolist(),
        uniform_tests_by_seed=arrays["/tally/uniform_tests_by_seed"].numpy(),
        uniform_faults_by_seed=arrays["/tally/uniform_faults_by_seed"].numpy(),
        uniform_times_seen=arrays["/tally/uniform_times_seen"].numpy(),
        moments={stream: _parse_moments(stream, arrays) for stream in STREAMS},
    )
    if "uniform_tests" not in progress.counts or "raised" not in progress.counts:
        raise KeyError("tally/counts")
    if progress.uniform_tests_by_seed.shape != progress.uniform_faults_by_seed.shape:
        raise ValueError("its uniform tests and faults are of different seeds")
    return progress


def _parse_moments(stream: str, arrays: Mapping[str, Tensor]) -> SavedMoments:
    count, shift, sums = (arrays[f"/moments/{stream}/{name}"] for name in ("count", "shift", "sums"))
    if shift.shape != sums.shape:
        raise ValueError(f"the moments of its {stream} stream are of different neurons")
    return SavedMoments(int(count), shift.double().numpy(), sums.double().numpy())
