"""The section of its range that a neuron's value lies in, and the bits of those that tests have hit.

A row of bits a neuron. Each neuron walks over the tests of a batch in their order, so what one test sets the next one
finds: in C on a CPU, in a kernel on a GPU, and where neither is to be had in torch, a few neurons at a time. All three
take the same steps in float32 and agree to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from themis.compute import native
from themis.criteria.covering import WORD, first_hits, has_bits, set_bits

MOST = 1 << 24
"""Sections that float32 can tell apart."""
CHUNK = 1 << 20
"""Values that are looked at together in torch."""


@dataclass(frozen=True)
class Sections:
    """`k` sections a neuron: number `int((a - low) / width)` where `low <= a <= high`, from 0.

    low, high, width `[neurons]`. width is a section's, rounded once; 0 leaves a neuron out. is_ceil: width is the whole
    range's, and the number `ceil((a - low) / width * k) - 1`. is_clamped: what comes out as `k` or more, by rounding
    or at the upper end, is the last section; else none.
    """

    low: Tensor
    high: Tensor
    width: Tensor
    k: int
    is_ceil: bool = False
    is_clamped: bool = True

    def of(self, values: Tensor) -> Tensor:
        """The section of each of `values [tests, neurons]`, int64; -1 is none."""
        place = (values - self.low) / self.width
        if self.is_ceil:
            place = (place * self.k).ceil() - 1
        is_in = (values >= self.low) & (values <= self.high) & (place >= 0)
        if not self.is_clamped:
            is_in &= place < self.k
        return torch.where(is_in, place.clamp(max=self.k - 1), -1).long()

    def items(self, values: Tensor) -> Tensor:
        """The bit of each of `values [tests, neurons]`, counted over whole rows, int64; -1 is none."""
        section = self.of(values)
        row = torch.arange(values.shape[1], device=values.device) * n_words(self.k) * WORD
        return torch.where(section >= 0, row + section, -1)

    def among(self, neurons: slice) -> Sections:
        """Those of some neurons."""
        return replace(self, low=self.low[neurons], high=self.high[neurons], width=self.width[neurons])


def n_words(k: int) -> int:
    """Words of a row of `k` bits."""
    return -(-k // WORD)


def no_bits(n_neurons: int, k: int, device: torch.device) -> Tensor:
    """Rows of bits of which none is set, int32 `[neurons, words]`."""
    return torch.zeros(n_neurons, n_words(k), dtype=torch.int32, device=device)


def chunks(n_tests: int, n_neurons: int) -> list[slice]:
    """All neurons, in parts of which the values of all tests are looked at together."""
    step = max(CHUNK // n_tests, 1)
    return [slice(start, min(start + step, n_neurons)) for start in range(0, n_neurons, step)]


def cover(sections: Sections, values: Tensor, bits: Tensor) -> tuple[Tensor, Tensor | int]:
    """Set the bits of the sections that `values [tests, neurons]` lie in.

    Returns which tests set one that none before had set, bool `[tests]`, and how many were set.
    """
    is_single = values.dtype == sections.low.dtype == torch.float32
    if is_single and (library := native.library_for(values)) is not None:
        low, high, width = (each.contiguous() for each in (sections.low, sections.high, sections.width))
        return native.sections(
            library, values.contiguous(), low, high, width, sections.k, bits,
            is_ceil=sections.is_ceil, is_clamped=sections.is_clamped,
        )  # fmt: skip
    if is_single and values.device.type == "cuda":
        from themis.criteria.sections_cuda import walk_on

        if (walk := walk_on(values.device)) is not None:
            return walk(sections, values.contiguous(), bits)
    return cover_plainly(sections, values, bits)


def cover_plainly(sections: Sections, values: Tensor, bits: Tensor) -> tuple[Tensor, int]:
    """`cover` in torch."""
    raised = torch.zeros(len(values), dtype=torch.bool, device=values.device)
    n_set = 0
    for part in chunks(*values.shape):
        items = sections.among(part).items(values[:, part])
        rows = bits[part].view(-1)
        fresh, first = first_hits(items, (items >= 0) & ~has_bits(rows, items.clamp(min=0)))
        set_bits(rows, fresh)
        raised[first] = True
        n_set += len(fresh)
    return raised, n_set
