"""What a criterion reads from a batch: the activations of each layer, as neurons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from themis.errors import DataError, UsageError

Activations = Tensor | Mapping[str, Tensor]
"""Activations of a batch: `[inputs, neurons]`, or `[inputs, ...]` by layer in the order of the forward pass."""
ONLY_LAYER = "layer"
"""Name of the layer if activations are a single tensor."""


@dataclass(frozen=True)
class Batch:
    """Activations of a batch of inputs, with what some criteria need in addition.

    clean: activations of the seeds' clean inputs, in the same form. predicted: classes `[inputs]` that the model
    answered; by default the index of the largest value of the layer `output`. labels: true classes `[inputs]`.
    axes: the dimension of a layer that holds its channels, if it is not the default: 1, or 2 for a sequence
    `[inputs, tokens, channels]`.
    """

    activations: Activations
    clean: Activations | None = None
    predicted: Tensor | None = None
    labels: Tensor | None = None
    axes: Mapping[str, int] | None = None


@dataclass(frozen=True)
class Layout:
    """The layers that a criterion reads, in order, and the number of neurons of each."""

    names: tuple[str, ...]
    widths: tuple[int, ...]

    @property
    def n_neurons(self) -> int:
        return sum(self.widths)

    def slices(self) -> dict[str, slice]:
        """The columns of each layer's neurons."""
        slices, start = {}, 0
        for name, width in zip(self.names, self.widths, strict=True):
            slices[name] = slice(start, start + width)
            start += width
        return slices


@dataclass(frozen=True)
class Readings:
    """A batch as a criterion reads it: `values [inputs, neurons]`, at least float32, and those of the clean inputs.

    clean_rows: the row of `clean` that belongs to each input, int64 `[inputs]`; without it, `clean` has one row each.
    """

    values: Tensor
    layout: Layout
    clean: Tensor | None = None
    predicted: Tensor | None = None
    labels: Tensor | None = None
    clean_rows: Tensor | None = None

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: slice | Tensor) -> Readings:
        clean = self.clean if self.clean is None or self.clean_rows is not None else self.clean[rows]
        columns = (self.predicted, self.labels, self.clean_rows)
        return Readings(
            self.values[rows], self.layout, clean, *(None if column is None else column[rows] for column in columns)
        )

    def clean_values(self) -> Tensor | None:
        """The clean values of each input, `[inputs, neurons]`, if there are any."""
        return self.clean if self.clean is None or self.clean_rows is None else self.clean[self.clean_rows]

    def layers(self) -> dict[str, Tensor]:
        """The values of each layer, `[inputs, neurons of the layer]`."""
        return {name: self.values[:, columns] for name, columns in self.layout.slices().items()}

    def classes(self, criterion: str) -> Tensor:
        """The predicted class of each input; `criterion` is the name of the one that needs it."""
        if self.predicted is None:
            raise UsageError(
                f"{criterion} needs the classes that the model predicted, got none: pass the scores as layer 'output', "
                "or batches as Batch(activations, predicted=...)"
            )
        return self.predicted

    def sensitivities(self, criterion: str) -> Tensor:
        """`|values - clean|`; `criterion` is the name of the one that needs it."""
        clean = self.clean_values()
        if clean is None:
            raise UsageError(f"{criterion} compares each input with its clean one: pass clean=..., its activations")
        return (self.values - clean).abs()


def by_layer(activations: Activations, subject: str = "activations") -> dict[str, Tensor]:
    """Activations by layer; raises an error if they are not tensors with one row per input."""
    layers = dict(activations) if isinstance(activations, Mapping) else {ONLY_LAYER: activations}
    layers = {
        name: torch.as_tensor(layer) if isinstance(layer, np.ndarray) else layer for name, layer in layers.items()
    }
    if not layers:
        raise UsageError(f"{subject} must have a layer, got an empty dict")
    first = next(iter(layers.values()))
    for name, tensor in layers.items():
        if not isinstance(tensor, Tensor) or tensor.ndim < 2:
            got = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise UsageError(
                f"{subject} must be tensors [inputs, neurons] or [inputs, channels, ...], but {name!r} is {got}"
            )
        if len(tensor) != len(first):
            raise DataError(
                f"{subject} must have one row per input in every layer, but {name!r} has {len(tensor)}, not "
                f"{len(first)}"
            )
    return layers


def as_neurons(activation: Tensor, neurons: str, channel_axis: int | None = None) -> Tensor:
    """A layer's activation `[inputs, ...]` as `[inputs, neurons]`: its elements, or the mean of each channel.

    Channels are dimension 1; for a sequence `[inputs, tokens, channels]`, the last one.
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
