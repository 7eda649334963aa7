"""A set of 64-bit keys that grows: kept sorted in one tensor."""

from __future__ import annotations

import torch
from torch import Tensor


def known(keys: Tensor, asked: Tensor) -> Tensor:
    """Which of `asked` are in the sorted `keys`, bool of its shape."""
    if not len(keys):
        return torch.zeros_like(asked, dtype=torch.bool)
    place = torch.searchsorted(keys, asked.contiguous()).clamp(max=len(keys) - 1)
    return keys[place] == asked


def joined(keys: Tensor, fresh: Tensor) -> Tensor:
    """Both, sorted; both are sorted, and have nothing in common."""
    place = torch.searchsorted(keys, fresh) + torch.arange(len(fresh), device=fresh.device)
    every = torch.empty(len(keys) + len(fresh), dtype=torch.int64, device=keys.device)
    is_old = torch.ones_like(every, dtype=torch.bool)
    is_old[place] = False
    every[place] = fresh
    every[is_old] = keys
    return every
