"""How a black box is called: batches, several calls at a time, repetitions after an error, a rate limit and a cache."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.data.several import Key
from themis.errors import ThemisError

Array = NDArray[np.float32]
FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0
"""Seconds before a call is repeated for the first time, which double with each repetition, and their limit."""
CACHE_MIB = 256
"""Memory for answers if no other is given."""


@dataclass(frozen=True)
class Examples:
    """Perturbed inputs, and the other inputs of the same examples by name or position, if there are several."""

    inputs: Array
    others: dict[Key, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.inputs)

    def rows(self, rows: slice | list[int]) -> Examples:
        """A part of the examples."""
        return Examples(self.inputs[rows], {key: values[rows] for key, values in self.others.items()})

    def copy(self) -> Examples:
        return Examples(self.inputs.copy(), {key: values.copy() for key, values in self.others.items()})

    def hash_of(self, row: int) -> bytes:
        """A hash of all inputs of one example."""
        content = hashlib.blake2b(self.inputs[row].tobytes(), digest_size=16)
        for values in self.others.values():
            content.update(values[row].tobytes())
        return content.digest()


@dataclass(frozen=True)
class Answers:
    """Scores with one row per input, and activations by layer; None if they were not requested."""

    outputs: Tensor
    activations: dict[str, Tensor] | None

    def rows(self, rows: slice | Tensor) -> Answers:
        activations = self.activations
        return Answers(
            self.outputs[rows],
            None if activations is None else {name: values[rows] for name, values in activations.items()},
        )

    @property
    def nbytes(self) -> int:
        return self.outputs.nbytes + sum(values.nbytes for values in (self.activations or {}).values())

    @staticmethod
    def join(parts: Sequence[Answers]) -> Answers:
        first = parts[0]
        if len(parts) == 1:
            return first
        activations = first.activations
        if activations is not None:
            activations = {name: torch.cat([(part.activations or {})[name] for part in parts]) for name in activations}
        return Answers(torch.cat([part.outputs for part in parts]), activations)


@dataclass(frozen=True)
class RequestCounts:
    """What a black box was sent."""

    inputs: int = 0
    calls: int = 0
    repeated: int = 0
    """Calls that were made again after an error."""
    cached: int = 0
    """Inputs that were answered from the cache instead."""

    def since(self, before: RequestCounts) -> RequestCounts:
        """The difference from an earlier count."""
        return RequestCounts(*(getattr(self, field.name) - getattr(before, field.name) for field in fields(self)))

    def __add__(self, more: RequestCounts) -> RequestCounts:
        return RequestCounts(*(getattr(self, field.name) + getattr(more, field.name) for field in fields(self)))


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
        cache_bytes: int = 0,
    ) -> None:
        self.answer, self.batch_size, self.workers, self.retries = answer, batch_size, workers, retries
        self.campaign_batch: int | None = None
        """The batch size that a campaign requested; the smaller of the two counts."""
        self.sent = RequestCounts()
        self._lock = Lock()
        self._seconds_per_call = 0.0 if rate is None else 1 / rate
        self._next_call = 0.0
        self._cache = _Cache(cache_bytes)
        self._reads_cache = True

    def __call__(self, inputs: Examples, needs_activations: bool) -> Answers:
        """The answers to all inputs."""
        if not (self._cache.max_bytes and self._reads_cache):
            return self._send(inputs, needs_activations)
        keys = [inputs.hash_of(row) for row in range(len(inputs))]
        known = {key: self._cache.get(key) for key in keys}
        usable = {
            key: answer
            for key, answer in known.items()
            if answer is not None and (answer.activations is not None or not needs_activations)
        }
        first_row: dict[bytes, int] = {}
        for row, key in enumerate(keys):
            if key not in usable:
                first_row.setdefault(key, row)
        self.sent += RequestCounts(cached=len(inputs) - len(first_row))
        if first_row:
            answers = self._send(inputs.rows(list(first_row.values())), needs_activations)
            for k, key in enumerate(first_row):
                usable[key] = answers.rows(slice(k, k + 1))
                self._cache.put(key, usable[key])
        parts = [usable[key] for key in keys]
        if not needs_activations:
            parts = [Answers(part.outputs, None) for part in parts]
        return Answers.join(parts)

    @contextmanager
    def fresh(self) -> Iterator[None]:
        """A block in which every input is sent, even if the cache has its answer."""
        before, self._reads_cache = self._reads_cache, False
        try:
            yield
        finally:
            self._reads_cache = before

    def _send(self, inputs: Examples, needs_activations: bool) -> Answers:
        size = min(filter(None, (self.batch_size, self.campaign_batch)), default=len(inputs))
        batches = [inputs.rows(slice(first, first + size)) for first in range(0, len(inputs), size)]
        if self.workers == 1 or len(batches) == 1:
            return Answers.join([self._call(batch, needs_activations) for batch in batches])
        with ThreadPoolExecutor(min(self.workers, len(batches))) as pool:
            calls = [pool.submit(self._call, batch, needs_activations) for batch in batches]
            try:
                return Answers.join([call.result() for call in calls])
            except BaseException:
                for call in calls:
                    call.cancel()  # those that have not begun
                raise

    def _call(self, batch: Examples, needs_activations: bool) -> Answers:
        """One call; after an error it is made again, with longer and longer waits."""
        for attempt in range(self.retries + 1):
            self._wait_for_turn()
            with self._lock:
                self.sent += RequestCounts(inputs=len(batch), calls=1, repeated=int(attempt > 0))
            try:
                return self.answer(batch.copy(), needs_activations)  # the function may overwrite what it gets
            except (ThemisError, MemoryError):
                raise
            except Exception:
                if attempt == self.retries:
                    raise
            time.sleep(min(LONGEST_WAIT, FIRST_WAIT * 2**attempt))
        raise AssertionError("the last attempt returns or raises")

    def _wait_for_turn(self) -> None:
        if not self._seconds_per_call:
            return
        with self._lock:
            now = time.monotonic()
            turn = max(now, self._next_call)
            self._next_call = turn + self._seconds_per_call
        time.sleep(turn - now)


class _Cache:
    """The answers used last, by the hash of their input, as many as fit in `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self._n_bytes = max_bytes, 0
        self._answers: OrderedDict[bytes, Answers] = OrderedDict()

    def get(self, key: bytes) -> Answers | None:
        answers = self._answers.get(key)
        if answers is not None:
            self._answers.move_to_end(key)
        return answers

    def put(self, key: bytes, answers: Answers) -> None:
        before = self._answers.pop(key, None)
        self._n_bytes -= 0 if before is None else before.nbytes
        own = Answers(
            answers.outputs.clone(),
            None
            if answers.activations is None
            else {name: values.clone() for name, values in answers.activations.items()},
        )
        self._answers[key] = own
        self._n_bytes += own.nbytes
        while self._n_bytes > self.max_bytes:
            self._n_bytes -= self._answers.popitem(last=False)[1].nbytes
