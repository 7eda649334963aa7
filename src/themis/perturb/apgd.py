"""Auto-PGD: projected gradient that sets its own step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from themis.compute.rng import Rng
from themis.perturb.ball import anywhere, box, by_row, follow, read_radius
from themis.perturb.context import Context

STEPS = 20
FIRST_STEP = 2.0
"""As a share of the radius."""
MOMENTUM = 0.25
"""The share of the last move in the next one."""
RISING = 0.75
"""The share of steps that must climb for their size to be kept."""
PASSES = 3 * STEPS + 1


def checkpoints(steps: int) -> list[int]:
    """The steps after which their size is looked at: at first every fifth of them all, then more and more often."""
    shares = [0.0, 0.22]
    while shares[-1] <= 1:
        shares.append(shares[-1] + max(shares[-1] - shares[-2] - 0.03, 0.06))
    return [math.ceil(each * steps - 1e-9) for each in shares[:-1]]


def apgd(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Auto-PGD: twenty steps with momentum up the loss in a box, halved and taken back where they climb too seldom.

    Croce and Hein 2020. What is kept is the largest loss seen, that of a fault before others.
    """
    radius = read_radius(theta, inputs, context)
    with torch.no_grad():
        low, high = box(inputs, radius, context)
        found = before = anywhere(inputs, radius, rng).clamp_(low, high)
        outputs, loss, gradient = context.climb_loss(found)
        best, best_loss, best_gradient = found, loss, gradient
        kept, kept_loss, kept_fault = found, loss, _is_fault(outputs, context)
        step = radius * FIRST_STEP
        n_rising, loss_at_check, is_halved = torch.zeros_like(loss), loss, torch.ones_like(loss, dtype=torch.bool)
        checks = checkpoints(STEPS)
        for k in range(1, STEPS + 1):
            ahead = torch.addcmul(found, gradient.sign(), step).clamp_(low, high)
            if k > 1:
                ahead = torch.lerp(ahead, 2 * found - before, MOMENTUM).clamp_(low, high)
            before, found, loss_before = found, ahead, loss
            if k < STEPS:
                outputs, loss, gradient = context.climb_loss(found)
            else:
                outputs = context.forward(found)
                loss = context.losses(outputs)

            is_fault = _is_fault(outputs, context)
            is_kept = (is_fault & ~kept_fault) | ((is_fault == kept_fault) & (loss > kept_loss))
            kept, kept_loss = torch.where(by_row(is_kept, inputs), found, kept), torch.where(is_kept, loss, kept_loss)
            kept_fault = kept_fault | is_fault

            is_best = loss > best_loss
            best, best_gradient = (
                torch.where(by_row(is_best, inputs), new, old)
                for new, old in ((found, best), (gradient, best_gradient))
            )
            best_loss = torch.where(is_best, loss, best_loss)
            n_rising += loss > loss_before
            if k in checks:
                is_seldom = n_rising < RISING * (k - checks[checks.index(k) - 1])
                is_stuck = ~is_halved & (best_loss == loss_at_check)
                is_halved = is_seldom | is_stuck
                n_rising, loss_at_check = torch.zeros_like(loss), best_loss
                back = by_row(is_halved, inputs)
                step = torch.where(back, step / 2, step)
                found, before = torch.where(back, best, found), torch.where(back, best, before)
                loss, gradient = torch.where(is_halved, best_loss, loss), torch.where(back, best_gradient, gradient)
    return follow(kept, inputs, radius, gradient.sign(), context)


def _is_fault(outputs: Tensor, context: Context) -> Tensor:
    """Which are faults, as far as the oracle's margin is known."""
    if context.margin is None:
        return torch.zeros(len(outputs), dtype=torch.bool, device=outputs.device)
    return context.margin(outputs) < 0
