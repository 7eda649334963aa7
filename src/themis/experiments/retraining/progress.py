"""Progress of a retraining: one bar over the steps of a round in a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from themis.experiments.retraining.listener import Listener
from themis.report.progress import StepBar

if TYPE_CHECKING:
    from themis.experiments.retraining.tune import Epoch


class ShowSteps(Listener):
    """Which step is done, and how the training goes; close it to take the bar away."""

    def __init__(self, console: Console) -> None:
        self.n_done = self.n_steps = 0
        self._bar = StepBar(console)

    def on_note(self, text: str) -> None:
        self._bar.note(text)

    def on_steps(self, n_done: int, n_steps: int) -> None:
        self.n_done, self.n_steps = n_done, n_steps
        if n_done:
            self.on_note(f"{n_done:,} of {n_steps:,} steps were done before")
        self._bar.start(n_done, n_steps)

    def on_step(self, text: str, n_done: int, n_steps: int) -> None:
        self.n_done = n_done
        self._bar.say(text, f"{n_done:,}/{n_steps:,} {text}", n_done)

    def on_epoch(self, text: str, epoch: Epoch) -> None:
        line = f"{text}, {epoch_line(epoch)}"
        self._bar.say(line, line, None)

    def close(self) -> None:
        self._bar.stop()


def epoch_line(epoch: Epoch) -> str:
    """An epoch in words."""
    scores = f"{epoch.clean:.1%} clean, {epoch.disturbed:.1%} disturbed"
    return f"epoch {epoch.number}: {scores} on the seeds held out"
