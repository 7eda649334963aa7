"""What a campaign gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from themis.errors import MissingExtraError, UsageError
from themis.judge.coverage import Coverage
from themis.judge.estimate import Estimate
from themis.judge.normality import Normality
from themis.perturb.perturbation import Theta
from themis.runs.faults import Faults, RunHandle
from themis.settings import Settings
from themis.target.activations import Layer
from themis.version import __version__

if TYPE_CHECKING:
    from themis.runs.display.plots import Figure


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
    """Mean absolute error of the clean answers, in tasks whose answer is a number."""
    clean_iou: float | None
    """Mean IoU of the clean answers, in tasks whose answer is a map."""
    chunk: int
    n_kept: int
    """Seeds whose clean activations are kept; the others are run again with each test."""
    device: str
    gives_probabilities: bool
    oracle: str
    """The oracle with all that the clean outputs decided."""
    oracle_asked: str
    fault: str
    """What a fault is, in words."""
    tests_before: int = 0
    """Tests that had been run when the campaign was resumed."""
    criterion: dict[str, Any] | None = None
    """The campaign's criterion: its name, whether it leads, what it learnt from."""
    classes: tuple[str, ...] | None = None
    """The classes' names by their numbers, where the data knows them."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data; the settings are kept elsewhere."""
        return {name: value for name, value in asdict(self).items() if name not in ("settings", "theta")}


@dataclass(frozen=True)
class Round:
    """One round: what was measured up to and with it, and how it was judged. Counts are totals since the start."""

    number: int
    tests: int
    dropped: int
    """Of these tests, those that were not run: no longer the same picture."""
    passes: int
    faults: int
    distinct_faults: int
    failing_seeds: int
    coverage: Coverage
    seconds: float
    criterion_score: float | None = None
    """Of the campaign's criterion, if it has one."""


@dataclass(frozen=True)
class Seconds:
    """Where the time went."""

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
    """coverage, tests, passes, seconds, plateau or user; error in the summary of a campaign that failed."""
    faults: Faults
    rounds: list[Round]
    start: Start
    fault_rate: Estimate | None
    residual_risk: Estimate | None
    coverage_uniform: float | None
    coverage_interval: Estimate | None
    design_effect: float | None
    normality: Normality | None
    near_ties: list[int] = field(repr=False)
    """Tests whose answer hung on a margin under 1e-4: another device or batch shape may answer them otherwise."""
    seconds: Seconds
    kinds: dict[str, dict[str, int]]
    """Tests and faults by kind of proposal."""
    raised: int
    """Tests that raised the campaign's criterion."""
    policy: dict[str, Any]
    """What the policy itself counted."""
    of_criterion: dict[str, Any]
    """What the criterion itself says."""
    environment: dict[str, Any] = field(repr=False)

    @property
    def handle(self) -> RunHandle:
        """Gives access to the model and the seeds, so that tests can be run again."""
        if self.faults.handle is None:
            raise UsageError("the run must know its model and data, it knows neither: pass the folder it is stored in")
        return self.faults.handle

    @property
    def coverage(self) -> float:
        """Share of the sampled neurons that has converged."""
        return self.judged.sampled

    @property
    def judged(self) -> Coverage:
        """The last round's coverage in full."""
        return self.rounds[-1].coverage

    def criterion(self) -> dict[str, Any] | None:
        """How the campaign's criterion did: its score, the tests that raised it and the faults among them."""
        if self.start.criterion is None:
            return None
        selected = self.faults.selected()
        return {
            **self.start.criterion,
            "score": self.rounds[-1].criterion_score,
            "raised": self.raised,
            "faults_selected": len(selected),
            "distinct_faults_selected": len(set(selected)),
            **self.of_criterion,
        }

    def plot_coverage(self) -> Figure:
        """Coverage by tests, with the interval of the last round."""
        return _draw("coverage_figure", self)

    def plot_faults(self) -> Figure:
        """Distinct faults and failing seeds by tests."""
        return _draw("faults_figure", self)

    def plot_layers(self) -> Figure:
        """By layer: neurons covered, and the faults' share of sensitivity."""
        return _draw("layers_figure", self)

    def plot_matrix(self, classes: Sequence[str] | None = None) -> Figure:
        """Which answers turn into which; `classes` are their names, by default as the data has them."""
        return _draw("matrix_figure", self, classes or self.start.classes)

    def plot_theta(self) -> Figure:
        """Where in theta's range faults were found."""
        return _draw("theta_figure", self)

    def plot_time(self) -> Figure:
        """Seconds by phase."""
        return _draw("time_figure", self)

    def plot_robustness(self) -> Figure:
        """How many seeds are still answered rightly by strength; shrinks a fault of each seed, which takes a while."""
        from themis.runs.analysis.robustness import robustness

        return _draw("robustness_figure", robustness(self))

    def __repr__(self) -> str:
        last = self.rounds[-1]
        found = f"{last.distinct_faults:,} distinct faults in {last.tests:,} tests"
        return f"<Run: {found}, coverage {percent(self.coverage)}. {self.stop}>"

    def _repr_html_(self) -> str:
        from themis.runs.display.notebook import show_run

        return show_run(self)

    def summary(self) -> dict[str, Any]:
        """Plain data, as written to `summary.json`."""
        last, start = self.rounds[-1], self.start
        return {
            "stop": self.stop,
            "stop_reason": self.stop_reason,
            "coverage": last.coverage.sampled,
            "coverage_all": last.coverage.all,
            "coverage_uniform": self.coverage_uniform,
            "coverage_interval": _plain(self.coverage_interval),
            "coverage_by_layer": last.coverage.by_layer,
            "design_effect": self.design_effect,
            "forecast_tests": last.coverage.forecast,
            "tests": last.tests,
            "dropped_tests": last.dropped,
            "passes": last.passes,
            "rounds": len(self.rounds),
            "faults": last.faults,
            "distinct_faults": last.distinct_faults,
            "failing_seeds": last.failing_seeds,
            "seeds": start.n_usable,
            "seeds_given": start.n_seeds,
            "clean_accuracy": start.clean_accuracy,
            "clean_error": start.clean_error,
            "clean_iou": start.clean_iou,
            "oracle": start.oracle,
            "neurons": start.n_neurons,
            "neurons_dead": last.coverage.n_dead,
            "neurons_unseen": last.coverage.n_unseen,
            "fault_rate": _plain(self.fault_rate),
            "residual_risk": _plain(self.residual_risk),
            "normality": _plain(self.normality),
            "kinds": self.kinds,
            "criterion": self.criterion(),
            "policy": {"name": name_of(start.settings.policy), **self.policy},
            "near_ties": len(self.near_ties),
            "seconds": asdict(self.seconds),
            "perturbation": start.perturbation,
            "random_seed": start.settings.random_seed,
            "version": __version__,
        }


def percent(share: float, digits: int = 1) -> str:
    """A percentage that reads 100 or 0 only when it is exactly that."""
    text = f"{100 * share:.{digits}f}%"
    least = 10.0**-digits
    if share < 1 and text == f"{100:.{digits}f}%":
        return f">{100 - least:.{digits}f}%"
    if share > 0 and text == f"{0:.{digits}f}%":
        return f"<{least:.{digits}f}%"
    return text


def name_of(policy: Any) -> str:
    """A policy's name, or its class's."""
    return policy if isinstance(policy, str) else type(policy).__name__


def _draw(kind: str, *what: Any) -> Figure:
    """A figure of `themis.runs.display.plots`, which needs matplotlib."""
    try:
        from themis.runs.display import plots
    except ImportError as error:
        raise MissingExtraError("figures need matplotlib: pip install matplotlib") from error
    figure: Figure = getattr(plots, kind)(*what)
    return figure


def _plain(value: Any) -> dict[str, Any] | None:
    return None if value is None else asdict(value)
