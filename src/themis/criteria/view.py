"""What a criterion sees of a target: its readings, put side by side as a forward pass shows each layer."""

from __future__ import annotations

from dataclasses import is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from themis.criteria.criterion import Criterion
from themis.criteria.readings import Layout, Readings
from themis.measure.tests import Bools
from themis.probe import Layer
from themis.target import AnyTarget


class View:
    """One criterion's sight of one target, a forward pass at a time."""

    def __init__(self, criterion: Criterion, layers: tuple[Layer, ...], axes: dict[str, int | None]) -> None:
        self.criterion, self.axes = criterion, axes
        chosen = criterion.choose(tuple(each.name for each in layers))
        shapes = {each.name: each.shape for each in layers if each.name in chosen}
        widths = tuple(self._read(torch.zeros(1, *shape), name).shape[1] for name, shape in shapes.items())
        self.layout = Layout(chosen, widths)
        self._at = self.layout.slices()
        self._values = torch.empty(0)
        self._clean: Tensor | None = None
        self._readings: Readings | None = None

    @staticmethod
    def of(criterion: Criterion, target: AnyTarget, layers: tuple[Layer, ...], example: Tensor) -> View:
        """The view of a target whose layers are known; `example` is one raw input."""
        axes: dict[str, int | None] = {each.name: each.channel_axis for each in layers}
        if criterion.neurons == "channel" and None in axes.values() and is_dataclass(target):
            whole: Any = replace(target, neurons="channel")
            axes |= {each.name: each.channel_axis for each in whole.find_layers(example)}
        return View(criterion, layers, {name: None if axis is None else axis + 1 for name, axis in axes.items()})

    def begin(self, n_inputs: int, device: torch.device, dtype: torch.dtype, *, is_kept: bool = False) -> None:
        """Before a forward pass; `is_kept` says that its readings outlive the next one."""
        shape = (n_inputs, self.layout.n_neurons)
        if is_kept or self._values.shape != shape or self._values.device != device:
            self._values = torch.empty(shape, dtype=dtype, device=device)

    def visit(self, layer: Layer, activation: Tensor) -> None:
        """Take in one layer's activation as the model computed it."""
        at = self._at.get(layer.name)
        if at is not None:
            n_inputs = len(self._values)
            self._read(activation.detach().reshape(n_inputs, *layer.shape), layer.name, self._values[:, at])

    def end(self, n: int, outputs: Tensor, seed: Tensor | None = None) -> Readings:
        """The readings of the first `n` inputs of the pass; `seed` says whose clean readings go with them."""
        clean = None if self._clean is None or seed is None else self._clean.index_select(0, seed)
        predicted = outputs[:n].detach().argmax(1) if outputs.ndim == 2 and outputs.shape[1] > 1 else None
        self._readings = Readings(self._values[:n], self.layout, clean, predicted)
        return self._readings

    def take(self, was_run: Bools) -> Bools:
        """Let the criterion take in the pass that has ended; which tests, of all those asked for, raised it."""
        raised = np.zeros_like(was_run)
        if was_run.any():
            assert self._readings is not None
            raised[was_run] = self.criterion.update(self._readings).cpu().numpy()
        return raised

    def keep_clean(self, first: int, n: int, n_seeds: int) -> None:
        """Keep the readings of the pass that has ended as those of the seeds from `first` on."""
        if "clean" in self.criterion.needs:
            if self._clean is None:
                self._clean = self._values.new_empty(n_seeds, self.layout.n_neurons)
            self._clean[first : first + n] = self._values[:n]

    def _read(self, activation: Tensor, name: str, out: Tensor | None = None) -> Tensor:
        return self.criterion.read_layer(activation, self.axes.get(name), out)
