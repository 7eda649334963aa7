"""Folding one chunk: what happens to each layer's activations as soon as they are computed; gradients of objectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from themis.compute.native import NO_NEURONS, CompiledFold, library_for
from themis.measure.clean import Activations, Located
from themis.measure.moments import Accumulator
from themis.measure.tests import Bools, Tests
from themis.perturb import Theta
from themis.target.activations import Layer, flatten

OutputTerm = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps disturbed inputs, outputs and the tests' seeds to a term of the objective, summed over the tests."""
NO_COLUMNS = slice(0, 0)
DIFFERENCE = 0.01
"""Step of a finite difference in theta, as a share of its range."""


@dataclass(frozen=True)
class Objective:
    """What gradient ascent on theta maximises: the summed sensitivity of `neurons`, each divided by its `scale`.

    neurons: flat indices, ascending. margin_kind: tests of this kind maximise the loss of their margin instead.
    is_activation: use the neurons' activations instead of their sensitivities. weight: factor of that sum. output_term:
    a term added to it, which costs one forward and one backward pass of `n_models` other models.
    """

    neurons: Tensor
    scale: Tensor | None = None
    margin_kind: str = ""
    is_activation: bool = False
    weight: float = 1.0
    output_term: OutputTerm | None = None
    n_models: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether it has nothing but sensitivities and margins."""
        return self.output_term is None and not self.is_activation and self.weight == 1

    def of_margin(self, tests: Tests) -> Bools:
        """Which tests maximise the loss of their margin."""
        of_margin: Bools = tests.kind == self.margin_kind
        return of_margin

    def by_layer(self, layers: tuple[Layer, ...]) -> LayeredObjective:
        """The same objective with its neurons grouped by layer."""
        return LayeredObjective(self, NeuronSelection.of(self.neurons, layers))


@dataclass(frozen=True)
class NeuronSelection:
    """Some neurons, grouped by layer once: for each layer, their positions within it."""

    within: dict[str, Tensor]

    @cached_property
    def columns(self) -> dict[str, slice]:
        """For each layer, the columns of its neurons among all of the selection."""
        columns, first = {}, 0
        for name, positions in self.within.items():
            columns[name] = slice(first, first + len(positions))
            first += len(positions)
        return columns

    @cached_property
    def positions(self) -> Tensor:
        """The positions of all neurons within their layers, layer after layer."""
        return torch.cat(list(self.within.values()))

    @staticmethod
    def of(neurons: Tensor, layers: tuple[Layer, ...]) -> NeuronSelection:
        """From flat indices, which must be ascending."""
        edges = torch.tensor([layer.start for layer in layers] + [layers[-1].stop], device=neurons.device)
        cuts = torch.searchsorted(neurons, edges).tolist()
        return NeuronSelection(
            {layer.name: neurons[cuts[k] : cuts[k + 1]] - layer.start for k, layer in enumerate(layers)}
        )


@dataclass(frozen=True)
class WatchedNeurons:
    """Neurons whose signed differences every measurement has, and their clean activations if all of them were kept."""

    selection: NeuronSelection
    clean: Activations | None = None


@dataclass(frozen=True)
class LayeredObjective:
    """An objective whose neurons are grouped by layer."""

    objective: Objective
    selection: NeuronSelection
    climbing: Tensor | None = None
    """The tests whose sensitivities count, int64; None for all of them."""

    def layer_value(self, layer: Layer, activations: Tensor, clean: Tensor, rows: Tensor) -> Tensor:
        """What the neurons of one layer contribute to the objective of each test, `[tests]`."""
        positions, objective = self.selection.within[layer.name], self.objective
        values = activations.index_select(1, positions)
        if not objective.is_activation:
            values = (values - clean[rows[:, None], positions]).abs()
        if objective.scale is not None:
            values = values / objective.scale[layer.start + positions].to(values.dtype)
        return objective.weight * values.sum(1)


def signature(by_layer: Tensor) -> Tensor:
    """The share of the sensitivity in each layer, given the sums `[tests, layers]`; zero where it is not finite."""
    by_layer = by_layer.float()
    share = by_layer / by_layer.sum(1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
    return share.nan_to_num_(0.0, 0.0, 0.0)


def _are_numbers(activation: Tensor, n: int) -> bool:
    """Whether an activation is `n` numbers of float32, one after another in the memory of a CPU."""
    is_float = activation.dtype == torch.float32 and activation.is_cpu
    return is_float and activation.numel() == n and activation.is_contiguous()


class ObjectiveMeter:
    """Sums the objective of each test of a chunk over the layers of one forward pass, `[tests]`."""

    def __init__(self, locate: Callable[[Layer], Located], n_tests: int, objective: LayeredObjective) -> None:
        self.locate, self.n_tests, self.objective = locate, n_tests, objective
        self.objective_value: Tensor = torch.zeros(n_tests)

    def on_activation(self, layer: Layer, activations: Tensor) -> None:
        """Add one layer's `activations [chunk, neurons]` of the disturbed inputs."""
        clean, rows = self.locate(layer)
        n = self.n_tests
        value = self.objective.layer_value(layer, activations[:n], clean, rows[:n])
        self.objective_value = self.objective_value.to(value) + value


class ChunkFold:
    """Folds the sensitivities of one chunk into moments, layer by layer.

    `locate(layer)` returns where the seeds' clean activations are. The first `n_tests` rows of the chunk are tests, the
    rest is padding. Sensitivities go to `into`, which the caller commits. `buffers` has two scratch tensors
    `[chunk, neurons]` per layer.
    """

    def __init__(
        self,
        locate: Callable[[Layer], Located],
        buffers: dict[str, tuple[Tensor, Tensor]],
        n_tests: int,
        into: Accumulator,
        panel: WatchedNeurons | None,
        objective: LayeredObjective | None,
    ) -> None:
        self.locate, self.buffers, self.n_tests, self.into = locate, buffers, n_tests, into
        self.panel, self.objective = panel, objective
        self.objective_value: Tensor | float = 0.0  # summed over all tests
        self.by_layer: list[tuple[Tensor, slice]] = []
        """Each test's sensitivity summed over parts of a layer: rows of a tensor `[any, tests]`."""
        shift, positions = into.shift, NO_NEURONS if panel is None else panel.selection.positions
        self.panel_differences = torch.empty(n_tests, positions.shape[0], dtype=shift.dtype, device=shift.device)
        """Signed differences of the panel's neurons, `[tests, panel]`."""
        self.compiled: CompiledFold | None = None
        if (native := library_for(shift)) is not None:
            sums, squares = into.chunk_sums
            self.compiled = CompiledFold(
                native, len(buffers), n_tests, shift, sums, squares, positions, self.panel_differences
            )

    def on_activation(self, layer: Layer, activation: Tensor) -> None:
        """Fold one layer's activation of the disturbed inputs, as the model computed it."""
        (clean, rows), compiled = self.locate(layer), self.compiled
        is_plain = self.objective is None and layer.channel_axis is None and self.into.count > 0
        if compiled is not None and is_plain and _are_numbers(activation, rows.shape[0] * layer.n_neurons):
            self._fold_compiled(compiled, layer, activation, clean, rows)  # without an operation of torch
            return
        activations, rows = flatten(activation, layer, len(rows))[: self.n_tests], rows[: self.n_tests]
        if self.objective is not None and len(self.objective.selection.within[layer.name]):
            self._add_objective(self.objective, layer, activations, clean, rows)
        activations = activations.detach()
        if compiled is None or library_for(activations) is None:
            self._take_panel(layer, activations, clean, rows)
            self._fold_by_torch(layer, activations, clean, rows)
            return
        if self.into.count == 0:
            shift, _, _ = self.into.part(layer.start, layer.stop)
            torch.sub(activations[0], clean[rows[0]], out=shift).abs_()
        self._fold_compiled(compiled, layer, activations.contiguous(), clean, rows)

    def _fold_compiled(
        self, compiled: CompiledFold, layer: Layer, activations: Tensor, clean: Tensor, rows: Tensor
    ) -> None:
        """Fold the first tests of activations whose memory is `[chunk, neurons]`."""
        columns = NO_COLUMNS if self.panel is None else self.panel.selection.columns[layer.name]
        self.by_layer.append((compiled.by_block, compiled.add(activations, clean, rows, layer.start, columns)))

    def _add_objective(
        self, objective: LayeredObjective, layer: Layer, activations: Tensor, clean: Tensor, rows: Tensor
    ) -> None:
        if objective.climbing is not None:
            activations, rows = activations[objective.climbing], rows[objective.climbing]
        if len(rows):
            value = objective.layer_value(layer, activations, clean, rows)
            self.objective_value = self.objective_value + value.sum()

    def _take_panel(self, layer: Layer, activations: Tensor, clean: Tensor, rows: Tensor) -> None:
        """Take the differences of the panel's neurons, which the compiled fold does on the way."""
        if self.panel is None or not len(positions := self.panel.selection.within[layer.name]):
            return
        if self.panel.clean is None:
            panel_clean = clean[rows[:, None], positions]
        else:
            panel_clean = self.panel.clean[layer.name][rows]
        columns = self.panel_differences[:, self.panel.selection.columns[layer.name]]
        columns.copy_(activations.index_select(1, positions) - panel_clean)

    def _fold_by_torch(self, layer: Layer, activations: Tensor, clean: Tensor, rows: Tensor) -> None:
        first, second = (buffer[: self.n_tests] for buffer in self.buffers[layer.name])
        if clean.data_ptr() != first.data_ptr():  # unless the clean activations were gathered there already
            torch.index_select(clean, 0, rows, out=first)
        sensitivity = torch.sub(activations, first, out=second).abs_()
        self.by_layer.append((sensitivity.sum(1)[None], slice(0, 1)))
        self.into.add(sensitivity, layer.start, layer.stop, scratch=first)

    def sensitivity_by_layer(self) -> Tensor:
        """Each test's summed sensitivity in each layer, `[tests, layers]`."""
        of_layers = [tensor[rows] for tensor, rows in self.by_layer]
        return torch.stack([parts[0] if len(parts) == 1 else parts.sum(0) for parts in of_layers], 1)


def by_backward(value: Tensor | float, theta: Tensor) -> Tensor:
    """The gradient of `value` in `theta`; zero if it does not depend on theta."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return torch.zeros_like(theta)
    gradient = torch.autograd.grad(value, theta, allow_unused=True)[0]
    return torch.zeros_like(theta) if gradient is None else gradient


def by_differences(theta: Tensor, ranges: Sequence[Theta], n: int, value_at: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient of the first `n` tests by central differences inside the bounds of theta."""
    gradient = torch.zeros_like(theta)
    for k, bounds in enumerate(ranges):
        step = DIFFERENCE * (bounds.high - bounds.low)
        ends, values = [], []
        for direction in (-step, step):
            moved = theta.clone()
            moved[:, k] = (theta[:, k] + direction).clamp(bounds.low, bounds.high)
            values.append(value_at(moved))
            ends.append(moved[:n, k])
        gradient[:n, k] = (values[1] - values[0]) / (ends[1] - ends[0])
    return gradient[:n]
