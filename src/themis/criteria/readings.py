"""What a criterion reads of a batch: its neurons' values side by side, and what else is known of the inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from themis.errors import DataError, UsageError

Activations = Tensor | Mapping[str, Tensor]
"""Of some inputs: `[inputs, neurons]`, or by layer `[inputs, ...]` in the order of the forward pass."""
ALONE = "layer"
"""Name of the layer when activations are one tensor."""


@dataclass(frozen=True)
class Batch:
    """Activations of some inputs, with what some criteria need beside them.

    clean: activations of the seeds' clean inputs, in the same form. predicted: classes `[inputs]` that the model
    answered; by default the largest value of the layer `output`. labels: true classes `[inputs]`. axes: the dimension
    of a layer that holds its channels, where it is another than 1, or of a sequence `[inputs, tokens, channels]` 2.
    """

    activations: Activations
    clean: Activations | None = None
    predicted: Tensor | None = None
    labels: Tensor | None = None
    axes: Mapping[str, int] | None = None


@dataclass(frozen=True)
class Layout:
    """The layers that a criterion reads, in order, and how many neurons each has."""

    names: tuple[str, ...]
    widths: tuple[int, ...]

    @property
    def n_neurons(self) -> int:
        return sum(self.widths)

    def slices(self) -> dict[str, slice]:
        """Where each layer's neurons stand."""
        found, start = {}, 0
        for name, width in zip(self.names, self.widths, strict=True):
            found[name] = slice(start, start + width)
            start += width
        return found


@dataclass(frozen=True)
class Readings:
    """A batch as a criterion reads it: `values [inputs, neurons]`, float32 at least, and those of the clean inputs."""

    values: Tensor
    layout: Layout
    clean: Tensor | None = None
    predicted: Tensor | None = None
    labels: Tensor | None = None

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: slice | Tensor) -> Readings:
        more = (None if each is None else each[rows] for each in (self.clean, self.predicted, self.labels))
        return Readings(self.values[rows], self.layout, *more)

    def layers(self) -> dict[str, Tensor]:
        """The values of each layer, `[inputs, its neurons]`."""
        return {name: self.values[:, at] for name, at in self.layout.slices().items()}

    def classes(self, who: str) -> Tensor:
        """The predicted class of each input."""
        if self.predicted is None:
            raise UsageError(
                f"{who} goes by the class that the model answered, which is not told here: give the scores as layer "
                "'output', or batches as Batch(activations, predicted=...)"
            )
        return self.predicted

    def sensitivities(self, who: str) -> Tensor:
        """`|values - clean|`."""
        if self.clean is None:
            raise UsageError(f"{who} compares each input with its clean one: pass clean=..., its activations")
        return (self.values - self.clean).abs()


def by_layer(activations: Activations, what: str = "activations") -> dict[str, Tensor]:
    """Activations by layer; refuses what are none."""
    found = dict(activations) if isinstance(activations, Mapping) else {ALONE: activations}
    found = {name: torch.as_tensor(each) if isinstance(each, np.ndarray) else each for name, each in found.items()}
    if not found:
        raise UsageError(f"{what} must have a layer, got an empty dict")
    n = None
    for name, tensor in found.items():
        if not isinstance(tensor, Tensor) or tensor.ndim < 2:
            got = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise UsageError(f"{what} must be tensors [inputs, neurons] or [inputs, channels, ...], {name!r} is {got}")
        n = len(tensor) if n is None else n
        if len(tensor) != n:
            raise DataError(f"{what} must have one row an input in every layer, {name!r} has {len(tensor)}, not {n}")
    return found


def as_neurons(activation: Tensor, neurons: str, channel_axis: int | None = None) -> Tensor:
    """A layer's activation `[inputs, ...]` as `[inputs, neurons]`: its elements, or each channel's mean.

    Channels are dimension 1; of a sequence `[inputs, tokens, channels]` the last one.
    """
    if not activation.is_floating_point():
        raise UsageError(f"activations must be floating-point numbers, got {activation.dtype}: convert them first")
    if activation.dtype not in (torch.float32, torch.float64):
        activation = activation.float()
    if activation.ndim == 2:
        return activation
    if neurons == "element":
        return activation.flatten(1)
    axis = channel_axis or (2 if activation.ndim == 3 else 1)
    return activation.mean([k for k in range(1, activation.ndim) if k != axis])
