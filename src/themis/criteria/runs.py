"""Layers of one width side by side: looked at together, since a look at each costs more than what it sees."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

from themis.criteria.readings import Layout

NEURONS = 2**13
"""Neurons that a run has at most, unless a single layer has more: wide layers gain nothing by company."""


@dataclass(frozen=True)
class Run:
    """Neighbouring layers of one width."""

    names: tuple[str, ...]
    start: int
    """Where the first one's neurons begin."""
    width: int

    def __len__(self) -> int:
        return len(self.names)

    def of(self, values: Tensor) -> Tensor:
        """Their part of `values [inputs, neurons]`, as `[inputs, layers, width]`."""
        return values[:, self.start : self.start + len(self) * self.width].view(len(values), len(self), self.width)


def runs(layout: Layout) -> list[Run]:
    """All layers, in order, in runs."""
    found, start = [], 0
    for width, layers in groupby(zip(layout.names, layout.widths, strict=True), lambda each: each[1]):
        names, size = [name for name, _ in layers], max(1, NEURONS // max(1, width))
        for first in range(0, len(names), size):
            found.append(Run(tuple(names[first : first + size]), start, width))
            start += len(found[-1]) * width
    return found
