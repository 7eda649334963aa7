"""Callbacks: the user's code that is called as a campaign proceeds."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from themis.errors import warn
from themis.text import print_text

if TYPE_CHECKING:
    from themis.runs.fault import Fault
    from themis.runs.run import Round, Run, Start

EVENTS = ("on_start", "on_round", "on_fault", "on_end", "on_error")
FINAL_EVENTS = ("on_end", "on_error")
"""Events after which the campaign has ended; Ctrl-C in one of them stops the callback only."""


class Callback:
    """Override the methods you need. A callback that raises is reported and dropped; the campaign continues.

    Ctrl-C in a callback stops the campaign, as it does elsewhere, and `sys.exit` ends the process. The fault, round or
    result that a callback receives is already on disk.
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


def report_failure(callback: object, where: str, error: BaseException) -> None:
    """Warn about a callback that raised; on stderr if warnings are errors, which would stop the campaign."""
    try:
        is_ctrl_c = isinstance(error, KeyboardInterrupt)
        message = "Ctrl-C was pressed; what was found is kept" if is_ctrl_c else str(error) or "it has no message"
    except Exception:
        message = "it has no message"
    text = f"callback {type(callback).__name__} raised {type(error).__name__} {where}: {message}"
    try:
        warn(text)
    except Exception:
        with suppress(OSError, ValueError):  # stderr may be closed
            print_text(f"themis: {text}", file=sys.stderr)
