"""Attacks: disturbances that use the model's own gradient."""

from __future__ import annotations

from torch import Tensor

from themis.perturb.context import Context
from themis.perturb.perturbation import Perturbation, Theta, column
from themis.rng import Rng


def fgsm(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Fast gradient sign: one step up the loss, of the same size for every value."""
    return inputs + context.loss_gradient(inputs).sign_() * (column(theta, 0, inputs) * context.span)


ATTACKS = (
    Perturbation(
        "fgsm",
        (Theta("radius", 0.0, 8 / 255, unit="share of the input range", limits=(0, 1)),),
        fgsm,
        is_random=False,
        theta_is_magnitude=True,
        passes=3,
        needs_gradient=True,
        family="attack",
    ),
)
