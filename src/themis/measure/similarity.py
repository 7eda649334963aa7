"""Tests that stopped being the same picture: set aside before the model sees them."""

from __future__ import annotations

import torch
from torch import Tensor

from themis.errors import UsageError
from themis.measure.distance import WINDOW, ssim
from themis.oracle.oracle import KEPT


def check_similarity(min_ssim: float | None, shape: tuple[int, ...]) -> None:
    """Refuse `min_ssim` for inputs, one of them of this shape, that have no SSIM."""
    if min_ssim is not None and (len(shape) != 3 or min(shape[1:]) < WINDOW):
        raise UsageError(
            f"min_ssim needs pictures [channels, height, width] of {WINDOW} pixels or more, got inputs {list(shape)}: "
            "leave it out"
        )


def recognisable_first(
    inputs: Tensor, disturbed: Tensor, n: int, bounds: tuple[float, float], min_ssim: float
) -> tuple[Tensor, int]:
    """The order that brings tests still like their seed to the front, and how many there are among the first `n`."""
    with torch.no_grad():
        is_kept = ssim(inputs[:n], disturbed.detach()[:n], bounds) >= min_ssim
    order = torch.arange(len(inputs), device=inputs.device)
    order[:n] = torch.cat([is_kept.nonzero(), (~is_kept).nonzero()]).squeeze(1)
    return order, int(is_kept.sum())


def spread(columns: dict[str, Tensor], kept: Tensor, n: int) -> dict[str, Tensor]:
    """What came of the `kept` ones among `n` tests, as columns over all of them; the others are no fault."""
    dropped = {"is_fault": 0.0, "outcome": KEPT, "margin": torch.nan, "gradient": 0.0}
    whole = {}
    for name, column in columns.items():
        whole[name] = column.new_full((n, *column.shape[1:]), dropped[name])
        whole[name][kept] = column
    is_dropped = torch.ones(n, dtype=torch.bool, device=kept.device)
    is_dropped[kept] = False
    return {**whole, "is_dropped": is_dropped}
