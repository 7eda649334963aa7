"""Neighbouring layers of equal width, which criteria process together: one operation per layer would cost more."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

from themis_lab.criteria.readings import Layout

MAX_SPAN_NEURONS = 2**13
"""Neurons of a span at most, unless a single layer has more: joining wide layers gains nothing."""


@dataclass(frozen=True)
class LayerSpan:
    """Neighbouring layers of equal width."""

    names: tuple[str, ...]
    start: int
    """The column of the first layer's first neuron."""
    width: int

    def __len__(self) -> int:
        return len(self.names)

    def of(self, values: Tensor) -> Tensor:
        """The span's part of `values [inputs, neurons]`, as `[inputs, layers, width]`."""
        return values[:, self.start : self.start + len(self) * self.width].view(len(values), len(self), self.width)


def layer_spans(layout: Layout) -> list[LayerSpan]:
    """All layers, in order, as spans."""
    spans, start = [], 0
    for width, layers in groupby(zip(layout.names, layout.widths, strict=True), lambda layer: layer[1]):
        names, size = [name for name, _ in layers], max(1, MAX_SPAN_NEURONS // max(1, width))
        for first in range(0, len(names), size):
            spans.append(LayerSpan(tuple(names[first : first + size]), start, width))
            start += len(spans[-1]) * width
    return spans
