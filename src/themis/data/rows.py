"""Rows: inputs that are read when needed, so that a data set may be larger than memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from themis.data.files import Numbers, available_bytes
from themis.errors import DataError
from themis.progress import advance, step

MAX_HELD_BYTES = 1 << 30
"""Data up to this size, and up to a quarter of the available memory, is read once and held in memory."""
CACHE_BYTES = 256 << 20
"""Size of the cache of rows of larger data, which also takes at most an eighth of the available memory."""
BLOCK_BYTES = 16 << 20
"""Size of inputs that are processed at a time."""

Read = Callable[[int], Tensor | Numbers]
"""Reads the input at an index of the data: `[...]`, numbers of any type."""


def held_bytes() -> int:
    """The size up to which data is held in memory."""
    return min(MAX_HELD_BYTES, available_bytes() // 4)


class Rows:
    """Inputs `[seeds, ...]`, float32, that are indexed like a tensor: `rows[k]`, `rows[tensor]`, `rows[5:9]`.

    Every row is checked when it is read: it must be finite and have the same shape as the others.
    """

    def __init__(
        self,
        read: Read,
        index: Tensor,
        shape: tuple[int, ...],
        *,
        device: torch.device | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        """index `[seeds]`: the index of each row in the data. shape: of one input. cache_bytes: see CACHE_BYTES."""
        self._read, self._index, self._device = read, index, device or torch.device("cpu")
        self.shape = (len(index), *shape)
        cache_bytes = min(CACHE_BYTES, available_bytes() // 8) if cache_bytes is None else cache_bytes
        most = cache_bytes // max(1, torch.float32.itemsize * math.prod(shape))
        self._row = lru_cache(most)(partial(_read_row, read, tuple(shape)))

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Size of all rows if they were held in memory."""
        return torch.float32.itemsize * math.prod(self.shape)

    def __getitem__(self, rows: Any) -> Tensor:
        requested = self._index[rows.cpu() if isinstance(rows, Tensor) else rows]
        indices = requested.reshape(-1).tolist()
        # NumPy, because torch would wake all its threads and wait for them for every single row.
        inputs = np.empty((len(indices), *self.shape[1:]), np.float32)
        first_row: dict[int, int] = {}  # a chunk often contains a seed more than once
        for row, k in enumerate(indices):
            inputs[row] = inputs[first_row[k]] if k in first_row else self._row(k)
            first_row.setdefault(k, row)
        return torch.from_numpy(inputs).reshape(*requested.shape, *self.shape[1:]).to(self._device)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Rows, device=self._device), (self._read, self._index, self.shape[1:])  # without the cache

    def part(self, rows: Any) -> Rows:
        """Some of the rows, without reading them."""
        index = self._index[rows].reshape(-1)
        return self._with(_index=index, shape=(len(index), *self.shape[1:]))

    def to(self, device: torch.device) -> Rows:
        """The same rows, placed on a device when they are read."""
        return self._with(_device=device)

    def _with(self, **changes: Any) -> Rows:
        """The same rows, which share the cache, with other attributes."""
        other = object.__new__(type(self))
        vars(other).update(vars(self) | changes)
        return other

    def with_channels_first(self) -> Rows:
        """The same rows with the last axis moved to the front."""
        read = self._read

        def read_moved(k: int) -> Numbers:
            return np.moveaxis(as_array(read(k)), -1, 0)

        *shape, channels = self.shape[1:]
        return Rows(read_moved, self._index, (channels, *shape), device=self._device)

    def in_memory(self) -> Tensor | Rows:
        """All rows as a tensor, if they fit in memory."""
        if self.nbytes > held_bytes():
            return self
        with step("reading the inputs"):
            inputs = torch.empty(self.shape, device=self._device)
            for first, block in blocks(self):
                inputs[first : first + len(block)] = block
                advance(first, len(self), "inputs")
        return inputs


def _read_row(read: Read, shape: tuple[int, ...], k: int) -> Numbers:
    values = as_array(read(k))
    if tuple(values.shape) != shape:
        raise DataError(
            f"all inputs must have the same shape, but seed {k} has {list(values.shape)} and the first has "
            f"{list(shape)}: resize them in the data set"
        )
    with np.errstate(over="ignore"):
        row = np.array(values, np.float32)  # a copy: a data set may reuse its memory
    if not np.isfinite(row).all():
        raise DataError(f"inputs must be finite, but seed {k} has a NaN or an infinity: fix or drop it")
    return row


def as_array(values: Tensor | Numbers) -> Numbers:
    """A tensor on any device as a NumPy array; arrays are returned unchanged."""
    if not isinstance(values, Tensor):
        return values
    values = values.detach().cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def blocks(inputs: Any) -> Iterator[tuple[int, Tensor]]:
    """All inputs as float32 tensors in blocks of about `BLOCK_BYTES`, each with the index of its first row."""
    step = max(1, BLOCK_BYTES // max(1, 4 * math.prod(inputs.shape[1:])))
    for start in range(0, len(inputs), step):
        part = inputs[start : start + step]
        if not isinstance(part, Tensor):
            with np.errstate(over="ignore"):  # an infinity is refused by the caller
                part = torch.from_numpy(np.array(part, np.float32))
        yield start, part.detach().cpu().float()
