"""Coverage: the share of neurons whose mean sensitivity is known to the chosen precision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from themis.judge.exact import exact
from themis.judge.posterior import PAPER_DRAWS, Judge, Posterior
from themis.judge.sampler import sample_neurons
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
    names_neurons: bool = True,
) -> tuple[Coverage, Tensor | None]:
    """Coverage of `moments`, and the sampled neurons that have not converged (flat indices, ascending).

    Without `names_neurons`, the closed form counts the sample instead of sorting all neurons, and the second is None.
    """
    is_judged = ~is_dead
    n_tests, n_judged = int(moments.count), int(is_judged.sum())
    converged = rule.converged(exact(moments, draws=rule.draws), moments) & is_judged
    is_unseen = (moments.mean == 0) & is_judged & (n_tests < UNSEEN_TESTS)
    open_neurons = None
    if judge is exact and not names_neurons:
        sampled = _count_sample(is_judged & (moments.variance == 0), converged, n_judged, k)
        needed = _tests_needed(moments, rule)[is_judged]
    else:
        judged = is_judged.nonzero().squeeze(1)
        sample = judged[sample_neurons(moments.variance[judged], k)]
        chosen = moments[sample]
        is_open = ~converged[sample]
        if judge is not exact and len(sample) and n_tests:
            is_open = ~rule.converged(judge(chosen, draws=rule.draws, random_seed=random_seed), chosen)
        sampled = int((~is_open).sum()) / max(len(sample), 1)
        open_neurons = sample[is_open].sort().values
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
