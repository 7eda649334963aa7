"""Chunks: how many tests go through the model at once, and the memory they need."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from themis.errors import warn
from themis.measure.tests import Tests
from themis.target.activations import Layer

CHUNK_ACTIVATIONS = 1 << 24
"""Activations per chunk on a CPU, 64 MiB; larger chunks do not fit into its caches."""
MIN_CHUNK, MAX_CHUNK = 8, 256
ACCELERATOR_BATCH = 256
PASS_STEPS, MIN_PASS, ACCELERATOR_STEP = 16, 8, 32
"""A pass of less than a chunk is padded to a multiple of a sixteenth of the chunk, but of 8 or more; on an accelerator,
to a multiple of 32."""
ATTACK_ACTIVATIONS, MIN_ATTACK = 1 << 17, 16
"""Least number of activations per layer, and of tests, in a block of an attack on a CPU. In such blocks, a full chunk
was measured to take 0.7 (DAVE-2) to 1.06 (ResNet-56) times as long as in one piece."""

Result = TypeVar("Result")


def chunk_size(n_neurons: int, device: torch.device, batch_size: int | None) -> int:
    """The number of tests in one forward pass.

    On a CPU it depends on the model alone, because kernels round differently for different batch shapes, and results
    must not depend on `batch_size`. On an accelerator it is `batch_size`; only near-ties can differ.
    """
    if device.type != "cpu":
        return batch_size or ACCELERATOR_BATCH
    fitting = max(1, CHUNK_ACTIVATIONS // n_neurons)
    return min(MAX_CHUNK, max(MIN_CHUNK, 1 << round(math.log2(fitting))))


def pass_size(n_tests: int, chunk: int, device: torch.device, block: int = 1) -> int:
    """The number of rows in a forward pass of `n_tests` tests with padding; `block` is the block size of an attack.

    There are few sizes, so that kernels are prepared for few shapes. Sizes may round differently: the size is recorded
    with each fault, and a replay uses it.
    """
    step = max(MIN_PASS, chunk // PASS_STEPS, block) if device.type == "cpu" else ACCELERATOR_STEP
    return min(chunk, -(-n_tests // step) * step)


def attack_size(n_rows: int, layers: Sequence[Layer], device: torch.device) -> int:
    """The number of tests per block of an attack, in a pass of `n_rows`.

    The steps of an attack take tens to hundreds of passes, for padding too. On a CPU, blocks therefore have one fixed
    size: only the last one has padding, and results do not depend on the other tests of a pass. The size depends on the
    model alone: with small layers, blocks have more tests, or the overhead of calls would outweigh their work.
    """
    if device.type != "cpu":
        return n_rows
    per_layer = max(1, layers[-1].stop // len(layers))
    size = 1 << max(0, math.ceil(math.log2(ATTACK_ACTIVATIONS / per_layer)))
    return min(n_rows, max(MIN_ATTACK, size))


def padded(rows: Tensor, size: int) -> Tensor:
    """Pad `rows` to `size` by repeating the last row, so that every forward pass has the same shape."""
    if rows.shape[0] == size:
        return rows
    return torch.cat([rows, rows[-1:].expand(size - len(rows), *rows.shape[1:])])


def columns_of(tests: Tests, size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Seeds, theta and noise seeds, padded to the shape of a pass by repeating the last test."""
    rows, theta, noise_seed = (
        padded(torch.from_numpy(np.ascontiguousarray(column)), size).to(device, non_blocking=True)
        for column in (tests.seed, tests.theta, tests.noise_seed)
    )
    return rows, theta, noise_seed


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, says that memory ran out."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
            return True
        error = error.__cause__
    return False


class ChunkBuffers:
    """The size of a chunk, and scratch buffers `[2, chunk, neurons]` per layer; both shrink when memory runs out."""

    def __init__(self, layers: tuple[Layer, ...], chunk: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layers, self.chunk, self.dtype, self.device = layers, chunk, dtype, device
        self.buffers: dict[str, Tensor] = {}
        self.is_short = False
        """Whether memory has run out."""

    def attempt(self, work: Callable[[], Result]) -> Result:
        """Return what `work` returns; while memory runs out, halve the chunk and try again."""
        while True:
            try:
                if not self.buffers:
                    self._allocate()
                return work()
            except Exception as error:
                if not is_out_of_memory(error) or self.chunk == 1:
                    raise
            self.chunk //= 2
            self.is_short = True
            self.release()
            gc.collect()  # the error's frames hold tensors in reference cycles
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            warn(
                f"out of memory on {self.device} with {2 * self.chunk} tests per forward pass: continuing with "
                f"{self.chunk}; pass batch_size={self.chunk} to start with it"
            )

    def shrink(self, chunk: int) -> None:
        """Reduce the chunk to the size that another process uses after running out of memory."""
        if chunk < self.chunk:
            self.release()
            self.chunk, self.is_short = chunk, True

    def release(self) -> None:
        """Free the buffers."""
        self.buffers = {}

    def _allocate(self) -> None:
        widest = max(layer.n_neurons for layer in self.layers)
        scratch = torch.empty(2, self.chunk * widest, dtype=self.dtype, device=self.device)
        self.buffers = {
            layer.name: scratch[:, : self.chunk * layer.n_neurons].view(2, self.chunk, layer.n_neurons)
            for layer in self.layers
        }
