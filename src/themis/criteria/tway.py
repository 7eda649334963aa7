"""Combinations of neurons (DeepCT)."""

from __future__ import annotations

from math import comb
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from themis.criteria.covering import Covering, has_bits, set_bits
from themis.criteria.criterion import Common
from themis.criteria.readings import Readings
from themis.errors import UsageError

MAX_ITEMS = 2**28
"""Configurations that can be kept: all of them are looked at with every batch."""
BLOCK = 2**22
"""Configurations times tests that are compared at once."""


class TWay(Covering):
    """Configurations of `t` neurons of a layer that occurred, over all: t-way combination dense coverage.

    A neuron is on when its activation is above 0. Each set of `t` neurons of one layer has 2^t configurations of on
    and off. `score` is the share of all configurations of all sets that some test showed (dense coverage);
    `sparse` the share of sets that showed all of theirs; `completeness(p)` the share of sets that showed at least the
    share `p` of theirs. The paper defines all three.

    max_neurons: the most neurons of a layer that are combined; of a wider layer, that many at even distances. By
    default 200 for pairs and 50 for triples, about 20,000 sets either way.
    """

    name = "tway"
    learns = False
    variants: ClassVar = {
        "deepct": "Ma et al., DeepCT: Tomographic Combinatorial Testing for Deep Learning Systems, SANER 2019",
    }

    def __init__(self, t: int = 2, max_neurons: int | None = None, **common: Unpack[Common]) -> None:
        if t not in (2, 3):
            raise UsageError(f"tway: t must be 2 or 3, got {t}: larger sets are too many to count")
        if max_neurons is not None and max_neurons < t:
            raise UsageError(f"tway: max_neurons must be at least t, got {max_neurons} for t={t}: give a larger one")
        super().__init__(**common)
        self.t = t
        self.max_neurons = max_neurons

    def n_sets(self) -> int:
        """How many sets of `t` neurons there are."""
        return 0 if self.layout is None else sum(comb(self._width(n), self.t) for n in self.layout.widths)

    def n_items(self) -> int:
        n = self.n_sets() * (1 << self.t)
        if n > MAX_ITEMS:
            raise UsageError(
                f"tway: there must be at most 2^28 configurations, got {n:,}: give fewer max_neurons or layers"
            )
        return n

    def items(self, readings: Readings) -> Tensor:
        self.n_items()  # refuses too many
        found, start = [], 0
        for values in readings.layers().values():
            is_on, sets = self._sets(values)
            state = sum((is_on[:, sets[:, p]].long() << p for p in range(self.t)), torch.zeros_like(is_on[:, :1]))
            number = start + torch.arange(len(sets), device=values.device)
            found.append(torch.where(state < 0, -1, (number << self.t) + state))
            start += len(sets)
        return torch.cat(found, 1)

    def sparse(self) -> float:
        """The share of sets of which every configuration occurred: t-way combination sparse coverage."""
        return self.completeness(1.0)

    def completeness(self, p: float) -> float:
        """The share of sets of which at least the share `p` of the configurations occurred: (p, t)-completeness."""
        if not 0 < p <= 1:
            raise UsageError(f"tway: p must be above 0 and at most 1, got {p}")
        if not self.state or not self.n_sets():
            return 0.0
        bits = self.state["bits"]
        occurred = has_bits(bits, torch.arange(self.n_items(), device=bits.device)).view(-1, (1 << self.t)).sum(1)
        return int((occurred >= p * (1 << self.t)).sum()) / self.n_sets()

    def _take(self, readings: Readings) -> Tensor:
        bits, device = self.state["bits"], readings.values.device
        raised, start = torch.zeros(len(readings), dtype=torch.bool, device=device), 0
        for values in readings.layers().values():
            is_on, sets = self._sets(values)
            items = torch.arange(start << self.t, (start + len(sets)) << self.t, device=device)
            rows = is_on.T.contiguous()
            missing = items[~has_bits(bits, items)]  # few are left in the end
            for some in torch.split(missing, max(BLOCK // len(readings), 1)):
                members = sets[(some >> self.t) - start]
                shows = torch.ones(len(some), len(readings), dtype=torch.bool, device=device)
                for p in range(self.t):
                    shows &= rows[members[:, p]] == (some >> p & 1).to(torch.int8)[:, None]
                is_new = shows.any(1)
                raised[shows[is_new].to(torch.uint8).argmax(1)] = True  # the first of equal ones
                set_bits(bits, some[is_new])
                self.state["count"] += is_new.sum()
            start += len(sets)
        return raised

    def _sets(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Which of a layer's combined neurons are on, int8 `[tests, neurons]`, and the sets that they form.

        A value that is not finite is neither on nor off: it is so far below 0 that it makes every number negative.
        """
        n, width = values.shape[1], self._width(values.shape[1])
        at = torch.arange(width, device=values.device)
        values = values[:, at if width == n else at * (n - 1) // (width - 1)]
        is_on = torch.where(values.isfinite(), values > 0, -100).to(torch.int8)
        return is_on, torch.combinations(at, self.t)

    def _width(self, n: int) -> int:
        return min(n, self.max_neurons or (200 if self.t == 2 else 50))
