"""Top-k neuron coverage and top-k neuron patterns (DeepGauge)."""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
from torch import Tensor

from themis.criteria.covering import Covering, at_first, first_hits
from themis.criteria.criterion import Common, Criterion, Laws
from themis.criteria.keys import joined, known
from themis.criteria.ranges import check_count
from themis.criteria.ranks import starts, tops
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
        top, _ = tops(readings, self.k)
        item = top + starts(readings.layout, top.device)[:, None]
        if self.variant == "deephunter":
            item = item * self.k + torch.arange(top.shape[2], device=top.device)
        return torch.where(top >= 0, item, -1).flatten(1)


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
        top, is_shown = tops(readings, self.k)
        word = top
        if self.variant == "neural-coverage":
            word = top * self.k + torch.arange(top.shape[2], device=top.device)
        number = torch.arange(top.shape[1], device=top.device)[:, None]
        hashes = torch.where(top >= 0, mixed(mixed(word) + number), 0).sum(2)
        if self.by == "network":
            hashes, is_shown = hashes.sum(1, keepdim=True), is_shown.all(1, keepdim=True)
        return torch.where(is_shown, mixed(hashes) & torch.iinfo(torch.int64).max, -1)

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


def mixed(words: Tensor) -> Tensor:
    """Each 64-bit word well mixed: the same word for the same, another for another (SplitMix64's last steps)."""
    words = words + _signed(0x9E3779B97F4A7C15)
    words = (words ^ (words >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return words ^ (words >> 31 & (1 << 33) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64)
