"""Stopping by a signal: Ctrl-C, and the signals that end a process, wait for a moment when nothing is half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Signals that stop a campaign: Ctrl-C, a request of the system (kill, a scheduler), and the end of the terminal."""


class Terminated(KeyboardInterrupt):
    """The process was asked to end by another signal than Ctrl-C. Whatever handles Ctrl-C handles it too."""

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


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Signals that stop a campaign take effect at the end of the block; a second one takes effect at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    received: list[tuple[int, Any]] = []

    def defer(number: int, frame: Any) -> None:
        if received:
            handlers[number](number, frame)
            if number == signal.SIGINT:
                raise KeyboardInterrupt
        received.append((number, frame))

    for number in handlers:
        signal.signal(number, defer)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received:
        number, frame = received[0]
        handlers[number](number, frame)
