"""Callbacks: what else should happen as a campaign goes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from themis.faults import Fault
    from themis.result import Round, Run, Start


class Callback:
    """Override what you need. One that raises is reported and dropped; the campaign goes on."""

    def on_start(self, start: Start) -> None:
        """The clean sweep is done; tests are about to run."""

    def on_round(self, round: Round) -> None:
        """A round was measured and judged."""

    def on_fault(self, fault: Fault) -> None:
        """A fault was found; called once each, after its round was measured."""

    def on_end(self, run: Run) -> None:
        """The campaign has stopped."""

    def on_error(self, error: Exception) -> None:
        """The campaign has failed and raises this error; `on_end` is not called."""


class Callbacks:
    """Calls each callback in turn, and drops one that raises."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._callbacks = list(callbacks)

    def wants(self, event: str) -> bool:
        """Whether any callback overrides `event`: nothing is prepared that nobody takes."""
        return any(getattr(type(each), event, None) is not getattr(Callback, event) for each in self._callbacks)

    def call(self, event: str, value: Any) -> None:
        for each in list(self._callbacks):
            try:
                getattr(each, event)(value)
            except Exception as error:
                self._callbacks.remove(each)
                warnings.warn(
                    f"callback {type(each).__name__} raised {type(error).__name__} in {event} and was dropped: {error}",
                    RuntimeWarning,
                    stacklevel=3,
                )
