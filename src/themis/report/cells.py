"""The progress of an experiment: one bar over its cells in a terminal, plain lines elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.progress import TimeRemainingColumn

from themis.experiments import CellEnd, Listener
from themis.report.progress import StepBar
from themis.text import counted


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
