"""Gates decide whether a model may ship: each is a limit on a result of a campaign, and passes or fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from themis.errors import StoreError, UsageError, nearest
from themis.judge.decide import Decision
from themis.judge.estimate import Estimate
from themis.judge.risk import seeds_to_exceed
from themis.perturb.perturbation import is_same_code
from themis.report.gates.results import GateResult, GateResults, write_junit, write_markdown
from themis.runs.analysis.compare import MODEL_REMEDY, DiffOptions, Side, diff_runs
from themis.runs.analysis.diff import Diff, replay_command
from themis.runs.analysis.review import required_review
from themis.runs.display.text import about, summary_rows
from themis.runs.estimates import ALPHA, slices_of
from themis.runs.replay import AnyRun, Replayer, as_run, read_run
from themis.runs.run import Run, SliceRate
from themis.runs.store.reader import Reader
from themis.runs.trust import Trusted
from themis.settings import HOLDS, MAX_RISK, UNDECIDED, read_claim
from themis.suites.folder import is_suite, name_suites
from themis.suites.result import CorruptionErrors, Rebuild, SuiteDecision, SuiteRun, open_members
from themis.text import counted, percent

__all__ = ["METRICS", "GateResult", "GateResults", "Gates", "check_gates", "write_junit", "write_markdown"]

# The limits, as users write them

_MORE_TESTS = "raise the budget with --max-tests or --max-seconds, or lower the limit"
_BETTER_MODEL = "train the model better, or lower the limit"


@dataclass(frozen=True)
class Metric:
    """A figure that must not be below a limit."""

    about: str
    missing: str
    """Why a run may lack this figure, and what to do about it."""
    remedy: str = _MORE_TESTS
    """How to raise the figure."""
    forecast: str = ""
    """The name in the summary of the number of further tests that this takes."""
    read: Callable[[dict[str, Any]], float | None] | None = None
    """How to read the figure from the summary; by default by the metric's name."""


def _recall(summary: dict[str, Any]) -> float | None:
    """The recall; if no fault was found, 1 or 0 depending on whether the residual risk is small."""
    recall: float | None = summary.get("recall")
    risk = summary.get("residual_risk")
    if summary["distinct_faults"] or summary.get("reachable_faults") is None or risk is None:
        return recall
    return float(risk["high"] <= MAX_RISK)


NOTHING_TO_COVER = "the model has no hidden layers, so there are no neurons to cover: remove this gate"
_NO_LABELS = "the task is not a {} with labels: remove this gate"
METRICS = {
    "coverage": Metric("of the sampled neurons", "no neuron was judged", _MORE_TESTS, "forecast_tests"),
    "coverage_all": Metric("of all neurons", "no neuron was judged", _MORE_TESTS, "forecast_tests"),
    "coverage_low": Metric(
        "of all neurons, as the lower end of the 95% interval",
        "there are too few seeds for an interval: add more",
        read=lambda summary: (summary["coverage_interval"] or {}).get("low"),
    ),
    "coverage_uniform": Metric(
        "of all neurons, by the uniform stream alone", "there were no uniform tests: run it with --uniform-share 0.2"
    ),
    "recall": Metric(
        "of the distinct faults that four times the tests would find",
        "it has neither a fault nor uniform tests: run it again",
        forecast="forecast_faults_tests",
        read=_recall,
    ),
    "clean_accuracy": Metric(
        "of the clean inputs answered correctly",
        "the data has no labels, or the task has no accuracy: remove this gate",
        _BETTER_MODEL,
    ),
    "clean_iou": Metric("mean IoU of the clean answers", _NO_LABELS.format("segmentation"), _BETTER_MODEL),
    "clean_map": Metric("mean average precision of the clean answers", _NO_LABELS.format("detection"), _BETTER_MODEL),
    "criterion": Metric(
        "scored by the campaign's criterion",
        "the campaign had no criterion: run it with --criterion NAME",
        read=lambda summary: (summary["criterion"] or {}).get("score"),
    ),
}
"""The metrics of `fail_under`, by name."""


@dataclass(frozen=True)
class Gates:
    """The limits of a run. One further gate is always checked: that the campaign was completed."""

    fail_under: tuple[tuple[str, float], ...] = ()
    """Metrics and their smallest allowed values."""
    max_fault_rate: float | None = None
    """The largest allowed upper end of the 95% interval of the fault rate."""
    max_new_faults: int | None = None
    """The largest allowed number of new faults, which do not break the model of the baseline."""
    baseline: AnyRun | None = None
    trust: Trusted = False
    """Run folders whose code may run although they were not made on this machine by this user."""
    allow_constant: bool = False
    """Whether a limit on faults may pass although the clean answers are no better than a constant."""
    slice_by: str | None = None
    """Columns whose slices `max_fault_rate` applies to as well; by default those of the run."""
    max_valid_fault_rate: float | None = None
    """The largest allowed upper end of the interval of the rate of valid faults, judging by reviewers' marks."""

    def __post_init__(self) -> None:
        for name in ("max_fault_rate", "max_valid_fault_rate"):
            most = getattr(self, name)
            if most is not None and not 0 <= most <= 1:
                raise UsageError(f"{name} must lie in 0..1, got {most:g}: write 0.05 for 5%")
        if self.max_new_faults is not None and self.max_new_faults < 0:
            raise UsageError(f"max_new_faults must be 0 or more, got {self.max_new_faults}: 0 allows none")
        if self.slice_by is not None and self.max_fault_rate is None:
            raise UsageError("slice_by needs a limit, but max_fault_rate is missing: add it, such as 0.05 for 5%")

    @staticmethod
    def of(fail_under: str | Iterable[str] | dict[str, float] = (), **limits: Any) -> Gates:
        """Parse gates as users write them: `fail_under` is "coverage=0.99", a list of such texts, or a dict."""
        if isinstance(fail_under, str):
            fail_under = fail_under.split(",")
        if not isinstance(fail_under, dict):
            parts = (text.strip().partition("=") for text in fail_under)
            fail_under = {name.strip().replace("-", "_"): least for name, _, least in parts}
        gates = Gates(tuple((name, _read_limit(name, least)) for name, least in fail_under.items()), **limits)
        if (gates.max_new_faults is None) != (gates.baseline is None):
            present, missing = ("max_new_faults", "baseline")[:: 1 if gates.baseline is None else -1]
            raise UsageError(f"{present} and {missing} must be given together, but {missing} is missing: add it")
        return gates

    def __bool__(self) -> bool:
        """Whether any limit is set."""
        limits = (self.max_fault_rate, self.max_valid_fault_rate, self.max_new_faults)
        return bool(self.fail_under) or any(limit is not None for limit in limits)

    def check_ahead(self, uniform_share: float, perturbation: str | None = None) -> None:
        """Refuse, before a campaign, gates that could not be checked after it; `perturbation` is its code."""
        if self.max_fault_rate is not None and uniform_share == 0:
            raise UsageError("max_fault_rate needs a uniform_share above 0: set it to 0.2, or remove the gate")
        if isinstance(self.baseline, str | Path):
            with closing(Reader(self.baseline)) as run:
                recorded = run.record["perturbation_code"]
            if perturbation is not None and not is_same_code(perturbation, recorded):
                raise UsageError(
                    f"the baseline must have the same perturbation as the campaign, but {self.baseline} has another: "
                    "choose a run with the same perturbation"
                )


def _read_limit(name: str, least: str | float) -> float:
    if name not in METRICS:
        raise UsageError(f"fail_under needs a known METRIC=NUMBER, got {name!r}: {nearest(name, METRICS)}")
    try:
        limit = float(least)
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit) or (name != "criterion" and not 0 <= limit <= 1):
        rule = "a number" if name == "criterion" else "a number in 0..1"
        raise UsageError(f"the limit on {name} must be {rule}, got {least!r}: write {name}=0.99 for 99%")
    return limit


# The checks

CONSTANT_REMEDY = (
    "check the weights, the preprocessing and the labels, give more varied inputs, or accept it with --allow-constant "
    "(allow_constant=True)"
)
N_TELLING = 3
"""Most telling faults shown with the results."""


def check_gates(run: AnyRun, gates: Gates, *, folder: str | Path | None = None, remedy: str = "") -> GateResults:
    """Check a finished run, or its folder, against gates.

    folder: the run folder, if the run does not know it. remedy: advice for a baseline whose model is not the one that
    was tested.
    """
    run = as_run(run, gates.trust)
    own = run.folder if folder is None else Path(folder)
    name, faults, settings = "the run" if own is None else str(own), run.faults, run.start.settings
    _require_end(run, name)
    summary = run.summary()
    if not run.start.covers_neurons:
        summary = {name: None if name.startswith("coverage") else value for name, value in summary.items()}
    results = [_check_end(summary, name)]
    results += [_check_metric(metric, least, summary) for metric, least in gates.fail_under]

    def add_limit_on_faults(result: GateResult) -> None:
        results.append(result if gates.allow_constant else refuse_constant(result, summary))

    if run.decision is not None:
        more = f"continue it with themis resume {name} and a larger budget, or give more seeds"
        add_limit_on_faults(_check_decision(run.decision, None, more))
    if gates.max_fault_rate is not None:
        remedy_of_rate = "improve the model"
        if faults.task != "against" and run.requests is None:
            command = f"themis retrain {name}{' --judge DATA' * (settings.split is None)}"
            remedy_of_rate = f"retrain on the faults ({command}, or themis.retrain in Python)"
        add_limit_on_faults(_check_rate(gates.max_fault_rate, summary, remedy_of_rate))
        slices: Sequence[SliceRate] = run.slices if settings.slice_by else ()
        if gates.slice_by is not None:
            slices = _read_slices(own, gates.slice_by)
        results += check_slices(gates.max_fault_rate, slices)
    if gates.max_valid_fault_rate is not None:
        add_limit_on_faults(_check_valid_rate(gates.max_valid_fault_rate, own))
    difference = None
    if gates.max_new_faults is not None and gates.baseline is not None:
        base = gates.baseline
        if not isinstance(base, Run):
            with closing(Reader(base)) as stored:
                base = read_run(Replayer(stored, trust=gates.trust))
        sides = Side(base, "the baseline", remedy or MODEL_REMEDY), Side(run, name)
        difference = diff_runs(*sides, DiffOptions("versions"))
        results.append(_check_new_faults(gates.max_new_faults, difference))
    telling = (*(difference.new_faults if difference else ()), *faults.most_telling(N_TELLING))
    unique = tuple({fault.id: fault for fault in telling}.values())[:N_TELLING]
    return GateResults(name, tuple(results), summary, unique, difference, own, tuple(summary_rows(run)))


def _read_slices(folder: Path | None, slice_by: str) -> Sequence[SliceRate]:
    if folder is None:
        raise UsageError("slice_by needs a run with a folder, but it has none: pass slice_by to themis.run")
    with closing(Reader(folder)) as run:
        return slices_of(run, slice_by)


def _require_end(run: Run, name: str) -> None:
    """Refuse a run folder whose campaign has not ended."""
    if run.stop_reason == "running":
        raise UsageError(f"a run must have ended to be checked, but {name} is running: wait until it has ended")
    if run.stop_reason in ("killed", "failed"):
        raise StoreError(f"a checked run must have ended, but {name} was killed: resume it with themis resume {name}")


def _check_end(summary: dict[str, Any], name: str) -> GateResult:
    """The gate that every run has: the campaign was completed, and at least one test was run."""
    tests, dropped = summary["tests"], summary.get("dropped_tests", 0)
    stop = str(summary["stop"]).rstrip(".")
    found = f"{counted(tests, 'test')}, {counted(summary['distinct_faults'], 'distinct fault')}"
    text = f"{found}; {stop[:1].lower()}{stop[1:]}"
    remedy = f"the campaign ended early: resume it with themis resume {name}"
    if tests == dropped:
        text, remedy = f"all {tests:,} tests were dropped", "lower min_ssim, min_vif or the magnitude"
    has_passed = summary["stop_reason"] not in ("user", "error") and tests > dropped
    return GateResult("campaign", has_passed, None, None, text, remedy)


def _check_metric(name: str, least: float, summary: dict[str, Any]) -> GateResult:
    metric = METRICS[name]
    value = summary.get(name) if metric.read is None else metric.read(summary)
    if value is None or not math.isfinite(value):
        lacks_neurons = name.startswith("coverage") and summary.get("coverage") is None
        missing = NOTHING_TO_COVER if lacks_neurons else metric.missing
        raise UsageError(f"the gate on {name} needs a figure that the run does not have: {missing}")
    is_share = name != "criterion" or bool(summary["criterion"].get("is_share", True))
    shown, limit = distinguishable(value, least, is_share)
    text = f"{shown} {metric.about}, at least {limit} required"
    if name == "recall" and not summary["distinct_faults"]:
        upper, most = distinguishable(summary["residual_risk"]["high"], MAX_RISK)
        text = f"no fault was found; the residual risk is at most {upper}, at most {most} allowed"
    if name.startswith("coverage") and summary.get("coverage_caution"):
        text += f"; attention: {summary['coverage_caution']}"
    forecast = summary.get(metric.forecast)
    hint = f"{about(forecast)} more tests are forecast: " if forecast else ""
    return GateResult(name, value >= least, value, least, text, hint + metric.remedy)


def _check_rate(most: float, summary: dict[str, Any], remedy: str) -> GateResult:
    rate = summary["fault_rate"]
    if rate is None:
        raise UsageError("max_fault_rate needs uniform tests, but the run has none: run it with --uniform-share 0.2")
    value, low, high = (percent(rate[end], 2) for end in ("value", "low", "high"))
    found = f"{value}{' in operation' * bool(summary.get('profile'))} (95%: {low} to {high})"
    return _limit_rate("max_fault_rate", Estimate(**rate), most, found, (remedy, "seeds and tests narrow"))


def _limit_rate(gate: str, rate: Estimate, most: float, found: str, remedies: tuple[str, str]) -> GateResult:
    """A gate on the upper end of a rate; `remedies`: how to lower the rate, and what narrows its interval."""
    upper, limit = distinguishable(rate.high, most)
    has_passed = rate.high <= most
    text = f"{found}; the upper end of {upper} is {_place(has_passed)} the limit of {limit}"
    remedy = f"{remedies[0]}, or raise the limit"
    if rate.value <= most:
        remedy = f"the rate itself is within the limit: more {remedies[1]} the interval"
    return GateResult(gate, has_passed, rate.high, most, text, remedy)


def _place(is_within: bool) -> str:
    return "within" if is_within else "over"


def _check_decision(decision: Decision | SuiteDecision, value: float | None, remedy: str) -> GateResult:
    """The gate of a campaign or a suite with a claim to decide. remedy: what to do if the claim is undecided."""
    if decision.verdict != UNDECIDED:
        remedy = "improve the model, or claim less"
    limit = read_claim(decision.claim)[1]
    return GateResult("decide", decision.verdict == HOLDS, value, limit, decision.clause, remedy)


def check_slices(most: float, slices: Sequence[SliceRate]) -> list[GateResult]:
    """One gate per slice, which fails if the slice is over the limit with certainty, and a gate on judging any slice.

    The limits of all slices hold together. A slice can be judged if it has enough seeds to be found over the limit
    when its fault rate is three times the limit.
    """
    if not slices:
        return []
    n, least = len(slices), 1
    if 0 < most < 1:
        n_tested = max(1, sum(rate.tests > 0 for rate in slices))
        least = seeds_to_exceed(most, min(1.0, 3 * most), ALPHA / n_tested)
    results = []
    for rate in slices:
        is_over = rate.at_least > most
        is_judged = is_over or rate.seeds >= least
        text, needed = counted(rate.seeds, "tested seed"), "" if is_judged else f"; {least:,} are needed to judge it"
        if rate.fault_rate is not None:
            low, limit = distinguishable(rate.at_least, most)
            end = f"the lower end of {low} is {_place(not is_over)} the limit of {limit}"
            text = f"{percent(rate.fault_rate.value, 2)} on {text}; {end}"
        remedy = "train on more inputs like these, or raise the limit"
        gate = f"max_fault_rate[{rate.name}]"
        results.append(GateResult(gate, not is_over, rate.at_least, most, text + needed, remedy, is_judged))
    judged = [rate for rate, result in zip(slices, results, strict=True) if result.is_judged]
    text = f"{len(judged)} of {counted(n, 'slice')} can be judged, which takes {counted(least, 'tested seed')}"
    if judged:
        smallest = min(judged, key=lambda rate: rate.seeds)
        text += f"; the smallest of them is {smallest.name} with {smallest.seeds:,}"
    remedy = "use more seeds or tests, columns with fewer values, or a higher limit"
    return [GateResult("slices", bool(judged), None, None, text, remedy), *results]


def _check_valid_rate(most: float, folder: Path | None) -> GateResult:
    if folder is None:
        raise UsageError("the gate on max_valid_fault_rate needs the run's folder: pass out='runs/NAME' to run")
    with closing(Reader(folder)) as run:
        review = required_review(run)
    assert review.fault_rate is not None
    remedies = ("improve the model", "marks, seeds and tests narrow")
    return _limit_rate("max_valid_fault_rate", review.fault_rate, most, review.text, remedies)


def refuse_constant(result: GateResult, summary: dict[str, Any]) -> GateResult:
    """Fail a limit on faults if the model's clean answers are no better than a constant."""
    constant = summary.get("constant")
    if constant is None:
        return result
    joint = "but" if result.has_passed else "and"
    text = f"{result.text}, {joint} {constant}, so that it says nothing"
    return replace(result, has_passed=False, text=text, remedy=CONSTANT_REMEDY)


def _check_new_faults(most: int, difference: Diff) -> GateResult:
    n, after = len(difference.new), difference.faults_after
    left_out, compared = (0, 1) if after is None else (after.left_out, after.n)
    unseen = left_out + (0 if after is None else len(after.apart))
    has_passed = n <= most and not left_out and not (unseen and not compared)
    text = (
        f"{n:,} new fault{'s' * (n != 1)} compared with {difference.before['run']} ({len(difference.fixed):,} fixed, "
        f"{len(difference.still):,} still there), {_place(n <= most)} the limit of {most:,}"
        f"{f'; {unseen:,} could not be compared' * bool(unseen)}. {difference.sentence.rstrip('.')}"
    )
    ids = [fault.id for fault in difference.new_faults[:N_TELLING]]
    remedy = f"replay them: {replay_command(difference.after['run'], *ids)}"
    if n <= most:
        remedy = "use a baseline with the same seeds, perturbation and magnitude"
    return GateResult("max_new_faults", has_passed, float(n), float(most), text, remedy)


def distinguishable(value: float, limit: float, is_share: bool = True) -> list[str]:
    """Both numbers as text, with enough digits to tell them apart."""
    pairs = [[percent(x, k) if is_share else f"{x:.{k + 3}g}" for x in (value, limit)] for k in (1, 2, 4, 8)]
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])


def check_suite_gates(
    suite: SuiteRun,
    gates: Gates,
    *,
    rebuild: Rebuild | None = None,
    rebuild_baseline: Rebuild | None = None,
    remedy: str = "",
) -> GateResults:
    """Check the members of a suite against gates.

    rebuild, rebuild_baseline: how to open the first member of the suite and of the baseline if their models have moved.
    """
    with ExitStack() as stack:
        members = stack.enter_context(open_members(suite, rebuild, gates.trust))
        baseline = None
        if gates.baseline is not None:
            earlier = SuiteRun(_check_baseline(gates.baseline))
            baseline = stack.enter_context(open_members(earlier, rebuild_baseline, gates.trust))
        results = []
        for name in suite.members:
            if name not in members and suite.is_only_graded:
                continue
            if name not in members:
                missing = GateResult("campaign", False, None, None, "it has not run", f"themis resume {suite.path}")
                results.append((name, GateResults(str(suite.path / name), (missing,), {})))
                continue
            own = gates
            if baseline is not None:
                if name not in baseline:
                    raise UsageError(
                        f"the baseline must have a member {name!r}, but {gates.baseline} has none: run the same "
                        "suite on the earlier model"
                    )
                own = replace(gates, baseline=baseline[name])
            results.append((name, check_gates(members[name], own, remedy=remedy)))
    own_results: tuple[GateResult, ...] = ()
    summary = {"tests": suite.tests, "decision": suite.record.get("decision")}
    if suite.decision is not None:
        value = None if suite.decision.figure is None else suite.decision.figure.value
        own_results = (_check_decision(suite.decision, value, "give more seeds, with --level-seeds"),)
    return GateResults(str(suite.path), own_results, summary, folder=suite.path, members=tuple(results))


def check_mce(most: float, errors: CorruptionErrors) -> GateResult:
    """Check the mean corruption error of a suite against a limit, as a share of the baseline's errors."""
    if errors.mce is None:
        raise UsageError(f"max_mce needs a baseline with errors, but {errors.baseline} makes none: name another")
    has_passed = errors.mce <= most
    value, limit = distinguishable(errors.mce, most)
    worst, share = max(errors.by_member.items(), key=lambda of: of[1] or 0.0)
    text = (
        f"{value} of the errors of {errors.baseline}, {_place(has_passed)} the limit of {limit}; the "
        f"largest share is that of {worst}, {percent(share or 0.0)}"
    )
    remedy = "train the model better, or raise the limit"
    return GateResult("max_mce", has_passed, errors.mce, most, text, remedy)


def check_suite_ahead(gates: Gates, uniform_share: float) -> None:
    """Refuse, before a suite runs, gates that could not be checked after it."""
    replace(gates, baseline=None, max_new_faults=None).check_ahead(uniform_share)
    if gates.baseline is not None:
        _check_baseline(gates.baseline)


def _check_baseline(baseline: AnyRun) -> str | Path:
    if isinstance(baseline, str | Path) and is_suite(baseline):
        return baseline
    named = name_suites(baseline) if isinstance(baseline, str | Path) else ""
    problem = named or "is not: create it with themis suite on the earlier model"
    raise UsageError(f"the baseline of a suite must be the folder of a suite, but {baseline} {problem}")
