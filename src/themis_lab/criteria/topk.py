"""Top-k neuron coverage and top-k neuron patterns (DeepGauge)."""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from themis.criteria import Laws
from themis.errors import UsageError
from themis_lab.criteria.covering import Covering, add_keys, check_k, first_hits, has_keys, mark_tests
from themis_lab.criteria.criterion import Criterion
from themis_lab.criteria.options import CriterionOptions
from themis_lab.criteria.readings import Layout, Readings

MAX_K = 1 << 20
BLOCK_NEURONS = 32
"""Neurons of a wide layer whose maximum is taken first."""


class TKNC(Covering):
    """Neurons that were among the `k` most active ones of their layer on some test, over all neurons.

    Of equal values, the neuron with the lower index ranks first. `deephunter` counts pairs of a neuron and its rank,
    `k` per neuron; a layer narrower than `k` has fewer ranks to hit.
    """

    name = "tknc"
    learns = False
    variants: ClassVar = {
        "deepgauge": "DeepGauge (ASE 2018), section 3.2.2; the same in NeuraL-Coverage, coverage.py: TKNC",
        "deephunter": "DeepHunter (ISSTA 2019), coverage.py: bknc_update_coverage",
    }

    def __init__(self, k: int = 10, **options: Unpack[CriterionOptions]) -> None:
        check_k(self.name, k, MAX_K)
        super().__init__(**options)
        self.k = k

    def n_items(self) -> int:
        n = 0 if self.layout is None else self.layout.n_neurons
        return n * self.k if self.variant == "deephunter" else n

    def items(self, readings: Readings) -> Tensor:
        top, _ = top_neurons(readings, self.k)
        item = top + layer_starts(readings.layout, top.device)[:, None]
        if self.variant == "deephunter":
            item = item * self.k + torch.arange(top.shape[2], device=top.device)
        return torch.where(top >= 0, item, -1).flatten(1)


class TKNP(Criterion):
    """Distinct patterns of the `k` most active neurons that tests have shown: a count.

    by: `layer` counts the patterns of each layer, `network` those of all layers together (the original's default).
    `neural-coverage` distinguishes the same neurons in a different order; `deepgauge` does not. A test with a
    non-finite value shows no pattern of that layer. Patterns are kept as 63-bit hashes: the chance that two of n
    patterns collide is n^2 / 2^64, five in a million for ten million patterns.
    """

    name = "tknp"
    laws = Laws(bounded=False, monotone=True, order_free=True, mergeable=True)
    learns = False
    variants: ClassVar = {
        "neural-coverage": "github.com/Yuanyuan-Yuan/NeuraL-Coverage, coverage.py: TKNP",
        "deepgauge": "DeepGauge (ASE 2018), section 3.2.2: sets of neurons",
    }

    def __init__(self, k: int = 50, by: str = "layer", **options: Unpack[CriterionOptions]) -> None:
        check_k(self.name, k, MAX_K)
        if by not in ("layer", "network"):
            raise UsageError(f"tknp: by must be 'layer' or 'network', got {by!r}")
        super().__init__(**options)
        self.k, self.by = k, by

    def score(self) -> float:
        return float(len(self.state["patterns"])) if self.state else 0.0

    def patterns(self, readings: Readings) -> Tensor:
        """The hash of each pattern that each test shows, int64 `[tests, layers]` or `[tests, 1]`; -1 for none."""
        top, is_shown = top_neurons(readings, self.k)
        hashes = sum_hashes(top, self.k if self.variant == "neural-coverage" else 0)
        if self.by == "network":
            hashes, is_shown = hashes.sum(1, keepdim=True), is_shown.all(1, keepdim=True)
        return torch.where(is_shown, mix_bits(hashes) & torch.iinfo(torch.int64).max, -1)

    def _initial_state(self, readings: Readings) -> dict[str, Tensor]:
        return {"patterns": torch.zeros(0, dtype=torch.int64, device=readings.values.device)}

    def _update(self, readings: Readings) -> Tensor:
        patterns, seen = self.patterns(readings), self.state["patterns"]
        fresh, first = first_hits(patterns, (patterns >= 0) & ~has_keys(seen, patterns))
        self.state["patterns"] = add_keys(seen, fresh)
        return mark_tests(first, len(readings))

    def _merge_state(self, other: dict[str, Tensor]) -> dict[str, Tensor]:
        mine, theirs = self.state["patterns"], other["patterns"]
        return {"patterns": add_keys(mine, theirs[~has_keys(mine, theirs)])}


def sum_hashes(top: Tensor, factor: int) -> Tensor:
    """Hashes of the patterns `top [tests, layers, ranks]`, -1 for none, int64 `[tests, layers]`, different by layer.

    A pattern is a list of neurons if `factor` is at least the number of ranks, and a set if it is 0.
    """
    word = top * factor + torch.arange(top.shape[2], device=top.device) if factor else top
    number = torch.arange(top.shape[1], device=top.device)[:, None]
    return torch.where(top >= 0, mix_bits(mix_bits(word) + number), 0).sum(2)


def mix_bits(words: Tensor) -> Tensor:
    """A bijective hash of 64-bit words (the finalizer of SplitMix64)."""
    words = words + _signed(0x9E3779B97F4A7C15)
    words = (words ^ (words >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return words ^ (words >> 31 & (1 << 33) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64)


def top_neurons(readings: Readings, k: int) -> tuple[Tensor, Tensor]:
    """The neurons of the `k` largest values of each layer on each test, the largest first, as indices in their layer.

    int64 `[tests, layers, k]`, -1 in place of a value that is not finite or does not exist; k is at most the width of
    the widest layer. Also returns whether all values of a layer are finite, bool `[tests, layers]`. Of equal values,
    the neuron with the lower index comes first on every device.
    """
    values, layout = readings.values, readings.layout
    k = min(k, max(layout.widths))
    if values.device.type == "cuda" and values.dtype == torch.float32:
        from themis_lab.criteria import kernels_cuda

        if kernels_cuda.fits_top_neurons(len(values), layout, k) and kernels_cuda.can_top_neurons(values.device):
            return kernels_cuda.top_neurons(values.contiguous(), layout, k)
    tops, is_finite, start = [], [], 0
    for width, layers in groupby(layout.widths):
        n = len(list(layers))
        part = values[:, start : start + n * width].reshape(-1, n, width)
        top = most_active(part, k)
        tops.append(torch.nn.functional.pad(top, (0, k - top.shape[2]), value=-1))
        is_finite.append((part.amin(2) > -torch.inf) & (part.amax(2) < torch.inf))
        start += n * width
    return torch.cat(tops, 1), torch.cat(is_finite, 1)


@lru_cache(maxsize=8)
def layer_starts(layout: Layout, device: torch.device) -> Tensor:
    """The first column of each layer, int64 `[layers]`; cached because a copy to a GPU waits for all work there."""
    return torch.tensor([columns.start for columns in layout.slices().values()], device=device)


def most_active(values: Tensor, k: int) -> Tensor:
    """The neurons of the `k` largest of `values [..., neurons]`, int64 `[..., min(k, neurons)]`, the largest first.

    -1 in place of a value that is not finite.
    """
    n = values.shape[-1]
    if n < 4 * BLOCK_NEURONS * k:
        return _most_active(values.nan_to_num(-torch.inf, -torch.inf, -torch.inf), k)
    # The k largest values lie in the k blocks with the largest maxima, or in the remainder at the end.
    n_in_blocks = n - n % BLOCK_NEURONS
    blocks = values[..., :n_in_blocks].reshape(*values.shape[:-1], -1, BLOCK_NEURONS)
    peaks = blocks.amax(-1)
    if not bool((peaks < torch.inf).all()):  # a NaN hides the other values of its block
        blocks = blocks.nan_to_num(-torch.inf, -torch.inf, -torch.inf)
        peaks = blocks.amax(-1)
    chosen = _most_active(peaks, k).sort(-1).values
    candidates = blocks.gather(-2, chosen.clamp(min=0)[..., None].expand(*chosen.shape, BLOCK_NEURONS))
    candidates = candidates.masked_fill((chosen < 0)[..., None], -torch.inf).flatten(-2)
    remainder = values[..., n_in_blocks:].nan_to_num(-torch.inf, -torch.inf, -torch.inf)
    top = _most_active(torch.cat([candidates, remainder], -1), k)
    place = chosen[..., None] * BLOCK_NEURONS + torch.arange(BLOCK_NEURONS, device=values.device)
    after = torch.arange(n_in_blocks, n, device=values.device).expand(*values.shape[:-1], n - n_in_blocks)
    place = torch.cat([place.flatten(-2), after], -1)
    return torch.where(top >= 0, place.gather(-1, top.clamp(min=0)), -1)


def _most_active(values: Tensor, k: int) -> Tensor:
    """`most_active` of values in which -inf stands for those that are not finite."""
    n = values.shape[-1]
    k = min(k, n)
    top, at = values.topk(k)
    # topk does not say which of the values equal to the last one it takes: take the first ones instead.
    last = top[..., -1:]
    countdown = torch.arange(n, 0, -1, dtype=torch.int32, device=values.device)
    tied = n - torch.where(values == last, countdown, 0).topk(k).values.long()  # n stands for none
    at = torch.where(top > last, at, n)
    at = torch.cat([at, tied], -1).sort(-1).values
    candidates = values.gather(-1, at.clamp(max=n - 1)).masked_fill(at == n, -torch.inf)
    candidates, order = torch.sort(candidates, dim=-1, descending=True, stable=True)
    return torch.where(candidates > -torch.inf, at.gather(-1, order), -1)[..., :k]
