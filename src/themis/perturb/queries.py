"""Attacks that only ask the model: they need no gradient, so that any target can be attacked."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from themis.compute.rng import Rng
from themis.errors import UsageError
from themis.perturb.attack import SHARE, by_row, read_radius, with_slope
from themis.perturb.context import Context
from themis.perturb.perturbation import Perturbation, Theta, collector

QUERIES = 100
"""Queries per test by default."""
FIRST_SHARE = 0.8
"""The share of the inputs that a proposal changes at first."""
HALVINGS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
"""The shares of all queries after which that share is halved, as published for the Square attack."""
LEAST_ASKED = 8
"""A batch of questions is not made smaller than this."""
MOST_STEP = 0.5
"""How much smaller a box is tried at most than the smallest one with a fault, as a share of it; so it is at first."""
GROWTH, DECAY = 2.0, 0.85
"""What a step is multiplied by after a fault, and after none."""

ASKING: list[Perturbation] = []
_attack = collector(
    ASKING, theta_is_magnitude=True, is_smooth=False, family="attack", moves=False, passes=QUERIES, has_queries=True
)


@_attack(Theta("radius", 0.0, 8 / 255, unit=SHARE, limits=(0, 1)))
def square(inputs: Tensor, theta: Tensor, rng: Rng, context: Context, queries: int = QUERIES) -> Tensor:
    """Square attack: a random search for a fault in a box, square by square, that uses the model's scores.

    Andriushchenko et al. 2020. A change is kept unless it raises the oracle's margin. A test ends at its first fault.
    """
    radius = read_radius(theta, inputs, context)
    with torch.no_grad():
        questions = _Questions(inputs, context)
        signs = _stripes(inputs, rng)
        drawn = rng.drawn
        current = questions.disturbed(signs, radius)
        best = questions.margins(current)
        for k in range(1, queries):
            questions.is_open &= ~(best < 0)
            if not questions.is_open.any():
                break
            window, values = _proposal(inputs, k / queries, rng)
            tried = torch.where(window, values, signs)
            is_same = by_row((questions.disturbed(tried, radius) == current).flatten(1).all(1), inputs)
            tried = torch.where(is_same & window, -tried, tried)
            candidate = questions.disturbed(tried, radius)
            margin = questions.margins(candidate)
            is_kept = questions.is_open & (margin <= best)
            rows = by_row(is_kept, inputs)
            signs, current = torch.where(rows, tried, signs), torch.where(rows, candidate, current)
            best = torch.where(is_kept, margin, best)
        rng.drawn = drawn + (queries - 1) * _n_draws(inputs)  # whenever the search has ended
        signs, current = questions.completed(signs), questions.completed(current)
    return with_slope(current, inputs, radius, signs, context)


@_attack(Theta("radius", 0.0, 8 / 255, unit=SHARE, limits=(0, 1)))
def square_label(inputs: Tensor, theta: Tensor, rng: Rng, context: Context, queries: int = QUERIES) -> Tensor:
    """A search for a fault in a box, square by square, that only uses whether an answer is a fault, not the scores.

    It starts with a fault far outside of the box, and keeps a change if it is a fault in a smaller box as well.
    """
    radius = read_radius(theta, inputs, context)
    with torch.no_grad():
        questions = _Questions(inputs, context)
        signs = _stripes(inputs, rng)
        drawn = rng.drawn
        tried, reach = signs, radius
        size, step = torch.full_like(radius, context.span), torch.full_like(radius, MOST_STEP)
        for k in range(1, queries + 1):
            margin = questions.margins(questions.disturbed(tried, reach))
            is_fault = by_row(questions.is_open & (margin < 0), inputs)
            signs, size = torch.where(is_fault, tried, signs), torch.where(is_fault, reach, size)
            step = torch.where(is_fault, step * GROWTH, step * DECAY).clamp_max(MOST_STEP)
            questions.is_open &= (size > radius).flatten()
            if k == queries or not questions.is_open.any():
                break
            window, values = _proposal(inputs, k / queries, rng)
            tried = torch.where(window, values if k % 2 else -signs, signs)
            reach = torch.maximum(size * (1 - step), radius)
        rng.drawn = drawn + (queries - 1) * _n_draws(inputs)
        signs = questions.completed(signs)
    return with_slope(questions.disturbed(signs, radius), inputs, radius, signs, context)


class _Questions:
    """Asks the model about the tests that are still open.

    Only they are sent, in batches of few shapes, and only they count as passes.
    """

    def __init__(self, inputs: Tensor, context: Context) -> None:
        if context.margin is None:
            raise UsageError("a Square attack needs the oracle's margin, got none: pass margin=... to Context")
        self.inputs, self.context, self.margin = inputs, context, context.margin
        self.n_tests = len(inputs) if context.n_tests is None else context.n_tests
        self.is_open = torch.arange(len(inputs), device=inputs.device) < self.n_tests
        self.outputs: Tensor | None = None

    def disturbed(self, signs: Tensor, radius: Tensor) -> Tensor:
        """The inputs moved by the radius in the direction of the signs."""
        return torch.addcmul(self.inputs, signs, radius).clamp_(*self.context.bounds)

    def margins(self, candidates: Tensor) -> Tensor:
        """The oracle's margins of the candidates of open tests; those of others say nothing."""
        rows = self.is_open.nonzero()[:, 0]
        if self.outputs is None or self.context.has_side_inputs:  # which have a row for each test
            self.outputs = self.context.forward(candidates).clone()
            return self.margin(self.outputs)
        size = len(candidates)
        while size // 2 >= max(len(rows), LEAST_ASKED):
            size //= 2
        sent = rows[torch.arange(size, device=rows.device).clamp_max_(len(rows) - 1)]
        self.outputs[rows] = self.context.forward(candidates[sent], len(rows))[: len(rows)]
        return self.margin(self.outputs)

    def completed(self, values: Tensor) -> Tensor:
        """The values of all tests; those of padding are copies of the last test's."""
        return values[torch.arange(len(values), device=values.device).clamp_max_(self.n_tests - 1)]


def _signs(share: Tensor, inputs: Tensor) -> Tensor:
    """Minus or plus one, by uniform numbers."""
    return torch.where(share < 0.5, -1, 1).to(inputs.dtype)


def _stripes(inputs: Tensor, rng: Rng) -> Tensor:
    """Random signs: the same ones down each column of a picture, where that breaks most models."""
    shape = inputs.shape[1:]
    drawn = (*shape[:-2], 1, shape[-1]) if len(shape) > 2 else tuple(shape)
    return _signs(rng.uniform(*drawn), inputs).expand_as(inputs)


def _n_draws(inputs: Tensor) -> int:
    """The random numbers of a proposal."""
    shape = inputs.shape[1:]
    if len(shape) == 1:
        return 2 * shape[0]
    n = min(2, len(shape) - 1)
    return n + math.prod(shape[:-n])


def _proposal(inputs: Tensor, progress: float, rng: Rng) -> tuple[Tensor, Tensor]:
    """A random window of each test, and new signs in it, one per channel; `progress` is the share of queries spent.

    It is a square of a picture, an interval of a signal, or some values of a row.
    """
    shape, share = inputs.shape[1:], FIRST_SHARE / 2 ** sum(progress > end for end in HALVINGS)
    draws = rng.uniform(_n_draws(inputs))
    if len(shape) == 1:
        order = draws[:, : shape[0]]
        return (order < share) | (order == order.amin(1, keepdim=True)), _signs(draws[:, shape[0] :], inputs)
    n = min(2, len(shape) - 1)
    space = shape[-n:]
    side = round((share * math.prod(space)) ** (1 / n))
    window = torch.ones((), dtype=torch.bool, device=inputs.device)
    for k, size in enumerate(space):
        length = max(1, min(side, size - 1))
        first = (draws[:, k : k + 1] * (size - length + 1)).floor()
        at = torch.arange(size, device=inputs.device)
        inside = (at >= first) & (at < first + length)
        window = window & inside.view(-1, *(1,) * (len(shape) - n + k), size, *(1,) * (n - 1 - k))
    return window, _signs(draws[:, n:].reshape(-1, *shape[:-n], *(1,) * n), inputs)
