"""Criteria that cover a set of items: items that some test has hit, over all items."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from themis.criteria import Laws
from themis.errors import UsageError
from themis_lab.criteria.criterion import Criterion
from themis_lab.criteria.readings import Readings

WORD = 32
"""Bits per word."""
WORDS_AT_ONCE = 1 << 20
"""Words whose bits are counted together."""
NEURON_VALUES = 1 << 20
"""Values that torch compares together."""
ITEMS_ON_GPU = 1 << 23
"""Up to this many items a GPU goes through all of them: finding out how many were hit would mean waiting for it."""
SORTED_ON_GPU = 1 << 17
"""Up to this many items a GPU sorts all of them, for the same reason."""


class Covering(Criterion):
    """Items that tests hit, kept as bits. A subclass defines `n_items` and `items`."""

    laws = Laws(bounded=True, monotone=True, order_free=True, mergeable=True)

    @abstractmethod
    def n_items(self) -> int:
        """The number of items that can be hit."""

    @abstractmethod
    def items(self, readings: Readings) -> Tensor:
        """The items that each test hits, int64 `[tests, any]`; -1 for none. A test may list an item twice."""

    def n_covered(self) -> int:
        """The number of items that some test has hit."""
        return int(self.state["count"]) if self.state else 0

    def score(self) -> float:
        return self.n_covered() / max(self.n_items(), 1)

    def _initial_state(self, readings: Readings) -> dict[str, Tensor]:
        device = readings.values.device
        return {
            "bits": torch.zeros(-(-self.n_items() // WORD), dtype=torch.int32, device=device),
            "count": torch.zeros((), dtype=torch.int64, device=device),
        }

    def _update(self, readings: Readings) -> Tensor:
        items = self.items(readings)
        if items.is_cuda and self.n_items() <= ITEMS_ON_GPU:
            raised, n_set = cover_items(self.state["bits"], items)
            self.state["count"] += n_set
            return raised
        is_new = (items >= 0) & ~has_bits(self.state["bits"], items.clamp(min=0))
        fresh, first = first_hits(items, is_new)
        set_bits(self.state["bits"], fresh)
        self.state["count"] += len(fresh)
        return mark_tests(first, len(readings))

    def _covered(self) -> Tensor:
        """Which items some test has hit, bool `[items]`."""
        bits = self.state["bits"]
        position = torch.arange(WORD, dtype=torch.int32, device=bits.device)
        return (bits[:, None] >> position & 1).bool().view(-1)[: self.n_items()]

    def _merge_state(self, other: dict[str, Tensor]) -> dict[str, Tensor]:
        bits = self.state["bits"] | other["bits"]
        return {"bits": bits, "count": count_bits(bits)}


class Crossing(Covering):
    """Neurons that some test has driven above an upper bound, or below a lower bound if there is one.

    There are only one or two items per neuron, so they are kept as booleans.
    """

    def n_items(self) -> int:
        return 0 if self.layout is None else self.layout.n_neurons * self.n_sides()

    def n_sides(self) -> int:
        """Items per neuron: 2 if crossing the lower bound and crossing the upper bound are two items, else 1."""
        return 1

    @abstractmethod
    def bounds(self, values: Tensor) -> tuple[Tensor | None, Tensor]:
        """The lower bounds, if there are any, and the upper bounds of `values [tests, neurons]`, `[neurons]` each."""

    def includes_bound(self) -> bool:
        """Whether a value that equals its bound has crossed it."""
        return False

    def hits(self, readings: Readings) -> Tensor:
        """Which items each test hits, bool `[tests, items]`."""
        return torch.cat(self._crossed(readings.values, *self.bounds(readings.values)), 1)

    def items(self, readings: Readings) -> Tensor:
        hits = self.hits(readings)
        return torch.where(hits, torch.arange(hits.shape[1], device=hits.device), -1)

    def n_covered(self) -> int:
        return int(self.state["covered"].sum()) if self.state else 0

    def _initial_state(self, readings: Readings) -> dict[str, Tensor]:
        return {"covered": torch.zeros(self.n_items(), dtype=torch.bool, device=readings.values.device)}

    def _merge_state(self, other: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"covered": self.state["covered"] | other["covered"]}

    def _crossed(self, values: Tensor, low: Tensor | None, high: Tensor) -> list[Tensor]:
        """Which values cross a bound, bool `[tests, neurons]` per side."""
        above = (values >= high if self.includes_bound() else values > high) & (values < torch.inf)
        if low is None:
            return [above]
        below = (values <= low if self.includes_bound() else values < low) & (values > -torch.inf)
        return [below | above] if self.n_sides() == 1 else [below, above]

    def _update(self, readings: Readings) -> Tensor:
        values = readings.values
        low, high = self.bounds(values)
        covered = self.state["covered"].view(self.n_sides(), -1)
        if values.device.type == "cuda" and values.dtype == high.dtype == torch.float32:
            from themis_lab.criteria import kernels_cuda

            if kernels_cuda.can_cross(values.device):
                return kernels_cuda.cross(values.contiguous(), low, high, covered, self.includes_bound())
        raised = torch.zeros(len(values), dtype=torch.bool, device=values.device)
        for part in neuron_chunks(*values.shape):
            self._update_part(values[:, part], None if low is None else low[part], high[part], covered[:, part], raised)
        return raised

    def _update_part(self, values: Tensor, low: Tensor | None, high: Tensor, covered: Tensor, raised: Tensor) -> None:
        """Update `covered [sides, neurons]` and `raised [tests]` with the values of some neurons."""
        # Few neurons can cross a new bound: those whose extremes lie beyond it, or are hidden by a NaN.
        largest = values.amax(0)
        is_open = ~((largest < high if self.includes_bound() else largest <= high) | covered[-1])
        if low is not None:
            smallest = values.amin(0)
            is_open |= ~((smallest > low if self.includes_bound() else smallest >= low) | covered[0])
        neurons = is_open.nonzero()[:, 0]
        crossed = self._crossed(values[:, neurons], None if low is None else low[neurons], high[neurons])
        countdown = torch.arange(len(values), 0, -1, dtype=torch.int32, device=values.device)[:, None]
        for covered_side, hits in zip(covered, crossed, strict=True):
            earliest = torch.where(hits, countdown, 0).amax(0)
            is_fresh = (earliest > 0) & ~covered_side[neurons]
            covered_side[neurons[is_fresh]] = True
            raised[len(values) - earliest[is_fresh]] = True


def neuron_chunks(n_tests: int, n_neurons: int) -> list[slice]:
    """All neurons, in parts whose values for all tests are processed together."""
    step = max(NEURON_VALUES // n_tests, 1)
    return [slice(start, min(start + step, n_neurons)) for start in range(0, n_neurons, step)]


def first_hits(items: Tensor, is_new: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct items `[tests, any]` where `is_new`, ascending, and the first test that hits each."""
    width = max(items.shape[1], 1)
    if items.is_cuda and items.numel() <= SORTED_ON_GPU:
        hits, order = items.flatten().where(is_new.flatten(), -1).sort(stable=True)
        head = (_is_head(hits) & (hits >= 0)).nonzero()[:, 0]
        return hits[head], order[head] // width
    at = is_new.flatten().nonzero()[:, 0]
    hits, order = items.flatten()[at].sort(stable=True)
    head = _is_head(hits).nonzero()[:, 0]
    return hits[head], at[order[head]] // width


def _is_head(ordered: Tensor) -> Tensor:
    is_head = torch.ones_like(ordered, dtype=torch.bool)
    is_head[1:] = ordered[1:] != ordered[:-1]
    return is_head


def mark_tests(tests: Tensor, n_tests: int) -> Tensor:
    """Bool `[n_tests]`: true for each of `tests`, which are indices."""
    raised = torch.zeros(n_tests, dtype=torch.bool, device=tests.device)
    raised[tests] = True
    return raised


# Items as bits


def has_bits(bits: Tensor, items: Tensor) -> Tensor:
    """Which of `items` are set, bool of their shape."""
    return (bits[items // WORD] >> (items % WORD).to(torch.int32) & 1).bool()


def set_bits(bits: Tensor, items: Tensor) -> None:
    """Set the bits of distinct `items`, none of which is set, so that addition has the effect of `or`."""
    one = torch.ones((), dtype=torch.int32, device=bits.device)
    bits.index_add_(0, items // WORD, one << (items % WORD).to(torch.int32))


def cover_items(bits: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
    """Set the bits of `items [tests, any]`, -1 for none, in time proportional to all bits, without synchronising.

    Returns which tests set a bit that no earlier test had set, bool `[tests]`, and how many were set, int64 `[]`.
    """
    n_tests, n_bits, device = len(items), len(bits) * WORD, items.device
    test = torch.arange(n_tests, device=device)[:, None].expand_as(items)
    place = torch.where(items >= 0, items, n_bits + test)  # not one place for all: writing there would take turns
    first = torch.full((n_bits + n_tests,), n_tests, device=device)
    first = first.scatter_reduce_(0, place.flatten(), test.flatten(), "amin")[:n_bits].view(-1, WORD)
    position = torch.arange(WORD, dtype=torch.int32, device=device)
    is_new = (first < n_tests) & (bits[:, None] >> position & 1 == 0)
    bits |= (is_new.int() << position).sum(1, dtype=torch.int32)
    raised = torch.zeros(n_tests + 1, dtype=torch.bool, device=device)
    return raised.scatter_(0, first.where(is_new, n_tests).flatten(), True)[:n_tests], is_new.sum()


def count_bits(bits: Tensor) -> Tensor:
    """The number of set bits in words `[any]`, int64 `[]`."""
    table = torch.tensor([byte.bit_count() for byte in range(256)], dtype=torch.uint8, device=bits.device)
    starts = range(0, len(bits), WORDS_AT_ONCE)
    counts = [table[bits[k : k + WORDS_AT_ONCE].view(torch.uint8).int()].sum(dtype=torch.int64) for k in starts]
    return torch.stack([torch.zeros((), dtype=torch.int64, device=bits.device), *counts]).sum()


# Items as a sorted tensor of 64-bit keys, if there are too many possible items for bits


def has_keys(keys: Tensor, items: Tensor) -> Tensor:
    """Which of `items` are in the sorted `keys`, bool of their shape."""
    if not len(keys):
        return torch.zeros_like(items, dtype=torch.bool)
    place = torch.searchsorted(keys, items.contiguous()).clamp(max=len(keys) - 1)
    return keys[place] == items


def add_keys(keys: Tensor, fresh: Tensor) -> Tensor:
    """The sorted union of two sorted tensors that have no key in common."""
    place = torch.searchsorted(keys, fresh) + torch.arange(len(fresh), device=fresh.device)
    union = torch.empty(len(keys) + len(fresh), dtype=torch.int64, device=keys.device)
    is_old = torch.ones_like(union, dtype=torch.bool)
    is_old[place] = False
    union[place] = fresh
    return union.masked_scatter_(is_old, keys)


def check_k(criterion: str, k: int, largest: int) -> None:
    """Raise an error unless `k` is a whole number from 1 to `largest`."""
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= largest:
        raise UsageError(f"{criterion}: k must be a whole number from 1 to {largest}, got {k!r}")
