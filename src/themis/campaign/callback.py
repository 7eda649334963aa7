"""Callbacks: code of the user's that is called as a campaign proceeds."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from themis.errors import UsageError, warn
from themis.text import print_text

if TYPE_CHECKING:
    from themis.runs.fault import Fault
    from themis.runs.run import Round, Run, Start

EVENTS = ("on_start", "on_round", "on_fault", "on_end", "on_error")
LAST = ("on_end", "on_error")
"""Events after which there is nothing left to stop: Ctrl-C in one of them ends the callback, not the campaign."""


class Callback:
    """Override the methods you need. A callback that raises is reported and dropped; the campaign continues.

    Ctrl-C in a callback stops the campaign as it does anywhere else, and `sys.exit` ends the process. When a
    callback is called, the fault, the round or the result that it gets is already on disk.
    """

    def on_start(self, start: Start) -> None:
        """The clean sweep is done; tests are about to run."""

    def on_round(self, round: Round) -> None:
        """A round was measured and judged."""

    def on_fault(self, fault: Fault) -> None:
        """A fault was found; called once per fault, after it was written."""

    def on_end(self, run: Run) -> None:
        """The campaign has stopped."""

    def on_error(self, error: Exception) -> None:
        """The campaign has failed and raises this error; `on_end` is not called."""


class Callbacks:
    """Calls each callback in turn, and drops one that raises. A callback need not define every event."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        if not isinstance(callbacks, Iterable):
            raise UsageError(f"callbacks must be a list of callbacks, got {type(callbacks).__name__}: write [callback]")
        self._callbacks = list(callbacks)
        for callback in self._callbacks:
            if isinstance(callback, type) or not any(hasattr(callback, event) for event in EVENTS):
                name = getattr(callback, "__name__", type(callback).__name__)
                raise UsageError(
                    f"a callback must be an object with methods such as on_round, got {name}: pass an instance of a "
                    "subclass of themis.Callback"
                )
        self.is_stopping = False  # the user has stopped the campaign; remaining events are still delivered

    def wants(self, event: str) -> bool:
        """Whether any callback overrides `event`; if not, its value need not be prepared."""
        methods = (getattr(callback, event, None) for callback in self._callbacks)
        default = getattr(Callback, event)
        return any(method is not None and getattr(method, "__func__", method) is not default for method in methods)

    def call(self, event: str, value: Any) -> None:
        for callback in list(self._callbacks):
            method = getattr(callback, event, None)
            if method is None:
                continue
            try:
                method(value)
            except Exception as error:
                self._drop(callback, event, error)
            except KeyboardInterrupt as error:
                if event not in LAST and not self.is_stopping:
                    raise
                self._drop(callback, event, error)

    def _drop(self, callback: Callback, event: str, error: BaseException) -> None:
        self._callbacks = [other for other in self._callbacks if other is not callback]
        report_failure(callback, f"in {event} and was dropped", error)


def report_failure(callback: object, where: str, error: BaseException) -> None:
    """Warn of a callback that raised; on stderr if warnings are errors, which would stop the campaign after all."""
    try:
        message = str(error) or "it has no message"
    except Exception:
        message = "it has no message"
    text = f"callback {type(callback).__name__} raised {type(error).__name__} {where}: {message}"
    try:
        warn(text)
    except Exception:
        with suppress(OSError, ValueError):  # stderr may be closed
            print_text(f"themis: {text}", file=sys.stderr)
