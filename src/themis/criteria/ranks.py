"""The most active neurons of each layer: of equal ones the first comes first, on every device."""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor

from themis.criteria.readings import Layout, Readings

BLOCK = 32
"""Neurons of a wide layer whose maximum is taken first."""


def tops(readings: Readings, k: int) -> tuple[Tensor, Tensor]:
    """The neurons of the `k` largest values of each layer on each test, the largest first, counted in their layer.

    int64 `[tests, layers, k]`, -1 in place of a value that is not finite or not there; k is at most the widest layer's
    width. And whether all values of a layer are finite, bool `[tests, layers]`.
    """
    values, layout = readings.values, readings.layout
    k = min(k, max(layout.widths))
    if values.device.type == "cuda" and values.dtype == torch.float32:
        from themis.criteria.ranks_cuda import fits, tops_on

        if fits(len(values), layout, k) and (found := tops_on(values.device)) is not None:
            return found(values.contiguous(), layout, k)
    every, is_finite, start = [], [], 0
    for width, run in groupby(layout.widths):
        n = len(list(run))
        part = values[:, start : start + n * width].reshape(-1, n, width)
        top = most_active(part, k)
        every.append(torch.nn.functional.pad(top, (0, k - top.shape[2]), value=-1))
        is_finite.append((part.amin(2) > -torch.inf) & (part.amax(2) < torch.inf))
        start += n * width
    return torch.cat(every, 1), torch.cat(is_finite, 1)


@lru_cache(maxsize=8)
def starts(layout: Layout, device: torch.device) -> Tensor:
    """Where each layer's neurons start, int64 `[layers]`; kept, for sending it to a GPU waits for all work there."""
    return torch.tensor([at.start for at in layout.slices().values()], device=device)


def most_active(values: Tensor, k: int) -> Tensor:
    """The neurons of the `k` largest of `values [..., neurons]`, int64 `[..., min(k, neurons)]`, the largest first.

    -1 in place of a value that is not finite.
    """
    n = values.shape[-1]
    if n < 4 * BLOCK * k:
        return _most_active(values.nan_to_num(-torch.inf, -torch.inf, -torch.inf), k)
    # The k largest lie in the k blocks with the largest maxima, and in what is left over at the end.
    whole = n - n % BLOCK
    blocks = values[..., :whole].reshape(*values.shape[:-1], -1, BLOCK)
    peaks = blocks.amax(-1)
    if not bool((peaks < torch.inf).all()):  # a NaN hides the others of its block
        blocks = blocks.nan_to_num(-torch.inf, -torch.inf, -torch.inf)
        peaks = blocks.amax(-1)
    chosen = _most_active(peaks, k).sort(-1).values
    near = blocks.gather(-2, chosen.clamp(min=0)[..., None].expand(*chosen.shape, BLOCK))
    near = near.masked_fill((chosen < 0)[..., None], -torch.inf).flatten(-2)
    rest = values[..., whole:].nan_to_num(-torch.inf, -torch.inf, -torch.inf)
    found = _most_active(torch.cat([near, rest], -1), k)
    place = chosen[..., None] * BLOCK + torch.arange(BLOCK, device=values.device)
    after = torch.arange(whole, n, device=values.device).expand(*values.shape[:-1], n - whole)
    place = torch.cat([place.flatten(-2), after], -1)
    return torch.where(found >= 0, place.gather(-1, found.clamp(min=0)), -1)


def _most_active(values: Tensor, k: int) -> Tensor:
    """`most_active` of values of which those that are not finite are -inf."""
    n = values.shape[-1]
    k = min(k, n)
    top, at = values.topk(k)
    # Which of those equal to the last one were taken is anyone's guess: take the first of them instead.
    least = top[..., -1:]
    countdown = torch.arange(n, 0, -1, dtype=torch.int32, device=values.device)
    tied = n - torch.where(values == least, countdown, 0).topk(k).values.long()  # n is none
    at = torch.where(top > least, at, n)
    at = torch.cat([at, tied], -1).sort(-1).values
    found = values.gather(-1, at.clamp(max=n - 1)).masked_fill(at == n, -torch.inf)
    found, order = torch.sort(found, dim=-1, descending=True, stable=True)
    return torch.where(found > -torch.inf, at.gather(-1, order), -1)[..., :k]
