"""Attacks: perturbations that use the model's gradient, and perturbations that only query the model."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial, update_wrapper
from typing import NamedTuple

import torch
from torch import Tensor

from themis.compute.rng import Rng
from themis.errors import UsageError
from themis.perturb.context import Context
from themis.perturb.perturbation import Perturbation, Theta, collector, column

MIN_NORM = 1e-30
"""Smallest norm in a denominator."""
MIN_RADIUS = 1e-6
"""Radius, as a share of the input range, below which rounding hides the position of an input in the ball."""
PGD_STEPS = 10
PGD_STEP = 0.25
"""Length of a step as a share of the radius; ten steps can cross the ball from one side to the other."""
PATH_LENGTH, MAX_PGD_STEP = 1.8, 1.25
"""Total length of fewer steps, and largest length of one step, as shares of the radius."""


def read_radius(theta: Tensor, inputs: Tensor, context: Context) -> Tensor:
    """Theta as a radius in the unit of the inputs, with a shape that broadcasts with them."""
    return (column(theta, 0, inputs) * context.span).to(inputs.dtype)


def box(inputs: Tensor, radius: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """The lowest and highest allowed values, given the radius and the bounds."""
    low, high = context.bounds
    return (inputs - radius).clamp_(min=low), (inputs + radius).clamp_(max=high)


def random_point(inputs: Tensor, radius: Tensor, rng: Rng) -> Tensor:
    """A random point in the box of this radius; it may lie outside the bounds."""
    return torch.addcmul(inputs, rng.uniform(*inputs.shape[1:]).mul_(2).sub_(1).to(inputs.dtype), radius)


def with_slope(result: Tensor, inputs: Tensor, radius: Tensor, direction: Tensor, context: Context) -> Tensor:
    """Give `result` a derivative in the radius: a larger ball scales the change, an empty ball starts a change along
    `direction`. This ignores that a larger ball may contain a different result."""
    if inputs.requires_grad:
        result = result + (inputs - inputs.detach())  # perturbations before the attack shift its result
    if not radius.requires_grad:
        return result
    size = radius.detach()
    is_small = size < MIN_RADIUS * context.span
    slope = torch.where(is_small, direction, (result - inputs).detach() / torch.where(is_small, 1, size))
    return result + (radius - size) * slope


def by_row(values: Tensor, inputs: Tensor) -> Tensor:
    """Values `[tests]` in a shape that broadcasts with `inputs`."""
    return values.reshape(-1, *(1,) * (inputs.ndim - 1))


def norm(values: Tensor) -> Tensor:
    """The Euclidean norm of each test's values, in a shape that broadcasts with them."""
    return by_row(values.flatten(1).norm(dim=1), values)


def unit(values: Tensor) -> Tensor:
    """Each test's values divided by their norm, however small; zeros stay zeros."""
    values = values / by_row(values.flatten(1).abs().amax(1), values).clamp_min(MIN_NORM)  # squares must not underflow
    return values / norm(values).clamp_min(MIN_NORM)


RANGE_UNIT = "share of the input range"
ATTACKS: list[Perturbation] = []
_attack = collector(
    ATTACKS, theta_is_magnitude=True, needs_gradient=True, is_smooth=False, family="attack", moves=False
)


@_attack(Theta("radius", 0.0, 8 / 255, unit=RANGE_UNIT, limits=(0, 1)), is_random=False, passes=3, is_smooth=True)
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


@_attack(Theta("radius", 0.0, 8 / 255, unit=RANGE_UNIT, limits=(0, 1)), passes=3 * PGD_STEPS)
def pgd(inputs: Tensor, theta: Tensor, rng: Rng, context: Context, steps: int = PGD_STEPS) -> Tensor:
    """Projected gradient: ten steps up the loss, of the same size for every value, from a random point in a box."""
    radius, step = read_radius(theta, inputs, context), _step(steps)
    with torch.no_grad():
        low, high = box(inputs, radius, context)
        current = random_point(inputs, radius, rng).clamp_(low, high)
        for _ in range(steps):
            direction = context.loss_gradient(current).sign_()
            current = torch.addcmul(current, direction, radius, value=step).clamp_(low, high)
    return with_slope(current, inputs, radius, direction, context)


@_attack(Theta("radius", 0.0, 1.0, unit="Euclidean norm in input ranges", limits=(0, math.inf)), passes=3 * PGD_STEPS)
def pgd_l2(inputs: Tensor, theta: Tensor, rng: Rng, context: Context, steps: int = PGD_STEPS) -> Tensor:
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
            change *= (radius / norm(change).clamp_min(MIN_NORM)).clamp_max(1)
            current = change.add_(inputs).clamp_(*context.bounds)  # clipping can only bring it closer to the input
    return with_slope(current, inputs, radius, direction, context)


def _step(steps: int) -> float:
    """The length of each of `steps` steps, as a share of the radius."""
    return min(MAX_PGD_STEP, max(PGD_STEP, PATH_LENGTH / steps))


def with_steps(perturbation: Perturbation, steps: int) -> Perturbation:
    """Limit an attack by projected gradients to this number of steps; return other perturbations unchanged.

    `apgd`, which needs many steps to adapt their size, becomes `pgd`.
    """
    short = next((short for full, short in SHORT_VERSIONS if perturbation.apply is full), None)
    if short is None or 3 * steps >= perturbation.passes:
        return perturbation
    return replace(perturbation, apply=update_wrapper(partial(short, steps=steps), short), passes=3 * steps)


APGD_STEPS = 20
APGD_FIRST_STEP = 2.0
"""Length of the first step, as a multiple of the radius."""
APGD_MOMENTUM = 0.25
"""The share of the last step in the next one."""
MIN_RISING_SHARE = 0.75
"""The share of steps that must raise the loss; otherwise, the step size is halved."""
APGD_PASSES = 3 * APGD_STEPS + 1


def checkpoints(steps: int) -> list[int]:
    """The steps after which the step size is checked: first after a fifth of all steps, then more and more often."""
    shares = [0.0, 0.22]
    while shares[-1] <= 1:
        shares.append(shares[-1] + max(shares[-1] - shares[-2] - 0.03, 0.06))
    return [math.ceil(share * steps - 1e-9) for share in shares[:-1]]


@_attack(Theta("radius", 0.0, 8 / 255, unit=RANGE_UNIT, limits=(0, 1)), passes=APGD_PASSES)
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
        step = radius * APGD_FIRST_STEP
        n_rising, loss_at_check, is_halved = torch.zeros_like(loss), loss, torch.ones_like(loss, dtype=torch.bool)
        checks = checkpoints(APGD_STEPS)
        for k in range(1, APGD_STEPS + 1):
            ahead = torch.addcmul(current, gradient.sign(), step).clamp_(low, high)
            if k > 1:
                ahead = torch.lerp(ahead, 2 * current - before, APGD_MOMENTUM).clamp_(low, high)
            before, current, loss_before = current, ahead, loss
            if k < APGD_STEPS:
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
                is_slow = n_rising < MIN_RISING_SHARE * (k - checks[checks.index(k) - 1])
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


CW_SEARCHES, CW_STEPS = 4, 25
"""Weights that are tried, and steps with each weight."""
CW_PASSES = 3 * (1 + CW_SEARCHES * CW_STEPS)
START_NOISE = 1e-4
"""Noise of the start, as a share of the input range, because a regression's margin is flat at the clean answer."""
FIRST_WEIGHT, WEIGHT_FACTOR = 2.0, 10.0
"""The first weight relative to the one that a linear model needs, and its growth factor while it is too low."""
FIRST_RATE, LAST_RATE, MAX_RATE = 0.8, 0.05, 0.1
"""The length of a step relative to the distance of the fault in a linear model, the share of it at the last step, and
the largest step of one value as a share of the input range."""
MEAN_DECAY, SQUARE_DECAY = 0.6, 0.999
"""The decay rates of Adam's running mean and square of the gradient."""
CONFIDENCE_SLACK = 1e-4
"""Additional confidence of a fault, as a share of the clean margin, because kernels may round differently."""
MIN_STEEPNESS = 1e-12


@_attack(
    Theta("confidence", 0.0, 5.0, unit="the oracle's margin, as a difference of scores", limits=(0, math.inf)),
    passes=CW_PASSES,
    has_identity=False,
)
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
        start = torch.add(inputs, rng.normal(*inputs.shape[1:]).to(inputs.dtype), alpha=START_NOISE * context.span)
        first = kept = _evaluate(start.clamp_(low, high), inputs, context)
        aim = -confidence - CONFIDENCE_SLACK * first.margin.abs()
        weight, rate = _scale(first, confidence)
        too_low, enough = torch.zeros_like(weight), torch.full_like(weight, torch.inf)
        for _ in range(CW_SEARCHES):
            now, has_fault = first, first.margin < aim
            mean, square = torch.zeros_like(inputs), torch.zeros_like(inputs)
            for k in range(1, CW_STEPS + 1):
                pull = by_row(torch.where(now.margin < aim, 0, weight), inputs)
                gradient = torch.addcmul(2 * now.change, now.slope, pull)
                mean.lerp_(gradient, 1 - MEAN_DECAY)
                square.mul_(SQUARE_DECAY).addcmul_(gradient, gradient, value=1 - SQUARE_DECAY)
                spread = (square / (1 - SQUARE_DECAY**k)).sqrt_().clamp_min_(MIN_STEEPNESS)
                share = (1 - (1 - LAST_RATE) * (k - 1) / CW_STEPS) / (1 - MEAN_DECAY**k)
                place = torch.addcmul(now.inputs, mean / spread, rate, value=-share * context.span)
                now = _evaluate(place.clamp_(low, high), inputs, context)
                kept = _better(now, kept, aim)
                has_fault = has_fault | (now.margin < aim)
            enough = torch.where(has_fault, weight, enough)
            too_low = torch.where(has_fault, too_low, weight)
            weight = torch.where(enough.isinf(), weight * WEIGHT_FACTOR, (too_low + enough) / 2)
    result = kept.inputs
    if inputs.requires_grad:
        result = result + (inputs - inputs.detach())  # perturbations before the attack shift its result
    if not theta.requires_grad:
        return result
    # For a linear model, slightly more confidence lies straight down the margin.
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
    """The candidate at `place`; without a gradient of the margin, as in segmentation, the slope is that of the loss."""
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
    """The first weight and the step size, based on the distance of the fault in a linear model."""
    n = first.inputs[0].numel()
    steepness = norm(first.slope).flatten().clamp_min(MIN_STEEPNESS)
    distance = ((first.margin + confidence).abs() / steepness).clamp_max(math.sqrt(n))
    rate = (FIRST_RATE * distance / math.sqrt(n)).clamp_max(MAX_RATE)
    return FIRST_WEIGHT * 2 * distance / steepness, by_row(rate, first.inputs)


def _better(now: _Candidate, kept: _Candidate, aim: Tensor) -> _Candidate:
    """The closer of two candidates that reach the aim; otherwise the one with the smaller margin."""
    is_done, was_done = now.margin < aim, kept.margin < aim
    is_better = torch.where(is_done & was_done, now.length < kept.length, now.margin < kept.margin)
    rows = by_row(is_better, now.inputs)
    return _Candidate(
        *(torch.where(rows if new.ndim > 1 else is_better, new, old) for new, old in zip(now, kept, strict=True))
    )


SHORT_VERSIONS = ((pgd, pgd), (pgd_l2, pgd_l2), (apgd, pgd))
"""Attacks with many steps, each with the attack that replaces it with few steps."""

DEFAULT_QUERIES = 100
"""Queries per test."""
FIRST_SHARE = 0.8
"""The share of the input that a proposal changes at first."""
HALVINGS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
"""The shares of all queries after which that share is halved, as published for the Square attack."""
MIN_QUERY_BATCH = 8
"""Smallest batch of queries on an accelerator."""
CPU_BATCH_BITS = 4
"""Leading bits of the batch sizes on a CPU; the others are zero, so that at most an eighth of a batch is padding."""
MAX_SHRINK = 0.5
"""Largest step, and first step, by which a box is made smaller than the smallest one with a fault, as a share of it."""
STEP_GROWTH, STEP_DECAY = 2.0, 0.85
"""The factors of the step after a fault and after a test that is not a fault."""

QUERY_ATTACKS: list[Perturbation] = []
_query_attack = collector(
    QUERY_ATTACKS,
    theta_is_magnitude=True,
    is_smooth=False,
    family="attack",
    moves=False,
    passes=DEFAULT_QUERIES,
    has_queries=True,
)


@_query_attack(Theta("radius", 0.0, 8 / 255, unit=RANGE_UNIT, limits=(0, 1)))
def square(inputs: Tensor, theta: Tensor, rng: Rng, context: Context, queries: int = DEFAULT_QUERIES) -> Tensor:
    """Square attack: a random search for a fault in a box, square by square, that uses the model's scores.

    Andriushchenko et al. 2020. A change is kept unless it raises the oracle's margin. A test ends at its first fault.
    """
    radius = read_radius(theta, inputs, context)
    with torch.no_grad():
        questions = _Queries(inputs, context)
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
            candidate = questions.disturbed(tried, radius)
            same = (questions.is_open & (candidate == current).flatten(1).all(1)).nonzero()[:, 0]
            if len(same):
                tried[same] = torch.where(window[same], -tried[same], tried[same])
                candidate[same] = questions.disturbed(tried[same], radius[same], same)
            margin = questions.margins(candidate)
            is_kept = questions.is_open & (margin <= best)
            rows = by_row(is_kept, inputs)
            signs, current = torch.where(rows, tried, signs), torch.where(rows, candidate, current)
            best = torch.where(is_kept, margin, best)
        rng.drawn = drawn + (queries - 1) * _n_draws(inputs)  # the same even if the search has ended early
        signs, current = questions.completed(signs), questions.completed(current)
    return with_slope(current, inputs, radius, signs, context)


@_query_attack(Theta("radius", 0.0, 8 / 255, unit=RANGE_UNIT, limits=(0, 1)))
def square_label(inputs: Tensor, theta: Tensor, rng: Rng, context: Context, queries: int = DEFAULT_QUERIES) -> Tensor:
    """A search for a fault in a box, square by square, that only uses whether an answer is a fault, not the scores.

    It starts with a fault far outside of the box, and keeps a change if it is a fault in a smaller box as well.
    """
    radius = read_radius(theta, inputs, context)
    with torch.no_grad():
        questions = _Queries(inputs, context)
        signs = _stripes(inputs, rng)
        drawn = rng.drawn
        tried, reach = signs, radius
        size, step = torch.full_like(radius, context.span), torch.full_like(radius, MAX_SHRINK)
        for k in range(1, queries + 1):
            margin = questions.margins(questions.disturbed(tried, reach))
            is_fault = by_row(questions.is_open & (margin < 0), inputs)
            signs, size = torch.where(is_fault, tried, signs), torch.where(is_fault, reach, size)
            step = torch.where(is_fault, step * STEP_GROWTH, step * STEP_DECAY).clamp_max(MAX_SHRINK)
            questions.is_open &= (size > radius).flatten()
            if k == queries or not questions.is_open.any():
                break
            window, values = _proposal(inputs, k / queries, rng)
            tried = torch.where(window, values if k % 2 else -signs, signs)
            reach = torch.maximum(size * (1 - step), radius)
        rng.drawn = drawn + (queries - 1) * _n_draws(inputs)
        signs = questions.completed(signs)
    return with_slope(questions.disturbed(signs, radius), inputs, radius, signs, context)


class _Queries:
    """Queries the model for the tests whose search is still open.

    Only open tests are sent, in batches of few shapes, and only open tests count as passes.
    """

    def __init__(self, inputs: Tensor, context: Context) -> None:
        if context.margin is None:
            raise UsageError("a Square attack needs the oracle's margin, got none: pass margin=... to Context")
        self.inputs, self.context, self.margin = inputs, context, context.margin
        self.n_tests = len(inputs) if context.n_tests is None else context.n_tests
        self.is_open = torch.arange(len(inputs), device=inputs.device) < self.n_tests
        self.outputs: Tensor | None = None

    def disturbed(self, signs: Tensor, radius: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        """The inputs, or `rows` of them, moved by the radius in the direction of the signs."""
        return torch.addcmul(self.inputs[rows], signs, radius).clamp_(*self.context.bounds)

    def margins(self, candidates: Tensor) -> Tensor:
        """The oracle's margins of the candidates; only those of open tests are valid."""
        rows = self.is_open.nonzero()[:, 0]
        if self.outputs is None or len(rows) == len(candidates) or self.context.has_side_inputs:  # need all rows
            self.outputs = self.context.forward(candidates).clone()
            return self.margin(self.outputs)
        size = min(len(candidates), _n_sent(len(rows), rows.device))
        sent = rows[torch.arange(size, device=rows.device).clamp_max_(len(rows) - 1)]
        self.outputs[rows] = self.context.forward(candidates[sent], len(rows))[: len(rows)]
        return self.margin(self.outputs)

    def completed(self, values: Tensor) -> Tensor:
        """The values, with those of padding replaced by copies of the last test's."""
        return values[torch.arange(len(values), device=values.device).clamp_max_(self.n_tests - 1)]


def _n_sent(n_open: int, device: torch.device) -> int:
    """The size of a batch for `n_open` tests: hardly larger on a CPU, and a power of two on an accelerator."""
    n_bits = (n_open - 1).bit_length()
    step = 1 << max(0, n_bits - CPU_BATCH_BITS) if device.type == "cpu" else max(MIN_QUERY_BATCH, 1 << n_bits)
    return -(-n_open // step) * step


def _signs(share: Tensor, inputs: Tensor) -> Tensor:
    """Minus or plus one with equal probability, given uniform numbers."""
    return torch.where(share < 0.5, -1, 1).to(inputs.dtype)


def _stripes(inputs: Tensor, rng: Rng) -> Tensor:
    """Random signs that are constant along each column of a picture, a start that breaks many models."""
    shape = inputs.shape[1:]
    drawn = (*shape[:-2], 1, shape[-1]) if len(shape) > 2 else tuple(shape)
    return _signs(rng.uniform(*drawn), inputs).expand_as(inputs)


def _n_draws(inputs: Tensor) -> int:
    """The number of random numbers of a proposal."""
    shape = inputs.shape[1:]
    if len(shape) == 1:
        return 2 * shape[0]
    n = min(2, len(shape) - 1)
    return n + math.prod(shape[:-n])


def _proposal(inputs: Tensor, progress: float, rng: Rng) -> tuple[Tensor, Tensor]:
    """A random window of each test, and new signs in it, one per channel; `progress` is the share of queries used.

    The window is a square of a picture, an interval of a signal, or some values of a row.
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
