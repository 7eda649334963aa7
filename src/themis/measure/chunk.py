"""Chunks: how many tests go through the model at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

CHUNK_ACTIVATIONS = 1 << 24
"""Activations of one chunk on a CPU: 64 MiB of them; larger chunks fall out of its caches."""
CHUNK_LEAST, CHUNK_MOST = 8, 256
ACCELERATOR_BATCH = 256


def chunk_size(n_neurons: int, device: torch.device, batch_size: int | None) -> int:
    """Tests in one forward pass.

    On a CPU a function of the model alone: kernels round differently for different batch shapes, and results must not
    depend on `batch_size`. On an accelerator it is `batch_size`, and only near-ties can differ.
    """
    if device.type != "cpu":
        return batch_size or ACCELERATOR_BATCH
    fitting = max(1, CHUNK_ACTIVATIONS // n_neurons)
    return min(CHUNK_MOST, max(CHUNK_LEAST, 1 << round(math.log2(fitting))))


def padded(rows: Tensor, size: int) -> Tensor:
    """`rows` filled up to `size` by repeating the last: a forward pass always has the same shape."""
    if len(rows) == size:
        return rows
    return torch.cat([rows, rows[-1:].expand(size - len(rows), *rows.shape[1:])])


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, says that memory ran out."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
            return True
        error = error.__cause__
    return False
