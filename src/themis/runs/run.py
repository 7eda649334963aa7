"""The result of a campaign: its start, its rounds and the run as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from themis.errors import UsageError
from themis.judge.calibration import Calibration
from themis.judge.coverage import Coverage
from themis.judge.decide import Decision
from themis.judge.estimate import Estimate, describe_share
from themis.judge.normality import Normality
from themis.perturb.perturbation import Theta
from themis.runs.display.text import CleanScores, Counts, RunVerdict, write_verdict
from themis.runs.faults import Faults
from themis.runs.store.files import json_safe
from themis.settings import Settings, policy_name
from themis.target.activations import OUTPUT, Layer
from themis.text import counted, percent
from themis.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from themis.runs.analysis.diff import Diff
    from themis.runs.analysis.review import Review
    from themis.runs.replay import RunHandle
    from themis.runs.trust import Trusted


@dataclass(frozen=True)
class Start:
    """What is known before the first test."""

    bounds: tuple[float, float]
    perturbation: str
    theta: tuple[Theta, ...]
    settings: Settings
    layers: tuple[Layer, ...]
    n_neurons: int
    n_seeds: int
    n_usable: int
    clean_accuracy: float | None
    clean_error: float | None
    """Mean absolute error on clean inputs, in tasks whose answer is a number."""
    clean_iou: float | None
    """Mean IoU on clean inputs, in tasks whose answer is a map."""
    chunk: int
    """Tests per forward pass."""
    n_kept: int
    """Seeds whose clean activations are kept in memory; the others are recomputed when tests need them."""
    device: str
    gives_probabilities: bool
    oracle: str
    """The oracle as settled by the clean outputs."""
    oracle_asked: str
    """The oracle as requested, such as `auto`."""
    fault: str
    """The definition of a fault, in words."""
    tests_before: int = 0
    """Tests that had been run when the campaign was resumed."""
    criterion: dict[str, Any] | None = None
    """The campaign's criterion: its name, whether it guides the search, and what it was fitted to."""
    classes: tuple[str, ...] | None = None
    """The names of the classes by number, if the data has them."""
    perturbed: str | None = None
    """Which of several inputs per example is perturbed, in words; None if there is only one."""
    entry: str | None = None
    """Which entry of the model's result holds its scores, in words; None if the result is a tensor."""
    clean_map: float | None = None
    """Mean average precision on clean inputs, as COCO defines it, in tasks whose answers are boxes."""
    slight: str | None = None
    """A warning that the perturbation hardly changes the inputs; None if it does."""
    left_out: str | None = None
    """Why some seeds are not tested, in words; None if all of them are."""
    constant: str | None = None
    """Why a low fault rate would mean nothing, in words: the clean answers are no better than a constant. Else None."""
    kept_bytes: int | None = None
    """Memory for the clean activations that are kept; None in runs of earlier versions."""

    @property
    def task(self) -> str:
        """The name of the oracle without its parameter: wrong, changed, regression, ..."""
        return self.oracle.partition(":")[0]

    @property
    def profile(self) -> str | None:
        """How often theta and seeds occur in operation, in words; None if all values are equally frequent."""
        return describe_profile([theta.as_dict() for theta in self.theta], self.settings.seed_weights)

    @property
    def clean(self) -> CleanScores:
        """How well the model answers clean inputs."""
        return CleanScores(self.clean_accuracy, self.clean_error, self.clean_iou, self.clean_map)

    @property
    def covers_neurons(self) -> bool:
        """Whether there is anything to cover: a model without hidden layers has only its output."""
        return covers_neurons([layer.name for layer in self.layers], self.settings.preset)

    def as_dict(self) -> dict[str, Any]:
        """The start as plain data, without settings and theta, which are stored elsewhere."""
        return {name: value for name, value in asdict(self).items() if name not in ("settings", "theta")}


def covers_neurons(layers: Iterable[str], preset: str | None) -> bool:
    """Whether coverage is a goal: there is a layer besides the output, or the preset is the paper's."""
    return preset == "paper" or any(name != OUTPUT for name in layers)


def record_covers_neurons(record: dict[str, Any]) -> bool:
    """Whether coverage is a goal of a recorded run; True if its layers are not recorded yet."""
    layers = record.get("start", {}).get("layers")
    return not layers or covers_neurons((layer["name"] for layer in layers), record["settings"].get("preset"))


@dataclass(frozen=True)
class Round:
    """The state of a campaign after a round. Counts are totals since the start."""

    number: int
    tests: int
    dropped: int
    """Tests that were counted but not run, because they are too dissimilar from the seed."""
    passes: int
    faults: int
    distinct_faults: int
    failing_seeds: int
    coverage: Coverage
    seconds: float
    criterion_score: float | None = None
    residual_risk: Estimate | None = None
    """The probability that the next uniform test shows a new distinct fault; None without uniform tests."""
    # The following are None in rounds of earlier versions.
    reachable_faults: Estimate | None = None
    """How many distinct faults four times the tests would find."""
    reachable_seeds: Estimate | None = None
    """How many failing seeds four times the tests would find."""
    recall: float | None = None
    """A lower limit, with probability 3/4, of the share of reachable distinct faults found; None without faults."""
    forecast_faults_tests: int | None = None
    """Tests still needed to find 95% of the reachable distinct faults."""


@dataclass(frozen=True)
class StrengthPart:
    """The share of random disturbances of strength `low` to `high` that the model still answered correctly.

    Strength is the distance of theta from its identity as a share of its range, in the furthest dimension.
    """

    low: float
    high: float
    tests: int
    correct: Estimate
    """The mean over the seeds of the share that each answered correctly."""


@dataclass(frozen=True)
class SliceRate:
    """What the uniform stream says about the seeds of a slice: those with one value of a column."""

    column: str
    value: str
    seeds: int
    """Tested seeds of the slice."""
    tests: int
    fault_rate: Estimate | None
    """None if no seed of the slice was tested."""
    at_least: float
    """A lower limit of the fault rate; the limits of all slices of the run hold together with 95% confidence."""

    @property
    def name(self) -> str:
        return f"{self.column} {self.value}"


def worst_slices(slices: Iterable[SliceRate], overall: Estimate | None) -> list[SliceRate]:
    """The slices that fail clearly more often than all seeds, the worst first."""
    worst = [] if overall is None else [rate for rate in slices if rate.at_least > overall.value]
    return sorted(worst, key=lambda rate: -rate.at_least)


@dataclass(frozen=True)
class Seconds:
    """Time spent by phase."""

    measure: float
    judge: float
    search: float
    total: float


@dataclass(frozen=True)
class Run:
    """A finished campaign."""

    stop: str
    """Why it stopped, as a sentence."""
    stop_reason: str
    """coverage, found, decided, tests, seeds, passes, seconds, plateau, user or error.

    `found`: the model has no coverage goal, and few faults were left to find. `seeds`: every seed was tested once, and
    the claim is still undecided. `error`: the campaign failed; this only occurs in its summary."""
    faults: Faults
    rounds: list[Round]
    start: Start
    fault_rate: Estimate | None
    """With a claim to decide, the interval is valid however often it was looked at during the campaign."""
    residual_risk: Estimate | None
    """The probability that the next uniform test shows a distinct fault that no test of the campaign has found."""
    residual_risk_uniform: Estimate | None
    """The probability that it shows a distinct fault that no test of the uniform stream has found."""
    coverage_uniform: float | None
    coverage_interval: Estimate | None
    design_effect: float | None
    normality: Normality | None
    correct_by_strength: tuple[StrengthPart, ...]
    """The uniform stream by strength; empty without a uniform stream, or if tests were dropped."""
    calibration: Calibration | None
    """The gap between confidence and correctness; None without classes or labels, and before the end."""
    slices: tuple[SliceRate, ...]
    """The fault rate of each slice, by the columns of `slice_by`; by default by class, which is the label of a seed or
    else its clean answer, and by the metadata of a MAITE data set."""
    near_ties: list[int] = field(repr=False)
    """Tests with a margin below 1e-4: another device or batch shape may answer them differently."""
    seconds: Seconds
    kinds: dict[str, dict[str, int]]
    """Number of tests and faults by kind of proposal."""
    raised: int
    """Tests that raised the campaign's criterion."""
    policy: dict[str, Any]
    """Figures reported by the policy itself."""
    of_criterion: dict[str, Any]
    """Figures reported by the criterion itself."""
    environment: dict[str, Any] = field(repr=False)
    requests: dict[str, int] | None = None
    """Requests to a black box since the campaign was started or resumed: how many `inputs` in how many `calls`, and how
    many calls were `repeated` after an error; None for other models."""
    posterior_means: NDArray[np.float32] | None = field(default=None, repr=False)
    """The posterior mean of every neuron's sensitivity `[neurons]`, in the order of `start.layers` and in the units of
    `start.settings.scale`; None for a run that was opened from its folder."""

    decision: Decision | None = None
    """The verdict on the claim of the setting `decide`; None without one, or before the campaign has ended."""
    review: Review | None = None
    """The reviewers' marks when the run was opened; None if no fault is marked."""
    folder: Path | None = field(default=None, repr=False)
    """The run folder; None if nothing was written."""

    @property
    def handle(self) -> RunHandle:
        """Gives access to the model and the seeds, so that tests can be run again."""
        if self.faults.handle is None:
            raise UsageError("the run must know its model and data, but knows neither: pass the folder it is stored in")
        return self.faults.handle

    @property
    def coverage(self) -> float:
        """Share of the sampled neurons that have converged."""
        return self.judged.sampled

    @property
    def judged(self) -> Coverage:
        """The complete coverage of the last round."""
        return self.rounds[-1].coverage

    @property
    def counts(self) -> Counts:
        """The number of tests, faults, seeds and neurons."""
        return Counts.of(self.rounds[-1], vars(self.start))

    @property
    def verdict(self) -> RunVerdict:
        """The result in one sentence."""
        start = self.start
        rate, constant = self.fault_rate, start.constant
        return write_verdict(start.perturbation, start.task, self.counts, start.clean, rate, constant=constant)

    @property
    def worst_slices(self) -> list[SliceRate]:
        """The slices that fail clearly more often than all seeds, the worst first."""
        return worst_slices(self.slices, self.fault_rate)

    @property
    def coverage_caution(self) -> str | None:
        """Why a high coverage says little, if it was reached with few tests; otherwise None."""
        if not self.start.covers_neurons:
            return None
        last, start = self.rounds[-1], self.start
        n_run = last.tests - last.dropped
        return coverage_caution(last.coverage.sampled, n_run, start.n_usable, start.settings.scale)

    def criterion(self) -> dict[str, Any] | None:
        """Result of the campaign's criterion: its score, the tests that raised it and the faults among them."""
        if self.start.criterion is None:
            return None
        columns, raised = self.faults.columns, self.faults.columns["raised"]
        selected = list(zip(columns["seed_id"][raised].tolist(), columns["answer"][raised].tolist(), strict=True))
        return {
            **self.start.criterion,
            "score": self.rounds[-1].criterion_score,
            "raised": self.raised,
            "faults_selected": len(selected),
            "distinct_faults_selected": len(set(selected)),
            **self.of_criterion,
        }

    def report(self, path: str | Path | None = None) -> Path:
        """Write the report as one HTML file, by default `report.html` in the run folder, and return its path."""
        if self.folder is None:
            raise UsageError("a report is made from the run folder, but the run has none: pass out='runs/NAME' to run")
        written: Path = _above("report.page").write_report(self.folder, None if path is None else Path(path))
        return written

    def gate(
        self,
        *,
        max_fault_rate: float | None = None,
        max_valid_fault_rate: float | None = None,
        fail_under: str | Iterable[str] | dict[str, float] = (),
        max_new_faults: int | None = None,
        baseline: Run | str | Path | None = None,
        trust: Trusted = False,
        allow_constant: bool = False,
    ) -> Any:
        """Check limits as `themis gate` does. The `GateResults` are true if all gates pass, and print a line per gate.

        max_valid_fault_rate: a limit on the rate of faults that reviewers marked as valid tests with `themis review`.
        baseline: the run that `max_new_faults` compares with, or its folder. trust: run folders whose code may run
        although they were not made on this machine by this user. allow_constant: let `max_fault_rate` pass even if
        the clean answers are no better than a constant.
        """
        gates = _above("report.gates.gates").Gates.of(
            fail_under,
            max_fault_rate=max_fault_rate,
            max_valid_fault_rate=max_valid_fault_rate,
            max_new_faults=max_new_faults,
            baseline=baseline,
            trust=trust,
            allow_constant=allow_constant,
        )
        if not gates and self.decision is None:
            raise UsageError("a gate must be given, but there is none: pass max_fault_rate=0.05 or another limit")
        return _above("report.gates.gates").check_gates(self, gates, folder=self.folder)

    def diff(self, other: Run | str | Path, **options: Any) -> Diff:
        """Compare with a later run, or its folder, as `themis.diff` does; the options are the same."""
        difference: Diff = _above("suites.diff").diff(self, other, **options)
        return difference

    def plot_robustness(self) -> Figure:
        """Plot how many seeds the search could not break, by strength. It shrinks one fault per seed, which is slow."""
        curve = _above("runs.analysis.shrink").robustness(self)
        figure: Figure = _above("runs.display.figure").robustness_figure(curve)
        return figure

    def __repr__(self) -> str:
        last = self.rounds[-1]
        faults = f"{counted(last.distinct_faults, 'distinct fault')} in {counted(last.tests, 'test')}"
        rate = "unknown" if self.fault_rate is None else describe_share(self.fault_rate)
        coverage = f", coverage {percent(self.coverage)}" if self.start.covers_neurons else ""
        return f"<Run: fault rate {rate}, {faults}{coverage}. {self.stop}>"

    def _repr_html_(self) -> str:
        from themis.runs.display.fault import show_run

        return show_run(self)

    def summary(self) -> dict[str, Any]:
        """The run as plain data, as written to `summary.json`."""
        last, start = self.rounds[-1], self.start
        return {
            **_named(self, "stop", "stop_reason", "decision"),
            "coverage": last.coverage.sampled,
            "coverage_all": last.coverage.all,
            "coverage_by_layer": last.coverage.by_layer,
            **_named(self, "coverage_uniform", "coverage_interval", "coverage_caution", "design_effect"),
            "forecast_tests": last.coverage.forecast,
            **_named(last, "tests", "passes", "faults", "distinct_faults", "failing_seeds"),
            "dropped_tests": last.dropped,
            "rounds": len(self.rounds),
            "seeds": start.n_usable,
            "seeds_given": start.n_seeds,
            **_named(start, "left_out", "constant", "clean_accuracy", "clean_error", "clean_iou", "clean_map"),
            **_named(start, "perturbation", "profile", "oracle", "fault"),
            "neurons": start.n_neurons,
            "neurons_dead": last.coverage.n_dead,
            "neurons_unseen": last.coverage.n_unseen,
            **_named(
                self,
                "fault_rate",
                "correct_by_strength",
                "calibration",
                "slices",
                "residual_risk",
                "residual_risk_uniform",
            ),
            **_named(last, "reachable_faults", "reachable_seeds", "recall", "forecast_faults_tests"),
            **_named(self, "normality", "kinds", "requests", "seconds"),
            "criterion": self.criterion(),
            "policy": {"name": policy_name(start.settings.policy), **self.policy},
            "near_ties": len(self.near_ties),
            "random_seed": start.settings.random_seed,
            "version": __version__,
            **({} if self.review is None else {"review": self.review.as_dict()}),
        }


def describe_profile(theta: Sequence[Mapping[str, Any]], seed_weights: str | None) -> str | None:
    """How often theta and seeds occur in operation, in words; None if all values are equally frequent."""
    texts = [f"{each['name']}~{each['distribution']}" for each in theta if "distribution" in each]
    texts += [] if seed_weights is None else [f"seeds by {seed_weights}"]
    return ", ".join(texts) or None


HIGH_COVERAGE, MIN_TESTS_PER_SEED = 0.9, 2
"""Readers take coverage above HIGH_COVERAGE as nearly complete, but with fewer tests per seed it says little."""


def coverage_caution(coverage: float, n_tests: int, n_seeds: int, scale: str) -> str | None:
    """Why a high coverage says little after so few tests; None if it is not high, or based on enough tests."""
    if coverage < HIGH_COVERAGE or n_tests >= MIN_TESTS_PER_SEED * n_seeds:
        return None
    seeds = "most of them were not tested" if 2 * n_tests < n_seeds else f"fewer than {MIN_TESTS_PER_SEED} per seed"
    text = f"coverage of {percent(coverage)} after {counted(n_tests, 'test')} on {counted(n_seeds, 'seed')} ({seeds})"
    if scale == "relative":
        return f"{text} says little about the others: set no coverage goal, and a budget of more tests"
    return (
        f"{text} says little: the tolerance is absolute, and this model's activations move little; use --scale "
        "relative (scale='relative'), which measures each neuron in units of its own spread on clean inputs"
    )


def _above(module: str) -> Any:
    """Import a module that builds on runs; methods of `Run` that use it are shorthands for its functions."""
    return import_module(f"themis.{module}")


def _named(source: Any, *names: str) -> dict[str, Any]:
    """Some fields of an object as plain data."""
    return {name: json_safe(getattr(source, name)) for name in names}
