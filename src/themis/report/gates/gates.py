"""Gates: may this model ship? Each is a limit on what a campaign found, and passes or fails."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from themis.errors import StoreError, UsageError
from themis.report.gates.job_page import write_markdown
from themis.report.gates.junit import write_junit
from themis.report.gates.limits import METRICS, Gates, open_baseline

if TYPE_CHECKING:
    from themis.runs.diff.result import Diff
    from themis.runs.faults import Fault
    from themis.runs.replay import RunSource

__all__ = ["METRICS", "Gates", "Verdict", "Verdicts", "check_gates", "write_junit", "write_markdown"]

N_TELLING = 3
"""Faults that a verdict shows."""
NEEDED = ("stop", "stop_reason", "tests", "faults", "distinct_faults", "coverage", "fault_rate", "residual_risk")


@dataclass(frozen=True)
class Verdict:
    """What came of one gate."""

    gate: str
    has_passed: bool
    value: float | None
    limit: float | None
    text: str
    """The value against the limit, in words."""
    remedy: str = ""
    """What to do about it, if it has failed."""

    @property
    def line(self) -> str:
        """As it is printed."""
        state = "passed" if self.has_passed else "FAILED"
        return f"{state}  {self.gate}: {self.text}" + (
            f"; {self.remedy}" if not self.has_passed and self.remedy else ""
        )


@dataclass(frozen=True)
class Verdicts:
    """What came of all gates of a run."""

    run: str
    verdicts: tuple[Verdict, ...]
    summary: dict[str, Any] = field(repr=False)
    telling: tuple[Fault, ...] = field(default=(), repr=False)
    """The most telling faults: new ones first, where there is a baseline."""
    diff: Diff | None = field(default=None, repr=False)
    folder: Path | None = None
    """Of the run, if it has one."""

    @property
    def has_failed(self) -> bool:
        return any(not each.has_passed for each in self.verdicts)

    @property
    def has_limits(self) -> bool:
        """Whether any gate but the campaign's end was asked for."""
        return any(each.gate != "campaign" for each in self.verdicts)

    @property
    def lines(self) -> list[str]:
        """A line a gate."""
        return [each.line for each in self.verdicts]

    @property
    def sentence(self) -> str:
        """All of them in one."""
        failed = [each.gate for each in self.verdicts if not each.has_passed]
        n = len(self.verdicts)
        if not failed and not self.has_limits:
            return "The campaign came to its end; no limit was set, so nothing says whether the model may ship."
        if not failed:
            return f"{'The gate has' if n == 1 else f'All {n} gates have'} passed."
        return f"{len(failed)} of {n} gate{'s' * (n != 1)} failed: {', '.join(failed)}."

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "has_failed": self.has_failed,
            "gates": [
                {"gate": v.gate, "has_passed": v.has_passed, "value": v.value, "limit": v.limit, "text": v.text}
                for v in self.verdicts
            ],
            "diff": None if self.diff is None else self.diff.as_dict(),
        }


def check_gates(run: RunSource, gates: Gates, *, folder: str | Path | None = None, remedy: str = "") -> Verdicts:
    """Hold a finished run, or its folder, against gates.

    folder: where the run was written to, if it is given as `themis.run` gave it. remedy: advice where the baseline's
    model is no longer the one that was tested.
    """
    from themis.runs.diff.diff import diff
    from themis.runs.run import Run

    with ExitStack() as stack:
        if isinstance(run, str | Path):
            from themis.runs.store.reader import Reader

            run = stack.enter_context(closing(Reader(run)))
        name, where, summary = _describe(run, None if folder is None else Path(folder))
        verdicts = [_judge_end(summary, name)]
        verdicts += [_judge_metric(metric, least, summary) for metric, least in gates.fail_under]
        if gates.max_fault_rate is not None:
            verdicts.append(_judge_rate(gates.max_fault_rate, summary, name))
        found = None
        if gates.max_new_faults is not None and gates.baseline is not None:
            base = gates.baseline
            if isinstance(base, str | Path):
                base = stack.enter_context(closing(open_baseline(base)))
            names = ("" if not isinstance(base, Run) else "the baseline", name)
            found = diff(base, run, kind="versions", names=names, remedies=(remedy, ""))
            verdicts.append(_judge_new(gates.max_new_faults, found))
        faults = run.faults if isinstance(run, Run) else _folder_faults(run)
        telling = (*(found.new_faults if found else ()), *faults.most_telling(N_TELLING))
        unique = tuple({fault.id: fault for fault in telling}.values())[:N_TELLING]
        return Verdicts(name, tuple(verdicts), summary, unique, found, where)


def _folder_faults(run: Any) -> Any:
    from themis.runs.analysis.shrink import read_faults

    return read_faults(run)


def _describe(run: Any, folder: Path | None) -> tuple[str, Path | None, dict[str, Any]]:
    """A run's name, folder and summary; refuses one that has none yet, or a damaged one."""
    from themis.runs.replay import Replayer
    from themis.runs.run import Run

    if isinstance(run, Run):
        return "the run" if folder is None else str(folder), folder, run.summary()
    reader = run.run if isinstance(run, Replayer) else run
    summary = reader.summary()
    if summary is None:
        if reader.is_running():
            raise UsageError(f"a run must have ended to be judged, {reader.path} is running: wait for it")
        raise StoreError(
            f"{reader.path} must have a summary, its campaign was killed: themis resume {reader.path} goes on with it"
        )
    if not isinstance(summary, dict) or any(name not in summary for name in NEEDED):
        raise StoreError(
            f"{reader.path / 'summary.json'} must be a run's summary, it is damaged: restore it from a copy"
        )
    return str(reader.path), reader.path, summary


def _judge_end(summary: dict[str, Any], name: str) -> Verdict:
    is_whole = summary["stop_reason"] not in ("user", "error") and summary["tests"] > summary.get("dropped_tests", 0)
    stop = str(summary["stop"]).rstrip(".")
    text = f"{summary['tests']:,} tests, {summary['distinct_faults']:,} distinct faults; {stop[:1].lower()}{stop[1:]}"
    remedy = f"it ended early: themis resume {name} goes on"
    if summary["tests"] == summary.get("dropped_tests", 0):
        text, remedy = f"all {summary['tests']:,} tests were dropped", "lower min_ssim or the magnitude"
    return Verdict("campaign", is_whole, None, None, text, remedy)


def _judge_metric(name: str, least: float, summary: dict[str, Any]) -> Verdict:
    metric = METRICS[name]
    value = metric.read(summary)
    if value is None or not math.isfinite(value):
        raise UsageError(f"the gate on {name} needs a figure that the run does not have: {metric.missing}")
    is_share = name != "criterion" or bool(summary["criterion"].get("is_share", True))
    said, limit = _apart(value, least, is_share)
    has_passed = value >= least
    more = summary.get("forecast_tests") if name in ("coverage", "coverage_all") else None
    hint = f"about {more:,} more tests are forecast: " if more else ""
    verb = "at least" if has_passed else "under"
    return Verdict(name, has_passed, value, least, f"{said} {metric.about}, {verb} {limit}", hint + metric.remedy)


def _judge_rate(most: float, summary: dict[str, Any], name: str) -> Verdict:
    rate = summary["fault_rate"]
    if rate is None:
        raise UsageError(
            "the gate on max_fault_rate needs uniform tests, the run has none: run it with --uniform-share 0.2, or "
            "leave the gate out"
        )
    has_passed = rate["high"] <= most
    high, limit = _apart(rate["high"], most)
    text = (
        f"{high} at the most, the upper end of {_percent(rate['value'])} (95%: {_percent(rate['low'])} to "
        f"{_percent(rate['high'])}), {'within' if has_passed else 'over'} {limit}"
    )
    remedy = f"retrain on the faults (themis retrain {name}; of a run from Python themis.retrain), or raise the limit"
    if rate["value"] <= most:
        remedy = "the rate itself is within it: more seeds and tests narrow the interval"
    return Verdict("max_fault_rate", has_passed, rate["high"], most, text, remedy)


def _judge_new(most: int, found: Diff) -> Verdict:
    n, after = len(found.new), found.faults_after
    left_out, compared = (0, 1) if after is None else (after.left_out, after.n)
    unseen = left_out + (0 if after is None else len(after.apart))
    has_passed = n <= most and not left_out and not (unseen and not compared)
    text = (
        f"{n:,} new fault{'s' * (n != 1)} against {found.before['run']} ({len(found.fixed):,} fixed, "
        f"{len(found.still):,} still there), {'within' if n <= most else 'over'} {most:,}"
        f"{f'; {unseen:,} could not be compared' * bool(unseen)}. {found.sentence.rstrip('.')}"
    )
    from themis.runs.diff.result import replay

    ids = [fault.id for fault in found.new_faults[:N_TELLING]]
    remedy = f"look at them: {replay(found.after['run'], *ids)}"
    if n <= most:
        remedy = "give a baseline of the same seeds, perturbation and magnitude"
    return Verdict("max_new_faults", has_passed, float(n), float(most), text, remedy)


def _percent(share: float) -> str:
    from themis.runs.run import percent

    return percent(share, 2)


def _apart(value: float, limit: float, is_share: bool = True) -> Sequence[str]:
    """Both numbers with as many digits as tell them apart."""
    from themis.runs.run import percent

    pairs = [[percent(each, k) if is_share else f"{each:.{k + 3}g}" for each in (value, limit)] for k in (1, 2, 4, 8)]
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])
