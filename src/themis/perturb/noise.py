"""Noise."""

from __future__ import annotations

from torch import Tensor

from themis.perturb.context import Context
from themis.perturb.perturbation import Perturbation, Theta, column
from themis.rng import Rng


def gaussian(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Independent normal noise on every value."""
    return inputs + rng.normal(*inputs.shape[1:]) * (column(theta, 0, inputs) * context.span)


NOISE = (
    Perturbation(
        "gaussian",
        (Theta("sigma", 0.0, 0.1, unit="share of the input range", limits=(0, 10)),),
        gaussian,
        theta_is_magnitude=True,
        family="noise",
    ),
)
