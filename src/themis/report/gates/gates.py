"""Gates: may this model ship? Each gate is a limit on what a campaign found, and passes or fails."""

from __future__ import annotations

import math
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from themis.errors import StoreError, UsageError
from themis.report.gates.formats import write_junit, write_markdown
from themis.report.gates.limits import METRICS, NOTHING_TO_COVER, Gates, open_baseline
from themis.runs.display.text import about
from themis.runs.run import record_covers_neurons
from themis.settings import MAX_RISK
from themis.text import counted

if TYPE_CHECKING:
    from themis.runs.diff.result import Diff
    from themis.runs.fault import Fault
    from themis.runs.replay import RunSource

__all__ = ["METRICS", "GateResult", "GateResults", "Gates", "check_gates", "write_junit", "write_markdown"]

CONSTANT_REMEDY = (
    "check the weights, the preprocessing and the labels, give more varied inputs, or accept it with --allow-constant "
    "(allow_constant=True)"
)
N_TELLING = 3
"""Faults that are shown with the results."""


@dataclass(frozen=True)
class GateResult:
    """The result of one gate."""

    gate: str
    has_passed: bool
    value: float | None
    limit: float | None
    text: str
    """The value and the limit, in words."""
    remedy: str = ""
    """What to do if the gate has failed."""

    @property
    def line(self) -> str:
        """The result as it is printed."""
        if self.has_passed:
            return f"passed  {self.gate}: {self.text}"
        return f"FAILED  {self.gate}: {self.text}" + (f"; {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class GateResults:
    """The results of all gates of a run."""

    run: str
    results: tuple[GateResult, ...]
    summary: dict[str, Any] = field(repr=False)
    telling: tuple[Fault, ...] = field(default=(), repr=False)
    """The most telling faults; with a baseline, new faults come first."""
    diff: Diff | None = field(default=None, repr=False)
    folder: Path | None = None
    """The run folder, if there is one."""

    def __bool__(self) -> bool:
        return not self.has_failed

    def __repr__(self) -> str:
        return "\n".join(self.lines)

    @property
    def has_failed(self) -> bool:
        return any(not result.has_passed for result in self.results)

    @property
    def has_limits(self) -> bool:
        """Whether there is a gate besides the one on the end of the campaign."""
        return any(result.gate != "campaign" for result in self.results)

    @property
    def lines(self) -> list[str]:
        """One line per gate."""
        return [result.line for result in self.results]

    @property
    def sentence(self) -> str:
        """All results in one sentence."""
        failed = [result.gate for result in self.results if not result.has_passed]
        n = len(self.results)
        if not failed and not self.has_limits:
            return "The campaign was completed, but no limit was set, so no gate decides whether the model may ship."
        if not failed:
            return "The gate passed." if n == 1 else f"All {n} gates passed."
        return f"{len(failed)} of {n} gate{'s' * (n != 1)} failed: {', '.join(failed)}."

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "has_failed": self.has_failed,
            "gates": [
                {
                    "gate": result.gate,
                    "has_passed": result.has_passed,
                    "value": result.value,
                    "limit": result.limit,
                    "text": result.text,
                }
                for result in self.results
            ],
            "diff": None if self.diff is None else self.diff.as_dict(),
        }


def check_gates(run: RunSource, gates: Gates, *, folder: str | Path | None = None, remedy: str = "") -> GateResults:
    """Check a finished run, or its folder, against gates.

    folder: where the run was written to, if it is passed as `themis.run` returned it. remedy: advice for a baseline
    whose model is no longer the one that was tested.
    """
    from themis.runs.diff.api import diff_runs
    from themis.runs.run import Run

    with ExitStack() as stack:
        if isinstance(run, str | Path):
            from themis.runs.store.reader import Reader

            run = stack.enter_context(closing(Reader(run)))
        name, run_folder, summary = _describe(run, None if folder is None else Path(folder))
        results = [_check_end(summary, name)]
        results += [_check_metric(metric, least, summary) for metric, least in gates.fail_under]
        if gates.max_fault_rate is not None:
            rate = _check_rate(gates.max_fault_rate, summary, name, is_split=_is_split(run))
            results.append(rate if gates.allow_constant else refuse_constant(rate, summary))
        difference = None
        if gates.max_new_faults is not None and gates.baseline is not None:
            base = gates.baseline
            if isinstance(base, str | Path):
                base = stack.enter_context(closing(open_baseline(base)))
            names = ("" if not isinstance(base, Run) else "the baseline", name)
            difference = diff_runs(base, run, kind="versions", names=names, remedies=(remedy, ""), trust=gates.trust)
            results.append(_check_new_faults(gates.max_new_faults, difference))
        faults = run.faults if isinstance(run, Run) else _folder_faults(run)
        telling = (*(difference.new_faults if difference else ()), *faults.most_telling(N_TELLING))
        unique = tuple({fault.id: fault for fault in telling}.values())[:N_TELLING]
        return GateResults(name, tuple(results), summary, unique, difference, run_folder)


def _folder_faults(run: Any) -> Any:
    from themis.runs.analysis.shrink import read_faults

    return read_faults(run)


def _describe(run: Any, folder: Path | None) -> tuple[str, Path | None, dict[str, Any]]:
    """The name, the folder and the summary of a run; refuses a run without a valid summary."""
    from themis.runs.replay import Replayer
    from themis.runs.run import Run

    if isinstance(run, Run):
        name = "the run" if folder is None else str(folder)
        return name, folder, _figures(run.summary(), run.start.covers_neurons)
    reader = run.run if isinstance(run, Replayer) else run
    summary = reader.summary()
    if summary is None:
        if reader.is_running():
            raise UsageError(
                f"a run must have ended to be checked, but {reader.path} is running: wait until it has ended"
            )
        raise StoreError(
            f"a run must have a summary to be checked, but {reader.path} was killed: resume it with "
            f"themis resume {reader.path}"
        )
    return str(reader.path), reader.path, _figures(summary, record_covers_neurons(reader.record))


def _figures(summary: dict[str, Any], covers_neurons: bool) -> dict[str, Any]:
    """The summary, without coverage if the model has no hidden layers, and so nothing to cover."""
    if covers_neurons:
        return summary
    return {name: None if name.startswith("coverage") else value for name, value in summary.items()}


def _check_end(summary: dict[str, Any], name: str) -> GateResult:
    """The gate that every run has: the campaign was completed, and at least one test was run."""
    tests, dropped = summary["tests"], summary.get("dropped_tests", 0)
    stop = str(summary["stop"]).rstrip(".")
    found = f"{counted(tests, 'test')}, {counted(summary['distinct_faults'], 'distinct fault')}"
    text = f"{found}; {stop[:1].lower()}{stop[1:]}"
    remedy = f"the campaign ended early: resume it with themis resume {name}"
    if tests == dropped:
        text, remedy = f"all {tests:,} tests were dropped", "lower min_ssim or the magnitude"
    has_passed = summary["stop_reason"] not in ("user", "error") and tests > dropped
    return GateResult("campaign", has_passed, None, None, text, remedy)


def _check_metric(name: str, least: float, summary: dict[str, Any]) -> GateResult:
    metric = METRICS[name]
    value = metric.read(summary)
    if value is None or not math.isfinite(value):
        missing = metric.missing
        if name.startswith("coverage") and summary.get("coverage") is None:
            missing = NOTHING_TO_COVER
        raise UsageError(f"the gate on {name} needs a figure that the run does not have: {missing}")
    is_share = name != "criterion" or bool(summary["criterion"].get("is_share", True))
    shown, limit = distinguishable(value, least, is_share)
    forecasts = {"recall": "forecast_faults_tests", **dict.fromkeys(("coverage", "coverage_all"), "forecast_tests")}
    forecast = summary.get(forecasts[name]) if name in forecasts else None
    hint = f"{about(forecast)} more tests are forecast: " if forecast else ""
    text = f"{shown} {metric.about}, at least {limit} required"
    if name == "recall" and not summary["distinct_faults"]:
        upper, most = distinguishable(summary["residual_risk"]["high"], MAX_RISK)
        text = f"no fault was found; the residual risk is at most {upper}, at most {most} allowed"
    if name.startswith("coverage") and summary.get("coverage_caution"):
        text += f"; attention: {summary['coverage_caution']}"
    return GateResult(name, value >= least, value, least, text, hint + metric.remedy)


def _is_split(run: Any) -> bool:
    """Whether a run kept seeds apart that a retrained model can be judged by."""
    from themis.runs.replay import Replayer
    from themis.runs.run import Run

    if isinstance(run, Run):
        return run.start.settings.split is not None
    return (run.run if isinstance(run, Replayer) else run).record["settings"].get("split") is not None


def _check_rate(most: float, summary: dict[str, Any], name: str, *, is_split: bool) -> GateResult:
    from themis.text import percent

    rate = summary["fault_rate"]
    if rate is None:
        raise UsageError(
            "the gate on max_fault_rate needs uniform tests, but the run has none: run it with --uniform-share 0.2, or "
            "remove the gate"
        )
    value, low, high = (percent(rate[end], 2) for end in ("value", "low", "high"))
    upper, limit = distinguishable(rate["high"], most)
    has_passed = rate["high"] <= most
    text = (
        f"{value} (95%: {low} to {high}); the upper end of {upper} is {'within' if has_passed else 'over'} the limit "
        f"of {limit}"
    )
    is_black_box = summary.get("requests") is not None
    command = f"themis retrain {name}{' --judge DATA' * (not is_split)}"
    advice = f"retrain on the faults ({command}, or themis.retrain in Python)"
    remedy = f"{'improve the model' if is_black_box else advice}, or raise the limit"
    if rate["value"] <= most:
        remedy = "the rate itself is within the limit: more seeds and tests narrow the interval"
    return GateResult("max_fault_rate", has_passed, rate["high"], most, text, remedy)


def refuse_constant(result: GateResult, summary: dict[str, Any]) -> GateResult:
    """The result of a limit on faults, which a model cannot pass if its clean answers are no better than a constant."""
    constant = summary.get("constant")
    if constant is None:
        return result
    joint = "but" if result.has_passed else "and"
    text = f"{result.text}, {joint} {constant}, so that it says nothing"
    return replace(result, has_passed=False, text=text, remedy=CONSTANT_REMEDY)


def _check_new_faults(most: int, difference: Diff) -> GateResult:
    from themis.runs.diff.result import replay_command

    n, after = len(difference.new), difference.faults_after
    left_out, compared = (0, 1) if after is None else (after.left_out, after.n)
    unseen = left_out + (0 if after is None else len(after.apart))
    has_passed = n <= most and not left_out and not (unseen and not compared)
    text = (
        f"{n:,} new fault{'s' * (n != 1)} compared with {difference.before['run']} ({len(difference.fixed):,} fixed, "
        f"{len(difference.still):,} still there), {'within' if n <= most else 'over'} the limit of {most:,}"
        f"{f'; {unseen:,} could not be compared' * bool(unseen)}. {difference.sentence.rstrip('.')}"
    )
    ids = [fault.id for fault in difference.new_faults[:N_TELLING]]
    remedy = f"replay them: {replay_command(difference.after['run'], *ids)}"
    if n <= most:
        remedy = "use a baseline with the same seeds, perturbation and magnitude"
    return GateResult("max_new_faults", has_passed, float(n), float(most), text, remedy)


def distinguishable(value: float, limit: float, is_share: bool = True) -> list[str]:
    """Both numbers as text, with as many digits as it takes to tell them apart."""
    from themis.text import percent

    pairs = [[percent(x, k) if is_share else f"{x:.{k + 3}g}" for x in (value, limit)] for k in (1, 2, 4, 8)]
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])
