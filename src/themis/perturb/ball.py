"""The ball around an input that an attack stays in, and how its find follows the radius."""

from __future__ import annotations

import torch
from torch import Tensor

from themis.compute.rng import Rng
from themis.perturb.context import Context
from themis.perturb.perturbation import column

TINY = 1e-30
"""What a norm is divided by at least."""
LEAST_RADIUS = 1e-6
"""Share of the input range under which rounding hides where in the ball an input lies."""


def read_radius(theta: Tensor, inputs: Tensor, context: Context) -> Tensor:
    """Theta as a radius in the inputs' unit, shaped to multiply them."""
    return (column(theta, 0, inputs) * context.span).to(inputs.dtype)


def box(inputs: Tensor, radius: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """The lowest and highest values within the radius and the bounds."""
    low, high = context.bounds
    return (inputs - radius).clamp_(min=low), (inputs + radius).clamp_(max=high)


def anywhere(inputs: Tensor, radius: Tensor, rng: Rng) -> Tensor:
    """A random place in the box of this radius, bounds aside."""
    return torch.addcmul(inputs, rng.uniform(*inputs.shape[1:]).mul_(2).sub_(1).to(inputs.dtype), radius)


def follow(found: Tensor, inputs: Tensor, radius: Tensor, direction: Tensor, context: Context) -> Tensor:
    """`found`, with its slope in the radius: a larger ball stretches the change, and one of no size begins it along
    `direction`. That a larger ball may hold another find is left out."""
    if inputs.requires_grad:
        found = found + (inputs - inputs.detach())  # what was done before the attack moves what it finds
    if not radius.requires_grad:
        return found
    size = radius.detach()
    is_small = size < LEAST_RADIUS * context.span
    slope = torch.where(is_small, direction, (found - inputs).detach() / torch.where(is_small, 1, size))
    return found + (radius - size) * slope


def by_row(values: Tensor, inputs: Tensor) -> Tensor:
    """Values `[tests]` shaped to go with `inputs`."""
    return values.reshape(-1, *(1,) * (inputs.ndim - 1))


def norm(values: Tensor) -> Tensor:
    """The Euclidean norm of each test's values, shaped to go with them."""
    return by_row(values.flatten(1).norm(dim=1), values)


def unit(values: Tensor) -> Tensor:
    """Each test's values over their norm, however small; zeros stay zeros."""
    values = values / by_row(values.flatten(1).abs().amax(1), values).clamp_min(TINY)  # squares must not underflow
    return values / norm(values).clamp_min(TINY)
