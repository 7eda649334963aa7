"""The attack of Carlini and Wagner: the smallest change that causes a fault."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from themis.compute.rng import Rng
from themis.errors import UsageError
from themis.perturb.ball import by_row, norm, unit
from themis.perturb.context import Context

SEARCHES, STEPS = 4, 25
"""Weights that are tried, and steps with each of them."""
PASSES = 3 * (1 + SEARCHES * STEPS)
JITTER = 1e-4
"""Noise of the start, as a share of the input range: at the clean answer, the margin of a number is flat."""
WEIGHT, RAISED = 2.0, 10.0
"""The first weight relative to what a linear model needs; and its growth factor while it is too low."""
RATE, LAST_RATE, MAX_RATE = 0.8, 0.05, 0.1
"""The length of a step relative to the distance of a linear model's fault; the share of it that remains at the last
step; and the largest step of one value, as a share of the input range."""
MEAN, SQUARE = 0.6, 0.999
"""The decay rates of Adam's running mean and square of the gradient."""
SLACK = 1e-4
"""How far beyond the confidence a fault must lie, as a share of the clean margin: kernels may round differently."""
TINY = 1e-12


def cw(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Carlini and Wagner: the smallest change in the Euclidean norm that causes a fault with this confidence.

    Adam, inside the bounds, minimises `|change|^2 + weight * margin`, where the margin counts until there is a fault;
    the weight is found by bisection. Confidence has the unit of the margin: a difference of scores, or of probabilities
    if the model returns these; in a regression, that of the answer. If it cannot be reached, the input with the
    smallest margin is kept.
    """
    confidence = theta[:, 0].detach().to(inputs.dtype)
    low, high = context.bounds
    with torch.no_grad():
        start = torch.add(inputs, rng.normal(*inputs.shape[1:]).to(inputs.dtype), alpha=JITTER * context.span)
        first = kept = _evaluate(start.clamp_(low, high), inputs, context)
        aim = -confidence - SLACK * first.margin.abs()
        weight, rate = _scale(first, confidence)
        too_low, enough = torch.zeros_like(weight), torch.full_like(weight, torch.inf)
        for _ in range(SEARCHES):
            now, has_fault = first, first.margin < aim
            mean, square = torch.zeros_like(inputs), torch.zeros_like(inputs)
            for k in range(1, STEPS + 1):
                pull = by_row(torch.where(now.margin < aim, 0, weight), inputs)
                gradient = torch.addcmul(2 * now.change, now.slope, pull)
                mean.lerp_(gradient, 1 - MEAN)
                square.mul_(SQUARE).addcmul_(gradient, gradient, value=1 - SQUARE)
                spread = (square / (1 - SQUARE**k)).sqrt_().clamp_min_(TINY)
                share = (1 - (1 - LAST_RATE) * (k - 1) / STEPS) / (1 - MEAN**k)
                place = torch.addcmul(now.inputs, mean / spread, rate, value=-share * context.span)
                now = _evaluate(place.clamp_(low, high), inputs, context)
                kept = _better(now, kept, aim)
                has_fault = has_fault | (now.margin < aim)
            enough = torch.where(has_fault, weight, enough)
            too_low = torch.where(has_fault, too_low, weight)
            weight = torch.where(enough.isinf(), weight * RAISED, (too_low + enough) / 2)
    result = kept.inputs
    if inputs.requires_grad:
        result = result + (inputs - inputs.detach())  # perturbations before the attack shift its result
    if not theta.requires_grad:
        return result
    # Slightly more confidence lies straight down the margin, as long as the model is linear.
    further = unit(kept.slope) / norm(kept.slope).clamp_min(1 / math.sqrt(inputs[0].numel())) * context.span
    return result - by_row(theta[:, 0] - theta[:, 0].detach(), inputs) * further


class _Candidate(NamedTuple):
    """Inputs, their change and the slope of their margin, in units of the input range."""

    inputs: Tensor
    change: Tensor
    length: Tensor
    margin: Tensor
    slope: Tensor


def _evaluate(place: Tensor, inputs: Tensor, context: Context) -> _Candidate:
    """The candidate at `place`; if the margin has no slope, as for a segmentation, that of the loss is used instead."""
    if context.margin is None:
        raise UsageError("'cw' needs the oracle's margin, got none: pass margin=... to Context")
    margin_of, margins = context.margin, []

    def objective(outputs: Tensor) -> Tensor:
        margins.append(margin_of(outputs))
        return margins[0] if margins[0].requires_grad else -context.losses(outputs)

    slope = context.climb(place, objective)[2] * context.span
    change = (place - inputs) / context.span
    return _Candidate(place, change, norm(change).flatten(), margins[0].detach().to(inputs.dtype), slope)


def _scale(first: _Candidate, confidence: Tensor) -> tuple[Tensor, Tensor]:
    """The first weight and the step size, from the distance of the fault in a linear model."""
    n = first.inputs[0].numel()
    steepness = norm(first.slope).flatten().clamp_min(TINY)
    distance = ((first.margin + confidence).abs() / steepness).clamp_max(math.sqrt(n))
    rate = (RATE * distance / math.sqrt(n)).clamp_max(MAX_RATE)
    return WEIGHT * 2 * distance / steepness, by_row(rate, first.inputs)


def _better(now: _Candidate, kept: _Candidate, aim: Tensor) -> _Candidate:
    """The nearer of two candidates that reach the aim; otherwise the one that reaches it or comes closer to it."""
    is_done, was_done = now.margin < aim, kept.margin < aim
    is_better = torch.where(is_done & was_done, now.length < kept.length, now.margin < kept.margin)
    rows = by_row(is_better, now.inputs)
    return _Candidate(
        *(torch.where(rows if new.ndim > 1 else is_better, new, old) for new, old in zip(now, kept, strict=True))
    )
