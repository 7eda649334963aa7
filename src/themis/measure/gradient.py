"""Gradients in theta: by a backward pass, or by differences where the target has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from themis.perturb import Theta

DIFFERENCE = 0.01
"""Step of a finite difference in theta, as a share of its range."""


def by_backward(height: Tensor | float, theta: Tensor) -> Tensor:
    """The gradient of `height`; nothing where it does not depend on theta."""
    if not isinstance(height, Tensor) or not height.requires_grad:
        return torch.zeros_like(theta)
    found = torch.autograd.grad(height, theta, allow_unused=True)[0]  # None where nothing depends on theta
    return torch.zeros_like(theta) if found is None else found


def by_differences(theta: Tensor, ranges: Sequence[Theta], n: int, height: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient of the first `n` tests by central differences inside the bounds of theta."""
    gradient = torch.zeros_like(theta)
    for k, bounds in enumerate(ranges):
        step = DIFFERENCE * (bounds.high - bounds.low)
        ends, heights = [], []
        for way in (-step, step):
            moved = theta.clone()
            moved[:, k] = (theta[:, k] + way).clamp(bounds.low, bounds.high)
            heights.append(height(moved))
            ends.append(moved[:n, k])
        gradient[:n, k] = (heights[1] - heights[0]) / (ends[1] - ends[0])
    return gradient[:n]
