"""What the last checkpoint of a run says: its progress, and estimates from it, also while the campaign is running."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from time import sleep
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from themis.errors import StoreError
from themis.judge.estimate import Estimate
from themis.reading import check_form
from themis.runs.fault import MAX_TESTS
from themis.runs.run import ClassRate, Round, Seconds, StrengthPart
from themis.runs.store.schema import PROGRESS

if TYPE_CHECKING:
    from torch import Tensor

    from themis.runs.store.reader import Reader
    from themis.runs.store.writer import Checkpoint
    from themis.search.policy import Space

MAX_BINS = 12
"""Equal parts of theta's range that the fault rate is shown for."""
N_PARTS = 5
"""Equal parts of the strength that the share of correct answers is shown for."""
MOST_CLASSES = 100
"""Classes that the fault rate is shown for."""
TESTS_PER_BIN = 10
"""Uniform tests that a part must have on average; with fewer tests there are fewer parts."""
TESTS_AT_ONCE = 1 << 20
"""Tests whose theta is computed at a time."""
Z = 1.959963984540054


@dataclass(frozen=True)
class UniformEstimates:
    """What the uniform stream says about the model; None without a uniform stream."""

    fault_rate: Estimate | None
    residual_risk: Estimate | None
    """The chance that the next uniform test shows a distinct fault that no test of the campaign has seen."""
    residual_risk_uniform: Estimate | None
    """The same for a distinct fault that no test of the uniform stream has seen."""


@dataclass(frozen=True)
class SensitivitySpread:
    """The mean sensitivity of a layer's neurons, and its 5th and 95th percentile over them."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class ThetaBin:
    """The uniform tests and faults in a part of theta's range, with the fault rate and its 95% interval."""

    low: float
    high: float
    tests: int
    faults: int
    rate: float
    rate_low: float
    rate_high: float


@dataclass(frozen=True)
class ThetaRates:
    """The fault rate along one dimension of theta."""

    name: str
    unit: str
    identity: float
    parts: tuple[ThetaBin, ...]


def uniform_estimates(
    summary: dict[str, Any] | None, progress: SavedProgress | None, rounds: Sequence[Round]
) -> UniformEstimates:
    """Fault rate and residual risk: from the summary if there is one, otherwise from checkpoint and last round.

    Runs of earlier versions have only the residual risk that counts what the uniform stream has seen.
    """
    if summary is not None:
        plain = (summary["fault_rate"], summary["residual_risk"], summary.get("residual_risk_uniform"))
        return UniformEstimates(*(None if estimate is None else Estimate(**estimate) for estimate in plain))
    if progress is None:
        return UniformEstimates(None, None, None)
    from themis.judge.risk import fault_rate, unseen_mass

    tests, faults = progress.uniform_tests_by_seed, progress.uniform_faults_by_seed
    of_uniform = unseen_mass(progress.uniform_times_seen, int(tests.sum()))
    of_campaign = rounds[-1].residual_risk if rounds else None
    return UniformEstimates(fault_rate(tests, faults), of_campaign or of_uniform, of_uniform)


def stored_by_strength(summary: dict[str, Any] | None) -> tuple[StrengthPart, ...]:
    """The share of correct answers by strength, as a summary has it; empty without one or in earlier versions."""
    parts = (summary or {}).get("correct_by_strength", ())
    return tuple(StrengthPart(**{**part, "correct": Estimate(**part["correct"])}) for part in parts)


def stored_by_class(summary: dict[str, Any] | None) -> tuple[ClassRate, ...]:
    """The fault rate by class, as a summary has it; empty without one or in earlier versions."""
    rates = (summary or {}).get("by_class", ())
    return tuple(ClassRate(**{**rate, "fault_rate": Estimate(**rate["fault_rate"])}) for rate in rates)


def phase_seconds(summary: dict[str, Any] | None, progress: SavedProgress | None) -> Seconds | None:
    """The time spent in each phase: from the summary if there is one, otherwise from the last checkpoint."""
    if summary is not None:
        return Seconds(**summary["seconds"])
    return None if progress is None else progress.seconds


def layer_sensitivity(run: Reader, progress: SavedProgress | None) -> dict[str, SensitivitySpread]:
    """By layer: the mean sensitivity of its neurons, and how it is spread over them."""
    if progress is None or "start" not in run.record:
        return {}
    n_tests = sum(moments.count for moments in progress.moments.values())
    if not n_tests:
        return {}
    mean = np.asarray(sum(moments.totals for moments in progress.moments.values()) / n_tests)
    spreads = {}
    for layer in run.record["start"]["layers"]:
        neurons = mean[layer["start"] : layer["start"] + layer["n_neurons"]]
        if len(neurons) and np.isfinite(neurons).all():
            low, high = np.quantile(neurons, (0.05, 0.95))
            spreads[layer["name"]] = SensitivitySpread(
                *(float(f"{value:.5g}") for value in (neurons.mean(), low, high))
            )
    return spreads


def rates_by_theta(run: Reader, progress: SavedProgress | None) -> list[ThetaRates]:
    """The fault rate of the uniform stream in equal parts of each dimension of theta.

    The theta of a uniform test is a function of its counter, so the tests in each part are counted exactly.
    """
    from themis.compute import rng
    from themis.runs.store.schema import theta_column
    from themis.search.policy import FOR_THETA, UNIFORM_STREAM

    n_tests = 0 if progress is None else progress.counts["uniform_tests"]
    if progress is None or not n_tests:
        return []
    seed = int(run.record["settings"]["random_seed"])
    columns = ", ".join(theta_column(name) for name in run.theta)
    rows = run.select(columns, "stream = 'uniform' AND id < ?", (progress.tests,))
    fault_theta = np.array(rows, dtype=np.float64).reshape(-1, len(run.theta))
    n_bins = int(np.clip(n_tests // TESTS_PER_BIN, 1, MAX_BINS))
    rates = []
    for k, dimension in enumerate(run.record["theta"]):
        low, high = float(dimension["low"]), float(dimension["high"])
        if high <= low:
            continue
        edges = np.linspace(low, high, n_bins + 1)
        tests, faults = np.zeros(n_bins, np.int64), np.histogram(fault_theta[:, k].clip(low, high), edges)[0]
        for first in range(0, n_tests, TESTS_AT_ONCE):
            counter = np.arange(first, min(first + TESTS_AT_ONCE, n_tests))
            test_theta = low + rng.uniform(seed, FOR_THETA, k, UNIFORM_STREAM, counter) * (high - low)
            tests += np.histogram(test_theta.clip(low, high), edges)[0]
        tests = np.maximum(tests, faults)  # a test that was drawn again has another theta than its counter says
        parts = tuple(
            ThetaBin(float(edges[b]), float(edges[b + 1]), int(n), int(f), *_wilson(int(f), int(n)))
            for b, (n, f) in enumerate(zip(tests, faults, strict=True))
            if n
        )
        rates.append(ThetaRates(dimension["name"], dimension["unit"], dimension["identity"], parts))
    return rates


def correct_by_strength(
    space: Space, n_tests: int, fault_seed_id: NDArray[np.int64], fault_theta: NDArray[np.float32]
) -> tuple[StrengthPart, ...]:
    """The share of the first `n_tests` uniform tests that are no faults, in equal parts of the strength.

    Seed and theta of a uniform test are functions of its counter, so the tests of each seed are counted exactly.
    `fault_seed_id` and `fault_theta` `[n, dimensions]` are those of its faults.
    """
    from themis.judge.risk import fault_rate
    from themis.search.policy import UNIFORM_STREAM

    dimensions = [
        {"low": low, "high": high, "identity": identity}
        for low, high, identity in zip(space.low, space.high, space.identity, strict=True)
    ]

    def count(place: NDArray[np.int64], theta: NDArray[np.float32]) -> NDArray[np.int64]:
        part = np.minimum((strengths(theta, dimensions)[0] * N_PARTS).astype(np.int64), N_PARTS - 1)
        flat = np.bincount(part * len(space.seeds) + place, minlength=N_PARTS * len(space.seeds))
        return flat.reshape(N_PARTS, len(space.seeds))

    order = np.argsort(space.seed_id, kind="stable")
    faults = count(order[np.searchsorted(space.seed_id, fault_seed_id, sorter=order)], fault_theta)
    tests = np.zeros_like(faults)
    for first in range(0, n_tests, TESTS_AT_ONCE):
        counter = np.arange(first, min(first + TESTS_AT_ONCE, n_tests))
        drawn = space.uniform_tests(counter, UNIFORM_STREAM, counter)
        tests += count(space.position(drawn.seed), drawn.theta)
    tests = np.maximum(tests, faults)  # a test that was drawn again has another theta than its counter says
    return tuple(
        StrengthPart(k / N_PARTS, (k + 1) / N_PARTS, int(tests[k].sum()), correct)
        for k in range(N_PARTS)
        if (correct := fault_rate(tests[k], tests[k] - faults[k])) is not None
    )


def rates_by_class(
    numbers: NDArray[np.int64], tests_by_seed: NDArray[np.int64], faults_by_seed: NDArray[np.int64]
) -> tuple[ClassRate, ...]:
    """The fault rate of the seeds of each class, by the `numbers` of their classes; -1 is none.

    All arguments are `[seeds]`. Of more than `MOST_CLASSES` classes, those with the most tests are kept.
    """
    from themis.judge.risk import fault_rate

    known, position = np.unique(numbers[numbers >= 0], return_inverse=True)
    if len(known) < 2:
        return ()
    by_class = np.bincount(position, tests_by_seed[numbers >= 0])
    rates = []
    for k in sorted(np.argsort(-by_class, kind="stable")[:MOST_CLASSES].tolist()):
        mine = numbers == known[k]
        rate = fault_rate(tests_by_seed[mine], faults_by_seed[mine])
        if rate is not None:
            rates.append(ClassRate(int(known[k]), int(mine.sum()), int(by_class[k]), rate))
    return tuple(rates)


def _wilson(faults: int, tests: int) -> tuple[float, float, float]:
    """A share with its 95% Wilson interval."""
    share, z2 = faults / tests, Z * Z / tests
    centre, half = share + z2 / 2, Z * np.sqrt(share * (1 - share) / tests + z2 / tests / 4)
    low, high = (centre - half) / (1 + z2), (centre + half) / (1 + z2)
    return float(share), max(0.0, min(share, float(low))), min(1.0, max(share, float(high)))


def strengths(
    theta: NDArray[Any], dimensions: Sequence[dict[str, Any]]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The strength of each theta `[n, dimensions]`, and the dimension that is furthest from its identity.

    The strength is the distance from the identity as a share of the range on that side, in the furthest dimension.
    """
    columns = ("low", "high", "identity")
    low, high, identity = (np.array([dimension[name] for dimension in dimensions]) for name in columns)
    distance = np.asarray(theta, dtype=np.float64) - identity
    reach = np.where(distance >= 0, high - identity, identity - low)
    shares = np.divide(np.abs(distance), reach, out=np.zeros_like(distance), where=reach > 0)
    return shares.max(-1), shares.argmax(-1)


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
