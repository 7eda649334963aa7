"""How a black box is called: batches, several calls at a time, repetitions after an error, and a rate limit."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.data.items import Key
from themis.errors import ThemisError

FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0
"""Seconds before a call is repeated for the first time, which double with each repetition, and their limit."""

Examples = dict[Key | None, NDArray[Any]]
"""Perturbed inputs under None, and the other inputs of the same examples by name or position, if there are several."""
Answers = dict[str, Tensor]
"""The scores, which are called `output`, and the activations of layers by their names, each with one row per input."""


def rows_of(columns: dict[Any, Any], rows: slice | list[int] | Tensor) -> dict[Any, Any]:
    """Some of the examples, or the answers to some of them."""
    return {name: values[rows] for name, values in columns.items()}


def _join(parts: Sequence[Answers]) -> Answers:
    return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


class Requests:
    """Calls `answer(batch, needs_activations)` with batches of inputs, and counts what it was sent."""

    def __init__(
        self,
        answer: Callable[[Examples, bool], Answers],
        *,
        batch_size: int | None = None,
        workers: int = 1,
        retries: int = 0,
        rate: float | None = None,
    ) -> None:
        self.answer, self.batch_size, self.workers, self.retries = answer, batch_size, workers, retries
        self.campaign_batch: int | None = None
        """The batch size that a campaign requested; the smaller of the two counts."""
        self.sent = Counter(inputs=0, calls=0, repeated=0)
        """Inputs that were sent, and calls, of which some were repeated after an error."""
        self._lock = Lock()
        self._seconds_per_call = 0.0 if rate is None else 1 / rate
        self._next_call = 0.0

    def __call__(self, inputs: Examples, needs_activations: bool) -> Answers:
        """The answers to all inputs."""
        n = len(inputs[None])
        size = min(filter(None, (self.batch_size, self.campaign_batch)), default=n)
        batches = [rows_of(inputs, slice(first, first + size)) for first in range(0, n, size)]
        if self.workers == 1 or len(batches) == 1:
            return _join([self._call(batch, needs_activations) for batch in batches])
        with ThreadPoolExecutor(min(self.workers, len(batches))) as pool:
            return _join(list(pool.map(lambda batch: self._call(batch, needs_activations), batches)))

    def _call(self, batch: Examples, needs_activations: bool) -> Answers:
        """One call; after an error it is made again, with longer and longer waits."""
        for attempt in range(self.retries + 1):
            with self._lock:
                now = time.monotonic()
                turn = max(now, self._next_call)
                self._next_call = turn + self._seconds_per_call
                self.sent.update(inputs=len(batch[None]), calls=1, repeated=int(attempt > 0))
            time.sleep(turn - now)
            try:
                own = {key: values.copy() for key, values in batch.items()}  # the function may overwrite what it gets
                return self.answer(own, needs_activations)
            except (ThemisError, MemoryError):
                raise
            except Exception:
                if attempt == self.retries:
                    raise
            time.sleep(min(LONGEST_WAIT, FIRST_WAIT * 2**attempt))
        raise AssertionError("the last attempt returns or raises")
