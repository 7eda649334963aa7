"""The limits that the figures of a campaign are checked against, as users write them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from themis.errors import UsageError, nearest
from themis.settings import MAX_RISK

if TYPE_CHECKING:
    from themis.runs.replay import RunSource
    from themis.runs.store.reader import Reader
    from themis.runs.trust import Trusted


@dataclass(frozen=True)
class Metric:
    """A figure that must not be below a limit: what it is, how to read it from the summary, and how to raise it."""

    about: str
    read: Callable[[dict[str, Any]], float | None]
    missing: str
    """Why a run may lack it, and what to do."""
    remedy: str


def _coverage_low(summary: dict[str, Any]) -> float | None:
    interval = summary.get("coverage_interval")
    return None if interval is None else interval["low"]


def _criterion(summary: dict[str, Any]) -> float | None:
    criterion = summary.get("criterion")
    return None if criterion is None else criterion["score"]


def _recall(summary: dict[str, Any]) -> float | None:
    """The recall. Without any fault there is nothing to recall, and the residual risk decides."""
    if summary.get("reachable_faults") is None:
        return None
    if summary.get("distinct_faults"):
        recall: float | None = summary.get("recall")
        return recall
    risk = summary.get("residual_risk")
    return None if risk is None else float(risk["high"] <= MAX_RISK)


NOTHING_TO_COVER = "the model has no hidden layers, so there are no neurons to cover: remove this gate"
_MORE = "raise the budget with --max-tests or --max-seconds, or lower the limit"
_BETTER = "train the model better, or lower the limit"
METRICS = {
    "coverage": Metric("of the sampled neurons", lambda s: s.get("coverage"), "no neuron was judged", _MORE),
    "coverage_all": Metric("of all neurons", lambda s: s.get("coverage_all"), "no neuron was judged", _MORE),
    "coverage_low": Metric(
        "of all neurons, as the lower end of the 95% interval",
        _coverage_low,
        "there are too few seeds for an interval: add more",
        _MORE,
    ),
    "coverage_uniform": Metric(
        "of all neurons, by the uniform stream alone",
        lambda s: s.get("coverage_uniform"),
        "there were no uniform tests: run it with --uniform-share 0.2",
        _MORE,
    ),
    "recall": Metric(
        "of the distinct faults that four times the tests would find",
        _recall,
        "an earlier version of Themis wrote it, or it has neither a fault nor uniform tests: run it again",
        _MORE,
    ),
    "clean_accuracy": Metric(
        "of the clean inputs answered correctly",
        lambda s: s.get("clean_accuracy"),
        "the data has no labels, or the task has no accuracy: remove this gate",
        _BETTER,
    ),
    "clean_iou": Metric(
        "mean IoU of the clean answers",
        lambda s: s.get("clean_iou"),
        "the task is not a segmentation with labels: remove this gate",
        _BETTER,
    ),
    "clean_map": Metric(
        "mean average precision of the clean answers",
        lambda s: s.get("clean_map"),
        "the task is not a detection with labels: remove this gate",
        _BETTER,
    ),
    "criterion": Metric(
        "scored by the campaign's criterion",
        _criterion,
        "the campaign had no criterion: run it with --criterion NAME",
        _MORE,
    ),
}
"""The metrics of `fail_under`, by name."""


@dataclass(frozen=True)
class Gates:
    """The limits of a run. There is always one more gate: that the campaign was completed."""

    fail_under: tuple[tuple[str, float], ...] = ()
    """Metrics and their smallest allowed values."""
    max_fault_rate: float | None = None
    """The largest allowed upper end of the 95% interval of the fault rate."""
    max_new_faults: int | None = None
    """The largest allowed number of new faults: those that do not break the model of the baseline."""
    baseline: RunSource | None = None
    trust: Trusted = False
    """Run folders whose code may run although they were not made on this machine by this user."""
    allow_constant: bool = False
    """Whether a limit on faults may pass although the clean answers are no better than a constant."""

    @staticmethod
    def of(
        fail_under: str | Iterable[str] | dict[str, float] = (),
        max_fault_rate: float | None = None,
        max_new_faults: int | None = None,
        baseline: RunSource | None = None,
        trust: Trusted = False,
        allow_constant: bool = False,
    ) -> Gates:
        """Parse gates as a user writes them: `fail_under` is "coverage=0.99", several of these, or a dict."""
        if isinstance(fail_under, str):
            fail_under = fail_under.split(",")
        pairs = fail_under.items() if isinstance(fail_under, dict) else map(_read_limit, fail_under)
        limits = tuple((name, _checked(name, least)) for name, least in pairs)
        if max_fault_rate is not None and not 0 <= max_fault_rate <= 1:
            raise UsageError(f"max_fault_rate must lie in 0..1, got {max_fault_rate:g}: write 0.05 for 5%")
        if max_new_faults is not None and max_new_faults < 0:
            raise UsageError(f"max_new_faults must be 0 or more, got {max_new_faults}: 0 allows none")
        if (max_new_faults is None) != (baseline is None):
            present, missing = ("max_new_faults", "baseline")[:: 1 if baseline is None else -1]
            raise UsageError(f"{present} and {missing} must be given together, but {missing} is missing: add it")
        return Gates(limits, max_fault_rate, max_new_faults, baseline, trust, allow_constant)

    def __bool__(self) -> bool:
        """Whether any limit is set."""
        return bool(self.fail_under) or self.max_fault_rate is not None or self.max_new_faults is not None

    def check_ahead(self, uniform_share: float, perturbation: str | None = None) -> None:
        """Refuse gates that could not be checked after a campaign, before it runs; `perturbation` is its code."""
        if self.max_fault_rate is not None and uniform_share == 0:
            raise UsageError(
                "max_fault_rate needs uniform tests, but uniform_share is 0: set it to 0.2, or remove the gate"
            )
        if isinstance(self.baseline, str | Path):
            with closing(open_baseline(self.baseline)) as run:
                recorded = run.record["perturbation_code"]
            from themis.perturb.perturbation import is_same_code

            if perturbation is not None and not is_same_code(perturbation, recorded):
                raise UsageError(
                    f"the baseline must have the same perturbation as the campaign, but {self.baseline} has another: "
                    "choose a run with the same perturbation"
                )

    def check_target(self, target: object, preset: str | None) -> None:
        """Refuse gates on the coverage of an estimator, which has no layers, before a campaign runs.

        Whether another function returns activations is known only when it is called.
        """
        from themis.target.blackbox import BlackBox
        from themis.target.estimator import Estimator

        if not isinstance(target, BlackBox) or not isinstance(target.predict, Estimator) or preset == "paper":
            return
        for name, _ in self.fail_under:
            if name.startswith("coverage"):
                raise UsageError(f"the gate on {name} needs neurons: {NOTHING_TO_COVER}")


def open_baseline(path: str | Path) -> Reader:
    """Open the run that another run is compared with."""
    from themis.runs.store.reader import Reader

    try:
        return Reader(path)
    except UsageError as error:
        raise UsageError(
            f"the baseline must be a run folder, but {path} is not one: create it with themis run on the earlier model"
        ) from error


def _read_limit(text: str) -> tuple[str, float]:
    name, equals, number = text.strip().partition("=")
    try:
        return name.strip().replace("-", "_"), float(number) if equals else math.nan
    except ValueError:
        return name, math.nan


def _checked(name: str, least: float) -> float:
    if name not in METRICS:
        remedy = f"write coverage={name}, or " if name.replace(".", "", 1).isdigit() else ""
        raise UsageError(
            f"fail_under must be METRIC=NUMBER with a known metric, got {name!r}: {remedy}{nearest(name, METRICS)}"
        )
    if not math.isfinite(least):
        raise UsageError(f"fail_under must be METRIC=NUMBER, got no number for {name}: write {name}=0.99")
    if name != "criterion" and not 0 <= least <= 1:
        meant = least if 1 < least <= 100 else 99.0
        raise UsageError(
            f"fail_under {name} must lie in 0..1, got {least:g}: write {name}={meant / 100:g} for {meant:g}%"
        )
    return float(least)
