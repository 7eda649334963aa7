"""Rows: inputs that are read when they are needed, so that a data set may be larger than memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from themis.data.files import Numbers, available_bytes
from themis.errors import DataError
from themis.progress import advance, step

HELD_BYTES = 1 << 30
"""Data up to this size (and up to a quarter of the available memory) is read once and then held in memory."""
CACHE_BYTES = 256 << 20
"""For larger data, the rows read last are cached up to this size (and up to an eighth of the available memory)."""
ROWS_PER_READ = 64
"""Rows that are read at a time into memory."""

Read = Callable[[int], Tensor | Numbers]
"""Reads the input at an index of the data: `[...]`, numbers of any type."""


def held_bytes() -> int:
    """The size up to which data is held in memory."""
    return min(HELD_BYTES, available_bytes() // 4)


class RowCache:
    """The rows read last, as many as fit in `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.n_bytes = max_bytes, 0
        self._rows: OrderedDict[int, Numbers] = OrderedDict()

    def get(self, k: int) -> Numbers | None:
        row = self._rows.get(k)
        if row is not None:
            self._rows.move_to_end(k)
        return row

    def put(self, k: int, row: Numbers) -> None:
        if row.nbytes > self.max_bytes:
            return
        self._rows[k] = row
        self.n_bytes += row.nbytes
        while self.n_bytes > self.max_bytes:
            self.n_bytes -= self._rows.popitem(last=False)[1].nbytes


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
        cache: RowCache | None = None,
    ) -> None:
        """index `[seeds]`: the index of each row in the data. shape: that of one input."""
        self._read, self._index, self._device = read, index, device or torch.device("cpu")
        self.shape = (len(index), *shape)
        self._cache = cache or RowCache(min(CACHE_BYTES, available_bytes() // 8))

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Size of all rows if they were held in memory."""
        n = torch.float32.itemsize
        for side in self.shape:
            n *= side
        return n

    def __getitem__(self, rows: Any) -> Tensor:
        requested = self._index[rows.cpu() if isinstance(rows, Tensor) else rows]
        indices = requested.reshape(-1).tolist()
        # NumPy, because torch would wake and wait for all threads for every single row.
        inputs = np.empty((len(indices), *self.shape[1:]), np.float32)
        first_row: dict[int, int] = {}  # a chunk often holds a seed more than once
        for row, k in enumerate(indices):
            inputs[row] = inputs[first_row[k]] if k in first_row else self._row(k)
            first_row.setdefault(k, row)
        return torch.from_numpy(inputs).reshape(*requested.shape, *self.shape[1:]).to(self._device)

    def part(self, rows: Any) -> Rows:
        """Some of the rows, without reading them."""
        return Rows(self._read, self._index[rows].reshape(-1), self.shape[1:], device=self._device, cache=self._cache)

    def to(self, device: torch.device) -> Rows:
        """The same rows, placed on a device when they are read."""
        return Rows(self._read, self._index, self.shape[1:], device=device, cache=self._cache)

    def moved(self, axis: int, to: int) -> Rows:
        """The same rows with an axis of each in another place."""
        read = self._read

        def read_moved(k: int) -> Numbers:
            return np.moveaxis(as_array(read(k)), axis, to)

        shape = np.moveaxis(np.empty((*self.shape[1:], 0)), axis - 1 if axis < 0 else axis, to).shape[:-1]
        return Rows(read_moved, self._index, shape, device=self._device)

    def in_memory(self) -> Tensor | Rows:
        """All rows as a tensor, if they fit in memory."""
        if self.nbytes > held_bytes():
            return self
        with step("reading the inputs"):
            inputs = torch.empty(self.shape, device=self._device)
            for first in range(0, len(self), ROWS_PER_READ):
                inputs[first : first + ROWS_PER_READ] = self[first : first + ROWS_PER_READ]
                advance(first, len(self), "inputs")
        return inputs

    def _row(self, k: int) -> Numbers:
        row = self._cache.get(k)
        if row is None:
            values = as_array(self._read(k))
            if tuple(values.shape) != self.shape[1:]:
                raise DataError(
                    f"all inputs must have the same shape, but seed {k} has {list(values.shape)} and the first "
                    f"has {list(self.shape[1:])}: resize them in the data set"
                )
            with np.errstate(over="ignore"):
                row = np.array(values, np.float32)  # a copy: a data set may reuse its memory
            if not np.isfinite(row).all():
                raise DataError(f"inputs must be finite, but seed {k} has a NaN or an infinity: fix or drop it")
            self._cache.put(k, row)
        return row


def as_array(values: Tensor | Numbers) -> Numbers:
    """A tensor on any device as a NumPy array; arrays are returned unchanged."""
    if not isinstance(values, Tensor):
        return values
    values = values.detach().cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
