"""Memory for a chunk: how many tests it has, and two buffers a layer; both shrink when memory runs out."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from themis.measure.chunk import is_out_of_memory
from themis.target.activations import Layer

Result = TypeVar("Result")


class Room:
    """The size of a chunk, and buffers `[chunk, neurons]` that every attempt finds made."""

    def __init__(self, layers: tuple[Layer, ...], chunk: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layers, self.chunk, self.dtype, self.device = layers, chunk, dtype, device
        self.buffers: dict[str, tuple[Tensor, Tensor]] = {}

    def attempt(self, work: Callable[[], Result]) -> Result:
        """What `work` gives; it is done again with a smaller chunk while memory runs out."""
        while True:
            try:
                if not self.buffers:
                    self._make_buffers()
                return work()
            except Exception as error:
                if not is_out_of_memory(error) or self.chunk == 1:
                    raise
            self.chunk //= 2
            self.release()
            gc.collect()  # the error's frames hold tensors in circles
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            warnings.warn(
                f"out of memory on {self.device} with {2 * self.chunk} tests at once: going on with {self.chunk}; "
                f"pass batch_size={self.chunk} to begin with it",
                RuntimeWarning,
                stacklevel=2,
            )

    def release(self) -> None:
        """Free the buffers."""
        self.buffers = {}

    def _make_buffers(self) -> None:
        widest = max(layer.n_neurons for layer in self.layers)
        scratch = torch.empty(2, self.chunk * widest, dtype=self.dtype, device=self.device)
        self.buffers = {layer.name: self._cut(scratch, layer) for layer in self.layers}

    def _cut(self, scratch: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        first, second = scratch[:, : self.chunk * layer.n_neurons].view(2, self.chunk, layer.n_neurons)
        return first, second
