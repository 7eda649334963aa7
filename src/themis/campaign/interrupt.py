"""Stopping by a signal: Ctrl-C, and signals that end a process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Signals that stop a campaign: Ctrl-C, a request to end (kill, a scheduler), and a closed terminal."""


class Terminated(KeyboardInterrupt):
    """A signal other than Ctrl-C asked the process to end. Code that handles Ctrl-C handles it too."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"the signal {signal.Signals(number).name} stopped it")


@contextmanager
def terminate_like_interrupt() -> Iterator[list[int]]:
    """In the block, SIGTERM and SIGHUP raise `Terminated`; yields a list that receives the numbers of the signals.

    A signal that is ignored (by nohup, for example) or that the program handles itself stays as it is.
    """
    received: list[int] = []

    def stop(number: int, frame: Any) -> None:
        received.append(number)
        raise Terminated(number)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in SIGNALS if number != signal.SIGINT}
    replaced = [number for number, handler in before.items() if handler == signal.SIG_DFL]
    for number in replaced:
        signal.signal(number, stop)
    try:
        yield received
    finally:
        for number in replaced:
            signal.signal(number, before[number])
