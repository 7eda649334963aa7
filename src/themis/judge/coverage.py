"""Coverage: the share of neurons whose mean sensitivity is known to the chosen precision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from themis.judge.exact import exact
from themis.judge.posterior import PAPER_DRAWS, Judge, Posterior
from themis.judge.sampler import sample_neurons
from themis.measure.moments import Moments
from themis.probe import Layer

UNSEEN_TESTS = 3000
"""Tests before an all-zero sensitivity counts as zero (rule of three: then under 0.1% of tests move the neuron)."""


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
        """The tolerance at this number of draws: more draws must not buy coverage without a test."""
        return self.tolerance * math.sqrt(PAPER_DRAWS / self.draws)

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
    """Tests still needed to reach the goal, if the spreads stay as they are; None while nothing is known."""


def cover(
    moments: Moments,
    layers: Sequence[Layer],
    *,
    is_dead: Tensor,
    rule: Rule,
    goal: float,
    k: int,
    judge: Judge = exact,
    random_seed: int = 0,
) -> tuple[Coverage, Tensor]:
    """Coverage of `moments`, and the sampled neurons that have not converged (flat indices, ascending)."""
    judged = (~is_dead).nonzero().squeeze(1)
    n_tests = int(moments.count)
    converged = rule.converged(exact(moments, draws=rule.draws), moments) & ~is_dead
    sample = judged[sample_neurons(moments.variance[judged], k)]
    sampled = converged[sample]
    if judge is not exact and len(sample) and n_tests:
        chosen = moments[sample]
        sampled = rule.converged(judge(chosen, draws=rule.draws, random_seed=random_seed), chosen)
    open_neurons = sample[~sampled].sort().values
    by_layer = _share(_count(converged, layers), _count(~is_dead, layers))
    coverage = Coverage(
        sampled=_mean(sampled),
        all=_mean(converged[judged]),
        by_layer=dict(zip((layer.name for layer in layers), by_layer, strict=True)),
        n_neurons=len(is_dead),
        n_dead=len(is_dead) - len(judged),
        n_unseen=int(((moments.mean == 0) & ~is_dead).sum()) if n_tests < UNSEEN_TESTS else 0,
        tests=n_tests,
        forecast=forecast(moments[sample], rule, goal),
    )
    return coverage, open_neurons


def forecast(moments: Moments, rule: Rule, goal: float) -> int | None:
    """Tests still needed until the share `goal` of these neurons has converged: MCSE falls as 1/sqrt(n)."""
    n = int(moments.count)
    if n < 10 or not len(moments.mean):
        return None
    probe = exact(Moments(moments.count, moments.mean[:1], torch.ones_like(moments.m2[:1])), draws=rule.draws)
    bound_factor = float(rule.mcse_bound(probe) / probe.mcse)
    needed = moments.variance * (bound_factor / rule.limit) ** 2 / rule.draws + 3
    needed = torch.where(moments.mean > 0, needed, UNSEEN_TESTS).sort().values
    last = max(0, math.ceil(goal * len(needed)) - 1)
    return max(0, math.ceil(float(needed[last])) - n)


def _mean(mask: Tensor) -> float:
    return float(mask.double().mean()) if len(mask) else 0.0


def _count(mask: Tensor, layers: Sequence[Layer]) -> Tensor:
    """How many are set, by layer."""
    last = torch.tensor([layer.stop - 1 for layer in layers], device=mask.device)
    return mask.cumsum(0)[last].diff(prepend=last.new_zeros(1))


def _share(part: Tensor, whole: Tensor) -> list[float]:
    """Shares; a layer without a judged neuron has nothing left to cover."""
    return torch.where(whole > 0, part / whole.clamp(min=1), 1.0).tolist()
