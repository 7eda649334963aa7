"""Attacks: perturbations that use the gradient of the model."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial, update_wrapper

import torch
from torch import Tensor

from themis.compute.rng import Rng
from themis.perturb import apgd as auto
from themis.perturb import carlini
from themis.perturb.ball import TINY, box, by_row, norm, random_point, read_radius, unit, with_slope
from themis.perturb.context import Context
from themis.perturb.perturbation import Perturbation, Theta, column

STEPS = 10
STEP = 0.25
"""As a share of the radius: ten steps are enough to cross the ball from one side to the other."""
WAY, LONGEST_STEP = 1.8, 1.25
"""What fewer steps cover together, and one step at most, as shares of the radius."""


def fgsm(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Fast gradient sign: one step up the loss, of the same size for every value.

    If the answer is a number, its loss does not say on which side it fails first: both are tried, for two more passes.
    """
    radius = column(theta, 0, inputs) * context.span
    direction = context.loss_gradient(inputs).sign_()
    if context.reference is not None and context.reference.is_floating_point():
        with torch.no_grad():
            sides = [(inputs + direction * step).clamp_(*context.bounds) for step in (radius, -radius)]
            up, down = (context.losses(context.forward(side)) for side in sides)
            direction = torch.where(by_row(down > up, inputs), -direction, direction)
    return inputs + direction * radius


def pgd(inputs: Tensor, theta: Tensor, rng: Rng, context: Context, steps: int = STEPS) -> Tensor:
    """Projected gradient: ten steps up the loss, of the same size for every value, from a random point in a box."""
    radius, step = read_radius(theta, inputs, context), _step(steps)
    with torch.no_grad():
        low, high = box(inputs, radius, context)
        current = random_point(inputs, radius, rng).clamp_(low, high)
        for _ in range(steps):
            direction = context.loss_gradient(current).sign_()
            current = torch.addcmul(current, direction, radius, value=step).clamp_(low, high)
    return with_slope(current, inputs, radius, direction, context)


def pgd_l2(inputs: Tensor, theta: Tensor, rng: Rng, context: Context, steps: int = STEPS) -> Tensor:
    """Projected gradient in the Euclidean norm: ten steps up the loss, from a random point in a ball.

    The radius is the norm of the whole change in units of the input range, as in the literature: 0.5 on a CIFAR-10
    picture is a root mean square of 0.009.
    """
    radius, step = read_radius(theta, inputs, context), _step(steps)
    with torch.no_grad():
        outward = unit(rng.normal(*inputs.shape[1:]).to(inputs.dtype))
        power = 1 / math.prod(inputs.shape[1:])
        share = (rng.uniform(1).to(inputs.dtype).log() * power).exp()  # uniform in the ball; pow rounds by position
        current = torch.addcmul(inputs, outward, radius * by_row(share, inputs)).clamp_(*context.bounds)
        for _ in range(steps):
            direction = unit(context.loss_gradient(current))
            change = torch.addcmul(current - inputs, direction, radius, value=step)
            change *= (radius / norm(change).clamp_min(TINY)).clamp_max(1)
            current = change.add_(inputs).clamp_(*context.bounds)  # clipping can only bring it closer to the input
    return with_slope(current, inputs, radius, direction, context)


def _step(steps: int) -> float:
    """The size of each of so many steps, as a share of the radius."""
    return min(LONGEST_STEP, max(STEP, WAY / steps))


def in_steps(perturbation: Perturbation, steps: int) -> Perturbation:
    """The same perturbation with projected gradients of at most so many steps; those without any are left as they are.

    `apgd`, which needs many steps to adapt their size, becomes `pgd`.
    """
    brief = next((brief for full, brief in BRIEF if perturbation.apply is full), None)
    if brief is None or 3 * steps >= perturbation.passes:
        return perturbation
    return replace(perturbation, apply=update_wrapper(partial(brief, steps=steps), brief), passes=3 * steps)


BRIEF = ((pgd, pgd), (pgd_l2, pgd_l2), (auto.apgd, pgd))
"""Attacks of many steps, each with one that can do with few."""
SHARE = "share of the input range"

_attack = partial(
    Perturbation, theta_is_magnitude=True, needs_gradient=True, is_smooth=False, family="attack", moves=False
)

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
