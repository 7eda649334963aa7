"""Folding one chunk: what happens to each layer's activations the moment a forward pass shows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from themis.compute.native import fold, library_for
from themis.measure.clean import Activations, Located
from themis.measure.moments import Accumulator
from themis.target.activations import Layer

Differ = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of disturbed inputs, the target's outputs and the tests' seeds: what is climbed, summed over the tests."""


@dataclass(frozen=True)
class Objective:
    """What ascent climbs: the summed sensitivity of `neurons` (flat indices, ascending), each over its `scale`.

    is_activation: their activations instead. weight: of that sum. differ: what is climbed besides, by a forward and a
    backward pass of `n_models` other models.
    """

    neurons: Tensor
    scale: Tensor | None = None
    is_activation: bool = False
    weight: float = 1.0
    differ: Differ | None = None
    n_models: int = 0

    def aim(self, layers: tuple[Layer, ...]) -> Aim:
        """The same with its neurons cut up by layer."""
        return Aim(self, Picked.of(self.neurons, layers))


@dataclass(frozen=True)
class Aim:
    """An objective whose neurons are known by layer."""

    objective: Objective
    picked: Picked

    def height(self, layer: Layer, activations: Tensor, clean: Tensor, rows: Tensor) -> Tensor:
        """How high each test `[tests]` is by the neurons of one layer."""
        at, objective = self.picked.within[layer.name], self.objective
        values = activations.index_select(1, at)
        if not objective.is_activation:
            values = (values - clean[rows[:, None], at]).abs()
        if objective.scale is not None:
            values = values / objective.scale[layer.start + at].to(values.dtype)
        return objective.weight * values.sum(1)


@dataclass(frozen=True)
class Picked:
    """Flat indices of some neurons, cut up by layer once: for each layer, positions within it."""

    within: dict[str, Tensor]

    @staticmethod
    def of(neurons: Tensor, layers: tuple[Layer, ...]) -> Picked:
        """`neurons` must ascend."""
        edges = torch.searchsorted(
            neurons, torch.tensor([each.start for each in layers] + [layers[-1].stop], device=neurons.device)
        )
        cuts = edges.tolist()
        return Picked({each.name: neurons[cuts[k] : cuts[k + 1]] - each.start for k, each in enumerate(layers)})


class Climb:
    """How high each test of a chunk is: the summed sensitivity of the climbed neurons, `[tests]`."""

    def __init__(self, locate: Callable[[Layer], Located], n_valid: int, aim: Aim) -> None:
        self.locate, self.n_valid, self.aim = locate, n_valid, aim
        self.height: Tensor = torch.zeros(n_valid)

    def visit(self, layer: Layer, activations: Tensor) -> None:
        """Take in one layer's `activations [chunk, neurons]` of the disturbed inputs."""
        clean, rows = self.locate(layer)
        n = self.n_valid
        added = self.aim.height(layer, activations[:n], clean, rows[:n])
        self.height = self.height.to(added) + added


class Fold:
    """One chunk on its way through the layers.

    `locate(layer)` says where the seeds' clean activations are; the first `n_valid` rows of the chunk are tests, the
    rest padding. Sensitivities go to `into`, which the caller commits. `buffers` gives two scratch tensors
    `[chunk, neurons]` by layer; `panel_clean` the panel's clean activations by layer, where all were kept.
    """

    def __init__(
        self,
        locate: Callable[[Layer], Located],
        buffers: dict[str, tuple[Tensor, Tensor]],
        n_valid: int,
        into: Accumulator,
        panel: Picked | None,
        panel_clean: Activations | None,
        aim: Aim | None,
    ) -> None:
        self.locate, self.buffers, self.n_valid, self.into = locate, buffers, n_valid, into
        self.panel, self.panel_clean, self.aim = panel, panel_clean, aim
        self.height: Tensor | float = 0.0  # of all tests, by the climbed neurons
        self.by_layer: list[Tensor] = []  # each test's summed sensitivity, a layer at a time
        self._panel_parts: list[Tensor] = []

    def visit(self, layer: Layer, activations: Tensor) -> None:
        """Take in one layer's `activations [chunk, neurons]` of the disturbed inputs."""
        clean, rows = self.locate(layer)
        if self.n_valid < len(activations):
            activations, rows = activations[: self.n_valid], rows[: self.n_valid]
        if self.aim is not None and len(self.aim.picked.within[layer.name]):
            self.height = self.height + self.aim.height(layer, activations, clean, rows).sum()
        activations = activations.detach()
        if self.panel is not None and len(at := self.panel.within[layer.name]):
            known = clean[rows[:, None], at] if self.panel_clean is None else self.panel_clean[layer.name][rows]
            self._panel_parts.append(activations.index_select(1, at) - known)
        native = library_for(activations)
        if native is None:
            self._fold_by_torch(layer, activations, clean, rows)
        else:
            shift, sums, squares = self.into.part(layer.start, layer.stop)
            if self.into.count == 0:
                torch.sub(activations[0], clean[rows[0]], out=shift).abs_()
            self.by_layer.append(fold(native, activations.contiguous(), clean, rows, shift, sums, squares))

    def _fold_by_torch(self, layer: Layer, activations: Tensor, clean: Tensor, rows: Tensor) -> None:
        first, second = (buffer[: self.n_valid] for buffer in self.buffers[layer.name])
        if clean.data_ptr() != first.data_ptr():  # not put together there already
            torch.index_select(clean, 0, rows, out=first)
        sensitivity = torch.sub(activations, first, out=second).abs_()
        self.by_layer.append(sensitivity.sum(1))
        self.into.add(sensitivity, layer.start, layer.stop, scratch=first)

    def signature(self, at: Tensor) -> Tensor:
        """Share of the sensitivity by layer of the tests `at`, `[tests, layers]`; zero where it is not finite."""
        by_layer = torch.stack(self.by_layer, 1)[at].float()
        share = by_layer / by_layer.sum(1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
        return share.nan_to_num_(0.0, 0.0, 0.0)

    def panel_differences(self) -> Tensor:
        """Signed differences of the panel's neurons, `[tests, panel]`."""
        return torch.cat(self._panel_parts, 1)
