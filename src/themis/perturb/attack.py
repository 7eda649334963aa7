"""Attacks: disturbances that use the model's own gradient."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from themis.compute.rng import Rng
from themis.perturb import apgd as auto
from themis.perturb import carlini
from themis.perturb.ball import TINY, anywhere, box, by_row, follow, norm, read_radius, unit
from themis.perturb.context import Context
from themis.perturb.perturbation import Perturbation, Theta, column

STEPS = 10
STEP = 0.25
"""As a share of the radius: ten steps cross the ball from one side to the other, and a bit more."""


def fgsm(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Fast gradient sign: one step up the loss, of the same size for every value.

    Where the answer is a number, its loss does not say to which side it breaks first: both are tried, for two passes
    more.
    """
    radius = column(theta, 0, inputs) * context.span
    direction = context.loss_gradient(inputs).sign_()
    if context.reference is not None and context.reference.is_floating_point():
        with torch.no_grad():
            sides = [(inputs + direction * way).clamp_(*context.bounds) for way in (radius, -radius)]
            up, down = (context.losses(context.forward(each)) for each in sides)
            direction = torch.where(by_row(down > up, inputs), -direction, direction)
    return inputs + direction * radius


def pgd(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Projected gradient: ten steps up the loss, of the same size for every value, from a random place in a box."""
    radius = read_radius(theta, inputs, context)
    with torch.no_grad():
        low, high = box(inputs, radius, context)
        found = anywhere(inputs, radius, rng).clamp_(low, high)
        for _ in range(STEPS):
            direction = context.loss_gradient(found).sign_()
            found = torch.addcmul(found, direction, radius, value=STEP).clamp_(low, high)
    return follow(found, inputs, radius, direction, context)


def pgd_l2(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Projected gradient in the Euclidean norm: ten steps up the loss, from a random place in a ball.

    The radius is the norm of the whole change in units of the input range, as the literature gives it: 0.5 on a picture
    of CIFAR-10 is a root mean square of 0.009.
    """
    radius = read_radius(theta, inputs, context)
    with torch.no_grad():
        away = unit(rng.normal(*inputs.shape[1:]).to(inputs.dtype))
        share = rng.uniform(1).to(inputs.dtype) ** (1 / math.prod(inputs.shape[1:]))  # even over the ball
        found = torch.addcmul(inputs, away, radius * by_row(share, inputs)).clamp_(*context.bounds)
        for _ in range(STEPS):
            direction = unit(context.loss_gradient(found))
            change = torch.addcmul(found - inputs, direction, radius, value=STEP)
            change *= (radius / norm(change).clamp_min(TINY)).clamp_max(1)
            found = change.add_(inputs).clamp_(*context.bounds)  # which takes it nearer to the input, if anywhere
    return follow(found, inputs, radius, direction, context)


SHARE = "share of the input range"

_attack = partial(Perturbation, theta_is_magnitude=True, needs_gradient=True, is_smooth=False, family="attack")

ATTACKS = (
    _attack(
        "fgsm",
        (Theta("radius", 0.0, 8 / 255, unit=SHARE, limits=(0, 1)),),
        fgsm,
        is_random=False,
        passes=3,
        is_smooth=True,
    ),
    _attack(
        "pgd",
        (Theta("radius", 0.0, 8 / 255, unit=SHARE, limits=(0, 1)),),
        pgd,
        passes=3 * STEPS,
    ),
    _attack(
        "pgd_l2",
        (Theta("radius", 0.0, 1.0, unit="Euclidean norm in input ranges", limits=(0, math.inf)),),
        pgd_l2,
        passes=3 * STEPS,
    ),
    _attack(
        "apgd",
        (Theta("radius", 0.0, 8 / 255, unit=SHARE, limits=(0, 1)),),
        auto.apgd,
        passes=auto.PASSES,
    ),
    _attack(
        "cw",
        (Theta("confidence", 0.0, 5.0, unit="the oracle's margin, as a difference of scores", limits=(0, math.inf)),),
        carlini.cw,
        passes=carlini.PASSES,
        has_identity=False,
    ),
)
