"""Modified condition/decision coverage (DeepCover)."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from themis.errors import UsageError
from themis_lab.criteria.covering import Covering, has_bits, mark_tests, set_bits
from themis_lab.criteria.options import CriterionOptions
from themis_lab.criteria.readings import Readings

MCDC_KINDS = ("ss", "vs", "sv", "vv")
MAX_PAIRS = 2**33
"""Items that a bitmap of 1 GiB holds."""
MAX_ITEMS_PER_TEST = 2**27
"""Items of one test: by value, all neurons of a layer may be conditions at once."""
ITEMS_AT_ONCE = 2**24
"""Items processed together."""


class MCDC(Covering):
    """Pairs of a condition neuron and a decision neuron of the next layer where one was observed to change the other.

    Two inputs, here a seed's clean input and its disturbed one, cover the pair (i, j) by
    `ss` if i changes its sign, no other neuron of its layer does, and j changes its sign;
    `sv` if the same holds, but j changes its value and not its sign;
    `vs` if i changes its value, no neuron of its layer changes its sign, and j changes its sign;
    `vv` if the same holds, but j changes its value and not its sign.
    These are the paper's SS, SV, VS and VV cover, with single neurons as features. The score is the covered pairs over
    all pairs of adjacent layers. The sign is whether the activation is above 0: after a ReLU, whether the neuron fires.

    ratio: a value changed if its magnitude grew or shrank by at least this factor (2 in the experiments).
    If a value of the condition's layer is not finite, nothing is known about its other neurons: nothing is covered.
    """

    name = "mcdc"
    learns = False
    needs = frozenset({"clean"})
    variants: ClassVar = {
        "deepcover": "Sun et al., Structural Test Coverage Criteria for Deep Neural Networks, TECS 2019; "
        "github.com/theyoucheng/deepcover, lp-src/lp.py; the same pairs in github.com/DNNCov/DNNCov, mcdc.py"
    }

    def __init__(self, kind: str = "ss", ratio: float = 2.0, **options: Unpack[CriterionOptions]) -> None:
        if kind not in MCDC_KINDS:
            raise UsageError(f"mcdc: kind must be one of {', '.join(MCDC_KINDS)}, got {kind!r}")
        if not ratio > 1:
            raise UsageError(f"mcdc: ratio must be above 1, got {ratio}: the paper takes 2")
        super().__init__(**options)
        self.kind, self.ratio = kind, ratio

    def n_items(self) -> int:
        if self.layout is None:
            return 0
        if len(self.layout.widths) < 2:
            raise UsageError(
                f"mcdc pairs a layer with the next one, got one layer, {self.layout.names[0]!r}: pass at least two"
            )
        pairs = [a * b for a, b in pairwise(self.layout.widths)]
        limit, n_pairs = (MAX_PAIRS, sum(pairs)) if self.kind[0] == "s" else (MAX_ITEMS_PER_TEST, max(pairs))
        if n_pairs > limit or sum(pairs) > MAX_PAIRS:
            raise UsageError(
                f"mcdc: {self.kind} can keep at most 2^{limit.bit_length() - 1} pairs of neurons, got {n_pairs:,}: "
                "use neurons='channel' or fewer layers"
            )
        return sum(pairs)

    def items(self, readings: Readings) -> Tensor:
        test, item = self._pairs(readings)
        counts = torch.bincount(test, minlength=len(readings))
        rank = torch.arange(len(test), device=test.device) - (counts.cumsum(0) - counts)[test]
        items = torch.full((len(readings), int(counts.max())), -1, device=test.device)
        items[test, rank] = item
        return items

    def _pairs(self, readings: Readings) -> tuple[Tensor, Tensor]:
        """Tests, ascending, and the item that each covers, both int64 `[any]`."""
        self.n_items()  # raises an error if there are no pairs, or too many
        clean = readings.clean_values()
        if clean is None:
            raise UsageError("mcdc compares each input with its clean one: pass clean=..., its activations")
        layer, first, base, width = _places(readings.layout.widths, readings.values.device)
        is_above, was_above = readings.values > 0, clean > 0
        now, before = readings.values.abs(), clean.abs()
        has_flipped, large = is_above != was_above, torch.maximum(now, before)
        is_finite = large < torch.inf
        # A non-finite value counts as two sign changes: its layer then has neither exactly one nor none.
        n_flipped = _sum_by_layer(torch.where(is_finite, has_flipped.to(torch.uint8), 2), first, width)
        is_alone = n_flipped == (self.kind[0] == "s")
        is_alone[:, -1] = False  # no layer follows
        has_changed = has_flipped
        if self.kind != "ss":
            small = torch.minimum(now, before)
            has_changed = ~has_flipped & (large > small) & (large >= self.ratio * small)
        condition = (has_flipped if self.kind[0] == "s" else has_changed) & is_alone[:, layer]
        n_conditions = _sum_by_layer(condition, first, width)
        follows_condition = (n_conditions > 0).roll(1, 1)  # the layer before has a condition; the last one never does
        decision = (has_flipped if self.kind[1] == "s" else has_changed) & is_finite & follows_condition[:, layer]
        last = n_conditions.view(-1).cumsum(0).view_as(n_conditions)  # of each test and layer, among all conditions
        (test, j), i = decision.nonzero(as_tuple=True), condition.nonzero()[:, 1]
        below = layer[j] - 1
        if self.kind[0] == "s":
            i = i[last[test, below] - 1]
        else:  # each decision is paired with every condition of the layer below
            n_paired = n_conditions[test, below]
            pair = torch.repeat_interleave(n_paired)
            place = (last[test, below] - n_paired.cumsum(0))[pair] + torch.arange(len(pair), device=pair.device)
            i, j, test, below = i[place], j[pair], test[pair], below[pair]
        return test, base[below] + (i - first[below]) * width[below + 1] + j - first[below + 1]

    def _update(self, readings: Readings) -> Tensor:
        widths = readings.layout.widths
        n_most = max(widths) if self.kind[0] == "s" else max(a * b for a, b in pairwise(widths))
        step = max(ITEMS_AT_ONCE // max(n_most, 1), 1)
        parts = [readings[at : at + step] for at in range(0, len(readings), step)]
        return torch.cat([self._cover(part) for part in parts])

    def _cover(self, readings: Readings) -> Tensor:
        test, item = self._pairs(readings)
        is_new = ~has_bits(self.state["bits"], item)
        fresh, place = torch.unique(item[is_new], return_inverse=True)
        set_bits(self.state["bits"], fresh)
        self.state["count"] += len(fresh)
        first = torch.full_like(fresh, len(readings)).scatter_reduce_(0, place, test[is_new], "amin")
        return mark_tests(first, len(readings))


@lru_cache(maxsize=8)
def _places(widths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The layer of each neuron; for each layer its first neuron, its first pair with the next layer, and its width."""
    width = torch.tensor(widths)
    first, pairs = width.cumsum(0) - width, width[:-1] * width[1:]
    layer = torch.repeat_interleave(width)
    return layer.to(device), first.to(device), (pairs.cumsum(0) - pairs).to(device), width.to(device)


def _sum_by_layer(marks: Tensor, first: Tensor, width: Tensor) -> Tensor:
    """Sums of `marks [tests, neurons]` over each layer, int32 `[tests, layers]`."""
    before = torch.nn.functional.pad(marks.cumsum(1, dtype=torch.int32), (1, 0))
    return before[:, first + width] - before[:, first]
