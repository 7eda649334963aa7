"""Progress of a retraining: one bar over the steps of a round in a terminal, plain lines elsewhere."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from themis.progress import PLAIN_SECONDS
from themis.retraining.listener import Listener

if TYPE_CHECKING:
    from themis.retraining.tune import Epoch


class ShowSteps(Listener):
    """Which step is done, and how the training goes; close it to take the bar away."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.n_done = self.n_steps = 0
        self._live: Progress | None = None
        self._printed = 0.0

    def on_note(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def on_steps(self, n_done: int, n_steps: int) -> None:
        self.n_done, self.n_steps = n_done, n_steps
        if n_done:
            self.on_note(f"{n_done:,} of {n_steps:,} steps were done before")
        self.close()
        if self.console.is_terminal and n_done < n_steps:
            line = TextColumn("{task.fields[line]}", markup=False)
            bar = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
            self._live = Progress(*bar, line, console=self.console, transient=True)
            self._task = self._live.add_task("", total=n_steps, completed=n_done, line="")
            self._live.start()

    def on_step(self, text: str, n_done: int, n_steps: int) -> None:
        self.n_done = n_done
        self._say(text, f"{n_done:,}/{n_steps:,} {text}", n_done)

    def on_epoch(self, text: str, epoch: Epoch) -> None:
        line = f"{text}, {epoch_line(epoch)}"
        self._say(line, line, None)

    def _say(self, line: str, plain: str, n_done: int | None) -> None:
        if self._live is not None:
            self._live.update(self._task, line=line, completed=n_done)
        elif perf_counter() - self._printed >= PLAIN_SECONDS:
            self._printed = perf_counter()
            self.on_note(plain)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def epoch_line(epoch: Epoch) -> str:
    """An epoch in words."""
    scores = f"{epoch.clean:.1%} clean, {epoch.disturbed:.1%} disturbed"
    return f"epoch {epoch.number}: {scores} on the seeds held out"
