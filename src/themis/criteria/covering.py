"""Criteria that cover a set: items that some test has hit, over all items there are."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from themis.criteria.criterion import Criterion, Laws
from themis.criteria.readings import Readings

WORD = 32
"""Bits of a word."""
CHUNK = 1 << 20
"""Words whose bits are counted together."""


class Covering(Criterion):
    """Items that tests hit. Each says `n_items` and `items`."""

    laws = Laws(bounded=True, monotone=True, order_free=True, mergeable=True)

    @abstractmethod
    def n_items(self) -> int:
        """How many items can be hit."""

    @abstractmethod
    def items(self, readings: Readings) -> Tensor:
        """The items that each test hits, int64 `[tests, any]`; -1 is none. A test may name an item twice."""

    def n_covered(self) -> int:
        """How many items some test has hit."""
        return int(self.state["count"]) if self.state else 0

    def score(self) -> float:
        return self.n_covered() / max(self.n_items(), 1)

    def _begin(self, readings: Readings) -> dict[str, Tensor]:
        device = readings.values.device
        return {
            "bits": torch.zeros(-(-self.n_items() // WORD), dtype=torch.int32, device=device),
            "count": torch.zeros((), dtype=torch.int64, device=device),
        }

    def _take(self, readings: Readings) -> Tensor:
        items = self.items(readings)
        is_new = (items >= 0) & ~has_bits(self.state["bits"], items.clamp(min=0))
        fresh, first = first_hits(items, is_new)
        set_bits(self.state["bits"], fresh)
        self.state["count"] += len(fresh)
        return at_first(first, len(readings))

    def _merge(self, other: dict[str, Tensor]) -> dict[str, Tensor]:
        bits = self.state["bits"] | other["bits"]
        return {"bits": bits, "count": count_bits(bits)}


def at_first(first: Tensor, n_tests: int) -> Tensor:
    """Bool `[tests]`: true at each test that is first to hit something."""
    raised = torch.zeros(n_tests, dtype=torch.bool, device=first.device)
    raised[first] = True
    return raised


def first_hits(items: Tensor, is_new: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct items `[tests, any]` where `is_new`, ascending, and the first test that hits each."""
    at = is_new.flatten().nonzero()[:, 0]
    every, order = items.flatten()[at].sort(stable=True)
    is_head = torch.ones_like(every, dtype=torch.bool)
    is_head[1:] = every[1:] != every[:-1]
    head = is_head.nonzero()[:, 0]
    return every[head], at[order[head]] // max(items.shape[1], 1)


def has_bits(bits: Tensor, items: Tensor) -> Tensor:
    """Which of `items` are set, bool of their shape."""
    return (bits[items // WORD] >> (items % WORD).to(torch.int32) & 1).bool()


def set_bits(bits: Tensor, items: Tensor) -> None:
    """Set the bits of distinct `items`, none of which is set: adding is as good as `or` then."""
    one = torch.ones((), dtype=torch.int32, device=bits.device)
    bits.index_add_(0, items // WORD, one << (items % WORD).to(torch.int32))


def count_bits(bits: Tensor) -> Tensor:
    """How many bits are set in words `[any]`, int64 `[]`."""
    table = torch.tensor([each.bit_count() for each in range(256)], dtype=torch.uint8, device=bits.device)
    starts = range(0, len(bits), CHUNK)
    parts = [table[bits[k : k + CHUNK].view(torch.uint8).int()].sum(dtype=torch.int64) for k in starts]
    return torch.stack([torch.zeros((), dtype=torch.int64, device=bits.device), *parts]).sum()
