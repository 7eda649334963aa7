"""Carlini and Wagner's attack: the smallest change that makes a fault."""

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
"""Weights that are tried, and steps with each."""
PASSES = 3 * (1 + SEARCHES * STEPS)
JITTER = 1e-4
"""Of the start, as a share of the input range: at the clean answer a number's margin is flat."""
WEIGHT, RAISED = 2.0, 10.0
"""The first weight, over what a linear model needs; and its growth while it is too low."""
RATE, LAST_RATE, MOST_RATE = 0.8, 0.05, 0.1
"""A step's length over the distance of a linear model's fault; what is left of it at the last step; and the most that
one value moves, as a share of the input range."""
MEAN, SQUARE = 0.6, 0.999
"""What Adam keeps of the gradient's mean and square from step to step."""
SLACK = 1e-4
"""How far beyond the confidence a fault must lie, as a share of the clean margin: kernels may round otherwise."""
TINY = 1e-12


def cw(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Carlini and Wagner: the smallest change, in the Euclidean norm, that makes a fault with this confidence.

    Adam, inside the bounds, on `|change|^2 + weight * margin`, where the margin counts until the fault is made; the
    weight is found by bisection. Confidence has the margin's unit: a difference of scores, of probabilities where the
    model gives these, in a regression that of the answer. Where it is out of reach, the least margin is kept.
    """
    confidence = theta[:, 0].detach().to(inputs.dtype)
    low, high = context.bounds
    with torch.no_grad():
        start = torch.add(inputs, rng.normal(*inputs.shape[1:]).to(inputs.dtype), alpha=JITTER * context.span)
        first = kept = _try(start.clamp_(low, high), inputs, context)
        aim = -confidence - SLACK * first.margin.abs()
        weight, rate = _scale(first, confidence)
        too_low, enough = torch.zeros_like(weight), torch.full_like(weight, torch.inf)
        for _ in range(SEARCHES):
            now, is_found = first, first.margin < aim
            mean, square = torch.zeros_like(inputs), torch.zeros_like(inputs)
            for k in range(1, STEPS + 1):
                pull = by_row(torch.where(now.margin < aim, 0, weight), inputs)
                gradient = torch.addcmul(2 * now.change, now.slope, pull)
                mean.lerp_(gradient, 1 - MEAN)
                square.mul_(SQUARE).addcmul_(gradient, gradient, value=1 - SQUARE)
                spread = (square / (1 - SQUARE**k)).sqrt_().clamp_min_(TINY)
                share = (1 - (1 - LAST_RATE) * (k - 1) / STEPS) / (1 - MEAN**k)
                place = torch.addcmul(now.inputs, mean / spread, rate, value=-share * context.span)
                now = _try(place.clamp_(low, high), inputs, context)
                kept = _better(now, kept, aim)
                is_found = is_found | (now.margin < aim)
            enough = torch.where(is_found, weight, enough)
            too_low = torch.where(is_found, too_low, weight)
            weight = torch.where(enough.isinf(), weight * RAISED, (too_low + enough) / 2)
    found = kept.inputs
    if inputs.requires_grad:
        found = found + (inputs - inputs.detach())  # what was done before the attack moves what it finds
    if not theta.requires_grad:
        return found
    # A little more confidence lies straight down the margin, if in a model that is linear so far.
    further = unit(kept.slope) / norm(kept.slope).clamp_min(1 / math.sqrt(inputs[0].numel())) * context.span
    return found - by_row(theta[:, 0] - theta[:, 0].detach(), inputs) * further


class _Tried(NamedTuple):
    """Inputs that were tried, their change and the slope of their margin in units of the input range."""

    inputs: Tensor
    change: Tensor
    length: Tensor
    margin: Tensor
    slope: Tensor


def _try(place: Tensor, inputs: Tensor, context: Context) -> _Tried:
    """Where the margin has no slope, as that of a segmentation, the loss is climbed in its place."""
    if context.margin is None:
        raise UsageError("'cw' needs the oracle's margin, got none: pass margin=... to Context")
    margin_of, margins = context.margin, []

    def height(outputs: Tensor) -> Tensor:
        margins.append(margin_of(outputs))
        return margins[0] if margins[0].requires_grad else -context.losses(outputs)

    slope = context.climb(place, height)[2] * context.span
    change = (place - inputs) / context.span
    return _Tried(place, change, norm(change).flatten(), margins[0].detach().to(inputs.dtype), slope)


def _scale(first: _Tried, confidence: Tensor) -> tuple[Tensor, Tensor]:
    """The first weight, and a step's size, from where the fault would be in a linear model."""
    n = first.inputs[0].numel()
    steepness = norm(first.slope).flatten().clamp_min(TINY)
    distance = ((first.margin + confidence).abs() / steepness).clamp_max(math.sqrt(n))
    rate = (RATE * distance / math.sqrt(n)).clamp_max(MOST_RATE)
    return WEIGHT * 2 * distance / steepness, by_row(rate, first.inputs)


def _better(now: _Tried, kept: _Tried, aim: Tensor) -> _Tried:
    """The nearer of two that reach the aim; of others, the one that does or that comes closer to it."""
    is_done, was_done = now.margin < aim, kept.margin < aim
    is_better = torch.where(is_done & was_done, now.length < kept.length, now.margin < kept.margin)
    rows = by_row(is_better, now.inputs)
    return _Tried(
        *(torch.where(rows if new.ndim > 1 else is_better, new, old) for new, old in zip(now, kept, strict=True))
    )
