"""Coverage: the share of neurons whose mean sensitivity is known to the chosen precision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from themis.judge.posterior import PAPER_DRAWS, Judge, Posterior, exact
from themis.measure.moments import Moments
from themis.target.activations import Layer

UNSEEN_TESTS = 3000
"""Tests after which a sensitivity that was always zero counts as zero: by the rule of three, less than 0.1% of tests
move the neuron."""

MANY_TESTS = 1e15
"""A forecast beyond this only means that the goal is out of reach."""


@dataclass(frozen=True)
class Rule:
    """When a neuron has converged: its MCSE is zero to three decimals, at 4,000 draws.

    `alpha` is the confidence of the upper bound on the MCSE; None takes the point value, as the paper does.
    """

    tolerance: float = 5e-4
    draws: int = PAPER_DRAWS
    alpha: float | None = 0.95

    @property
    def limit(self) -> float:
        """The tolerance at this number of draws: more draws must not raise coverage without more tests."""
        return self.tolerance * math.sqrt(PAPER_DRAWS / self.draws)

    @cached_property
    def factor(self) -> float:
        """The upper bound on the MCSE of independent draws, relative to the point value."""
        one = torch.ones(1, dtype=torch.float64)
        return float(self.mcse_bound(Posterior(one, one, one * self.draws, one, one)))

    def mcse_bound(self, posterior: Posterior) -> Tensor:
        """The MCSE that is compared with the limit."""
        if self.alpha is None:
            return posterior.mcse
        from scipy.special import chdtri  # chdtri(v, p): the point above which chi-squared(v) has mass p

        freedom = (posterior.ess - 1).clamp(min=1)
        if bool((freedom == freedom[:1]).all()):
            freedom = freedom[:1]  # `exact` has one ESS for all
        values = freedom.cpu().numpy()
        return posterior.mcse * torch.from_numpy(np.sqrt(values / chdtri(values, self.alpha))).to(posterior.mcse)

    def converged(self, posterior: Posterior, moments: Moments) -> Tensor:
        """Which neurons have converged, bool `[neurons]`."""
        is_seen = (moments.mean > 0) | (moments.count >= UNSEEN_TESTS)
        return (self.mcse_bound(posterior) < self.limit) & is_seen & (moments.count > 3)


@dataclass(frozen=True)
class Coverage:
    """Sensitivity convergence coverage after some tests.

    `sampled` is over the sampler's neurons (what the paper reports), `all` over every judged neuron. Dead neurons,
    constant on clean and disturbed inputs alike, are in neither.
    """

    sampled: float
    all: float
    by_layer: dict[str, float]
    n_neurons: int
    n_dead: int
    n_unseen: int
    tests: int
    forecast: int | None
    """Tests still needed to reach the goal, if the spreads stay as they are; None while it is unknown."""


@dataclass(frozen=True)
class Sample:
    """The sampled neurons, and how they are judged."""

    k: int
    judge: Judge = exact
    random_seed: int = 0
    names_neurons: bool = True
    """Whether to name those that have not converged; if not, the closed form counts them without sorting neurons."""


def cover(
    moments: Moments, layers: Sequence[Layer], *, is_dead: Tensor, rule: Rule, goal: float, sample: Sample
) -> tuple[Coverage, Tensor | None]:
    """Coverage of `moments`, and the sampled neurons that have not converged (flat indices, ascending) if wanted."""
    k, judge = sample.k, sample.judge
    is_judged = ~is_dead
    n_tests, n_judged = int(moments.count), int(is_judged.sum())
    converged = rule.converged(exact(moments, draws=rule.draws), moments) & is_judged
    is_unseen = (moments.mean == 0) & is_judged & (n_tests < UNSEEN_TESTS)
    open_neurons = None
    if judge is exact and not sample.names_neurons:
        sampled = _count_sample(is_judged & (moments.variance == 0), converged, n_judged, k)
        needed = _tests_needed(moments, rule)[is_judged]
    else:
        judged = is_judged.nonzero().squeeze(1)
        neurons = judged[sample_neurons(moments.variance[judged], k)]
        chosen = moments[neurons]
        is_open = ~converged[neurons]
        if judge is not exact and len(neurons) and n_tests:
            is_open = ~rule.converged(judge(chosen, draws=rule.draws, random_seed=sample.random_seed), chosen)
        sampled = int((~is_open).sum()) / max(len(neurons), 1)
        open_neurons = neurons[is_open].sort().values
        needed = _tests_needed(chosen, rule)
    by_layer = _share(*_count(torch.stack([converged, is_judged]), layers))
    coverage = Coverage(
        sampled=sampled,
        all=int(converged.sum()) / max(n_judged, 1),
        by_layer=dict(zip((layer.name for layer in layers), by_layer, strict=True)),
        n_neurons=len(is_dead),
        n_dead=len(is_dead) - n_judged,
        n_unseen=int(is_unseen.sum()),
        tests=n_tests,
        forecast=forecast(needed, n_tests, goal),
    )
    return coverage, open_neurons


def _count_sample(is_still: Tensor, converged: Tensor, n: int, k: int) -> float:
    """Coverage of the sampler's neurons among the `n` judged ones, without sorting.

    In order of variance, neurons without any (`is_still`) come first, by index: those that no test has moved, and those
    that every test moved by the same amount. The converged ones follow. The sampler's neurons are at
    `ceil(j*n/k) - 1`, j = 1..k, so those before `m` are `floor(m*k/n)`.
    """
    k = min(n, k)
    if not n:
        return 0.0
    still = converged[is_still]
    n_still, n_converged = len(still), int(converged.sum()) - int(still.sum())
    j = torch.arange(1, n_still * k // n + 1, device=still.device)
    n_covered = int(still[-(-j * n // k) - 1].sum()) + (n_still + n_converged) * k // n - n_still * k // n
    return n_covered / k


def _tests_needed(moments: Moments, rule: Rule) -> Tensor:
    """Tests after which each neuron converges, if its spread stays as it is: MCSE falls as 1/sqrt(n)."""
    needed = moments.variance * (rule.factor / rule.limit) ** 2 / rule.draws + 3
    return torch.where(moments.mean > 0, needed, UNSEEN_TESTS)


def forecast(needed: Tensor, n_tests: int, goal: float) -> int | None:
    """Tests still needed until the share `goal` of the neurons has converged; None while too little is known."""
    if n_tests < 10 or not len(needed):
        return None
    rank = max(1, math.ceil(goal * len(needed)))
    last = needed.max() if rank == len(needed) else needed.kthvalue(rank).values
    return max(0, math.ceil(min(float(last), MANY_TESTS)) - n_tests)


def _count(masks: Tensor, layers: Sequence[Layer]) -> Tensor:
    """The number of true values of each mask by layer, `[masks, layers]`."""
    last = torch.tensor([layer.stop - 1 for layer in layers], device=masks.device)
    return masks.cumsum(1)[:, last].diff(prepend=last.new_zeros(len(masks), 1))


def _share(part: Tensor, whole: Tensor) -> list[float]:
    """The shares by layer; a layer without a judged neuron is covered."""
    return torch.where(whole > 0, part.double() / whole.clamp(min=1), 1.0).tolist()


MANY = 16_384
"""Neurons from which on sorting all of them takes longer than sorting those in question."""
FEWER_BITS = 40
"""Bits of a float64 that do not tell its bucket: of the fraction, 12 bits do, so that buckets are narrow."""
MOST_BUCKETS = 1 << 17
"""Buckets below the one of the largest number, which cover a factor of 2**32; the first takes all smaller numbers. A
neuron that every test moved by the same amount has a variance of 0, and would be millions of empty buckets away."""


def sample_neurons(variance: Tensor, k: int) -> Tensor:
    """Indices of k neurons: in ascending, stable order of variance those at `ceil(j*N/k) - 1`, j = 1..k.

    All neurons if N <= k. At a given number of tests, convergence is monotone in the variance, so the coverage of the
    sample is within 1/k of that of all neurons.
    """
    n = len(variance)
    if n <= k:
        return _order(variance)
    j = torch.arange(1, k + 1, device=variance.device)
    places = -(-j * n // k) - 1
    if variance.device.type != "cpu" or n < MANY:
        return _order(variance)[places]
    return _at_places(variance, places)


def _order(variance: Tensor) -> Tensor:
    """The indices of a stable sort of numbers that are not negative.

    On a CPU by 16 bits at a time, the last ones first: NumPy counts such short numbers instead of comparing them, which
    takes less than half the time for some thousand of them.
    """
    if not variance.is_cpu:
        return torch.argsort(variance, stable=True)
    digits = (variance.numpy() + 0.0).astype("<f8").view("<u2").reshape(-1, 4).T  # + 0.0: see below
    order = digits[0].argsort(kind="stable")
    for digit in digits[1:]:
        order = order[digit[order].argsort(kind="stable")]
    return torch.from_numpy(order)


def _at_places(variance: Tensor, places: Tensor) -> Tensor:
    """The indices that a stable sort has at `places`, without sorting all neurons.

    The first bits of a number that is not negative are in its order. Numbers with the same first bits are in a bucket,
    as are the smallest ones together, and only those buckets are sorted that hold one of the places.
    """
    bucket = (variance + 0.0).view(torch.int64) >> FEWER_BITS  # + 0.0, because -0.0 would be negative
    bucket.sub_(bucket.max() - MOST_BUCKETS).clamp_(min=0)
    counts = torch.bincount(bucket)
    ends = counts.cumsum(0)
    wanted = torch.searchsorted(ends, places, right=True)  # the bucket of each place
    is_wanted = torch.zeros(len(counts), dtype=torch.bool)
    is_wanted[wanted] = True
    few = is_wanted[bucket].nonzero().squeeze(1)
    n_skipped = torch.where(is_wanted, 0, counts).cumsum(0)[wanted]  # neurons before the place that are not sorted
    return few[_order(variance[few])][places - n_skipped]


MIN_UNIT_SHARE = 1e-3
"""A neuron's unit is at least this share of its layer's median: a nearly constant neuron must not dominate."""


def relative_scale(clean: Moments, layers: Sequence[Layer]) -> Tensor:
    """Each neuron's clean spread, `[neurons]`; never zero."""
    spread = clean.variance.nan_to_num(posinf=0.0).sqrt()
    for layer in layers:
        part = spread[layer.start : layer.stop]
        moving = part[part > 0]
        median = moving.median() if len(moving) else torch.ones((), dtype=part.dtype, device=part.device)
        part.clamp_(min=float(median) * MIN_UNIT_SHARE)
    return spread


def rescale(moments: Moments, scale: Tensor | None) -> Moments:
    """The moments of the sensitivities divided by `scale`."""
    return moments if scale is None else Moments(moments.count, moments.mean / scale, moments.m2 / scale.square())
