"""Auto-PGD: projected gradient ascent that adapts its own step size."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from themis.compute.rng import Rng
from themis.perturb.ball import box, by_row, random_point, read_radius, with_slope
from themis.perturb.context import Context

STEPS = 20
FIRST_STEP = 2.0
"""As a multiple of the radius."""
MOMENTUM = 0.25
"""The share of the last step in the next one."""
RISING = 0.75
"""The share of steps that must raise the loss for the step size to be kept."""
PASSES = 3 * STEPS + 1


def checkpoints(steps: int) -> list[int]:
    """The steps after which the step size is checked: at first after a fifth of all steps, then more and more often."""
    shares = [0.0, 0.22]
    while shares[-1] <= 1:
        shares.append(shares[-1] + max(shares[-1] - shares[-2] - 0.03, 0.06))
    return [math.ceil(share * steps - 1e-9) for share in shares[:-1]]


def apgd(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Auto-PGD: twenty steps of gradient ascent with momentum in a box, halved and restarted when the loss stalls.

    Croce and Hein 2020. It keeps the input with the largest loss, and prefers faults to inputs that are none.
    """
    radius = read_radius(theta, inputs, context)
    with torch.no_grad():
        low, high = box(inputs, radius, context)
        current = before = random_point(inputs, radius, rng).clamp_(low, high)
        outputs, loss, gradient = context.climb_loss(current)
        best, best_loss, best_gradient = current, loss, gradient
        kept, kept_loss, kept_fault = current, loss, _is_fault(outputs, context)
        step = radius * FIRST_STEP
        n_rising, loss_at_check, is_halved = torch.zeros_like(loss), loss, torch.ones_like(loss, dtype=torch.bool)
        checks = checkpoints(STEPS)
        for k in range(1, STEPS + 1):
            ahead = torch.addcmul(current, gradient.sign(), step).clamp_(low, high)
            if k > 1:
                ahead = torch.lerp(ahead, 2 * current - before, MOMENTUM).clamp_(low, high)
            before, current, loss_before = current, ahead, loss
            if k < STEPS:
                outputs, loss, gradient = context.climb_loss(current)
            else:
                outputs = context.forward(current)
                loss = context.losses(outputs)

            is_fault = _is_fault(outputs, context)
            is_kept = (is_fault & ~kept_fault) | ((is_fault == kept_fault) & (loss > kept_loss))
            kept, kept_loss = torch.where(by_row(is_kept, inputs), current, kept), torch.where(is_kept, loss, kept_loss)
            kept_fault = kept_fault | is_fault

            is_best = loss > best_loss
            best, best_gradient = (
                torch.where(by_row(is_best, inputs), new, old)
                for new, old in ((current, best), (gradient, best_gradient))
            )
            best_loss = torch.where(is_best, loss, best_loss)
            n_rising += loss > loss_before
            if k in checks:
                is_slow = n_rising < RISING * (k - checks[checks.index(k) - 1])
                is_stuck = ~is_halved & (best_loss == loss_at_check)
                is_halved = is_slow | is_stuck
                n_rising, loss_at_check = torch.zeros_like(loss), best_loss
                back = by_row(is_halved, inputs)
                step = torch.where(back, step / 2, step)
                current, before = torch.where(back, best, current), torch.where(back, best, before)
                loss, gradient = torch.where(is_halved, best_loss, loss), torch.where(back, best_gradient, gradient)
    return with_slope(kept, inputs, radius, gradient.sign(), context)


def _is_fault(outputs: Tensor, context: Context) -> Tensor:
    """Which outputs are faults; all false if the oracle's margin is not known."""
    if context.margin is None:
        return torch.zeros(len(outputs), dtype=torch.bool, device=outputs.device)
    return context.margin(outputs) < 0
