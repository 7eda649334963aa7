"""Folding one chunk: each layer's activations become sums as soon as they are computed; gradients of objectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from themis.compute.native import NO_NEURONS, CompiledFold, library_for
from themis.measure.clean import Activations
from themis.measure.moments import Accumulator
from themis.measure.tests import Bools, Tests
from themis.target.activations import Layer, flatten

OutputTerm = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps disturbed inputs, outputs and the tests' seeds to a term of the objective, summed over the tests."""
NO_COLUMNS = slice(0, 0)


@dataclass(frozen=True)
class Objective:
    """What gradient ascent on theta maximises: the summed sensitivity of `neurons`, each divided by its `scale`.

    neurons: flat indices, ascending. margin_kind: tests of this kind maximise the loss of their margin instead.
    is_activation: sum activations instead of sensitivities. weight: the factor of that sum. output_term: a term added
    to it, at the cost of one forward and one backward pass of `n_models` other models.
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
        """Whether it consists of sensitivities and margins only."""
        return self.output_term is None and not self.is_activation and self.weight == 1

    def of_margin(self, tests: Tests) -> Bools:
        """Which tests maximise the loss of their margin."""
        of_margin: Bools = tests.kind == self.margin_kind
        return of_margin


@dataclass(frozen=True)
class NeuronSelection:
    """A selection of neurons, grouped by layer."""

    within: dict[str, Tensor]
    """The positions of each layer's neurons within the layer."""
    columns: dict[str, slice]
    """For each layer, the columns of its neurons in the selection."""
    positions: Tensor
    """The positions of all neurons within their layers, layer after layer."""

    @staticmethod
    def of(neurons: Tensor, layers: tuple[Layer, ...]) -> NeuronSelection:
        """Group flat indices, which must be ascending."""
        edges = torch.tensor([layer.start for layer in layers] + [layers[-1].stop], device=neurons.device)
        cuts = torch.searchsorted(neurons, edges).tolist()
        columns = {layer.name: slice(first, last) for layer, first, last in zip(layers, cuts, cuts[1:], strict=False)}
        within = {layer.name: neurons[columns[layer.name]] - layer.start for layer in layers}
        return NeuronSelection(within, columns, torch.cat(list(within.values())))


@dataclass(frozen=True)
class LayeredObjective:
    """An objective whose neurons are grouped by layer."""

    objective: Objective
    selection: NeuronSelection
    climbing: Tensor | None = None
    """The tests whose sensitivities are included, int64; None for all tests."""

    def layer_value(self, layer: Layer, activations: Tensor, clean: Tensor, rows: Tensor) -> Tensor:
        """The contribution of one layer's neurons to the objective of each test, `[tests]`."""
        positions, objective = self.selection.within[layer.name], self.objective
        values = activations.index_select(1, positions)
        if not objective.is_activation:
            values = (values - clean[rows[:, None], positions]).abs()
        if objective.scale is not None:
            values = values / objective.scale[layer.start + positions].to(values.dtype)
        return objective.weight * values.sum(1)


class ChunkFold:
    """Folds the sensitivities of one chunk into moments, layer by layer.

    `rows` are the rows of the seeds in the clean activations. The first `n_tests` rows of the chunk are tests, the rest
    is padding. Sensitivities are added to `into`, which the caller commits. `buffers` has scratch memory `[2, chunk,
    neurons]` for each layer.
    """

    def __init__(
        self,
        clean: Activations,
        rows: Tensor,
        buffers: dict[str, Tensor],
        n_tests: int,
        into: Accumulator,
        panel: NeuronSelection | None,
        objective: LayeredObjective | None,
    ) -> None:
        self.clean, self.rows, self.buffers, self.n_tests, self.into = clean, rows, buffers, n_tests, into
        self.panel, self.objective = panel, objective
        self.objective_value: Tensor | float = 0.0  # summed over all tests
        self.by_layer: list[tuple[Tensor, slice]] = []
        """Each test's sensitivity summed over parts of a layer: rows of a tensor `[any, tests]`."""
        shift, positions = into.shift, NO_NEURONS if panel is None else panel.positions
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
        clean, rows, compiled = self.clean[layer.name], self.rows, self.compiled
        is_plain = self.objective is None and layer.channel_axis is None and self.into.count > 0
        is_plain = is_plain and activation.dtype == torch.float32 and activation.is_cpu and activation.is_contiguous()
        if compiled is not None and is_plain and activation.numel() == rows.shape[0] * layer.n_neurons:
            activations = activation  # without an operation of torch
        else:
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
            activations = activations.contiguous()
        columns = NO_COLUMNS if self.panel is None else self.panel.columns[layer.name]
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
        """Take the differences of the panel's neurons; the compiled fold does this itself."""
        if self.panel is None or not len(positions := self.panel.within[layer.name]):
            return
        columns = self.panel_differences[:, self.panel.columns[layer.name]]
        columns.copy_(activations.index_select(1, positions) - clean[rows[:, None], positions])

    def _fold_by_torch(self, layer: Layer, activations: Tensor, clean: Tensor, rows: Tensor) -> None:
        first, second = self.buffers[layer.name][:, : self.n_tests]
        torch.index_select(clean, 0, rows, out=first)
        sensitivity = torch.sub(activations, first, out=second).abs_()
        self.by_layer.append((sensitivity.sum(1)[None], slice(0, 1)))
        self.into.add(sensitivity, layer.start, layer.stop, scratch=first)

    def sensitivity_by_layer(self) -> Tensor:
        """Each test's summed sensitivity in each layer, `[tests, layers]`."""
        return torch.stack([parts[rows].sum(0) for parts, rows in self.by_layer], 1)


def by_backward(value: Tensor | float, theta: Tensor) -> Tensor:
    """The gradient of `value` in `theta`; zero if it does not depend on theta."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return torch.zeros_like(theta)
    gradient = torch.autograd.grad(value, theta, allow_unused=True)[0]
    return torch.zeros_like(theta) if gradient is None else gradient
