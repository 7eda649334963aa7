"""t-way combination coverage of neurons (DeepCT)."""

from __future__ import annotations

from abc import abstractmethod
from functools import lru_cache, reduce
from itertools import groupby
from math import comb
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from themis.errors import UsageError
from themis_lab.criteria.covering import Covering, mark_tests, set_bits
from themis_lab.criteria.options import CriterionOptions
from themis_lab.criteria.readings import Readings

MAX_CONFIGURATIONS = 2**28
"""Configurations that can be kept: every batch goes over all of them."""
COMPARED_AT_ONCE = 2**24
"""Configurations times tests that are compared together."""
MATRIX_CELLS = 2**25
"""Cells of a matrix held at a time."""


class Combinations(Covering):
    """Configurations of sets of neurons that occurred, over all: each neuron is on above `threshold`, or off.

    A non-finite value is neither. A subclass says how many neurons of each layer are combined, and into which sets.
    """

    learns = False
    threshold: float = 0.0

    def _check_size(self, n: int) -> int:
        """The number of configurations, if they can be kept."""
        if n > MAX_CONFIGURATIONS:
            raise UsageError(
                f"{self.name}: there must be at most 2^28 configurations, got {n:,}: lower max_neurons or name fewer "
                "layers"
            )
        return n

    def _update(self, readings: Readings) -> Tensor:
        return self._cover(self._states(readings))

    def _cover(self, states: Tensor) -> Tensor:
        """Take in the `states` of tests; returns which of them showed a new configuration."""
        fresh = (self._shown(states) & ~self._covered()).nonzero().squeeze(1)
        if len(states) > 1 and len(fresh) * len(states) > COMPARED_AT_ONCE:  # the second half will add little
            return torch.cat([self._cover(half) for half in states.tensor_split(2)])
        set_bits(self.state["bits"], fresh)
        self.state["count"] += len(fresh)
        return mark_tests(self._first_tests(fresh, states) if len(fresh) else fresh, len(states))

    def _states(self, readings: Readings) -> Tensor:
        """Whether each combined neuron is off and whether it is on, bool `[tests, combined, 2]`."""
        values, widths, chosen = readings.values, readings.layout.widths, self._widths()
        if chosen != widths:
            values = values[:, _spread_neurons(widths, chosen, values.device)]
        is_on = values > self.threshold
        is_finite = values.isfinite()
        return torch.stack([~is_on & is_finite, is_on & is_finite], 2)

    @abstractmethod
    def _shown(self, states: Tensor) -> Tensor:
        """Which configurations occur in `states`, bool `[items]`: a matrix product counts the tests of each."""

    @abstractmethod
    def _first_tests(self, fresh: Tensor, states: Tensor) -> Tensor:
        """The first test that shows each of the items `fresh`, all of which occur."""

    @abstractmethod
    def _widths(self) -> tuple[int, ...]:
        """How many neurons of each layer are combined."""


class TWay(Combinations):
    """Configurations of `t` neurons of a layer that occurred, over all: t-way combination dense coverage.

    A neuron is on if its activation is above 0. Each set of `t` neurons of one layer has 2^t configurations of on and
    off. `score` is the share of all configurations of all sets that some test showed (dense coverage); `sparse` is the
    share of sets whose configurations all occurred; `completeness(p)` is the share of sets of whose configurations at
    least the share `p` occurred. The paper defines all three.

    max_neurons: how many neurons of a layer are combined at most; a wider layer is sampled at even distances. By
    default 200 for pairs and 50 for triples, about 20,000 sets in either case.
    """

    name = "tway"
    variants: ClassVar = {
        "deepct": "Ma et al., DeepCT: Tomographic Combinatorial Testing for Deep Learning Systems, SANER 2019"
    }

    def __init__(self, t: int = 2, max_neurons: int | None = None, **options: Unpack[CriterionOptions]) -> None:
        if t not in (2, 3):
            raise UsageError(f"tway: t must be 2 or 3, got {t}: larger sets are too many to count")
        if max_neurons is not None and max_neurons < t:
            raise UsageError(f"tway: max_neurons must be at least t, got {max_neurons} for t={t}: pass a larger one")
        super().__init__(**options)
        self.t = t
        self.max_neurons = max_neurons

    def n_sets(self) -> int:
        """How many sets of `t` neurons there are."""
        return 0 if self.layout is None else sum(comb(self._width(n), self.t) for n in self.layout.widths)

    def n_items(self) -> int:
        return self._check_size(self.n_sets() * (1 << self.t))

    def items(self, readings: Readings) -> Tensor:
        self.n_items()  # raises an error if there are too many
        sets = self._sets(readings.values.device)
        members = self._states(readings)[:, sets]  # [tests, sets, t, 2]
        number = torch.arange(len(sets), device=sets.device) << self.t
        item = number + sum(members[:, :, p, 1].long() << p for p in range(self.t))
        return torch.where(members.any(-1).all(-1), item, -1)

    def sparse(self) -> float:
        """The share of sets whose configurations all occurred: t-way combination sparse coverage."""
        return self.completeness(1.0)

    def completeness(self, p: float) -> float:
        """The share of sets where at least the share `p` of the configurations occurred: (p, t)-completeness."""
        if not 0 < p <= 1:
            raise UsageError(f"tway: p must be above 0 and at most 1, got {p}")
        if not self.state or not self.n_sets():
            return 0.0
        occurred = self._covered().view(-1, 1 << self.t).sum(1)
        return int((occurred >= p * (1 << self.t)).sum()) / self.n_sets()

    def _shown(self, states: Tensor) -> Tensor:
        dtype, shown = torch.float16 if states.is_cuda else torch.float32, []
        column = 0
        for width, layers in groupby(self._widths()):  # layers of equal width together: many small products are slow
            n, start = len(list(layers)), column
            column += n * width
            if width < self.t:
                continue
            span = states[:, start:column].view(len(states), n, width, 2).transpose(0, 1)
            rest, last = _split_sets(width, self.t, states.device)
            step = max(MATRIX_CELLS // (comb(width, self.t - 1) * max(len(states), 2 * width) << self.t - 1), 1)
            for part in torch.split(span.to(dtype), step):
                first = part if self.t == 2 else _paired(part)
                is_any = first.flatten(2).mT @ part.flatten(2) > 0
                is_any = is_any.view(len(part), -1, 1 << self.t - 1, width, 2)
                shown.append(is_any[:, rest, :, last].permute(1, 0, 3, 2).flatten())
        return torch.cat(shown) if shown else torch.zeros(0, dtype=torch.bool, device=states.device)

    def _first_tests(self, fresh: Tensor, states: Tensor) -> Tensor:
        rows, members = states.permute(1, 2, 0).flatten(0, 1), self._sets(states.device)[fresh >> self.t]
        shows = [rows[2 * members[:, p] + (fresh >> p & 1)] for p in range(self.t)]
        return reduce(torch.logical_and, shows).to(torch.uint8).argmax(1)  # the first true one

    def _sets(self, device: torch.device) -> Tensor:
        return _sets(self._widths(), self.t, device)

    def _widths(self) -> tuple[int, ...]:
        return () if self.layout is None else tuple(map(self._width, self.layout.widths))

    def _width(self, n: int) -> int:
        return min(n, self.max_neurons or (200 if self.t == 2 else 50))


@lru_cache(maxsize=2)
def _sets(widths: tuple[int, ...], t: int, device: torch.device) -> Tensor:
    """All sets of `t` neurons of a layer, as indices of the combined neurons, int32 `[sets, t]`."""
    starts = [sum(widths[:k]) for k in range(len(widths))]
    within = {width: torch.combinations(torch.arange(width, dtype=torch.int32), t) for width in set(widths)}
    return torch.cat([start + within[width] for start, width in zip(starts, widths, strict=True)]).to(device)


@lru_cache(maxsize=8)
def _split_sets(width: int, t: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The sets of one layer as two numbers: that of the set without its last neuron, and the last neuron."""
    sets = torch.combinations(torch.arange(width, device=device), t)
    first = sets[:, 0]
    return first if t == 2 else first * (2 * width - first - 1) // 2 + sets[:, 1] - first - 1, sets[:, -1]


@lru_cache(maxsize=8)
def _spread_neurons(widths: tuple[int, ...], chosen: tuple[int, ...], device: torch.device) -> Tensor:
    """The neurons that are combined: as many of each layer as `chosen`, at even distances."""
    neurons, start = [], 0
    for n, width in zip(widths, chosen, strict=True):
        at = torch.arange(width)
        neurons.append(start + (at if width == n else at * (n - 1) // (width - 1)))
        start += n
    return torch.cat(neurons).to(device)


def _paired(states: Tensor) -> Tensor:
    """The four configurations of each two neurons of `states [..., width, 2]`, `[..., pairs, 4]`."""
    left, right = torch.combinations(torch.arange(states.shape[-2], device=states.device), 2).T
    return (states[..., left, None, :] * states[..., right, :, None]).flatten(-2)
