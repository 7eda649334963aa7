"""Stopping by a signal: Ctrl-C, and the signals that end a process, wait for a moment when nothing is half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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


class Interrupts:
    """Signals that stop a campaign, and blocks at whose end they take effect.

    The handlers are set once for a campaign: to set them for each block would take longer than many blocks do, and
    a signal could arrive when only some of them are set.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._received: list[tuple[int, Any]] = []
        self._are_deferred = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """In the block, signals can be deferred. Outside of the main thread, which Python gives them to, nothing is."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with ExitStack() as restoring:
            for number in SIGNALS:
                if callable(handler := signal.getsignal(number)):
                    self._handlers[number] = handler
                    restoring.callback(self._restore, number, handler)
                    signal.signal(number, self._receive)
            yield

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Signals take effect at the end of the block; a second one takes effect at once."""
        self._received.clear()
        self._are_deferred = True
        try:
            yield
        finally:
            self._are_deferred = False
        if self._received:
            number, frame = self._received[0]
            self._handlers[number](number, frame)

    def _receive(self, number: int, frame: Any) -> None:
        if self._are_deferred and not self._received:
            self._received.append((number, frame))
            return
        self._handlers[number](number, frame)
        if self._are_deferred and number == signal.SIGINT:
            raise KeyboardInterrupt

    def _restore(self, number: int, handler: Any) -> None:
        if signal.getsignal(number) == self._receive:  # unless the program has set another one
            signal.signal(number, handler)
