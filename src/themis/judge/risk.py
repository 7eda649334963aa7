"""Inference about faults not found: the fault rate, the probability of a new fault, and how many are within reach.

For the residual risk, a fault is known if any test of the campaign has found it. The search learns from the uniform
tests: it may avoid the faults that they have found, or return to them. The faults that only the uniform stream has
found are therefore not a random selection, which `residual_risk` allows for.

Within reach is what a search with four times the tests would find. The forecast uses the discovery curve of the whole
campaign, uniform tests and search together, and so includes how the search learns. Estimators of species richness from
a random sample, such as Chao1, ignore this and were worse on real campaigns (`benchmarks/discovery.py`).
"""

from __future__ import annotations

import math
from bisect import bisect, bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from themis.errors import UsageError
from themis.judge.estimate import Estimate

Counts = Tensor | NDArray[np.number[Any]] | Sequence[int]
Bools = NDArray[np.bool_] | Sequence[bool]
Floats = NDArray[np.float64]
Sample = tuple[Floats, Floats | None]
"""Values of a variable in 0..1, and their weights if there are any."""

TAIL_PROBABILITY = 0.025
MAX_COUNT = 1 << 40
"""Searches for a number end here."""
_LOG_TAIL = float(np.log(1 / TAIL_PROBABILITY))
_HALF_Z2 = 1.959963984540054**2 / 2


def fault_rate(
    tests_by_seed: Counts, faults_by_seed: Counts, seed_weight: Floats | None = None, tail: float = TAIL_PROBABILITY
) -> Estimate | None:
    """The fault rate over inputs like these seeds: the mean of the fault rates of tested seeds; None without a test.

    `tests_by_seed` and `faults_by_seed` are counts `[seeds]`. Tests of one seed are alike, so precision grows with the
    number of seeds, not of tests. Each limit is Gaffke's limit for the mean of a variable in 0..1, here a seed's fault
    rate: the quantile of a Bayesian bootstrap of the seeds with one additional seed, which always fails (for the upper
    limit) or never fails (for the lower limit). With one test per seed, this is the Clopper-Pearson interval.

    `seed_weight` is how often inputs like each seed occur, if tests were drawn with these weights; a seed then counts
    by its weight divided by its probability of being tested at all. Each limit fails with probability `tail` at most.
    """
    return fault_rates([(tests_by_seed, faults_by_seed, seed_weight)], tail)[0]


def fault_rates(
    counts: Iterable[tuple[Counts, Counts, Floats | None]], tail: float = TAIL_PROBABILITY
) -> list[Estimate | None]:
    """`fault_rate` of several groups of seeds, each with its tests, faults and weights by seed."""
    samples = [_rates_of_seeds(*each) for each in counts]
    estimates = iter(_mean_estimates([sample for sample in samples if sample is not None], tail))
    return [None if sample is None else next(estimates) for sample in samples]


def _rates_of_seeds(tests_by_seed: Counts, faults_by_seed: Counts, seed_weight: Floats | None) -> Sample | None:
    """The fault rate of each tested seed, and its weight if there are weights; None without a test."""
    tests, faults = _counts(tests_by_seed), _counts(faults_by_seed)
    if tests.shape != faults.shape or (faults > tests).any():
        raise UsageError(
            "faults_by_seed must have one count per seed, at most its tests_by_seed, got other counts: count both by "
            "seed"
        )
    is_tested = tests > 0
    if not is_tested.any():
        return None
    rates = faults[is_tested] / tests[is_tested]
    if seed_weight is None:
        return rates, None
    share = (seed_weight / seed_weight.sum())[is_tested]
    with np.errstate(divide="ignore"):  # the share of a single seed is 1
        return rates, share / -np.expm1(tests.sum() * np.log1p(-share))


def weighted_fault_rate(seed: NDArray[np.int64], is_fault: Bools, weight: Floats) -> Estimate:
    """The fault rate if tests occurred in proportion to their weights; all arguments are `[tests]`."""
    tests, total = np.bincount(seed), np.bincount(seed, weight)
    faults, is_tested = np.bincount(seed, weight * np.asarray(is_fault)), total > 0
    rates = (faults[is_tested] / total[is_tested]).clip(0, 1)
    return mean_estimate(rates, weights=total[is_tested] / tests[is_tested])


def valid_fault_rate(
    rate: Estimate, seed: NDArray[np.int64], is_valid: NDArray[np.bool_], is_unsure: NDArray[np.bool_]
) -> Estimate:
    """The rate of valid faults, from the fault rate and marks on a random sample of the uniform faults, all `[faults]`.

    It is the fault rate times the share of valid faults. The limits of `rate` and those of the share each use half of
    the error probability of the result. Faults of a seed are alike, so the share is a mean over seeds, weighted by
    their marked faults. Unsure faults count as valid in the upper limit, as invalid in the lower limit, and as half a
    fault in the value.
    """
    _, place = np.unique(seed, return_inverse=True)
    kinds = (np.ones(len(seed)), is_valid, is_unsure)
    n, valid, unsure = (np.bincount(place, each).astype(np.float64) for each in kinds)
    low, high = (mean_estimate(of / n, TAIL_PROBABILITY / 2, n) for of in (valid, valid + unsure))
    share = float((valid + unsure / 2).sum() / n.sum())
    return Estimate(rate.value * share, rate.low * low.low, rate.high * high.high)


def mean_estimate(values: Floats, tail: float = TAIL_PROBABILITY, weights: Floats | None = None) -> Estimate:
    """The mean of a variable in 0..1 from a sample, with Gaffke's limits; each fails with probability `tail` at most.

    With weights, it is the weighted mean: the bootstrap draws pairs of value and weight, and its additional value has
    the largest weight.
    """
    return _mean_estimates([(np.asarray(values, dtype=np.float64), weights)], tail)[0]


def _mean_estimates(samples: Sequence[Sample], tail: float) -> list[Estimate]:
    sides = [(1 - values, weights) for values, weights in samples] + [*samples]
    limits, n = _mean_limits(sides, tail), len(samples)
    means = (float(np.average(values, weights=weights)) for values, weights in samples)
    return [Estimate(mean, 1 - low, high) for mean, low, high in zip(means, limits[:n], limits[n:], strict=True)]


def seeds_to_exceed(limit: float, rate: float, tail: float) -> int:
    """The number of seeds with mean `rate` needed for a lower limit above `limit`, whatever their spread.

    The spread is largest if every seed always or never fails; the limit is then that of Clopper and Pearson.
    """
    from scipy.special import betaincinv

    return 1 + bisect(range(1, MAX_COUNT), limit, key=lambda n: float(betaincinv(rate * n, n - rate * n + 1, tail)))


def mean_p_value(values: Floats, mean: float) -> float:
    """The two-sided p value of a mean, below `2 * tail` if and only if Gaffke's limits exclude it."""
    values = np.asarray(values, dtype=np.float64)
    sides = _Mixture.padded([_Mixture.of(side, None) for side in (values, 1 - values)])
    return float(np.clip(2 * (1 - _chance_under(np.array([mean, 1 - mean]), sides).max()), 0.0, 1.0))


def residual_risk(
    times_seen: Counts, first_seen: Counts, is_new: Bools, is_searched: Bools, n_tests: int
) -> Estimate | None:
    """The probability that the next uniform test shows a distinct fault that no test of the campaign has found.

    The columns describe the distinct faults of the uniform stream: how often it found each and at which of its
    `n_tests` tests first, whether the search had not found it by then, and whether the search has found it at any time.
    Returns None without a uniform test.

    - The value is `unseen_mass` over the later half of the tests; faults that earlier tests or the search have found
      are known. The less time the search has had to react to a test, the smaller the bias.
    - The lower limit is that of the last quarter, where the bias is smallest.
    - The upper limit does not depend on how the search reacts. Unknown faults never become more, so the probability is
      at most its average over these tests, each of which was a fair trial at its time. The limit is the smaller of the
      binomial limits over the later half and over all tests.
    """
    if n_tests < 1:
        return None
    seen, first = _counts(times_seen), _counts(first_seen)
    is_unknown, is_new = ~np.asarray(is_searched, dtype=bool), np.asarray(is_new, dtype=bool)

    def recent(n: int) -> Estimate:
        mass = unseen_mass(seen[is_unknown & (first >= n_tests - n)], n)
        assert mass is not None
        return mass

    n_half, n_quarter = -(-n_tests // 2), -(-n_tests // 4)
    high = min(
        _binomial_limit(int((is_new & (first >= n_tests - n_half)).sum()), n_half),
        _binomial_limit(int(is_new.sum()), n_tests),
    )
    value = min(recent(n_half).value, high)
    return Estimate(value, min(recent(n_quarter).low, value), high)


def unseen_mass(times_seen: Counts, n_tests: int) -> Estimate | None:
    """The probability that the next of these tests shows a new distinct fault (Good-Turing); None without a test.

    `times_seen` counts how often each distinct fault was seen, `[distinct faults]`. The limits come from an identity:
    for a fault expected `x` times and seen `c` times, `exp(a x [c = 0]) (1 - a**c)[c > 0]` has mean 1 for every `x` and
    `a < 1` (with Poisson counts; the lower limit uses `-a`). With probability `1 - tail`, the sum of `x` over unseen
    faults is therefore below `(log(1/tail) - sum log(1 - a**c)) / a`, whatever the probabilities of the faults. With
    many singletons, this Chernoff bound is too wide; `z**2 / 2` in place of the logarithm makes it Esty's normal
    interval, which is then correct.
    """
    seen = _counts(times_seen)
    seen = seen[seen > 0]
    n_faults = int(seen.sum())
    if n_faults > n_tests:
        raise UsageError(
            f"times_seen must add up to n_tests={n_tests} at most, got {n_faults}: count every uniform test"
        )
    if n_tests < 1:
        return None
    often, frequency = np.unique(seen, return_counts=True)
    singletons = int((seen == 1).sum())
    # There are at most as many unseen faults as faults; given the seeds, tests are independent.
    high = min(_unseen_limit(often, frequency) / n_tests, _binomial_limit(n_faults, n_tests), 1.0)
    return Estimate(singletons / n_tests, _unseen_floor(often, frequency, singletons) / n_tests, high)


def _counts(values: Counts) -> Floats:
    array = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values).astype(np.float64)
    if array.ndim != 1 or (array < 0).any():
        raise UsageError(f"counts must be one-dimensional and not negative, got shape {array.shape}")
    return array


def _mean_limits(samples: Sequence[Sample], tail: float) -> list[float]:
    """Gaffke's upper limit for the mean of each distribution on 0..1, given a sample of values with weights.

    All limits are found together, which takes hardly longer than finding one.
    """
    from scipy.special import betaincinv

    limits, mixtures = np.ones(len(samples)), {}
    for k, (values, weights) in enumerate(samples):
        mixture = _Mixture.of(values, weights)
        points, counts = mixture.points, mixture.counts
        if weights is None and len(points) == 2:
            limits[k] = points[0] + (1 - points[0]) * betaincinv(counts[1], counts[0], 1 - tail)
        elif points[0] < points[-1]:
            mixtures[k] = mixture
    most = max((len(mixture.points) for mixture in mixtures.values()), default=1)
    at, at_once = [*mixtures], max(1, POINTS_PER_BATCH // most)
    for first in range(0, len(at), at_once):
        part = at[first : first + at_once]
        limits[part] = _quantiles(_Mixture.padded([mixtures[k] for k in part]), 1 - tail)
    return limits.tolist()


@dataclass(frozen=True)
class _Mixture:
    """A Bayesian bootstrap: the mean of `points`, weighted by `scales` times weights that are Dirichlet(`counts`).

    The arrays are `[points]`, or `[mixtures, points]` for several mixtures.
    """

    points: Floats
    counts: Floats
    scales: Floats

    @staticmethod
    def of(values: Floats, weights: Floats | None) -> _Mixture:
        """The bootstrap of the values and of an additional value of 1 with the largest weight."""
        points = np.append(values, 1.0)
        if weights is None:
            points, counts = np.unique(points, return_counts=True)
            return _Mixture(points, counts.astype(np.float64), np.ones(len(points)))
        # Weights are rounded to steps of 5%, so that many are equal.
        steps = np.round(np.log(np.append(weights, weights.max()).clip(1e-300)) * 20)
        (points, steps), counts = np.unique([points, steps], axis=1, return_counts=True)
        return _Mixture(points, counts.astype(np.float64), np.exp((steps - steps.max()) / 20))

    def __getitem__(self, which: NDArray[np.intp]) -> _Mixture:
        return _Mixture(self.points[which], self.counts[which], self.scales[which])

    @staticmethod
    def padded(mixtures: Sequence[_Mixture]) -> _Mixture:
        """Stack several mixtures, padding the shorter ones with points that do not count."""
        width = max(len(each.points) for each in mixtures)
        columns = [[each.points, each.counts, each.scales] for each in mixtures]
        points, counts, scales = np.array(
            [[np.pad(column, (0, width - len(column))) for column in each] for each in columns]
        ).swapaxes(0, 1)
        return _Mixture(points, counts, scales)


def _quantiles(mixtures: _Mixture, share: float) -> Floats:
    """The quantile of each mixture, by the secant method.

    On the scale of normal quantiles, the probability of being below a limit is almost linear, so few steps are needed.
    """
    from scipy.special import ndtri

    def excess(limit: Floats, which: NDArray[np.intp]) -> Floats:
        chance = _chance_under(limit[which], mixtures[which]).clip(_NEGLIGIBLE, 1 - _NEGLIGIBLE)
        return np.asarray(ndtri(chance) - ndtri(share))

    # The quantile is a few standard deviations of the bootstrap above its mean.
    points, mass = mixtures.points, mixtures.counts * mixtures.scales
    mean = (mass * points).sum(1) / mass.sum(1)
    variance = (mass * mixtures.scales * (points - mean[:, None]) ** 2).sum(1) / mass.sum(1) ** 2
    last, limit = mean, np.minimum(1.0, mean + ndtri(share) * np.sqrt(variance))
    low, high, at = points.min(1), np.ones(len(points)), np.arange(len(points))
    of_last, of_limit = excess(last, at), excess(limit, at)
    for _ in range(_MAX_STEPS):
        low, high = np.where(of_limit < 0, limit, low), np.where(of_limit < 0, high, limit)
        at = (np.minimum(np.abs(of_limit), high - low) > _PRECISION).nonzero()[0]
        if not len(at):
            break
        slope = (of_limit - of_last) / np.where(limit == last, 1.0, limit - last)
        following = limit - of_limit / np.where(slope > 0, slope, np.nan)
        following = np.where((low <= following) & (following <= high), following, (low + high) / 2)
        last, of_last, limit, of_limit = limit.copy(), of_limit.copy(), limit.copy(), of_limit.copy()
        limit[at] = following[at]
        of_limit[at] = excess(limit, at)
    return np.asarray(limit)


_PRECISION, _MAX_STEPS = 1e-9, 100
_FREQUENCY_STEP, _NEGLIGIBLE = 0.1, 1e-9
_FREQUENCIES = np.split(np.exp(np.arange(-8, 20, _FREQUENCY_STEP)), (100, 180))
"""Frequencies of the integral in blocks; for most samples the first block is enough."""
_LOW_FREQUENCY_SUM = float(_FREQUENCIES[0][0] / np.expm1(_FREQUENCY_STEP))
"""The sum of the frequencies below the first one, where the integrand is proportional to them."""
POINTS_PER_BATCH = 1 << 10
"""Points of mixtures that are processed together, so that their intermediate results fit into a cache."""


def _chance_under(limit: Floats, mixtures: _Mixture) -> Floats:
    """The probability that each mixture is below its limit.

    It is the probability that independent Gamma(count) variables times `point - limit` add up to less than zero, by
    Imhof's integral over the characteristic function. On a logarithmic scale, the trapezoid rule gives eight digits.
    """
    offsets, counts = (mixtures.points - limit[:, None]) * mixtures.scales, mixtures.counts
    mean, sd = (counts * offsets).sum(1), np.sqrt((counts * offsets**2).sum(1))
    standard, total = (offsets / sd[:, None])[:, None], mean / sd * _LOW_FREQUENCY_SUM
    for block in _FREQUENCIES:
        scaled = block[:, None] * standard
        modulus = np.exp(-0.5 * (np.log1p(scaled * scaled) @ counts[..., None])[..., 0])
        total += (np.sin((np.arctan(scaled) @ counts[..., None])[..., 0]) * modulus).sum(1)
        if modulus[:, -1].max() < _NEGLIGIBLE:  # the modulus falls with the frequency
            break
    # Eight deviations away, the integrand oscillates too fast, but Cantelli's inequality gives the answer.
    chance = 0.5 - total * _FREQUENCY_STEP / np.pi
    return np.asarray(np.where(np.abs(mean) > 8 * sd, mean < 0, chance))


def _binomial_limit(successes: float, trials: float) -> float:
    """The Clopper-Pearson upper limit."""
    from scipy.special import betaincinv

    return 1.0 if successes >= trials else float(betaincinv(successes + 1, trials - successes, 1 - TAIL_PROBABILITY))


_UPWARD = np.append(np.linspace(0.002, 0.1, 50), np.linspace(0.1, 0.99, 90))[:, None]
_DOWNWARD = np.append(np.linspace(0.002, 0.1, 50), np.linspace(0.1, 0.999, 90))[:, None]
_PSEUDO_SINGLETONS = 0.65
"""Added to the number of singletons; without any, the upper limit is then that of a Poisson count, 3.69 faults."""


def _unseen_limit(often: Floats, frequency: NDArray[np.integer[Any]]) -> float:
    """The upper limit of the number of unseen faults that as many tests again would find."""
    cost = _HALF_Z2 - _PSEUDO_SINGLETONS * np.log1p(-_UPWARD[:, 0]) - np.log1p(-(_UPWARD**often)) @ frequency
    return float((cost / _UPWARD[:, 0]).min())


def _unseen_floor(often: Floats, frequency: NDArray[np.integer[Any]], singletons: int) -> float:
    """The lower limit of the number of unseen faults that as many tests again would find."""
    # With few singletons the full bound applies, because all faults may be known although some were seen only once.
    price = _HALF_Z2 + (_LOG_TAIL - _HALF_Z2) / np.sqrt(1 + singletons)
    is_even = often % 2 == 0  # odd counts above one could raise the limit above the estimate
    gain = singletons * np.log1p(_DOWNWARD[:, 0]) + np.log1p(-(_DOWNWARD ** often[is_even])) @ frequency[is_even]
    return max(0.0, float(((gain - price) / _DOWNWARD[:, 0]).max()))


REACH_FACTOR = 4
"""Faults are within reach if this many times the tests would find them."""
PRIOR_FINDINGS = 0.5
"""Added to the findings of the last doubling, because having found nothing does not mean a rate of zero (Jeffreys)."""
TREND_WEIGHT, TREND_TESTS = 0.4, 15
"""How far the trend of the last two doublings is continued at most, and the number of findings in them at which it is
continued half as far. On real curves, each doubling finds about as much as the one before."""
FORECAST_SPREAD = 0.5
"""Standard deviation, on the log scale, of the findings of real campaigns around the forecast, beyond Poisson noise."""
RECALL_QUANTILE = 0.75
"""The quantile of what is still to be found that `Reach.recall` uses."""


@dataclass(frozen=True)
class Reach:
    """A forecast of what the same search would have found after `REACH_FACTOR` times the tests.

    The number still to be found is a negative binomial variable with this mean and shape, capped at `n_left`.
    """

    found: int
    n_tests: int
    mean: float
    shape: float
    n_left: int | None = None

    def quantile(self, share: float) -> int:
        """The quantile of the number still to be found."""
        from scipy.special import betainc

        odds = self.shape / (self.shape + self.mean)
        n = bisect_left(range(MAX_COUNT), share, key=lambda n: float(betainc(self.shape, n + 1, odds)))
        return n if self.n_left is None else min(n, self.n_left)

    @property
    def estimate(self) -> Estimate:
        """The number within reach, including what was found."""
        value, low, high = (float(self.found + self.quantile(share)) for share in (0.5, 0.025, 0.975))
        return Estimate(value, low, high)

    @property
    def recall(self) -> float | None:
        """A lower limit, with probability `RECALL_QUANTILE`, of the share within reach found; None if nothing was."""
        return self.found / (self.found + self.quantile(RECALL_QUANTILE)) if self.found else None

    def tests_to(self, share: float) -> int:
        """The number of further tests to find this share of what is within reach, if each doubling finds as much."""
        missing = self.quantile(0.5)
        needed = share * (self.found + missing) - self.found
        if needed <= 0:
            return 0
        growth = float(REACH_FACTOR) ** (needed / missing)
        more: int = math.ceil(self.n_tests * (growth - 1))
        return more


def forecast(found_at: Iterable[int], n_tests: int, n_all: int | None = None) -> Reach:
    """Forecast what is within reach after `n_tests` tests; `found_at` are the tests that found something new.

    Let n1 and n2 be the findings of the last two doublings, in the tests (T/4, T/2] and (T/2, T]. The next two
    doublings find `2 n2 (n2/n1)**w`, where the weight w of the trend is small unless the counts are large. `n_all` is
    the number that exists, such as the number of seeds; the fewer are left, the harder they are to find.
    """
    numbers = np.fromiter(found_at, dtype=np.int64)
    found = len(numbers)
    recent = int((numbers >= n_tests / 2).sum())
    before = int((numbers >= n_tests / 4).sum()) - recent
    weight = TREND_WEIGHT * (recent + before) / (recent + before + TREND_TESTS)
    trend = ((recent + 0.5) / (before + 0.5)) ** weight
    mean = 2 * (recent + PRIOR_FINDINGS) * trend * math.exp(FORECAST_SPREAD**2 / 2)  # the rule holds for the median
    n_left = None
    if n_all is not None:
        n_left = max(0, n_all - found)
        chance = min(1.0, mean / 2 / max(n_left + recent, 1))  # per doubling, of each that is left
        mean = n_left * (1 - (1 - chance) ** 2)
    spread = (1 + 1 / (recent + PRIOR_FINDINGS)) * math.exp(FORECAST_SPREAD**2) - 1
    return Reach(found, n_tests, max(mean, 1e-9), 1 / spread, n_left)
