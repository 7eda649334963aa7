"""Progress of a comparison: one bar over all campaigns in a terminal, plain lines elsewhere."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from themis.comparison.comparing import Listener
from themis.comparison.plan import Cell
from themis.progress import PLAIN_SECONDS


class ShowCells(Listener):
    """Which campaign has finished and what it found; close it to take the bar away."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.n_done = self.n_cells = 0
        self._live: Progress | None = None
        self._printed = 0.0
        self._failures: set[tuple[str, str]] = set()

    def on_note(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def on_cells(self, n_done: int, n_cells: int) -> None:
        self.n_done, self.n_cells = n_done, n_cells
        kept = f", {n_done:,} of them finished before" if n_done else ""
        self.on_note(f"{n_cells:,} campaigns{kept}")
        if self.console.is_terminal and n_done < n_cells:
            line = TextColumn("{task.fields[line]}", markup=False)
            bar = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            self._live = Progress(*bar, line, console=self.console, transient=True)
            self._task = self._live.add_task("", total=n_cells, completed=n_done, line="")
            self._live.start()

    def on_cell(self, cell: Cell, record: dict[str, Any], n_done: int, n_cells: int) -> None:
        if "error" in record:
            if (failure := (cell.technique, record["error"])) not in self._failures:
                self.on_note(f"{cell} failed: {record['error']}")
            self._failures.add(failure)
            line = f"{cell} failed"
        else:
            self.n_done += 1
            line = f"{cell}: {record['distinct_faults']:,} distinct faults"
        if self._live is not None:
            self._live.update(self._task, completed=n_done, line=line)
        elif perf_counter() - self._printed >= PLAIN_SECONDS:
            self._printed = perf_counter()
            self.on_note(f"{n_done:,}/{n_cells:,} {line}")

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
