"""Modified condition/decision coverage (DeepCover)."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from themis.criteria.covering import Covering
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
        self.n_items()  # refuses what cannot be paired
        if readings.clean is None:
            raise UsageError("mcdc compares each input with its clean one: pass clean=..., its activations")
        changes = [
            self._changes(values, readings.clean[:, at])
            for values, at in zip(readings.layers().values(), readings.layout.slices().values(), strict=True)
        ]
        found, start = [], 0
        for (turned, moved, is_known), (turned_next, moved_next, is_known_next) in pairwise(changes):
            n_turned = turned.sum(1, keepdim=True)
            condition = turned & (n_turned == 1) if self.kind[0] == "s" else moved & (n_turned == 0)
            condition &= is_known.all(1, keepdim=True)
            decision = (turned_next if self.kind[1] == "s" else moved_next) & is_known_next
            decision = decision & condition.any(1, keepdim=True)
            i, j = places(condition)[:, :, None], places(decision)[:, None, :]
            width = decision.shape[1]
            found.append(torch.where((i >= 0) & (j >= 0), start + i * width + j, -1).flatten(1))
            start += condition.shape[1] * width
        return torch.cat(found, 1)

    def _changes(self, now: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Which neurons changed their sign, which their value only, and of which both values are known."""
        turned = (now > 0) != (before > 0)
        one, other = now.abs(), before.abs()
        large, small = torch.maximum(one, other), torch.minimum(one, other)
        moved = ~turned & (large > small) & (large >= self.ratio * small)
        return turned, moved, now.isfinite() & before.isfinite()

    def _take(self, readings: Readings) -> Tensor:
        widths = readings.layout.widths
        most = max(widths) if self.kind[0] == "s" else max(a * b for a, b in pairwise(widths))
        step = max(BLOCK // max(most, 1), 1)
        parts = [readings[at : at + step] for at in range(0, len(readings), step)]
        return torch.cat([Covering._take(self, part) for part in parts])


def places(marks: Tensor) -> Tensor:
    """Where each row is true, int64 `[rows, the most of a row]`, ascending, then -1."""
    counts = marks.sum(1)
    rows, columns = marks.nonzero(as_tuple=True)
    rank = torch.arange(len(rows), device=marks.device) - (counts.cumsum(0) - counts)[rows]
    found = torch.full((len(marks), int(counts.max())), -1, dtype=torch.int64, device=marks.device)
    found[rows, rank] = columns
    return found
