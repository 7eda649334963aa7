"""Gradients in theta: by a backward pass, or by finite differences if there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from themis.perturb import Theta

DIFFERENCE = 0.01
"""Step of a finite difference in theta, as a share of its range."""


def by_backward(value: Tensor | float, theta: Tensor) -> Tensor:
    """The gradient of `value` in `theta`; zero if it does not depend on theta."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return torch.zeros_like(theta)
    gradient = torch.autograd.grad(value, theta, allow_unused=True)[0]
    return torch.zeros_like(theta) if gradient is None else gradient


def by_differences(theta: Tensor, ranges: Sequence[Theta], n: int, value_at: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient of the first `n` tests by central differences inside the bounds of theta."""
    gradient = torch.zeros_like(theta)
    for k, bounds in enumerate(ranges):
        step = DIFFERENCE * (bounds.high - bounds.low)
        ends, values = [], []
        for direction in (-step, step):
            moved = theta.clone()
            moved[:, k] = (theta[:, k] + direction).clamp(bounds.low, bounds.high)
            values.append(value_at(moved))
            ends.append(moved[:n, k])
        gradient[:n, k] = (values[1] - values[0]) / (ends[1] - ends[0])
    return gradient[:n]
