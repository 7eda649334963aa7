"""Simulated campaigns whose truth is known: fault rate, missing mass of faults, and every neuron's spread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from moments import moments_of
from scipy import stats

from themis import Theta
from themis.judge.coverage import Rule, exact
from themis.judge.estimate import Estimate
from themis.judge.interval import coverage_interval
from themis.judge.risk import (
    TAIL_PROBABILITY,
    fault_rate,
    residual_risk,
    unseen_mass,
    valid_fault_rate,
    weighted_fault_rate,
)
from themis.measure.moments import Moments, Panel
from themis.perturb.distribution import Distribution, read_distribution
from themis.search.policy import UNIFORM_STREAM, Space

Outcome = tuple[Estimate, float]
"""What a campaign stated, and the truth."""


def holds(outcomes: Iterator[Outcome]) -> float:
    """The share of campaigns whose interval holds the truth."""
    return float(np.mean([each.low - 1e-12 <= truth <= each.high + 1e-12 for each, truth in outcomes]))


@dataclass(frozen=True)
class Inputs:
    """A population of inputs: `draw(rng, n)` gives the fault rates of n seeds, whose expectation is `rate`."""

    draw: Callable[[np.random.Generator, int], np.ndarray]
    rate: float


INPUTS = {
    "all alike": Inputs(lambda rng, n: np.full(n, 0.05), 0.05),
    "all alike, rare": Inputs(lambda rng, n: np.full(n, 0.001), 0.001),
    "every shade": Inputs(lambda rng, n: rng.beta(0.1, 1, n), 0.1 / 1.1),
    "few always fail": Inputs(lambda rng, n: (rng.random(n) < 0.02) * 1.0, 0.02),
    "hardly any always fails": Inputs(lambda rng, n: (rng.random(n) < 0.002) * 1.0, 0.002),
    "a hidden few": Inputs(lambda rng, n: np.where(rng.random(n) < 0.01, 1.0, 0.01), 0.0199),
    "half always fail": Inputs(lambda rng, n: (rng.random(n) < 0.5) * 1.0, 0.5),
    "never": Inputs(lambda rng, n: np.zeros(n), 0.0),
    "always": Inputs(lambda rng, n: np.ones(n), 1.0),
}
DESIGNS = [(1000, 4000), (1000, 1000), (1000, 100), (200, 10000), (50, 1000), (10, 500), (10, 10)]
"""Seeds and uniform tests."""


def fault_campaigns(
    inputs: Inputs, n_seeds: int, n_tests: int, n_campaigns: int, stated: Callable = fault_rate
) -> Iterator[Outcome]:
    """Campaigns on fresh seeds, each test on a seed drawn uniformly."""
    rng = np.random.default_rng(1)
    for _ in range(n_campaigns):
        tests = rng.multinomial(n_tests, np.full(n_seeds, 1 / n_seeds))
        faults = rng.binomial(tests, inputs.draw(rng, n_seeds))
        yield stated(tests, faults), inputs.rate


def textbook_rate(tests: np.ndarray, faults: np.ndarray) -> Estimate:
    """The binomial interval of Clopper and Pearson, which takes all tests for independent."""
    from scipy.stats import binomtest

    interval = binomtest(int(faults.sum()), int(tests.sum())).proportion_ci(0.95)
    return Estimate(faults.sum() / tests.sum(), interval.low, interval.high)


def _even(n_faults: int, expected: float, n_tests: int) -> np.ndarray:
    return np.full(n_faults, expected / n_tests)


def _zipf(n_faults: int, power: float, total: float) -> np.ndarray:
    chances = 1 / np.arange(1, n_faults + 1) ** power
    return total * chances / chances.sum()


MISSING = {
    "none": (1000, np.zeros(1)),
    "one, about as rare as 1 in n": (1000, _even(1, 1.0, 1000)),
    "one, found mostly": (1000, _even(1, 3.6, 1000)),
    "three": (1000, _even(3, 1.0, 1000)),
    "ten, found mostly": (1000, _even(10, 3.0, 1000)),
    "many, each rare": (1000, _even(1000, 0.1, 1000)),
    "very many, tiny": (1000, _even(5000, 0.0006, 1000)),
    "many, well known": (10_000, _even(1000, 6.0, 10_000)),
    "zipf": (1000, _zipf(1000, 1.0, 0.1)),
    "steep zipf": (10_000, _zipf(40, 3.0, 0.01)),
    "all tests fail": (100, _zipf(150, 1.0, 1.0)),
    "few tests": (5, _even(5, 1.0, 5)),
    "few tests, few faults": (8, _zipf(5, 2.0, 1.0)),
    "common and tiny": (1000, np.concatenate([_even(15, 3.0, 1000), _even(500, 0.006, 1000)])),
}
"""Uniform tests, and the chance of each distinct fault a test."""


def risk_campaigns(
    n_tests: int, chances: np.ndarray, n_campaigns: int, stated: Callable = unseen_mass
) -> Iterator[Outcome]:
    """Campaigns on one seed set; the truth is the mass of the faults that this campaign did not see."""
    rng = np.random.default_rng(2)
    counts = rng.multinomial(n_tests, np.append(chances, max(0.0, 1 - chances.sum())), size=n_campaigns)[:, :-1]
    for row in counts:
        yield stated(row[row > 0], n_tests), float(chances[row == 0].sum())


SEARCHES = {
    "random": (1.0, 1.0),
    "strong": (4.0, 1.0),
    "avoids what is known": (4.0, 0.2),
    "returns to what is known": (2.0, 4.0),
}
"""How much more often than a uniform test a search test meets a fault, and by how much once the fault is known."""
HIDDEN = {
    "none": np.zeros(1),
    "one, found mostly": _even(1, 3.6, 800),
    "zipf": _zipf(1000, 1.0, 0.1),
    "many, each rare": _even(1000, 0.1, 800),
    "all shades": np.random.default_rng(0).permutation(_zipf(2000, 0.7, 0.25)),
}
"""The chance per uniform test of each distinct fault."""


def searching_campaigns(
    chances: np.ndarray, search: tuple[float, float], n_campaigns: int, n_rounds: int = 10, n_uniform: int = 80
) -> Iterator[Outcome]:
    """Campaigns of two streams, of which the search knows what was found; the truth is the mass of what nobody saw."""
    rng = np.random.default_rng(4)
    boost, repeat = search
    for _ in range(n_campaigns):
        times, first = np.zeros(len(chances), dtype=int), np.zeros(len(chances), dtype=int)
        is_searched, is_new = np.zeros(len(chances), dtype=bool), np.zeros(len(chances), dtype=bool)
        for round in range(n_rounds):
            for test in range(round * n_uniform, (round + 1) * n_uniform):
                fault = int(np.searchsorted(chances.cumsum(), rng.random()))
                if fault < len(chances):
                    if not times[fault]:
                        first[fault], is_new[fault] = test, not is_searched[fault]
                    times[fault] += 1
            rates = 4 * n_uniform * boost * chances * np.where((times > 0) | is_searched, repeat, 1.0)
            is_searched |= rng.random(len(chances)) < -np.expm1(-rates)
        is_seen = times > 0
        columns = (column[is_seen] for column in (times, first, is_new, is_searched))
        yield residual_risk(*columns, n_tests=n_rounds * n_uniform), float(chances[~is_seen & ~is_searched].sum())


def textbook_risk(times_seen: np.ndarray, n_tests: int) -> Estimate:
    """Esty's normal interval for the missing mass."""
    once, twice = (times_seen == 1).sum(), (times_seen == 2).sum()
    value, half = once / n_tests, 1.96 * np.sqrt(once * (1 - once / n_tests) + 2 * twice) / n_tests
    return Estimate(value, max(0.0, value - half), value + half)


@dataclass(frozen=True)
class Network:
    """Neurons moved by seeds and thetas: `D = w(seed) |z|`, with `z` normal and of variance 1 for every neuron.

    `hard` is the spread of log w, by which seeds move everything; `by_seed` is the share of z's variance that a seed
    fixes, `shared` the share that neurons have in common. Spreads scatter log-normally by `scatter` about `offset`
    from the limit of convergence, in logarithms of the variance. `moves` is the share of tests that move a neuron.
    """

    hard: float = 0.5
    by_seed: float = 0.5
    shared: float = 0.5
    scatter: float = 1.0
    offset: float = 0.0
    moves: float = 1.0

    @property
    def variance(self) -> float:
        """The variance of D in closed form, before a neuron's own scale."""
        second = self.moves * np.exp(2 * self.hard**2)
        return float(second - (self.moves * np.exp(self.hard**2 / 2)) ** 2 * 2 / np.pi)

    def measure(self, rng: np.random.Generator, n_seeds: int, n_tests: int, sd: np.ndarray) -> tuple[np.ndarray, ...]:
        """Sensitivities `[tests, neurons]` of neurons with true spreads `sd`, and the tests' seeds `[tests]`."""
        n_neurons, n_causes = len(sd), 3

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, dtype=np.float32)

        seed = rng.integers(n_seeds, size=n_tests)
        causes = np.sqrt(self.by_seed) * normal(n_seeds, n_causes)[seed]
        causes += np.sqrt(1 - self.by_seed) * normal(n_tests, n_causes)
        loadings = normal(n_causes, n_neurons)
        z = np.sqrt(self.shared) * (causes @ (loadings / np.linalg.norm(loadings, axis=0)))
        if self.shared < 1:
            own = np.sqrt(self.by_seed) * normal(n_seeds, n_neurons)[seed]
            z += np.sqrt(1 - self.shared) * (own + np.sqrt(1 - self.by_seed) * normal(n_tests, n_neurons))
        moved = np.abs(z) * np.exp(self.hard * normal(n_seeds))[seed, None]
        if self.moves < 1:
            moved *= rng.random(z.shape, dtype=np.float32) < self.moves
        return moved * (sd / np.sqrt(self.variance)).astype(np.float32), seed


NETWORKS = {
    "hard seeds, spreads scattered": Network(),
    "hard seeds, nearly covered": Network(offset=-2.0),
    "very hard seeds": Network(hard=0.8),
    "no hard seeds": Network(hard=0.0),
    "errors each neuron's own": Network(hard=0.0, by_seed=0.3, shared=0.0),
    "alike, at the limit": Network(scatter=0.1, offset=-0.15),
    "alike, over the limit": Network(scatter=0.1, offset=0.1),
    "the same, under the limit": Network(hard=0.0, scatter=0.0, offset=-0.05),
    "one cause": Network(hard=0.3, by_seed=0.8, shared=1.0),
    "seldom moved": Network(hard=0.3, moves=0.02),
    "all covered": Network(scatter=0.3, offset=-4.0),
    "none covered": Network(scatter=0.3, offset=4.0),
}


def coverage_campaigns(
    network: Network,
    n_seeds: int = 1000,
    n_tests: int = 2000,
    n_campaigns: int = 200,
    n_neurons: int = 150,
    n_panel: int = 150,
    stated: Callable = coverage_interval,
) -> Iterator[Outcome]:
    """Campaigns on fresh seeds and neurons; the truth is the coverage with the true spreads at as many tests."""
    rng, rule = np.random.default_rng(3), Rule()
    one = Moments(torch.tensor(n_tests), torch.ones(1), torch.ones(1, dtype=torch.float64) * (n_tests - 1))
    limit = float(rule.limit / rule.mcse_bound(exact(one))) ** 2  # MCSE is proportional to the spread
    for _ in range(n_campaigns):
        variance = limit * np.exp(network.offset + network.scatter * rng.standard_normal(n_neurons))
        moved, seed = network.measure(rng, n_seeds, n_tests, np.sqrt(variance))
        panel = Panel.empty(torch.arange(n_panel))
        for first in range(0, n_tests, 500):
            part = slice(first, first + 500)
            panel.add(torch.from_numpy(moved[part, :n_panel].copy()), torch.from_numpy(seed[part]))
        seen = moments_of(torch.from_numpy(moved).double())
        known = Moments(seen.count, torch.ones_like(seen.mean), torch.from_numpy(variance * (n_tests - 1)))
        point, truth = (float(rule.converged(exact(each), each).double().mean()) for each in (seen, known))
        yield stated(panel.blocks(), point, rule, None, n_neurons), truth


def textbook_coverage(blocks: Moments, point: float, rule: Rule, *_: object) -> Estimate:
    """The plain jackknife of the coverage itself, each replicate judged at the full number of tests."""
    from themis.judge.interval import _jackknife_variance, _leave_one_out

    total, without = _leave_one_out(blocks)
    variance = without.variance.flatten()
    again = Moments(total.count, total.mean.repeat(len(without.m2)), variance * (total.count - 1))
    share = rule.converged(exact(again), again).view_as(without.m2).double().mean(1)
    half = 2.093 * float(_jackknife_variance(share).sqrt())
    return Estimate(point, max(0.0, point - half), min(1.0, point + half))


SHARES_OF_GROUPS = (0.5, 0.5)
"""Seeds of two groups: those of the first break under a weaker disturbance."""
BREAKING = (stats.beta(2, 2), stats.beta(5, 1))


def _occurring(theta: Theta, shares: tuple[float, float], n_seeds: int, random_seed: int) -> tuple[Space, np.ndarray]:
    """A space of seeds of both groups, half of each, and the theta beyond which each seed breaks."""
    seeds, box = np.arange(n_seeds), (np.float32([each]) for each in (0, 1, 0))
    margin, group = np.zeros(n_seeds, np.float32), seeds % 2
    weight = None if shares == SHARES_OF_GROUPS else np.where(group == 0, *shares) / (n_seeds / 2)
    space = Space(
        seeds, seeds, margin, *box, is_random=True, random_seed=random_seed, theta=(theta,), seed_weight=weight
    )
    breaks = [
        each.rvs(n_seeds, random_state=np.random.default_rng((random_seed, k))) for k, each in enumerate(BREAKING)
    ]
    return space, np.where(group == 0, *breaks)


def _rate_under(distribution: Distribution, shares: tuple[float, float]) -> float:
    grid = (np.arange(100_000) + 0.5) / 100_000
    density = distribution.density(grid, 0.0, 1.0)
    return float(sum(share * (density * each.cdf(grid)).mean() for share, each in zip(shares, BREAKING, strict=True)))


def profile_campaigns(profile: str, shares: tuple[float, float] | None, n_campaigns: int) -> Iterator[Outcome]:
    """Campaigns whose uniform stream follows a profile, and the weights of the seeds if there are shares."""
    theta, shares = Theta("theta", 0, 1, distribution=profile), shares or SHARES_OF_GROUPS
    truth, counter = _rate_under(theta.distribution, shares), np.arange(500)
    for k in range(n_campaigns):
        space, breaks = _occurring(theta, shares, 120, k)
        drawn = space.uniform_tests(counter, UNIFORM_STREAM, counter)
        tests = np.bincount(drawn.seed, minlength=120)
        faults = np.bincount(drawn.seed, drawn.theta[:, 0] > breaks[drawn.seed], minlength=120)
        yield fault_rate(tests, faults.astype(np.int64), space.seed_weight), truth


def weighted_campaigns(profile: str, n_campaigns: int) -> Iterator[Outcome]:
    """Campaigns with uniform theta, whose tests are weighted afterwards."""
    theta, distribution = Theta("theta", 0, 1), read_distribution(profile)
    truth, counter = _rate_under(distribution, SHARES_OF_GROUPS), np.arange(500)
    for k in range(n_campaigns):
        space, breaks = _occurring(theta, SHARES_OF_GROUPS, 120, k)
        drawn = space.uniform_tests(counter, UNIFORM_STREAM, counter)
        weight = distribution.density(drawn.theta[:, 0], 0.0, 1.0)
        yield weighted_fault_rate(drawn.seed, drawn.theta[:, 0] > breaks[drawn.seed], weight), truth


@dataclass(frozen=True)
class Reviewed:
    """A population of inputs: `draw(rng, n)` gives, for n seeds, the fault rates and the shares of valid faults."""

    draw: Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]
    valid_rate: float


def _hard(share, rate, valid, easy_rate, easy_valid):
    def draw(rng, n):
        is_hard = rng.random(n) < share
        return np.where(is_hard, rate, easy_rate), np.where(is_hard, valid, easy_valid)

    return Reviewed(draw, share * rate * valid + (1 - share) * easy_rate * easy_valid)


REVIEWED = {
    "all alike": _hard(0.0, 0.0, 0.0, 0.05, 0.7),
    "all valid": Reviewed(lambda rng, n: (rng.beta(0.3, 3, n), np.ones(n)), 0.3 / 3.3),
    "none valid": _hard(0.1, 0.5, 0.0, 0.01, 0.0),
    "few fail often, hardly valid": _hard(0.05, 0.8, 0.2, 0.01, 0.95),
    "few fail, each all or nothing": Reviewed(
        lambda rng, n: (np.where(rng.random(n) < 0.08, 0.9, 0.0), (rng.random(n) < 0.5) * 1.0), 0.036
    ),
}


def review_campaigns(
    reviewed: Reviewed, n_seeds: int, n_tests: int, n_marks: int, unsure: float, n_campaigns: int
) -> Iterator[Outcome]:
    """Campaigns on fresh seeds, with marks on a random sample of their faults; some are marked unsure at random."""
    for k in range(n_campaigns):
        rng = np.random.default_rng(k)
        rates, shares = reviewed.draw(rng, n_seeds)
        seed = rng.integers(0, n_seeds, n_tests)
        is_fault = rng.random(n_tests) < rates[seed]
        is_valid = rng.random(n_tests) < shares[seed]
        marked = rng.permutation(np.flatnonzero(is_fault))[:n_marks]
        if not len(marked):
            continue
        is_unsure = rng.random(len(marked)) < unsure
        tests, faults = (np.bincount(seed[which], minlength=n_seeds) for which in (slice(None), is_fault))
        rate = fault_rate(tests, faults, tail=TAIL_PROBABILITY / 2)
        yield valid_fault_rate(rate, seed[marked], is_valid[marked] & ~is_unsure, is_unsure), reviewed.valid_rate
