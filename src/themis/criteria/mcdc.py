"""Modified condition/decision coverage (DeepCover)."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from themis.criteria.covering import Covering, at_first, has_bits, set_bits
from themis.criteria.criterion import Common
from themis.criteria.readings import Readings
from themis.errors import UsageError

KINDS = ("ss", "vs", "sv", "vv")
MAX_ITEMS = 2**33
"""Items that a bitmap of 1 GiB holds."""
MAX_OF_A_TEST = 2**27
"""Items of one test: by value, each of a layer's neurons may be a condition at once."""
BLOCK = 2**24
"""Items looked at at once."""


class MCDC(Covering):
    """Pairs of a condition neuron and a decision neuron of the next layer in which one was seen to move the other.

    Two inputs, here a seed's clean input and its disturbed one, cover the pair (i, j) by
    `ss` when i changes its sign, no other neuron of its layer does, and j changes its sign;
    `sv` the same, but j changes its value and not its sign;
    `vs` when i changes its value, no neuron of its layer its sign, and j changes its sign;
    `vv` the same, but j changes its value and not its sign.
    These are the paper's SS, SV, VS and VV cover, with single neurons as features; covered pairs / all pairs of
    adjacent layers. A sign is whether the activation is above 0: of a layer after ReLU, whether it fires.

    ratio: a value changed when its size grew or shrank by at least this factor (2 in the experiments).
    Where a value of the condition's layer is not finite, nothing is known of "no other neuron": nothing is covered.
    """

    name = "mcdc"
    learns = False
    needs = frozenset({"clean"})
    variants: ClassVar = {
        "deepcover": "Sun et al., Structural Test Coverage Criteria for Deep Neural Networks, TECS 2019; "
        "github.com/theyoucheng/deepcover, lp-src/lp.py; the same pairs in github.com/DNNCov/DNNCov, mcdc.py",
    }

    def __init__(self, kind: str = "ss", ratio: float = 2.0, **common: Unpack[Common]) -> None:
        if kind not in KINDS:
            raise UsageError(f"mcdc: kind must be one of {', '.join(KINDS)}, got {kind!r}")
        if not ratio > 1:
            raise UsageError(f"mcdc: ratio must be above 1, got {ratio}: 2 is what the paper takes")
        super().__init__(**common)
        self.kind, self.ratio = kind, ratio

    def n_items(self) -> int:
        if self.layout is None:
            return 0
        if len(self.layout.widths) < 2:
            raise UsageError(f"mcdc pairs a layer with the next one, got one layer, {self.layout.names[0]!r}: give two")
        pairs = [a * b for a, b in pairwise(self.layout.widths)]
        limit, what = (MAX_ITEMS, sum(pairs)) if self.kind[0] == "s" else (MAX_OF_A_TEST, max(pairs))
        if what > limit or sum(pairs) > MAX_ITEMS:
            raise UsageError(
                f"mcdc: {self.kind} can keep at most 2^{limit.bit_length() - 1} pairs of neurons, got {what:,}: "
                "take neurons='channel' or fewer layers"
            )
        return sum(pairs)

    def items(self, readings: Readings) -> Tensor:
        test, item = self._pairs(readings)
        counts = torch.bincount(test, minlength=len(readings))
        rank = torch.arange(len(test), device=test.device) - (counts.cumsum(0) - counts)[test]
        found = torch.full((len(readings), int(counts.max())), -1, device=test.device)
        found[test, rank] = item
        return found

    def _pairs(self, readings: Readings) -> tuple[Tensor, Tensor]:
        """Tests, ascending, and the item that each of them covers, both int64 `[any]`."""
        self.n_items()  # refuses what cannot be paired
        if readings.clean is None:
            raise UsageError("mcdc compares each input with its clean one: pass clean=..., its activations")
        layer, first, base, width = _places(readings.layout.widths, readings.values.device)
        is_above, was_above = readings.values > 0, readings.clean > 0
        now, before = readings.values.abs(), readings.clean.abs()
        turned, large = is_above != was_above, torch.maximum(now, before)
        is_known = large < torch.inf
        # A value that is not known counts as two that turned: no neuron of its layer turned alone then, nor did none.
        n_turned = _by_layer(torch.where(is_known, turned.to(torch.uint8), 2), first, width)
        is_alone = n_turned == (self.kind[0] == "s")
        is_alone[:, -1] = False  # no layer follows
        moved = turned
        if self.kind != "ss":
            small = torch.minimum(now, before)
            moved = ~turned & (large > small) & (large >= self.ratio * small)
        condition = (turned if self.kind[0] == "s" else moved) & is_alone[:, layer]
        n_conditions = _by_layer(condition, first, width)
        is_shown = (n_conditions > 0).roll(1, 1)  # the layer before has a condition; the last one never does
        decision = (turned if self.kind[1] == "s" else moved) & is_known & is_shown[:, layer]
        last = n_conditions.view(-1).cumsum(0).view_as(n_conditions)  # of each test and layer, among all conditions
        (test, j), i = decision.nonzero(as_tuple=True), condition.nonzero()[:, 1]
        below = layer[j] - 1
        if self.kind[0] == "s":
            i = i[last[test, below] - 1]
        else:  # each decision goes with every condition of the layer below
            n_each = n_conditions[test, below]
            each = torch.repeat_interleave(n_each)
            place = (last[test, below] - n_each.cumsum(0))[each] + torch.arange(len(each), device=each.device)
            i, j, test, below = i[place], j[each], test[each], below[each]
        return test, base[below] + (i - first[below]) * width[below + 1] + j - first[below + 1]

    def _take(self, readings: Readings) -> Tensor:
        widths = readings.layout.widths
        most = max(widths) if self.kind[0] == "s" else max(a * b for a, b in pairwise(widths))
        step = max(BLOCK // max(most, 1), 1)
        parts = [readings[at : at + step] for at in range(0, len(readings), step)]
        return torch.cat([self._cover(part) for part in parts])

    def _cover(self, readings: Readings) -> Tensor:
        test, item = self._pairs(readings)
        is_new = ~has_bits(self.state["bits"], item)
        fresh, place = torch.unique(item[is_new], return_inverse=True)
        set_bits(self.state["bits"], fresh)
        self.state["count"] += len(fresh)
        first = torch.full_like(fresh, len(readings)).scatter_reduce_(0, place, test[is_new], "amin")
        return at_first(first, len(readings))


@lru_cache(maxsize=8)
def _places(widths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each neuron its layer; of each layer its first neuron, the first of its pairs with the next, its width."""
    width = torch.tensor(widths)
    first, pairs = width.cumsum(0) - width, width[:-1] * width[1:]
    layer = torch.repeat_interleave(width)
    return layer.to(device), first.to(device), (pairs.cumsum(0) - pairs).to(device), width.to(device)


def _by_layer(marks: Tensor, first: Tensor, width: Tensor) -> Tensor:
    """Sums of `marks [tests, neurons]` over each layer, int32 `[tests, layers]`."""
    before = torch.nn.functional.pad(marks.cumsum(1, dtype=torch.int32), (1, 0))
    return before[:, first + width] - before[:, first]
