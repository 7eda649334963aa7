"""What a sweep of the clean inputs leaves: their outputs, and as many of their activations as fit into memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from themis.compute.shared_memory import SharedMemory
from themis.oracle import Motion, Oracle
from themis.oracle.oracle import Verdict
from themis.target.activations import Layer

Activations = dict[str, Tensor]
"""Activations `[inputs, neurons]` by layer."""
Located = tuple[Tensor, Tensor]
"""A matrix `[any, neurons]`, and the row of it for each seed."""


class CleanActivations:
    """The activations of the first seeds, as many as fit in `max_bytes`."""

    def __init__(
        self,
        layers: tuple[Layer, ...],
        n_seeds: int,
        max_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
        shared: str | None = None,
    ) -> None:
        """shared: the name under which processes of this machine, whose other arguments are the same, share them."""
        bytes_per_seed = sum(layer.n_neurons for layer in layers) * dtype.itemsize
        self.n_kept = n_kept = min(n_seeds, max_bytes // bytes_per_seed)
        self.is_short = n_kept < n_seeds
        """Whether activations that are not kept are computed again with each test."""
        self.is_kept = torch.zeros(n_kept, dtype=torch.bool)
        """Whose activations are there, for processes that share them: each of them sets what it has kept."""
        self._shared: SharedMemory | None = None
        if shared is None or n_kept == 0:
            self._kept = {layer.name: _allocate(n_kept, layer.n_neurons, dtype, device) for layer in layers}
            return
        sizes = [n_kept * layer.n_neurons * dtype.itemsize for layer in layers]
        self._shared = memory = SharedMemory(shared, SharedMemory.size_of(n_kept, *sizes))
        self.is_kept = memory.take((n_kept,), torch.bool)
        self._kept = {layer.name: memory.take((n_kept, layer.n_neurons), dtype) for layer in layers}

    def populate(self) -> None:
        """Make what other processes have kept as fast to read as what this one has."""
        if self._shared is not None:
            self._shared.populate()

    def keep(self, name: str, first: int, activations: Tensor) -> None:
        """Keep a layer's activations of the seeds from `first` on, as far as there is room."""
        room = min(len(activations), self.n_kept - first)
        if room > 0:
            self._kept[name][first : first + room] = activations[:room]

    def put(self, name: str, rows: Tensor, activations: Tensor) -> None:
        """Keep a layer's activations of the seeds `rows`, for which there must be room."""
        self._kept[name][rows] = activations

    def all(self, name: str) -> Tensor:
        """The kept activations of a layer, `[kept seeds, neurons]`."""
        return self._kept[name]

    def columns(self, name: str, neurons: Tensor) -> Tensor:
        """A copy of some neurons' kept activations, `[kept seeds, neurons]`, with each row contiguous in memory."""
        return self._kept[name][:, neurons]

    def missing(self, rows: Tensor) -> Tensor:
        """Which of `rows` (seeds) must be recomputed, as positions in `rows`."""
        return (rows >= self.n_kept).nonzero().squeeze(1)

    def gather(self, name: str, rows: Tensor, missing: Tensor, recomputed: Activations, out: Tensor) -> Located:
        """A layer's activations of the seeds `rows` in `out`: those that are kept, and the others as recomputed."""
        if self.n_kept:
            torch.index_select(self._kept[name], 0, rows.clamp(max=self.n_kept - 1), out=out)
        out[missing] = recomputed[name]
        return out, torch.arange(len(rows), device=rows.device)


def _allocate(n_rows: int, n_columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.empty(n_rows, n_columns, dtype=dtype, device=device)
    # NumPy asks for huge pages, which Linux fills in less than half the time of small ones.
    return torch.from_numpy(np.empty((n_rows, n_columns), dtype=str(dtype).removeprefix("torch.")))


@dataclass(frozen=True)
class Clean:
    """What is known of the clean inputs, and what tests are compared with. Of no input before the sweep."""

    oracle: Oracle
    outputs: Tensor
    reference: Tensor
    """The answers that the seeds should keep."""
    labels: Tensor | None
    kept: CleanActivations

    @cached_property
    def usable(self) -> Tensor:
        """The seeds that can be tested."""
        return self.oracle.check(self.outputs, self.labels).nonzero().squeeze(1)

    def compare(self, rows: Tensor, outputs: Tensor, motion: Motion | None) -> Verdict:
        """The oracle's verdict on tests of the seeds `rows`, whose pictures have moved."""
        labels = None if self.labels is None else self.labels.index_select(0, rows)
        return self.oracle.verdict(self.outputs.index_select(0, rows), outputs, labels, motion)
