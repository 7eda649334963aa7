"""k-multisection neuron coverage (DeepGauge)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from themis.criteria.covering import WORD, Covering, at_first, count_bits, first_hits
from themis.criteria.criterion import Common
from themis.criteria.keys import joined, known
from themis.criteria.ranges import check_count, widen
from themis.criteria.readings import Readings
from themis.criteria.sections import MOST, Sections, chunks, cover, n_words, no_bits

BEYOND = "deepimportance"
"""The variant that counts sections beyond the range."""
FARTHEST = 1 << 31
"""How many sections beyond the range are told apart, on each side."""


class KMNC(Covering):
    """Sections of the neurons' ranges over training data that some test has hit, of `k` a neuron.

    `deephunter` takes section `int((a - lo) / ((hi - lo) / k))`, the last one at `hi`, and ignores values out of range
    and neurons whose range is a point. `mindarmour` loses `a = hi`. `neural-coverage` rounds up, so it loses `a = lo`;
    its own k is 100. `deepimportance` has no range check: sections below and above the range count (up to 2^31 on each
    side are told apart), as do `a = hi` and one section of a neuron whose range is a point, so that it can pass 1.
    """

    name = "kmnc"
    variants: ClassVar = {
        "deephunter": "DeepHunter (ISSTA 2019), coverage.py: kmnc_update_coverage",
        BEYOND: "github.com/DeepImportance/deepimportance_code_release, coverages/kmn.py",
        "neural-coverage": "github.com/Yuanyuan-Yuan/NeuraL-Coverage, coverage.py: KMNC",
        "mindarmour": "github.com/mindspore-ai/mindarmour, model_coverage_metrics.py: KMultisectionNeuronCoverage",
    }

    def __init__(self, k: int = 1000, **common: Unpack[Common]) -> None:
        check_count(self.name, k, MOST)
        super().__init__(**common)
        self.k = k
        self.laws = replace(self.laws, bounded=self.variant != BEYOND)

    def n_items(self) -> int:
        return 0 if self.layout is None else self.layout.n_neurons * self.k

    def items(self, readings: Readings) -> Tensor:
        sections, values = self.sections(), readings.values
        items = sections.items(values)
        if self.variant != BEYOND:
            return items
        keys = beyond(sections, values, 0)
        first = values.shape[1] * n_words(self.k) * WORD  # after the bits of all neurons
        return torch.cat([items, torch.where(keys >= 0, keys + first, -1)], 1)

    def sections(self) -> Sections:
        """Those of the range."""
        is_ceil = self.variant == "neural-coverage"
        low, high, width = (self.learnt[name] for name in ("low", "high", "width"))
        if is_clamped := self.variant in ("deephunter", "neural-coverage"):
            high = torch.where(width > 0, high, low)
        else:
            high = torch.full_like(high, torch.inf)  # the section says whether it is in
        return Sections(low, high, width, self.k, is_ceil, is_clamped)

    def _learn(self, readings: Readings) -> None:
        widen(self.learnt, readings.values)

    def _conclude(self) -> None:
        width = self.learnt["high"] - self.learnt["low"]
        if self.variant != "neural-coverage":
            width = width / self.k
        self.learnt["width"] = torch.where(width < torch.inf, width, 0)  # 0: it is left out

    def _begin(self, readings: Readings) -> dict[str, Tensor]:
        device = readings.values.device
        state = {
            "bits": no_bits(readings.layout.n_neurons, self.k, device),
            "count": torch.zeros((), dtype=torch.int64, device=device),
        }
        if self.variant == BEYOND:
            state["beyond"] = torch.zeros(0, dtype=torch.int64, device=device)
        return state

    def _take(self, readings: Readings) -> Tensor:
        sections = self.sections()
        raised, n_set = cover(sections, readings.values, self.state["bits"])
        self.state["count"] += n_set
        return raised | self._take_beyond(sections, readings.values) if self.variant == BEYOND else raised

    def _take_beyond(self, sections: Sections, values: Tensor) -> Tensor:
        """Take in sections out of the range, and those of neurons without one: as keys, ascending by neuron."""
        fresh, first = [], []
        for part in chunks(*values.shape):
            keys = beyond(sections.among(part), values[:, part], part.start)
            found = first_hits(keys, (keys >= 0) & ~known(self.state["beyond"], keys))
            fresh.append(found[0])
            first.append(found[1])
        every = torch.cat(fresh)
        self.state["beyond"] = joined(self.state["beyond"], every)
        self.state["count"] += len(every)
        return at_first(torch.cat(first), len(values))

    def _merge(self, other: dict[str, Tensor]) -> dict[str, Tensor]:
        bits = self.state["bits"] | other["bits"]
        merged = {"bits": bits, "count": count_bits(bits.view(-1))}
        if self.variant == BEYOND:
            mine, theirs = self.state["beyond"], other["beyond"]
            merged["beyond"] = joined(mine, theirs[~known(mine, theirs)])
            merged["count"] += len(merged["beyond"])
        return merged


def beyond(sections: Sections, values: Tensor, start: int) -> Tensor:
    """A key of the section of each value that lies in none of the range, int64 `[tests, neurons]`; -1 is none."""
    place = ((values - sections.low) / sections.width).floor()
    is_point = sections.width == 0
    is_below = values < sections.low
    place = torch.where(is_below, place.clamp(max=-1), place)  # a quotient may come out as -0
    place = torch.where(is_point, 0, place)
    is_beyond = values.isfinite() & (is_point | is_below | (place >= sections.k))
    number = place.nan_to_num(0).clamp(-FARTHEST, FARTHEST).long().clamp(max=FARTHEST - 1)
    neuron = torch.arange(start, start + values.shape[1], device=values.device)
    return torch.where(is_beyond, neuron * 2 * FARTHEST + number + FARTHEST, -1)
