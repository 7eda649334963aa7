"""Noise."""

from __future__ import annotations

from torch import Tensor

from themis.perturb.perturbation import Context, column
from themis.rng import Rng


def gaussian(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Independent normal noise; theta is its standard deviation, as a share of the input range."""
    return inputs + rng.normal(*inputs.shape[1:]) * (column(theta, 0, inputs) * context.span)
