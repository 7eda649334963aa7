"""Who is told how a retraining goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from themis.experiments.retraining.tune import Epoch


class Listener:
    """Is told how a retraining goes; does nothing by itself."""

    def on_note(self, text: str) -> None:
        """What must be said."""

    def on_steps(self, n_done: int, n_steps: int) -> None:
        """Before the first step of a round; some may be there from an earlier time."""

    def on_step(self, text: str, n_done: int, n_steps: int) -> None:
        """A step is done."""

    def on_epoch(self, text: str, epoch: Epoch) -> None:
        """An epoch of the training that `text` names is done."""
