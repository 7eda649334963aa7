"""Top-k neuron coverage and top-k neuron patterns (DeepGauge)."""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
from torch import Tensor

from themis.criteria.covering import Covering, at_first, first_hits
from themis.criteria.criterion import Common, Criterion, Laws
from themis.criteria.keys import joined, known
from themis.criteria.ranges import check_count
from themis.criteria.readings import Readings
from themis.errors import UsageError

MOST = 1 << 20


class TKNC(Covering):
    """Neurons that were among the `k` most active of their layer on some test, over all neurons.

    Of equal values the neuron that stands first comes first. `deephunter` counts pairs of a neuron and its rank, over
    `k` a neuron; a layer narrower than `k` has fewer ranks to hit.
    """

    name = "tknc"
    learns = False
    variants: ClassVar = {
        "deepgauge": "DeepGauge (ASE 2018), section 3.2.2; the same in NeuraL-Coverage, coverage.py: TKNC",
        "deephunter": "DeepHunter (ISSTA 2019), coverage.py: bknc_update_coverage",
    }

    def __init__(self, k: int = 10, **common: Unpack[Common]) -> None:
        check_count(self.name, k, MOST)
        super().__init__(**common)
        self.k = k

    def n_items(self) -> int:
        n = 0 if self.layout is None else self.layout.n_neurons
        return n * self.k if self.variant == "deephunter" else n

    def items(self, readings: Readings) -> Tensor:
        found = []
        for at in readings.layout.slices().values():
            top = most_active(readings.values[:, at], self.k)
            item = at.start + top
            if self.variant == "deephunter":
                item = item * self.k + torch.arange(top.shape[1], device=top.device)
            found.append(torch.where(top >= 0, item, -1))
        return torch.cat(found, 1)


class TKNP(Criterion):
    """Patterns of the `k` most active neurons that tests have shown: a count.

    by: `layer` counts the patterns of each layer, `network` those of all layers together (what the original reports
    unless asked). `neural-coverage` tells the same neurons in another order apart; `deepgauge` does not. A test with a
    value that is not finite shows no pattern of that layer. Patterns are kept as 63-bit hashes: of n patterns, two are
    taken for one with odds of n^2 / 2^64, five in a million at ten million.
    """

    name = "tknp"
    laws = Laws(bounded=False, monotone=True, order_free=True, mergeable=True)
    learns = False
    variants: ClassVar = {
        "neural-coverage": "github.com/Yuanyuan-Yuan/NeuraL-Coverage, coverage.py: TKNP",
        "deepgauge": "DeepGauge (ASE 2018), section 3.2.2: sets of neurons",
    }

    def __init__(self, k: int = 50, by: str = "layer", **common: Unpack[Common]) -> None:
        check_count(self.name, k, MOST)
        if by not in ("layer", "network"):
            raise UsageError(f"tknp: by must be 'layer' or 'network', got {by!r}")
        super().__init__(**common)
        self.k, self.by = k, by

    def score(self) -> float:
        return float(len(self.state["patterns"])) if self.state else 0.0

    def patterns(self, readings: Readings) -> Tensor:
        """The hash of each pattern that each test shows, int64 `[tests, layers]` or `[tests, 1]`; -1 is none."""
        found, is_shown = [], []
        for number, at in enumerate(readings.layout.slices().values()):
            values = readings.values[:, at]
            top = most_active(values, self.k)
            if self.variant == "neural-coverage":
                top = top * self.k + torch.arange(top.shape[1], device=top.device)
            found.append(mixed(mixed(top) + number).sum(1))
            is_shown.append(values.isfinite().all(1))
        hashes, every = torch.stack(found, 1), torch.stack(is_shown, 1)
        if self.by == "network":
            hashes, every = hashes.sum(1, keepdim=True), every.all(1, keepdim=True)
        return torch.where(every, mixed(hashes) & torch.iinfo(torch.int64).max, -1)

    def _begin(self, readings: Readings) -> dict[str, Tensor]:
        return {"patterns": torch.zeros(0, dtype=torch.int64, device=readings.values.device)}

    def _take(self, readings: Readings) -> Tensor:
        patterns, seen = self.patterns(readings), self.state["patterns"]
        fresh, first = first_hits(patterns, (patterns >= 0) & ~known(seen, patterns))
        self.state["patterns"] = joined(seen, fresh)
        return at_first(first, len(readings))

    def _merge(self, other: dict[str, Tensor]) -> dict[str, Tensor]:
        mine, theirs = self.state["patterns"], other["patterns"]
        return {"patterns": joined(mine, theirs[~known(mine, theirs)])}


def most_active(values: Tensor, k: int) -> Tensor:
    """The neurons of the `k` largest of each row, int64 `[tests, min(k, neurons)]`, the largest first.

    Of equal ones the first comes first, on every device. -1 in place of a value that is not finite.
    """
    n = values.shape[1]
    k = min(k, n)
    values = torch.where(values.isfinite(), values, -torch.inf)
    top, at = values.topk(k)
    # Which of those equal to the last one were taken is anyone's guess: take the first of them instead.
    least = top[:, -1:]
    countdown = torch.arange(n, 0, -1, dtype=torch.int32, device=values.device)
    tied = n - torch.where(values == least, countdown, 0).topk(k).values.long()  # n is none
    at = torch.where(top > least, at, n)
    at = torch.cat([at, tied], 1).sort(1).values
    found = values.gather(1, at.clamp(max=n - 1)).masked_fill(at == n, -torch.inf)
    found, order = torch.sort(found, dim=1, descending=True, stable=True)
    return torch.where(found > -torch.inf, at.gather(1, order), -1)[:, :k]


def mixed(words: Tensor) -> Tensor:
    """Each 64-bit word well mixed: the same word for the same, another for another (SplitMix64's last steps)."""
    words = words + _signed(0x9E3779B97F4A7C15)
    words = (words ^ (words >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return words ^ (words >> 31 & (1 << 33) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64)
