"""Deferring Ctrl-C to a moment when nothing is half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Ctrl-C takes effect at the end of the block; a second Ctrl-C takes effect at once."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    received: list[tuple[int, Any]] = []

    def defer(number: int, frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append((number, frame))

    signal.signal(signal.SIGINT, defer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if received:
        handler(*received[0])
