"""Progress of a comparison: which campaigns are done, and what they found."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import TimeRemainingColumn

from themis.experiments.comparison.comparing import Listener
from themis.experiments.comparison.plan import Cell
from themis.report.progress import StepBar


class ShowCells(Listener):
    """Which campaign has finished and what it found; close it to take the bar away."""

    def __init__(self, console: Console) -> None:
        self.n_done = self.n_cells = 0
        self._bar = StepBar(console, TimeRemainingColumn())
        self._failures: set[tuple[str, str]] = set()

    def on_note(self, text: str) -> None:
        self._bar.note(text)

    def on_cells(self, n_done: int, n_cells: int) -> None:
        self.n_done, self.n_cells = n_done, n_cells
        kept = f", {n_done:,} of them finished before" if n_done else ""
        self.on_note(f"{n_cells:,} campaigns{kept}")
        self._bar.start(n_done, n_cells)

    def on_cell(self, cell: Cell, record: dict[str, Any], n_done: int, n_cells: int) -> None:
        if "error" in record:
            if (failure := (cell.technique, record["error"])) not in self._failures:
                self.on_note(f"{cell} failed: {record['error']}")
            self._failures.add(failure)
            line = f"{cell} failed"
        else:
            self.n_done += 1
            line = f"{cell}: {record['distinct_faults']:,} distinct faults"
        self._bar.say(line, f"{n_done:,}/{n_cells:,} {line}", n_done)

    def close(self) -> None:
        self._bar.stop()
