"""The progress that a run saved in its last checkpoint, and estimates from it, even while its campaign is running."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from time import sleep
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from themis.data.slices import SliceColumn, class_column, metadata_columns, slice_columns
from themis.errors import StoreError, UsageError
from themis.judge.calibration import Calibration
from themis.judge.decide import Decision
from themis.judge.estimate import Estimate, share
from themis.judge.normality import Normality
from themis.reading import check_form
from themis.runs.fault import MAX_TESTS, STREAMS
from themis.runs.run import Round, Seconds, SliceRate, StrengthPart
from themis.runs.store.schema import PROGRESS_FORM
from themis.settings import read_claim

if TYPE_CHECKING:
    from torch import Tensor

    from themis.runs.store.reader import Reader
    from themis.runs.store.writer import Checkpoint
    from themis.search.policy import Space

MAX_THETA_BINS = 12
"""Most bins of a dimension of theta for which the fault rate is shown."""
N_STRENGTH_PARTS = 5
"""Equal ranges of strength for which the share of correct answers is shown."""
TESTS_PER_BIN = 10
"""Uniform tests that a bin of theta must have on average; with fewer tests there are fewer bins."""
TESTS_AT_ONCE = 1 << 20
UNIFORM_FIGURES = ("fault_rate", "residual_risk", "residual_risk_uniform")
"""Figures of a run that are estimated from its uniform stream; None without one."""
ALPHA = 0.05
"""Probability that any of the lower limits of all slices of a run is too high."""
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class SensitivitySpread:
    """The mean sensitivity of a layer's neurons, and its 5th and 95th percentile over them."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class ThetaBin:
    """The uniform tests and faults in one bin of theta's range, with the fault rate and its 95% interval."""

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


def known_figures(
    record: dict[str, Any], summary: dict[str, Any] | None, progress: SavedProgress | None, rounds: Sequence[Round]
) -> dict[str, Any]:
    """The fields of `Run` that hold figures: from the summary of an ended campaign, otherwise from its checkpoint."""
    plain = summary or {}
    decision, normality, calibration = (plain.get(name) for name in ("decision", "normality", "calibration"))
    figures = {
        **{name: _estimate(plain.get(name)) for name in ("coverage_interval", *UNIFORM_FIGURES)},
        **{name: plain.get(name) for name in ("coverage_uniform", "design_effect", "requests")},
        "decision": decision and Decision(**decision),
        "normality": normality and Normality(**normality),
        "calibration": calibration and Calibration(*(_estimate(calibration[name]) for name in ("clean", "disturbed"))),
        "correct_by_strength": tuple(
            StrengthPart(**{**part, "correct": _estimate(part["correct"])})
            for part in plain.get("correct_by_strength", ())
        ),
        "slices": tuple(
            SliceRate(**{**each, "fault_rate": _estimate(each["fault_rate"])}) for each in plain.get("slices", ())
        ),
        "seconds": Seconds(**plain["seconds"]) if plain else None,
        "kinds": plain.get("kinds", {}),
    }
    if plain or progress is None:
        return figures
    from themis.judge.risk import fault_rate, unseen_mass

    tests, faults = progress.uniform_tests_by_seed, progress.uniform_faults_by_seed
    of_uniform = unseen_mass(progress.uniform_times_seen, int(tests.sum()))
    is_weighted = record["settings"].get("seed_weights") is not None  # the rate is then known only at the end
    rate = None if is_weighted else fault_rate(tests, faults)
    of_campaign = rounds[-1].residual_risk if rounds else None
    known = dict(zip(UNIFORM_FIGURES, (rate, of_campaign or of_uniform, of_uniform), strict=True))
    return {**figures, **known, "seconds": progress.seconds, "kinds": progress.kinds}


def _estimate(plain: dict[str, float] | None) -> Estimate | None:
    return None if plain is None else Estimate(**plain)


def layer_sensitivity(run: Reader, progress: SavedProgress | None) -> dict[str, SensitivitySpread]:
    """The mean sensitivity of the neurons of each layer, and its spread over them."""
    n_tests = 0 if progress is None else sum(moments.count for moments in progress.moments.values())
    if progress is None or "start" not in run.record or not n_tests:
        return {}
    mean = np.asarray(sum(moments.totals for moments in progress.moments.values()) / n_tests)
    spreads = {}
    for layer in run.record["start"]["layers"]:
        neurons = mean[layer["start"] : layer["start"] + layer["n_neurons"]]
        if len(neurons) and np.isfinite(neurons).all():
            figures = (neurons.mean(), *np.quantile(neurons, (0.05, 0.95)))
            spreads[layer["name"]] = SensitivitySpread(*(float(f"{value:.5g}") for value in figures))
    return spreads


def rates_by_theta(run: Reader, progress: SavedProgress | None) -> list[ThetaRates]:
    """The fault rate of the uniform stream in equal bins of each dimension of theta.

    The theta of a uniform test is a function of its counter, so the tests in each bin are counted exactly.
    """
    from themis.runs.store.schema import theta_column
    from themis.search.policy import UNIFORM_STREAM

    if progress is None or not (n_tests := progress.counts["uniform_tests"]):
        return []
    space = recorded_space(run.record)
    columns = ", ".join(theta_column(name) for name in run.theta)
    rows = run.select(columns, "stream = 'uniform' AND id < ?", (progress.tests,))
    fault_theta = np.array(rows, dtype=np.float64).reshape(-1, len(run.theta))
    n_bins = int(np.clip(n_tests // TESTS_PER_BIN, 1, MAX_THETA_BINS))
    rates = []
    for k, dimension in enumerate(run.record["theta"]):
        low, high = float(dimension["low"]), float(dimension["high"])
        edges = np.linspace(low, high, n_bins + 1)
        tests, faults = np.zeros(n_bins, np.int64), np.histogram(fault_theta[:, k].clip(low, high), edges)[0]
        for first in range(0, n_tests, TESTS_AT_ONCE):
            counter = np.arange(first, min(first + TESTS_AT_ONCE, n_tests))
            drawn = space.occurring_theta(UNIFORM_STREAM, counter)[:, k]
            tests += np.histogram(drawn.clip(low, high), edges)[0]
        tests = np.maximum(tests, faults)  # the theta of a redrawn test does not follow from its counter
        parts = tuple(
            ThetaBin(float(edges[b]), float(edges[b + 1]), int(n), int(f), *astuple(share(int(f), int(n))))
            for b, (n, f) in enumerate(zip(tests, faults, strict=True))
            if n
        )
        rates.append(ThetaRates(dimension["name"], dimension["unit"], dimension["identity"], parts))
    return rates


def recorded_space(record: dict[str, Any]) -> Space:
    """The search space of a run as recorded, with seeds numbered from 0 and without their margins."""
    from themis.perturb.perturbation import Theta
    from themis.search.policy import Space

    names = ("name", "low", "high", "identity", "distribution")
    theta = tuple(Theta(**{name: each[name] for name in names if name in each}) for each in record["theta"])
    low, high, identity = (np.array([getattr(each, name) for each in theta], dtype=np.float32) for name in names[1:4])
    seeds = np.arange(record["start"]["n_usable"])
    margin, random_seed = np.zeros(len(seeds), dtype=np.float32), record["settings"]["random_seed"]
    return Space(seeds, seeds, margin, low, high, identity, is_random=True, random_seed=random_seed, theta=theta)


def correct_by_strength(
    space: Space, n_tests: int, fault_seed_id: NDArray[np.int64], fault_theta: NDArray[np.float32]
) -> tuple[StrengthPart, ...]:
    """The share of the first `n_tests` uniform tests that are not faults, in equal ranges of strength.

    The seed and theta of a uniform test are functions of its counter, so the tests of each seed are counted exactly.
    `fault_seed_id` and `fault_theta` `[n, dimensions]` are those of the faults among these tests.
    """
    from themis.judge.risk import fault_rates
    from themis.search.policy import UNIFORM_STREAM

    def count(place: NDArray[np.int64], theta: NDArray[np.float32]) -> NDArray[np.int64]:
        strength = range_shares(theta, space.low, space.high, space.identity).max(-1)
        part = np.minimum((strength * N_STRENGTH_PARTS).astype(np.int64), N_STRENGTH_PARTS - 1)
        flat = np.bincount(part * len(space.seeds) + place, minlength=N_STRENGTH_PARTS * len(space.seeds))
        return flat.reshape(N_STRENGTH_PARTS, len(space.seeds))

    order = np.argsort(space.seed_id, kind="stable")
    faults = count(order[np.searchsorted(space.seed_id, fault_seed_id, sorter=order)], fault_theta)
    tests = np.zeros_like(faults)
    for first in range(0, n_tests, TESTS_AT_ONCE):
        counter = np.arange(first, min(first + TESTS_AT_ONCE, n_tests))
        drawn = space.uniform_tests(counter, UNIFORM_STREAM, counter)
        tests += count(space.position(drawn.seed), drawn.theta)
    tests = np.maximum(tests, faults)  # the theta of a redrawn test does not follow from its counter
    rates = fault_rates((tests[k], tests[k] - faults[k], space.seed_weight) for k in range(N_STRENGTH_PARTS))
    return tuple(
        StrengthPart(k / N_STRENGTH_PARTS, (k + 1) / N_STRENGTH_PARTS, int(tests[k].sum()), correct)
        for k, correct in enumerate(rates)
        if correct is not None
    )


@dataclass(frozen=True)
class SlicedSeeds:
    """The facts about each seed that slices are computed from; every array is `[seeds]`."""

    seed_id: Ints
    number: Ints
    """The class number of the seed; -1 without a class."""
    weight: NDArray[np.float64]
    """How often inputs like the seed occur in operation; 1 by default."""

    def columns(
        self, slice_by: str | None, names: Sequence[str] | None, metadata: Mapping[str, list[Any]] | None = None
    ) -> list[SliceColumn]:
        """The columns that `slice_by` names; by default the class, if the seeds have one, and all metadata fields."""
        if slice_by is not None:
            return slice_columns(slice_by, self.seed_id, self.number, names, metadata or {})
        column = class_column(self.number, names)
        return [*([] if column is None else [column]), *metadata_columns(metadata or {}, self.seed_id)]

    def rates(self, columns: Iterable[SliceColumn], tests: Ints, faults: Ints) -> tuple[SliceRate, ...]:
        """The fault rate of each slice, from the uniform tests and faults of each seed.

        With Bonferroni's correction, all lower limits hold together in at least 19 of 20 runs. Holm's method would
        find the same runs to be over a limit, but gives no limits that could be shown.
        """
        from themis.judge.risk import fault_rates

        members = [(each.name, value, each.position == k) for each in columns for k, value in enumerate(each.values)]
        is_weighted = bool((self.weight != 1).any())
        counts = [(tests[mine], faults[mine], self.weight[mine] if is_weighted else None) for _, _, mine in members]
        tail = ALPHA / max(1, sum(bool(n.any()) for n, _, _ in counts))
        estimates = zip(members, counts, fault_rates(counts), fault_rates(counts, tail), strict=True)
        return tuple(
            SliceRate(name, value, int((n > 0).sum()), int(n.sum()), rate, 0.0 if together is None else together.low)
            for (name, value, _), (n, _, _), rate, together in estimates
        )


def slices_of(run: Reader, slice_by: str) -> tuple[SliceRate, ...]:
    """The fault rate of the slices of a finished run by other columns; the model is not run."""
    if read_claim(run.record["settings"].get("decide"))[0] == "fault_rate":
        raise UsageError(
            f"slice_by needs a run without a claim about the fault rate, but {run.path} has one: run it without decide"
        )
    progress = read_progress(run)
    if progress is None or progress.seeds is None:
        raise UsageError(f"slice_by needs tests by this version of Themis, but {run.path} has none: run it again")
    columns = progress.seeds.columns(slice_by, run.record["start"].get("classes"))
    return progress.seeds.rates(columns, progress.uniform_tests_by_seed, progress.uniform_faults_by_seed)


def strengths(
    theta: NDArray[Any], dimensions: Sequence[dict[str, Any]]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The strength of each theta `[n, dimensions]`, and the index of the dimension furthest from its identity."""
    columns = ("low", "high", "identity")
    shares = range_shares(theta, *(np.array([dimension[name] for dimension in dimensions]) for name in columns))
    return shares.max(-1), shares.argmax(-1)


def range_shares(
    theta: NDArray[Any], low: NDArray[Any], high: NDArray[Any], identity: NDArray[Any]
) -> NDArray[np.float64]:
    """The distance of each dimension from its identity, as a share of the range on that side.

    The largest of these shares is the strength.
    """
    distance = np.asarray(theta, dtype=np.float64) - identity
    reach = np.where(distance >= 0, high - identity, identity - low)
    return np.asarray(np.divide(np.abs(distance), reach, out=np.zeros_like(distance), where=reach > 0))


MAX_READ_ATTEMPTS, RETRY_SECONDS = 3, 0.05


@dataclass(frozen=True)
class SavedMoments:
    """The sums of the sensitivities in one stream, per neuron, after `shift` was subtracted from each sensitivity."""

    count: int
    shift: NDArray[np.float64]
    sums: NDArray[np.float64]

    @property
    def totals(self) -> NDArray[np.float64]:
        """The sum of the sensitivities of each neuron."""
        return self.shift * self.count + self.sums


@dataclass(frozen=True)
class SavedProgress:
    """The counts and measurements of a campaign when its last checkpoint was written."""

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
    seeds: SlicedSeeds | None
    """None in runs of earlier versions."""


def read_progress(run: Reader) -> SavedProgress | None:
    """The progress at the last checkpoint; None before the first one, or if its file was removed."""
    for _ in range(MAX_READ_ATTEMPTS):  # a campaign may replace the checkpoint before its file is opened
        try:
            checkpoint = run.checkpoint()
        except StoreError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            sleep(RETRY_SECONDS)
            continue
        return None if checkpoint is None else parse_progress(checkpoint, run.record.get("start", {}).get("n_neurons"))
    return None


def parse_progress(checkpoint: Checkpoint, n_neurons: int | None = None) -> SavedProgress:
    """Validate the arrays and values of a checkpoint, and convert them; `n_neurons` is checked if it is known."""
    try:
        check_form(checkpoint.values, PROGRESS_FORM, "its values")
        return _parse(checkpoint, n_neurons)
    except ValueError as error:
        raise StoreError(f"the checkpoint of a run is damaged: {error}; restore the run folder from a copy") from error


def _parse(checkpoint: Checkpoint, n_neurons: int | None) -> SavedProgress:
    arrays, values = checkpoint.arrays, checkpoint.values
    tally = values["tally"]
    tests, faults, near_ties = (
        _counts(arrays, f"/tally/{name}") for name in ("uniform_tests_by_seed", "uniform_faults_by_seed", "near_ties")
    )
    times_seen, seeds = _counts(arrays, "/tally/uniform_times_seen", least=1), None
    if "/seeds/seed_id" in arrays:
        number = _counts(arrays, "/seeds/number", least=-1)
        seeds = SlicedSeeds(_counts(arrays, "/seeds/seed_id"), number, _array(arrays, "/seeds/weight", 1))
        if seeds.weight.dtype != np.float64 or not (np.isfinite(seeds.weight) & (seeds.weight >= 0)).all():
            raise ValueError("its seeds must have weights from 0")
    columns = [tests, faults, *([] if seeds is None else vars(seeds).values())]
    if len(set(map(len, columns))) > 1:
        raise ValueError("its counts by seed are of different seeds")
    n_tests, n_uniform = tally["counts"]["tests"], tally["counts"]["uniform_tests"]
    is_possible = (faults <= tests).all() and int(tests.sum()) <= n_uniform <= n_tests == checkpoint.tests
    if not is_possible or int(times_seen.sum()) > n_tests:
        raise ValueError("its counts of tests and faults contradict each other")
    return SavedProgress(
        tests=n_tests,
        rounds=checkpoint.rounds,
        chunk=values["chunk"],
        seconds=Seconds(**values["seconds"]),
        counts=tally["counts"],
        kinds=tally["kinds"],
        near_ties=near_ties.tolist(),
        uniform_tests_by_seed=tests,
        uniform_faults_by_seed=faults,
        uniform_times_seen=times_seen,
        moments={stream: _parse_moments(stream, arrays, n_neurons) for stream in STREAMS},
        seeds=seeds,
    )


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
