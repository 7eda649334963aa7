"""Progress: a live line in a terminal, plain lines elsewhere, and the summary at the end."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

from themis.callback import Callback
from themis.judge.estimate import Estimate
from themis.result import Round, Run, Start, percent

PLAIN_SECONDS = 5.0
"""Least time between two plain lines."""


class ShowProgress(Callback):
    """Coverage, distinct faults, tests a second and the forecast as the campaign goes."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._live: Progress | None = None
        self._printed = 0.0

    def on_start(self, start: Start) -> None:
        self.console.print(_opening(start), highlight=False, soft_wrap=True)
        self._goal = start.settings.coverage
        if self.console.is_terminal:
            is_wide = self.console.width >= 110
            columns: list[ProgressColumn] = [
                TextColumn("coverage"),
                BarColumn(28 if is_wide else 10),
                TextColumn("{task.fields[line]}"),
            ]
            if is_wide:
                columns.append(TimeElapsedColumn())
            self._live = Progress(*columns, console=self.console, transient=True)
            self._task = self._live.add_task("", total=self._goal, line="first round")
            self._live.start()

    def on_round(self, round: Round) -> None:
        line = _line(round)
        if self._live is not None:
            self._live.update(self._task, completed=round.coverage.sampled, line=line)
        elif perf_counter() - self._printed >= PLAIN_SECONDS:
            self._printed = perf_counter()
            self.console.print(f"round {round.number}: coverage {line}", highlight=False, soft_wrap=True)

    def on_end(self, run: Run) -> None:
        self._stop()
        for name, text in summary_rows(run):
            self.console.print(f"[dim]{name:<13}[/dim]  {text}", highlight=False, soft_wrap=True)
        self.console.print(run.stop, style="bold", highlight=False, soft_wrap=True)

    def on_error(self, error: Exception) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()


def summary_rows(run: Run) -> list[tuple[str, str]]:
    """What a campaign found, for a person: names and texts."""
    last, start = run.rounds[-1], run.start
    rows: list[tuple[str, str]] = [
        (
            "faults",
            f"{last.faults:,} raw, {last.distinct_faults:,} distinct, on {last.failing_seeds:,} of "
            f"{start.n_usable:,} seeds",
        ),
        ("fault rate", _estimate(run.fault_rate, "mean over seeds")),
        ("residual risk", _estimate(run.residual_risk, "that the next uniform test shows a new distinct fault")),
        (
            "coverage",
            f"{percent(last.coverage.sampled)} of the sampled neurons; {_estimate_all(run)}",
        ),
        (
            "neurons",
            f"{start.n_neurons:,} in {len(start.layers)} layers; {last.coverage.n_dead:,} dead, "
            f"{last.coverage.n_unseen:,} not yet moved",
        ),
        ("tests", f"{last.tests:,} ({last.passes:,} passes) in {run.seconds.total:.1f} s, {_rate(last):,.0f} a second"),
        ("time", _times(run)),
    ]
    if run.stop_reason != "coverage" and last.coverage.forecast:
        rows.append(("forecast", f"about {last.coverage.forecast:,} more tests to the coverage goal"))
    if run.normality is not None:
        rows.append(("normality", run.normality.verdict))
    return rows


def _opening(start: Start) -> str:
    theta = ", ".join(f"{t.name} {t.low:g} to {t.high:g}{' ' + t.unit if t.unit else ''}" for t in start.theta)
    accuracy = "" if start.clean_accuracy is None else f" ({percent(start.clean_accuracy)} answered rightly)"
    kept = "all" if start.n_kept >= start.n_seeds else f"{start.n_kept:,}"
    return (
        f"{start.n_neurons:,} neurons in {len(start.layers)} layers, {start.n_usable:,} of {start.n_seeds:,} seeds to "
        f"test{accuracy}\n{start.perturbation} ({theta}), policy {_name(start.settings.policy)}, on {start.device}, "
        f"clean activations kept for {kept} seeds"
    )


def _line(round: Round) -> str:
    forecast = round.coverage.forecast
    more = "" if not forecast else f", ~{forecast:,} to go"
    return (
        f"{percent(round.coverage.sampled)}, {round.distinct_faults:,} distinct faults, {round.tests:,} tests, "
        f"{_rate(round):,.0f}/s{more}"
    )


def _rate(round: Round) -> float:
    return round.tests / max(round.seconds, 1e-9)


def _estimate(estimate: Estimate | None, of: str) -> str:
    if estimate is None:
        return "unknown: no uniform stream"
    return f"{percent(estimate.value, 2)} {of} (95%: {percent(estimate.low, 2)} to {percent(estimate.high, 2)})"


def _estimate_all(run: Run) -> str:
    text = f"{percent(run.judged.all)} of all"
    interval = run.coverage_interval
    return text if interval is None else f"{text} (95%: {percent(interval.low)} to {percent(interval.high)})"


def _times(run: Run) -> str:
    s = run.seconds
    return f"measure {s.measure:.1f} s, judge {s.judge:.1f} s, search {s.search:.1f} s"


def _name(policy: Any) -> str:
    return policy if isinstance(policy, str) else type(policy).__name__
