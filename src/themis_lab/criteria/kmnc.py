"""k-multisection neuron coverage (DeepGauge)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from themis.compute import native
from themis_lab.criteria.boundary import widen_range
from themis_lab.criteria.covering import (
    WORD,
    Covering,
    add_keys,
    check_k,
    count_bits,
    first_hits,
    has_bits,
    has_keys,
    mark_tests,
    neuron_chunks,
    set_bits,
)
from themis_lab.criteria.options import CriterionOptions
from themis_lab.criteria.readings import Readings

DEEPIMPORTANCE = "deepimportance"
"""The variant that counts sections beyond the range."""
MAX_SECTIONS = 1 << 24
"""Sections that float32 can distinguish."""
MAX_OUTSIDE = 1 << 31
"""Sections beyond the range that are distinguished on each side."""


class KMNC(Covering):
    """Sections of the neurons' ranges over training data that some test has hit, out of `k` per neuron.

    `deephunter` takes section `int((a - lo) / ((hi - lo) / k))`, the last one at `hi`, and ignores values out of range
    and neurons whose range is a single point. `mindarmour` drops `a = hi`. `neural-coverage` rounds up, so it drops
    `a = lo`; its own k is 100. `deepimportance` has no range check: sections below and above the range count (up to
    2^31 on each side are distinguished), as do `a = hi` and one section of a neuron whose range is a single point, so
    that the score can exceed 1.
    """

    name = "kmnc"
    variants: ClassVar = {
        "deephunter": "DeepHunter (ISSTA 2019), coverage.py: kmnc_update_coverage",
        DEEPIMPORTANCE: "github.com/DeepImportance/deepimportance_code_release, coverages/kmn.py",
        "neural-coverage": "github.com/Yuanyuan-Yuan/NeuraL-Coverage, coverage.py: KMNC",
        "mindarmour": "github.com/mindspore-ai/mindarmour, model_coverage_metrics.py: KMultisectionNeuronCoverage",
    }

    def __init__(self, k: int = 1000, **options: Unpack[CriterionOptions]) -> None:
        check_k(self.name, k, MAX_SECTIONS)
        super().__init__(**options)
        self.k = k
        self.laws = replace(self.laws, bounded=self.variant != DEEPIMPORTANCE)

    def n_items(self) -> int:
        return 0 if self.layout is None else self.layout.n_neurons * self.k

    def items(self, readings: Readings) -> Tensor:
        sections, values = self.sections(), readings.values
        items = sections.items(values)
        if self.variant != DEEPIMPORTANCE:
            return items
        keys = outside_keys(sections, values, 0)
        first = values.shape[1] * n_words(self.k) * WORD  # after the bits of all neurons
        return torch.cat([items, torch.where(keys >= 0, keys + first, -1)], 1)

    def sections(self) -> Sections:
        """The sections of the neurons' training ranges."""
        is_ceil = self.variant == "neural-coverage"
        low, high, width = (self.learnt[name] for name in ("low", "high", "width"))
        if is_clamped := self.variant in ("deephunter", "neural-coverage"):
            high = torch.where(width > 0, high, low)
        else:
            high = torch.full_like(high, torch.inf)  # the section number decides what is inside
        return Sections(low, high, width, self.k, is_ceil, is_clamped)

    def _learn(self, readings: Readings) -> None:
        widen_range(self.learnt, readings.values)

    def _finish_fit(self) -> None:
        width = self.learnt["high"] - self.learnt["low"]
        if self.variant != "neural-coverage":
            width = width / self.k
        self.learnt["width"] = torch.where(width < torch.inf, width, 0)  # 0 leaves the neuron out

    def _initial_state(self, readings: Readings) -> dict[str, Tensor]:
        device = readings.values.device
        state = {
            "bits": no_bits(readings.layout.n_neurons, self.k, device),
            "count": torch.zeros((), dtype=torch.int64, device=device),
        }
        if self.variant == DEEPIMPORTANCE:
            state["beyond"] = torch.zeros(0, dtype=torch.int64, device=device)
        return state

    def _update(self, readings: Readings) -> Tensor:
        sections = self.sections()
        raised, n_set = cover_sections(sections, readings.values, self.state["bits"])
        self.state["count"] += n_set
        return raised | self._update_outside(sections, readings.values) if self.variant == DEEPIMPORTANCE else raised

    def _update_outside(self, sections: Sections, values: Tensor) -> Tensor:
        """Take in sections outside the range, and those of neurons without one, as keys ascending by neuron."""
        fresh, first = [], []
        for part in neuron_chunks(*values.shape):
            keys = outside_keys(sections.select(part), values[:, part], part.start)
            new_keys, tests = first_hits(keys, (keys >= 0) & ~has_keys(self.state["beyond"], keys))
            fresh.append(new_keys)
            first.append(tests)
        all_fresh = torch.cat(fresh)
        self.state["beyond"] = add_keys(self.state["beyond"], all_fresh)
        self.state["count"] += len(all_fresh)
        return mark_tests(torch.cat(first), len(values))

    def _merge_state(self, other: dict[str, Tensor]) -> dict[str, Tensor]:
        bits = self.state["bits"] | other["bits"]
        merged = {"bits": bits, "count": count_bits(bits.view(-1))}
        if self.variant == DEEPIMPORTANCE:
            mine, theirs = self.state["beyond"], other["beyond"]
            merged["beyond"] = add_keys(mine, theirs[~has_keys(mine, theirs)])
            merged["count"] += len(merged["beyond"])
        return merged


@dataclass(frozen=True)
class Sections:
    """`k` sections per neuron: number `int((a - low) / width)`, from 0, where `low <= a <= high`.

    low, high, width `[neurons]`. width: of a section, rounded once; 0 leaves a neuron out. is_ceil: width is that of
    the whole range, and the number is `ceil((a - low) / width * k) - 1`. is_clamped: a number of `k` or more, by
    rounding or at the upper end, becomes the last section; otherwise the value lies in none.
    """

    low: Tensor
    high: Tensor
    width: Tensor
    k: int
    is_ceil: bool = False
    is_clamped: bool = True

    def numbers(self, values: Tensor) -> Tensor:
        """The section of each of `values [tests, neurons]`, int64; -1 for none."""
        place = (values - self.low) / self.width
        if self.is_ceil:
            place = (place * self.k).ceil() - 1
        is_in = (values >= self.low) & (values <= self.high) & (place >= 0)
        if not self.is_clamped:
            is_in &= place < self.k
        return torch.where(is_in, place.clamp(max=self.k - 1), -1).long()

    def items(self, values: Tensor) -> Tensor:
        """The bit of each of `values [tests, neurons]`, counted over all rows of bits, int64; -1 for none."""
        section = self.numbers(values)
        row = torch.arange(values.shape[1], device=values.device) * n_words(self.k) * WORD
        return torch.where(section >= 0, row + section, -1)

    def select(self, neurons: slice) -> Sections:
        """The sections of some neurons."""
        return replace(self, low=self.low[neurons], high=self.high[neurons], width=self.width[neurons])


def n_words(k: int) -> int:
    """Words of a row of `k` bits."""
    return -(-k // WORD)


def no_bits(n_neurons: int, k: int, device: torch.device) -> Tensor:
    """One row of bits per neuron, all of them unset, int32 `[neurons, words]`."""
    return torch.zeros(n_neurons, n_words(k), dtype=torch.int32, device=device)


def cover_sections(sections: Sections, values: Tensor, bits: Tensor) -> tuple[Tensor, Tensor | int]:
    """Set the bits of the sections that `values [tests, neurons]` lie in.

    Returns which tests set a bit that no earlier test had set, bool `[tests]`, and how many were set. Each neuron goes
    over the tests of a batch in order, so a test sees the bits of the tests before it: in C on a CPU, in a kernel on a
    GPU, or in torch, a few neurons at a time, if neither is available. All three round float32 alike and agree to the
    bit.
    """
    is_single = values.dtype == sections.low.dtype == torch.float32
    low, high, width = (tensor.contiguous() for tensor in (sections.low, sections.high, sections.width))
    rounding = {"is_ceil": sections.is_ceil, "is_clamped": sections.is_clamped}
    if is_single and (library := native.library_for(values)) is not None:
        (n_tests, n), raised = values.shape, torch.zeros(len(values), dtype=torch.bool)
        ends = (low, high, width, sections.k, bits.shape[1], sections.is_ceil, sections.is_clamped)
        return raised, library.themis_sections(values.contiguous(), n_tests, n, *ends, bits, raised)
    if is_single and values.device.type == "cuda":
        from themis_lab.criteria import kernels_cuda

        if kernels_cuda.can_cover_sections(values.device):
            return kernels_cuda.cover_sections(values.contiguous(), low, high, width, sections.k, bits, **rounding)
    return cover_sections_in_torch(sections, values, bits)


def cover_sections_in_torch(sections: Sections, values: Tensor, bits: Tensor) -> tuple[Tensor, int]:
    """`cover_sections` in torch."""
    raised = torch.zeros(len(values), dtype=torch.bool, device=values.device)
    n_set = 0
    for part in neuron_chunks(*values.shape):
        items = sections.select(part).items(values[:, part])
        rows = bits[part].view(-1)
        fresh, first = first_hits(items, (items >= 0) & ~has_bits(rows, items.clamp(min=0)))
        set_bits(rows, fresh)
        raised[first] = True
        n_set += len(fresh)
    return raised, n_set


def outside_keys(sections: Sections, values: Tensor, start: int) -> Tensor:
    """A key for the section of each value outside its neuron's range, int64 `[tests, neurons]`; -1 if it is inside."""
    place = ((values - sections.low) / sections.width).floor()
    is_point = sections.width == 0
    is_below = values < sections.low
    place = torch.where(is_below, place.clamp(max=-1), place)  # a quotient may come out as -0
    place = torch.where(is_point, 0, place)
    is_outside = values.isfinite() & (is_point | is_below | (place >= sections.k))
    number = place.nan_to_num(0).clamp(-MAX_OUTSIDE, MAX_OUTSIDE).long().clamp(max=MAX_OUTSIDE - 1)
    neuron = torch.arange(start, start + values.shape[1], device=values.device)
    return torch.where(is_outside, neuron * 2 * MAX_OUTSIDE + number + MAX_OUTSIDE, -1)
