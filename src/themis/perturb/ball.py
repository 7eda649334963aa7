"""The ball around an input that an attack stays in, and the slope of its result in the radius."""

from __future__ import annotations

import torch
from torch import Tensor

from themis.compute.rng import Rng
from themis.perturb.context import Context
from themis.perturb.perturbation import column

TINY = 1e-30
"""The smallest number that a norm is divided by."""
MIN_RADIUS = 1e-6
"""Share of the input range below which rounding hides where in the ball an input lies."""


def read_radius(theta: Tensor, inputs: Tensor, context: Context) -> Tensor:
    """Theta as a radius in the unit of the inputs, shaped to multiply them."""
    return (column(theta, 0, inputs) * context.span).to(inputs.dtype)


def box(inputs: Tensor, radius: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """The lowest and highest values within the radius and the bounds."""
    low, high = context.bounds
    return (inputs - radius).clamp_(min=low), (inputs + radius).clamp_(max=high)


def random_point(inputs: Tensor, radius: Tensor, rng: Rng) -> Tensor:
    """A random point in the box of this radius; it may lie outside the bounds."""
    return torch.addcmul(inputs, rng.uniform(*inputs.shape[1:]).mul_(2).sub_(1).to(inputs.dtype), radius)


def with_slope(result: Tensor, inputs: Tensor, radius: Tensor, direction: Tensor, context: Context) -> Tensor:
    """`result` with its slope in the radius: a larger ball scales the change, and an empty one starts it along
    `direction`. That a larger ball may contain a different result is ignored."""
    if inputs.requires_grad:
        result = result + (inputs - inputs.detach())  # perturbations before the attack shift its result
    if not radius.requires_grad:
        return result
    size = radius.detach()
    is_small = size < MIN_RADIUS * context.span
    slope = torch.where(is_small, direction, (result - inputs).detach() / torch.where(is_small, 1, size))
    return result + (radius - size) * slope


def by_row(values: Tensor, inputs: Tensor) -> Tensor:
    """Values `[tests]` shaped to broadcast with `inputs`."""
    return values.reshape(-1, *(1,) * (inputs.ndim - 1))


def norm(values: Tensor) -> Tensor:
    """The Euclidean norm of each test's values, shaped to broadcast with them."""
    return by_row(values.flatten(1).norm(dim=1), values)


def unit(values: Tensor) -> Tensor:
    """Each test's values divided by their norm, however small it is; zeros stay zeros."""
    values = values / by_row(values.flatten(1).abs().amax(1), values).clamp_min(TINY)  # squares must not underflow
    return values / norm(values).clamp_min(TINY)
