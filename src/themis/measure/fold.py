"""Folding one chunk: what happens to each layer's activations the moment a forward pass shows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from themis.measure.moments import Accumulator
from themis.probe import Layer


@dataclass(frozen=True)
class Objective:
    """What ascent climbs: the summed sensitivity of `neurons` (flat indices, ascending), each over its `scale`."""

    neurons: Tensor
    scale: Tensor | None = None


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


class Fold:
    """One chunk on its way through the layers.

    `buffers` gives two scratch tensors `[chunk, neurons]` by layer, `fetch(name, out)` writes the seeds' activations;
    the first `n_valid` rows of the chunk are tests, the rest padding. Sensitivities go to `into`, which the caller
    commits.
    """

    def __init__(
        self,
        buffers: dict[str, tuple[Tensor, Tensor]],
        fetch: Callable[[str, Tensor], Tensor],
        n_valid: int,
        into: Accumulator,
        panel: Picked | None,
        climbed: Picked | None,
        scale: Tensor | None,
    ) -> None:
        self.buffers, self.fetch, self.n_valid, self.into = buffers, fetch, n_valid, into
        self.panel, self.climbed, self.scale = panel, climbed, scale
        self.objective: Tensor | float = 0.0
        self.by_layer: list[Tensor] = []  # each test's summed sensitivity, a layer at a time
        self._panel_parts: list[Tensor] = []

    def visit(self, layer: Layer, activations: Tensor) -> None:
        """Take in one layer's `activations [chunk, neurons]` of the disturbed inputs."""
        clean, difference = self.buffers[layer.name]
        self.fetch(layer.name, clean)
        if self.climbed is not None:
            self._climb(layer, activations, clean)
            activations = activations.detach()
        torch.sub(activations, clean, out=difference)
        if self.n_valid < len(difference):
            difference, clean = difference[: self.n_valid], clean[: self.n_valid]
        if self.panel is not None and len(at := self.panel.within[layer.name]):
            self._panel_parts.append(difference.index_select(1, at))
        sensitivity = difference.abs_()
        self.by_layer.append(sensitivity.sum(1))
        self.into.add(sensitivity, layer.start, layer.stop, scratch=clean)

    def _climb(self, layer: Layer, activations: Tensor, clean: Tensor) -> None:
        """Add the layer's share of the objective, with its graph."""
        assert self.climbed is not None
        at = self.climbed.within[layer.name]
        if len(at):
            climbed = (activations.index_select(1, at) - clean.index_select(1, at)).abs()
            if self.scale is not None:
                climbed = climbed / self.scale[layer.start + at].to(climbed.dtype)
            self.objective = self.objective + climbed[: self.n_valid].sum()

    def signature(self, at: Tensor) -> Tensor:
        """Share of the sensitivity by layer of the tests `at`, `[tests, layers]`; zero where it is not finite."""
        by_layer = torch.stack(self.by_layer, 1)[at].float()
        share = by_layer / by_layer.sum(1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
        return share.nan_to_num_(0.0, 0.0, 0.0)

    def panel_differences(self) -> Tensor:
        """Signed differences of the panel's neurons, `[tests, panel]`."""
        return torch.cat(self._panel_parts, 1)
