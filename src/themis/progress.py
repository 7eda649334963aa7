"""Steps that may take long: what runs at the moment and how far it is, for whoever shows it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(eq=False)
class Step:
    """A step that is running."""

    text: str
    n_done: int = 0
    n: int = 0
    """How many there are to be done; 0 if that is unknown."""
    noun: str = ""

    def describe(self) -> str:
        """The step and how far it is, in one line."""
        if not self.n_done:
            return self.text
        share = f"{self.n_done / self.n:.0%} of {self.n:,}" if self.n else f"{self.n_done:,}"
        return f"{self.text}: {share} {self.noun}"


Show = Callable[[Step], AbstractContextManager[None]]
"""Shows a step until the block ends."""
_show: ContextVar[Show | None] = ContextVar("show", default=None)
_running: ContextVar[Step | None] = ContextVar("running", default=None)


@contextmanager
def shown_by(show: Show) -> Iterator[None]:
    """Show the steps of this block."""
    token = _show.set(show)
    try:
        yield
    finally:
        _show.reset(token)


@contextmanager
def step(text: str) -> Iterator[None]:
    """A step that may take long."""
    show = _show.get()
    if show is None:
        yield
        return
    running = Step(text)
    token = _running.set(running)
    try:
        with show(running):
            yield
    finally:
        _running.reset(token)


def advance(n_done: int, n: int, noun: str) -> None:
    """Say how far the step is that runs; `n` is 0 if the end is unknown."""
    if (running := _running.get()) is not None:
        running.n_done, running.n, running.noun = n_done, n, noun
