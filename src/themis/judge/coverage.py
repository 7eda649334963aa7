"""From moments to a posterior and to coverage, the share of neurons whose mean sensitivity is known precisely."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from themis.measure.moments import Moments
from themis.target.activations import Layer

PAPER_DRAWS = 4000
"""The number of draws, over all chains, for which the paper defines `MCSE == 0.0`."""


class Posterior(NamedTuple):
    """The posterior of each neuron's mean sensitivity; float64 tensors `[neurons]`.

    `mean` and `sd` describe the posterior; `ess`, `mcse` and `rhat` describe the draws from which it was estimated.
    """

    mean: Tensor
    sd: Tensor
    ess: Tensor
    mcse: Tensor
    rhat: Tensor


class Judge(Protocol):
    """Infers each neuron's mean sensitivity under `D ~ Normal(mu, sigma)` with prior `p(mu, sigma^2) ~ 1/sigma^2`."""

    def __call__(self, moments: Moments, *, draws: int = PAPER_DRAWS, random_seed: int = 0) -> Posterior: ...


def exact(moments: Moments, *, draws: int = PAPER_DRAWS, random_seed: int = 0) -> Posterior:
    """The Student-t posterior, and the MCSE that `draws` independent draws from it would have.

    With fewer than four tests, the sd is infinite and no neuron can converge.
    """
    n = moments.count.double()
    spread = torch.where(n > 3, moments.m2 / (n * (n - 3)).clamp(min=1), torch.inf)
    sd = spread.sqrt()
    return Posterior(
        mean=moments.mean, sd=sd, ess=torch.full_like(sd, draws), mcse=sd / draws**0.5, rhat=torch.ones_like(sd)
    )


MIN_UNMOVED_TESTS = 3000
"""Tests after which a sensitivity that was always zero counts as zero; by the rule of three, fewer than 0.1% of tests
then move the neuron."""

MAX_FORECAST = 1e15
"""Larger forecasts are cut to this one, which means that the goal is out of reach."""


@dataclass(frozen=True)
class Rule:
    """The rule for convergence: the MCSE of a neuron at 4,000 draws is zero to three decimals.

    `alpha` is the confidence of the upper bound on the MCSE; None uses the point estimate, as the paper does.
    """

    tolerance: float = 5e-4
    draws: int = PAPER_DRAWS
    alpha: float | None = 0.95

    @property
    def limit(self) -> float:
        """The tolerance at this number of draws, scaled so that more draws do not raise coverage without more tests."""
        return self.tolerance * math.sqrt(PAPER_DRAWS / self.draws)

    @cached_property
    def factor(self) -> float:
        """The upper bound on the MCSE of independent draws, relative to the point estimate."""
        one = torch.ones(1, dtype=torch.float64)
        return float(self.mcse_bound(Posterior(one, one, one * self.draws, one, one)))

    def mcse_bound(self, posterior: Posterior) -> Tensor:
        """The upper bound on the MCSE, which is compared with the limit."""
        if self.alpha is None:
            return posterior.mcse
        from scipy.special import chdtri  # chdtri(v, p): the point above which chi-squared(v) has mass p

        freedom = (posterior.ess - 1).clamp(min=1)
        if bool((freedom == freedom[:1]).all()):
            freedom = freedom[:1]  # the judge `exact` has the same ESS for all neurons
        values = freedom.cpu().numpy()
        return posterior.mcse * torch.from_numpy(np.sqrt(values / chdtri(values, self.alpha))).to(posterior.mcse)

    def converged(self, posterior: Posterior, moments: Moments) -> Tensor:
        """Which neurons have converged, bool `[neurons]`."""
        is_seen = (moments.mean > 0) | (moments.count >= MIN_UNMOVED_TESTS)
        return (self.mcse_bound(posterior) < self.limit) & is_seen & (moments.count > 3)


@dataclass(frozen=True)
class Coverage:
    """Sensitivity convergence coverage after some tests.

    `sampled` is the share of the sampled neurons, which the paper reports; `all` is the share of all judged neurons.
    Dead neurons, which are constant on clean and disturbed inputs, count in neither.
    """

    sampled: float
    all: float
    by_layer: dict[str, float]
    n_neurons: int
    n_dead: int
    n_unseen: int
    tests: int
    forecast: int | None
    """Tests still needed to reach the goal, if the spreads do not change; None while it is unknown."""


@dataclass(frozen=True)
class Sample:
    """How many neurons are sampled, and how they are judged."""

    k: int
    judge: Judge = exact
    random_seed: int = 0
    names_neurons: bool = True
    """Whether to return the neurons that have not converged; if not, the forecast is for all judged neurons."""


def cover(
    moments: Moments, layers: Sequence[Layer], *, is_dead: Tensor, rule: Rule, goal: float, sample: Sample
) -> tuple[Coverage, Tensor | None]:
    """The coverage of `moments`, and the ascending flat indices of the sampled neurons that have not converged.

    These indices are None unless `sample` asks for them or another judge than `exact` needs them.
    """
    k, judge = sample.k, sample.judge
    is_judged = ~is_dead
    n_tests, n_judged = int(moments.count), int(is_judged.sum())
    converged = rule.converged(exact(moments, draws=rule.draws), moments) & is_judged
    is_unseen = (moments.mean == 0) & is_judged & (n_tests < MIN_UNMOVED_TESTS)
    judged = is_judged.nonzero().squeeze(1)
    neurons = judged[sample_neurons(moments.variance[judged], k)]
    chosen, is_open = moments[neurons], ~converged[neurons]
    if judge is not exact and len(neurons) and n_tests:
        is_open = ~rule.converged(judge(chosen, draws=rule.draws, random_seed=sample.random_seed), chosen)
    is_named = sample.names_neurons or judge is not exact
    open_to = chosen if is_named else moments[judged]
    needed = open_to.variance * (rule.factor / rule.limit) ** 2 / rule.draws + 3  # as MCSE falls as 1/sqrt(n)
    needed = torch.where(open_to.mean > 0, needed, MIN_UNMOVED_TESTS)
    names, ends = zip(*[(layer.name, layer.stop - 1) for layer in layers], strict=True)
    counts = torch.stack([converged, is_judged]).cumsum(1)[:, torch.tensor(ends, device=converged.device)]
    part, whole = counts.diff(prepend=counts.new_zeros(2, 1))
    by_layer = torch.where(whole > 0, part.double() / whole.clamp(min=1), 1.0)  # 1 without judged neurons
    coverage = Coverage(
        sampled=int((~is_open).sum()) / max(len(neurons), 1),
        all=int(converged.sum()) / max(n_judged, 1),
        by_layer=dict(zip(names, by_layer.tolist(), strict=True)),
        n_neurons=len(is_dead),
        n_dead=len(is_dead) - n_judged,
        n_unseen=int(is_unseen.sum()),
        tests=n_tests,
        forecast=forecast(needed, n_tests, goal),
    )
    return coverage, neurons[is_open].sort().values if is_named else None


def forecast(needed: Tensor, n_tests: int, goal: float) -> int | None:
    """Tests still needed until the share `goal` of the neurons has converged; None with too few tests."""
    if n_tests < 10 or not len(needed):
        return None
    rank = max(1, math.ceil(goal * len(needed)))
    last = needed.max() if rank == len(needed) else needed.kthvalue(rank).values
    return max(0, math.ceil(min(float(last), MAX_FORECAST)) - n_tests)


def sample_neurons(variance: Tensor, k: int) -> Tensor:
    """Indices of k neurons: those at ranks `ceil(j*N/k) - 1`, j = 1..k, in ascending, stable order of variance.

    If N <= k, all neurons. At a given number of tests, convergence is monotone in the variance, so the coverage of the
    sample is within 1/k of the coverage of all neurons.
    """
    n = len(variance)
    if n <= k:
        return torch.argsort(variance, stable=True)
    places = -(-torch.arange(1, k + 1, device=variance.device) * n // k) - 1
    if not variance.is_cpu:
        return torch.argsort(variance, stable=True)[places]
    # NumPy sorts several times as fast, but not stably, so neurons that share a picked variance are put in order.
    values = variance.numpy()
    order = np.argsort(values)
    ascending = values[order]
    picked = ascending[places.numpy()]
    for start, stop in set(zip(*(ascending.searchsorted(picked, side) for side in ("left", "right")), strict=True)):
        order[start:stop].sort()
    return torch.from_numpy(order)[places]


MIN_UNIT_SHARE = 1e-3
"""A neuron's unit is at least this share of its layer's median, so that nearly constant neurons do not dominate."""


def relative_scale(clean: Moments, layers: Sequence[Layer]) -> Tensor:
    """The spread of each neuron on clean inputs, `[neurons]`; never zero."""
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
