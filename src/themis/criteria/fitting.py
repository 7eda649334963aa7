"""The activations of a target, and fitting a criterion on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from themis.criteria.criterion import Criterion
from themis.criteria.readings import Batch, Readings
from themis.criteria.view import View, channel_axes, predicted_classes
from themis.data.seeds import Seeds, read_seeds
from themis.errors import ModelError
from themis.measure.chunk import chunk_size
from themis.measure.inputs import within_bounds
from themis.target.activations import OUTPUT, Layer
from themis.target.target import AnyTarget

MAX_PREPARED = 1000
"""Training inputs that `Criterion.prepare` gets."""


def activations(
    target: AnyTarget, data: Any, *, max_inputs: int | None = None, batch_size: int | None = None
) -> Iterator[Batch]:
    """The activations of inputs by layer, `[inputs, ...]`, in batches that any criterion accepts."""
    seeds = read_seeds(data, max_inputs)
    axes: dict[str, int] | None = None
    for layers, inputs, by_layer, outputs in _forward_passes(target, seeds, batch_size):
        if axes is None:
            axes = channel_axes(target, layers, inputs[0])
        shaped = {layer.name: by_layer[layer.name].reshape(len(inputs), *layer.shape) for layer in layers}
        yield Batch(shaped, predicted=predicted_classes(outputs), axes=axes)


def fit_to(
    criterion: Criterion, target: AnyTarget, data: Any, *, max_inputs: int | None = None, batch_size: int | None = None
) -> Criterion:
    """Fit a criterion on a target's training data; `max_inputs` takes a random sample, which is always the same."""
    seeds = read_seeds(data, max_inputs)
    rows = torch.arange(len(seeds))[:: -(-len(seeds) // MAX_PREPARED)]  # evenly spaced: data is often sorted by class
    with target.opened():
        labels = None if seeds.labels is None else seeds.labels[rows]
        criterion.prepare(target, seeds.take(rows).to(target.device), labels)
    return criterion.fit(_readings(criterion, target, seeds, batch_size)) if criterion.learns else criterion


def _readings(criterion: Criterion, target: AnyTarget, seeds: Seeds, batch_size: int | None) -> Iterator[Readings]:
    view: View | None = None
    for layers, inputs, by_layer, outputs in _forward_passes(target, seeds, batch_size):
        if view is None:
            view = View.of(criterion, target, layers, inputs[0])
        dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
        view.begin(len(inputs), target.device, dtype, is_kept=True)
        for layer in layers:
            view.on_activation(layer, by_layer[layer.name])
        yield view.end(len(inputs), outputs)


def _forward_passes(
    target: AnyTarget, seeds: Seeds, batch_size: int | None
) -> Iterator[tuple[tuple[Layer, ...], Tensor, dict[str, Tensor], Tensor]]:
    """Forward passes over all inputs: the layers, inputs, activations by layer and outputs of each pass."""
    device = target.device
    with target.opened():
        layers = target.find_layers(seeds.take(torch.arange(1))[0].to(device))
        by_name = {layer.name: layer for layer in layers}
        size = batch_size or chunk_size(layers[-1].stop, device, None)
        for first in range(0, len(seeds), size):
            rows = torch.arange(first, min(first + size, len(seeds)))
            inputs = seeds.take(rows).to(device)
            inputs = within_bounds(inputs, target.bounds, seeds.seed_id[rows])
            by_layer: dict[str, Tensor] = {}

            def keep(name: str, activation: Tensor, by_layer: dict[str, Tensor] = by_layer) -> None:
                by_layer[name] = activation.clone()  # the model may overwrite it later

            with torch.no_grad():
                outputs = target.forward(inputs, keep, by_name)
            if OUTPUT in by_name:
                by_layer[OUTPUT] = outputs
            if missing := [name for name in by_name if name not in by_layer]:
                raise ModelError(
                    f"the model must compute each of its layers in every forward pass, but {missing[0]!r} was left "
                    "out: name layers that are always computed with layers=[...]"
                )
            yield layers, inputs, by_layer, outputs
