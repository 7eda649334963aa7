"""Disturbed inputs that are too dissimilar from their seed, which are dropped, or hardly differ from it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from themis.errors import UsageError
from themis.measure.distance import WINDOW, ssim

SLIGHT = 0.02
"""A disturbance that changes inputs by less than this share of their contrast is slight."""


def change_of_contrast(inputs: Tensor, disturbed: Tensor) -> float:
    """The root mean square of the change, relative to the standard deviation of the inputs; of a table, by feature.

    It is infinite if all inputs are the same.
    """
    inputs, change = inputs.double(), (disturbed - inputs).double()
    if inputs.ndim == 2:
        contrast = inputs.std(0, correction=0)
        inputs, change, contrast = inputs[:, contrast > 0], change[:, contrast > 0], contrast[contrast > 0]
    else:
        contrast = inputs.std(correction=0)
    return float((change / contrast).square().mean().sqrt()) if contrast.sum() > 0 else math.inf


def check_similarity(min_ssim: float | None, shape: tuple[int, ...]) -> None:
    """Refuse `min_ssim` for inputs of a shape (of one input) that has no SSIM."""
    if min_ssim is not None and (len(shape) not in (3, 4) or min(shape[-2:]) < WINDOW):
        raise UsageError(
            f"min_ssim needs pictures [channels, height, width], or clips of them, of at least {WINDOW} pixels per "
            f"side, got inputs {list(shape)}: leave it out"
        )


def similar_first(
    inputs: Tensor, disturbed: Tensor, n: int, bounds: tuple[float, float], min_ssim: float
) -> tuple[Tensor, int]:
    """The order that puts tests similar to their seed first, and how many of the first `n` are similar."""
    with torch.no_grad():
        is_similar = ssim(inputs[:n], disturbed.detach()[:n], bounds) >= min_ssim
    order = torch.arange(len(inputs), device=inputs.device)
    order[:n] = torch.cat([is_similar.nonzero(), (~is_similar).nonzero()]).squeeze(1)
    return order, int(is_similar.sum())
