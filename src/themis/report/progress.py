"""Progress: a live line in a terminal, plain lines elsewhere, and a summary at the end."""

from __future__ import annotations

import sys
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from themis.campaign.callback import Callback
from themis.experiments import CellEnd, Listener
from themis.runs.display.text import opening, round_line, summary_lines
from themis.runs.run import Round, Run, Start
from themis.text import ForeignStream, counted, printable, wrapped

PLAIN_SECONDS = 5.0
"""Minimum time between two plain lines."""


class ShowProgress(Callback):
    """Shows coverage, distinct faults, tests per second and the forecast while the campaign runs."""

    def __init__(self, console: Console | None = None, *, is_verbose: bool = False) -> None:
        self.console, self.is_verbose = console or Console(), is_verbose
        self._live: Progress | None = None
        self._printed = 0.0

    def on_start(self, start: Start) -> None:
        self.console.print(printable(wrapped(opening(start), 2)), highlight=False, soft_wrap=True, markup=False)
        self._is_share = start.criterion is None or bool(start.criterion["is_share"])
        self._covers_neurons, self._max_tests = start.covers_neurons, start.settings.max_tests
        total = (start.settings.coverage or 1.0) if start.covers_neurons else start.settings.max_tests
        if self.console.is_terminal:
            is_wide = self.console.width >= 110
            columns: list[ProgressColumn] = [
                TextColumn("coverage" if start.covers_neurons else "tests"),
                BarColumn(28 if is_wide else 10),
                TextColumn("{task.fields[line]}", markup=False),
            ]
            if is_wide:
                columns.append(TimeElapsedColumn())
            self._live = Progress(*columns, console=self.console, transient=True)
            self._task = self._live.add_task("", total=total, line="first round")
            _start(self._live)

    def on_round(self, round: Round) -> None:
        covers_neurons, max_tests = self._covers_neurons, self._max_tests
        text = round_line(round, is_share=self._is_share, covers_neurons=covers_neurons, max_tests=max_tests)
        line = printable(text)
        if self._live is not None:
            completed = round.coverage.sampled if self._covers_neurons else round.tests
            self._live.update(self._task, completed=completed, line=line)
        elif perf_counter() - self._printed >= PLAIN_SECONDS:
            self._printed = perf_counter()
            text = f"round {round.number}: {'coverage ' * self._covers_neurons}{line}"
            self.console.print(wrapped(text, 2), highlight=False, soft_wrap=True, markup=False)

    def on_end(self, run: Run) -> None:
        self._stop()
        for k, lines in enumerate(summary_lines(run, is_verbose=self.is_verbose)):
            style = None if k else "bold"  # the verdict
            self.console.print(printable(lines), style=style, highlight=False, soft_wrap=True, markup=False)

    def on_error(self, error: Exception) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()


def _start(live: Progress) -> None:
    """Start a bar; what others print meanwhile is shown above it, where it cannot control the terminal either."""
    live.start()
    for name in ("stdout", "stderr"):
        if isinstance(getattr(sys, name), FileProxy):
            proxy: Any = getattr(sys, name)
            setattr(sys, name, ForeignStream(proxy, proxy))  # until the bar stops


class StepBar:
    """A progress bar over steps in a terminal, and occasional plain lines elsewhere."""

    def __init__(self, console: Console, *more: ProgressColumn, is_patient: bool = False) -> None:
        """`more`: columns to the right of the elapsed time. is_patient: let plain lines wait, the first one too."""
        self.console, self.more = console, more
        self._live: Progress | None = None
        self._printed = perf_counter() if is_patient else 0.0

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(printable(text), highlight=False, soft_wrap=True, markup=False)

    def start(self, n_done: int, n: int) -> None:
        """Start a new bar, unless all steps are done."""
        self.stop()
        if self.console.is_terminal and n_done < n:
            line = TextColumn("{task.fields[line]}", markup=False)
            bar = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), *self.more)
            self._live = Progress(*bar, line, console=self.console, transient=True)
            self._task = self._live.add_task("", total=n, completed=n_done, line="")
            _start(self._live)

    def say(self, line: str, plain: str, n_done: int | None) -> None:
        """Show a line beside the bar; without a bar, print `plain` unless a line was printed a moment ago."""
        if self._live is not None:
            self._live.update(self._task, line=printable(line), completed=n_done)
        elif perf_counter() - self._printed >= PLAIN_SECONDS:
            self._printed = perf_counter()
            self.note(plain)

    def stop(self) -> None:
        """Remove the bar."""
        if self._live is not None:
            self._live.stop()
            self._live = None


class ShowCells(Listener):
    """Shows which cells have ended and how; `close` removes the bar."""

    def __init__(self, console: Console) -> None:
        self.n_done = self.n_cells = 0
        self._bar = StepBar(console, TimeRemainingColumn())
        self._failures: set[tuple[str, str]] = set()

    def on_note(self, text: str) -> None:
        self._bar.note(text)

    def on_cells(self, n_done: int, n_cells: int, noun: str) -> None:
        self.n_done, self.n_cells = n_done, n_cells
        self.on_note(counted(n_cells, noun) + (f", {n_done:,} already finished" if n_done else ""))
        self._bar.start(n_done, n_cells)

    def on_progress(self, text: str) -> None:
        self._bar.say(text, text, None)

    def on_cell_end(self, end: CellEnd) -> None:
        if end.error is None:
            self.n_done += 1
        elif (failure := (end.cell.group, end.error)) not in self._failures:
            self._failures.add(failure)
            self.on_note(f"{end.text}: {end.error}")
        self._bar.say(end.text, f"{end.n_done:,}/{end.n_cells:,} {end.text}", end.n_done)

    def close(self) -> None:
        self._bar.stop()
