"""What a criterion reads from a target, layer by layer during forward passes, and fitting it on training data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from themis.data.seeds import Seeds, read_seeds
from themis.errors import ModelError, UsageError
from themis.measure.chunk import chunk_size
from themis.measure.clean import within_bounds
from themis.measure.tests import Bools
from themis.target.activations import OUTPUT, Layer
from themis.target.target import AnyTarget
from themis_lab.criteria.readings import Batch, Layout, Readings

if TYPE_CHECKING:
    from themis_lab.criteria.criterion import Criterion


class View:
    """The readings of one criterion from one target, one forward pass at a time.

    Call `begin` before a forward pass, `on_activation` for each layer and `end` after it.
    """

    can_be_captured = True
    """Whether a campaign may replay the passes from a CUDA graph: reading a layer runs the same kernels every time."""

    def __init__(
        self,
        criterion: Criterion,
        target: AnyTarget,
        layers: tuple[Layer, ...],
        example: Tensor,
        max_bytes: int | None = None,
    ) -> None:
        """The view of a target with these layers; `example` is one raw input.

        `max_bytes` limits the memory for the seeds' clean readings, which some criteria need.
        """
        axes = channel_axes(target, layers, example) if criterion.neurons == "channel" else {}
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
        self._readings = Readings(
            self._values[:n],
            self.layout,
            clean,
            predicted_classes(outputs[:n]),
            clean_rows=None if clean is None else seed,
        )
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
        if "clean" not in self.criterion.needs:
            return
        if self._clean is None:
            n_bytes = n_seeds * self.layout.n_neurons * self._values.element_size()
            if self.max_bytes is not None and n_bytes > self.max_bytes:
                raise UsageError(
                    f"{self.criterion.name} compares tests with the clean readings of all seeds, which take "
                    f"{n_bytes / 2**30:.2g} GiB of the {self.max_bytes / 2**30:.2g} allowed: raise clean_memory_gib, "
                    "use fewer seeds with max_seeds, or neurons=channel"
                )
            self._clean = self._values.new_empty(n_seeds, self.layout.n_neurons)
        self._clean[first : first + n] = self._values[:n]

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


MAX_PREPARED = 1000
"""Training inputs that `Criterion.prepare` gets."""


def activations(
    target: AnyTarget, data: Any, *, max_inputs: int | None = None, batch_size: int | None = None
) -> Iterator[Batch]:
    """The activations of inputs by layer, `[inputs, ...]`, in batches that any criterion accepts."""
    with target.opened():
        axes: dict[str, int] | None = None
        for layers, inputs in _batches(target, read_seeds(data, max_inputs), batch_size):
            if axes is None:
                axes = channel_axes(target, layers, inputs[0])
            by_layer = {layer.name: torch.empty(0) for layer in layers}  # in their order

            def keep(layer: Layer, activation: Tensor, by_layer: dict[str, Tensor] = by_layer) -> None:
                by_layer[layer.name] = activation.clone().reshape(-1, *layer.shape)  # the model may overwrite it later

            outputs = _forward(target, layers, inputs, keep)
            yield Batch(by_layer, predicted=predicted_classes(outputs), axes=axes)


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
    with target.opened():
        view: View | None = None
        dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
        for layers, inputs in _batches(target, seeds, batch_size):
            if view is None:
                view = View(criterion, target, layers, inputs[0])
            view.begin(len(inputs), target.device, dtype, is_kept=True)
            yield view.end(len(inputs), _forward(target, layers, inputs, view.on_activation))


def _batches(target: AnyTarget, seeds: Seeds, batch_size: int | None) -> Iterator[tuple[tuple[Layer, ...], Tensor]]:
    """The layers of an open target, and all inputs in batches."""
    device = target.device
    layers = target.find_layers(seeds.take(torch.arange(1))[0].to(device))
    for rows in torch.split(torch.arange(len(seeds)), batch_size or chunk_size(layers[-1].stop, device, None)):
        yield layers, within_bounds(seeds.take(rows).to(device), target.bounds, seeds.seed_id[rows])


def _forward(
    target: AnyTarget, layers: tuple[Layer, ...], inputs: Tensor, on_activation: Callable[[Layer, Tensor], None]
) -> Tensor:
    """The outputs of a forward pass, which shows every layer."""
    missing = {layer.name: layer for layer in layers}
    by_name = dict(missing)

    def show(name: str, activation: Tensor) -> None:
        missing.pop(name, None)
        on_activation(by_name[name], activation)

    with torch.no_grad():
        outputs = target.forward(inputs, show, by_name)
        if OUTPUT in by_name:
            show(OUTPUT, outputs)
    if missing:
        raise ModelError(
            f"the model must compute each of its layers in every forward pass, but {next(iter(missing))!r} was left "
            "out: name layers that are always computed with layers=[...]"
        )
    return outputs
