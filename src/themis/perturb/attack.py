"""Attacks: disturbances that use the model's own gradient."""

from __future__ import annotations

from torch import Tensor

from themis.perturb.perturbation import Context, column
from themis.rng import Rng


def fgsm(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Fast gradient sign: one step of size theta (a share of the input range) up the loss."""
    return inputs + context.loss_gradient(inputs).sign_() * (column(theta, 0, inputs) * context.span)
