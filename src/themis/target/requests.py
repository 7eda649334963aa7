"""Calling a black box: in batches, with concurrent calls, retries and a rate limit."""

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

FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 0.5, 60.0
"""Seconds before the first retry, which double with each further retry, and their limit."""

Examples = dict[Key | None, NDArray[Any]]
"""Perturbed inputs under the key None, and other inputs of the same examples by name or position."""
Answers = dict[str, Tensor]
"""The scores under the key `output`, and the activations of layers by name, each with one row per input."""


def rows_of(columns: dict[Any, Any], rows: slice | list[int] | Tensor) -> dict[Any, Any]:
    """Select rows of examples or answers."""
    return {name: values[rows] for name, values in columns.items()}


def _join(parts: Sequence[Answers]) -> Answers:
    return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


class Requests:
    """Calls `answer(batch, needs_activations)` with batches of inputs, and counts inputs and calls."""

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
        """The batch size of the campaign; the smaller one of this and `batch_size` is used."""
        self.sent = Counter(inputs=0, calls=0, repeated=0)
        """The numbers of inputs, of calls, and of calls that were repeated after an error."""
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
        """Make one call, with retries after longer and longer waits."""
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
            time.sleep(min(MAX_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2**attempt))
        raise AssertionError("the last attempt returns or raises")
