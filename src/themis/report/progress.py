"""Progress: a live line in a terminal, plain lines elsewhere, and a summary at the end."""

import sys
from collections.abc import Sequence
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

PLAIN_LINE_SECONDS = 5.0
"""Minimum time between two plain lines, where there is no terminal."""


class StepBar:
    """A progress bar over steps in a terminal, and occasional plain lines elsewhere."""

    def __init__(self, console: Console, *more: ProgressColumn, columns: Sequence[ProgressColumn] = ()) -> None:
        """columns: by default a bar, the number of steps done and the elapsed time; `more` columns follow them."""
        self.console = console
        self.columns = [*(columns or (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())), *more]
        self._live: Progress | None = None
        self._printed = 0.0

    def note(self, text: str, style: str | None = None) -> None:
        """Print text above the bar."""
        self.console.print(printable(text), style=style, highlight=False, soft_wrap=True, markup=False)

    def start(self, n_done: int, n: float | None, line: str = "") -> None:
        """Start a new bar, unless all steps are done; `n` is None if their number is not known."""
        self.close()
        if self.console.is_terminal and (n is None or n_done < n):
            shown = TextColumn("{task.fields[line]}", markup=False)
            self._live = Progress(*self.columns, shown, console=self.console, transient=True)
            self._task = self._live.add_task("", total=n, completed=n_done, line=line)
            self._live.start()
            for name in ("stdout", "stderr"):  # the output of other packages must not control the terminal
                if isinstance(getattr(sys, name), FileProxy):
                    proxy: Any = getattr(sys, name)
                    setattr(sys, name, ForeignStream(proxy, proxy))  # until the bar stops

    def say(self, line: str, plain: str, n_done: float | None) -> None:
        """Show a line beside the bar; without a bar, print `plain`, but not more often than every few seconds."""
        if self._live is not None:
            self._live.update(self._task, line=printable(line), completed=n_done)
        elif perf_counter() - self._printed >= PLAIN_LINE_SECONDS:
            self._printed = perf_counter()
            self.note(plain)

    def close(self) -> None:
        """Remove the bar."""
        if self._live is not None:
            self._live.stop()
            self._live = None


class ShowProgress(Callback):
    """Shows coverage, distinct faults, tests per second and the forecast while the campaign runs."""

    def __init__(self, console: Console | None = None, *, is_verbose: bool = False) -> None:
        self.console, self.is_verbose = console or Console(), is_verbose
        self._bar = StepBar(self.console)

    def on_start(self, start: Start) -> None:
        self._is_share = start.criterion is None or bool(start.criterion["is_share"])
        has_goal = start.covers_neurons and start.settings.decide is None
        self._covers_neurons, self._max_tests = has_goal, start.settings.max_tests
        name = TextColumn("coverage" if has_goal else "tests")
        self._bar = StepBar(self.console, columns=[name, BarColumn(10)])
        self._bar.note(wrapped(opening(start), 2))
        total = (start.settings.coverage or 1.0) if has_goal else start.settings.max_tests
        self._bar.start(0, total, "first round")

    def on_round(self, round: Round) -> None:
        covers_neurons, max_tests = self._covers_neurons, self._max_tests
        line = round_line(round, is_share=self._is_share, covers_neurons=covers_neurons, max_tests=max_tests)
        plain = wrapped(f"round {round.number}: {'coverage ' * covers_neurons}{line}", 2)
        self._bar.say(line, plain, round.coverage.sampled if covers_neurons else round.tests)

    def on_end(self, run: Run) -> None:
        self._bar.close()
        for k, lines in enumerate(summary_lines(run, is_verbose=self.is_verbose)):
            self._bar.note(lines, style=None if k else "bold")  # the verdict

    def on_error(self, error: Exception) -> None:
        self._bar.close()


class ShowCells(Listener):
    """Shows which cells have ended and how; `close` removes the bar."""

    def __init__(self, console: Console) -> None:
        self.n_done, self.n_cells, self.noun = 0, 0, ""
        self._bar = StepBar(console, TimeRemainingColumn())
        self._failures: set[tuple[str, str]] = set()

    def on_note(self, text: str) -> None:
        self._bar.note(text)

    def on_cells(self, n_done: int, n_cells: int, noun: str) -> None:
        self.n_done, self.n_cells, self.noun = n_done, n_cells, noun
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
        self._bar.close()
