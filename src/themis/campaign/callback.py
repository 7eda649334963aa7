"""Callbacks: what else should happen as a campaign goes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from themis.runs.faults import Fault
    from themis.runs.run import Round, Run, Start

LAST = ("on_end", "on_error")
"""Events after which nothing is left to stop: Ctrl-C in one ends the callback, not the result."""


class Callback:
    """Override what you need. One that raises is reported and dropped; the campaign goes on.

    Ctrl-C while a callback works stops the campaign as anywhere else, and `sys.exit` ends the process: what a callback
    has heard of is on the disk by then.
    """

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
    """Calls each callback in turn, and drops one that raises. A callback may lack events it has no use for."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._callbacks = list(callbacks)
        self.is_stopping = False  # the user stopped the campaign already: what is left to tell is told

    def wants(self, event: str) -> bool:
        """Whether any callback overrides `event`: nothing is prepared that nobody takes."""
        methods = (getattr(each, event, None) for each in self._callbacks)
        default = getattr(Callback, event)
        return any(each is not None and getattr(each, "__func__", each) is not default for each in methods)

    def call(self, event: str, value: Any) -> None:
        for each in list(self._callbacks):
            method = getattr(each, event, None)
            if method is None:
                continue
            try:
                method(value)
            except Exception as error:
                self._drop(each, event, error)
            except KeyboardInterrupt as error:
                if event not in LAST and not self.is_stopping:
                    raise
                self._drop(each, event, error)

    def _drop(self, callback: Callback, event: str, error: BaseException) -> None:
        self._callbacks = [each for each in self._callbacks if each is not callback]
        report_failure(callback, f"in {event} and was dropped", error, stacklevel=4)


def report_failure(callback: object, where: str, error: BaseException, *, stacklevel: int = 2) -> None:
    """Warn of a callback that raised; on stderr where warnings are errors, which would stop the campaign after all."""
    try:
        said = str(error)
    except Exception:
        said = "it has no message"
    text = f"callback {type(callback).__name__} raised {type(error).__name__} {where}: {said}"
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=stacklevel + 1)
    except Exception:
        with suppress(OSError, ValueError):  # a stderr that is closed
            print(f"themis: {text}", file=sys.stderr)
