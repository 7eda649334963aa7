"""What a criterion reads from a target: its readings, collected layer by layer during a forward pass."""

from __future__ import annotations

from dataclasses import is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from themis.criteria.criterion import Criterion
from themis.criteria.readings import Layout, Readings
from themis.errors import UsageError
from themis.measure.tests import Bools
from themis.target.activations import Layer
from themis.target.target import AnyTarget


class View:
    """The readings of one criterion from one target, one forward pass at a time.

    Call `begin` before a forward pass, `on_activation` for each layer and `end` after it.
    """

    can_be_captured = True
    """Whether a campaign may replay the passes from a CUDA graph: reading a layer runs the same kernels every time."""

    def __init__(
        self, criterion: Criterion, layers: tuple[Layer, ...], axes: dict[str, int], max_bytes: int | None = None
    ) -> None:
        """`max_bytes` limits the memory for the seeds' clean readings, which some criteria need."""
        self.criterion, self.axes, self.max_bytes = criterion, axes, max_bytes
        names = criterion.choose_layers(tuple(layer.name for layer in layers))
        shapes = {layer.name: layer.shape for layer in layers if layer.name in names}
        widths = tuple(self._read(torch.zeros(1, *shape), name).shape[1] for name, shape in shapes.items())
        self.layout = Layout(names, widths)
        self._columns = self.layout.slices()
        self._device: torch.device | None = None
        self._memory = self._values = torch.empty(0)
        self._clean: Tensor | None = None
        self._readings: Readings | None = None

    @staticmethod
    def of(
        criterion: Criterion,
        target: AnyTarget,
        layers: tuple[Layer, ...],
        example: Tensor,
        max_bytes: int | None = None,
    ) -> View:
        """The view of a target with these layers; `example` is one raw input."""
        axes = channel_axes(target, layers, example) if criterion.neurons == "channel" else {}
        return View(criterion, layers, axes, max_bytes)

    def begin(self, n_inputs: int, device: torch.device, dtype: torch.dtype, *, is_kept: bool = False) -> None:
        """Prepare for a forward pass; `is_kept` if its readings must outlive the next one.

        Passes that are no larger than an earlier one use the same memory, which a captured pass depends on.
        """
        if is_kept or len(self._memory) < n_inputs or self._device != device:
            self._device = device
            self._memory = torch.empty(n_inputs, self.layout.n_neurons, dtype=dtype, device=device)
        self._values = self._memory[:n_inputs]

    def on_activation(self, layer: Layer, activation: Tensor) -> None:
        """Read one layer's activation as the model computed it."""
        columns = self._columns.get(layer.name)
        if columns is not None:
            n_inputs = len(self._values)
            self._read(activation.detach().reshape(n_inputs, *layer.shape), layer.name, self._values[:, columns])

    def end(self, n: int, outputs: Tensor, seed: Tensor | None = None) -> Readings:
        """The readings of the first `n` inputs of the pass; `seed` selects the clean readings that belong to them."""
        clean = None if seed is None else self._clean
        rows = None if clean is None else seed
        predicted = predicted_classes(outputs[:n])
        self._readings = Readings(self._values[:n], self.layout, clean, predicted, clean_rows=rows)
        return self._readings

    def take(self, was_run: Bools) -> Bools:
        """Update the criterion with the last pass; returns which of all requested tests raised its score."""
        raised = np.zeros_like(was_run)
        if was_run.any():
            assert self._readings is not None
            raised[was_run] = self.criterion.update(self._readings).cpu().numpy()
        return raised

    def keep_clean(self, first: int, n: int, n_seeds: int) -> None:
        """Keep the readings of the last pass as the clean ones of the `n` seeds from `first` on."""
        if "clean" in self.criterion.needs:
            if self._clean is None:
                self._check_memory(n_seeds * self.layout.n_neurons * self._values.element_size())
                self._clean = self._values.new_empty(n_seeds, self.layout.n_neurons)
            self._clean[first : first + n] = self._values[:n]

    def _check_memory(self, n_bytes: int) -> None:
        if self.max_bytes is not None and n_bytes > self.max_bytes:
            raise UsageError(
                f"{self.criterion.name} compares tests with the clean readings of all seeds, which take "
                f"{n_bytes / 2**30:.2g} GiB of the {self.max_bytes / 2**30:.2g} allowed: raise clean_memory_gib, use "
                "fewer seeds with max_seeds, or neurons=channel"
            )

    def _read(self, activation: Tensor, name: str, out: Tensor | None = None) -> Tensor:
        return self.criterion.read_layer(activation, self.axes.get(name), out)


def channel_axes(target: AnyTarget, layers: tuple[Layer, ...], example: Tensor) -> dict[str, int]:
    """The dimension of each layer's activation `[inputs, ...]` that holds its channels, as far as it is known."""
    if any(layer.channel_axis is None for layer in layers) and is_dataclass(target):
        by_channel: Any = replace(target, neurons="channel")
        layers = by_channel.find_layers(example)
    return {layer.name: 1 + layer.channel_axis for layer in layers if layer.channel_axis is not None}


def predicted_classes(outputs: Tensor) -> Tensor:
    """The class of each output `[inputs, classes]`; if outputs are not scores of classes, all have the same class."""
    if outputs.ndim == 2 and outputs.shape[1] > 1:
        return outputs.detach().argmax(1)
    return torch.zeros(len(outputs), dtype=torch.int64, device=outputs.device)
