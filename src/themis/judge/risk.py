"""What the uniform stream says about the model: its fault rate, and the chance that the next test shows a new fault.

The residual risk counts as known whatever any test of the campaign has seen. A search learns from the uniform tests: it
may avoid what they have found or return to it, so the faults that only the uniform stream has seen are not those that
chance alone would leave. `residual_risk` allows for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from themis.errors import UsageError
from themis.judge.estimate import Estimate

Counts = Tensor | NDArray[np.number[Any]] | Sequence[int]
Bools = NDArray[np.bool_] | Sequence[bool]
Floats = NDArray[np.float64]

TAIL_PROBABILITY = 0.025
_LOG_TAIL = float(np.log(1 / TAIL_PROBABILITY))
_HALF_Z2 = 1.959963984540054**2 / 2


def fault_rate(tests_by_seed: Counts, faults_by_seed: Counts) -> Estimate | None:
    """The fault rate over inputs like these seeds: the mean of the tested seeds' own rates; None without a test.

    `tests_by_seed` and `faults_by_seed` are counts `[seeds]`. Tests of one seed are alike, so what is known grows with
    the seeds, not with the tests. Each limit is Gaffke's for the mean of a variable in 0..1, here a seed's own fault
    rate: the quantile of a Bayesian bootstrap of the seeds that has one more seed, which always fails (for the upper
    limit) or never does (for the lower). With one test per seed, this is Clopper and Pearson's interval.
    """
    tests, faults = _counts(tests_by_seed), _counts(faults_by_seed)
    if tests.shape != faults.shape or (faults > tests).any():
        raise UsageError(
            "faults_by_seed must have one count per seed, at most its tests_by_seed, got other counts: count both by "
            "seed"
        )
    is_tested = tests > 0
    if not is_tested.any():
        return None
    return mean_estimate(faults[is_tested] / tests[is_tested])


def mean_estimate(values: Floats, tail: float = TAIL_PROBABILITY) -> Estimate:
    """The mean of a variable in 0..1 that `values` are a sample of, with Gaffke's limits; each fails at most `tail`."""
    values = np.asarray(values, dtype=np.float64)
    return Estimate(float(values.mean()), 1 - _mean_limit(1 - values, tail), _mean_limit(values, tail))


def mean_p_value(values: Floats, mean: float) -> float:
    """The two-sided test of a mean that these limits invert: under `2 * tail` if and only if they exclude `mean`."""
    values = np.asarray(values, dtype=np.float64)
    ends = ((values, mean), (1 - values, 1 - mean))
    chances = [_chance_under(end, *np.unique(np.append(side, 1.0), return_counts=True)) for side, end in ends]
    return float(np.clip(2 * (1 - max(chances)), 0.0, 1.0))


def residual_risk(
    times_seen: Counts, first_seen: Counts, is_new: Bools, is_searched: Bools, n_tests: int, n_unplaced: int = 0
) -> Estimate | None:
    """The chance that the next uniform test shows a distinct fault that no test of the campaign has seen.

    The columns describe the distinct faults of the uniform stream: how often it saw each and at which of its `n_tests`
    tests first, whether the search had not seen it by then, and whether the search has seen it at any time. The order
    of the first `n_unplaced` tests is unknown; the faults that they showed must have `first_seen` 0. Returns None
    without a uniform test.

    - The value is `unseen_mass` over the later half of the tests: faults that the earlier tests or the search have seen
      are known. The less time the search has had to react to a test, the smaller the bias.
    - The lower limit is that of the last quarter, where the bias is smallest.
    - The upper limit does not depend on how the search reacts: what is unknown never grows, so the chance is now at
      most what it was on average over these tests, and each of them was a fair trial of it at its time. It is the
      smaller of the binomial limits over the later half and over all tests.
    """
    if n_tests < 1:
        return None
    seen, first = _counts(times_seen), _counts(first_seen)
    is_unknown, is_new = ~np.asarray(is_searched, dtype=bool), np.asarray(is_new, dtype=bool)
    if n_unplaced >= n_tests:
        return unseen_mass(seen[is_unknown], n_tests)

    def recent(n: int) -> Estimate:
        mass = unseen_mass(seen[is_unknown & (first >= n_tests - n)], n)
        assert mass is not None
        return mass

    n_placed = n_tests - n_unplaced
    n_half, n_quarter = (min(n_placed, -(-n_tests // parts)) for parts in (2, 4))
    high = min(
        _binomial_limit(int((is_new & (first >= n_tests - n_half)).sum()), n_half),
        _binomial_limit(int((is_new & (first >= n_unplaced)).sum()), n_placed),
    )
    value = min(recent(n_half).value, high)
    return Estimate(value, min(recent(n_quarter).low, value), high)


def unseen_mass(times_seen: Counts, n_tests: int) -> Estimate | None:
    """The chance that the next of these tests shows something new to them (Good and Turing); None without a test.

    `times_seen` counts how often each distinct fault was seen, `[distinct faults]`. The limits come from an identity:
    for a fault expected `x` times, seen `c` times, `exp(a x [c = 0]) (1 - a**c)[c > 0]` has mean 1 for every `x` and
    `a < 1` (a Poisson count; the lower limit takes `-a`). So with chance `1 - tail` the sum of `x` over the unseen
    stays under `(log(1/tail) - sum log(1 - a**c)) / a`, whatever the faults' chances. Many singletons make that bound
    of Chernoff's type too wide; `z**2 / 2` for the logarithm makes it Esty's normal interval, which is then correct.
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
    # The unseen faults cannot exceed all faults; given the seeds, tests are independent.
    high = min(_unseen_limit(often, frequency) / n_tests, _binomial_limit(n_faults, n_tests), 1.0)
    return Estimate(singletons / n_tests, _unseen_floor(often, frequency, singletons) / n_tests, high)


def _counts(values: Counts) -> Floats:
    array = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values).astype(np.float64)
    if array.ndim != 1 or (array < 0).any():
        raise UsageError(f"counts must be one-dimensional and not negative, got shape {array.shape}")
    return array


def _mean_limit(values: Floats, tail: float) -> float:
    """Gaffke's upper limit for the mean of a distribution on 0..1 that `values` are a sample of."""
    from scipy.optimize import brentq

    points, weights = np.unique(np.append(values, 1.0), return_counts=True)
    if len(points) == 1:
        return 1.0
    return float(brentq(lambda t: _chance_under(t, points, weights) - (1 - tail), points[0], 1.0, xtol=1e-10))


_STEP = 0.02
_FREQUENCIES = np.exp(np.arange(-14, 20, _STEP))


def _chance_under(limit: float, points: Floats, weights: NDArray[np.integer[Any]]) -> float:
    """The chance that a Dirichlet(`weights`) mixture of `points` is under `limit`.

    It is the chance that independent Gamma(weight) variables times `point - limit` add up to less than zero: Imhof's
    integral over the characteristic function, on a logarithmic scale, where the trapezoid rule is good to six digits.
    """
    offsets = points - limit
    mean, sd = float(weights @ offsets), float(np.sqrt(weights @ offsets**2))
    if abs(mean) > 8 * sd:  # far beyond either limit by Cantelli's inequality; the integrand would swing too fast
        return float(mean < 0)
    total = 0.0
    for block in np.array_split(_FREQUENCIES, 1 + len(_FREQUENCIES) * len(points) // 4_000_000):
        scaled = block[:, None] * (offsets / sd)
        angle = np.arctan(scaled) @ weights
        log_modulus = 0.5 * np.log1p(scaled * scaled) @ weights
        total += float((np.sin(angle) * np.exp(-log_modulus)).sum())
    return 0.5 - total * _STEP / np.pi


def _binomial_limit(successes: float, trials: float) -> float:
    """Clopper and Pearson's upper limit."""
    from scipy.special import betaincinv

    return 1.0 if successes >= trials else float(betaincinv(successes + 1, trials - successes, 1 - TAIL_PROBABILITY))


_UPWARD = np.append(np.linspace(0.002, 0.1, 50), np.linspace(0.1, 0.99, 90))[:, None]
_DOWNWARD = np.append(np.linspace(0.002, 0.1, 50), np.linspace(0.1, 0.999, 90))[:, None]
_PSEUDO_SINGLETONS = 0.65
"""Added to the singletons: if there are none, the upper limit is that of Poisson, 3.69 faults."""


def _unseen_limit(often: Floats, frequency: NDArray[np.integer[Any]]) -> float:
    """Upper limit for the number of unseen faults that as many tests again would find."""
    cost = _HALF_Z2 - _PSEUDO_SINGLETONS * np.log1p(-_UPWARD[:, 0]) - np.log1p(-(_UPWARD**often)) @ frequency
    return float((cost / _UPWARD[:, 0]).min())


def _unseen_floor(often: Floats, frequency: NDArray[np.integer[Any]], singletons: int) -> float:
    """Lower limit for the same."""
    # All faults may be known although some were seen only once: with few singletons, the full bound applies.
    price = _HALF_Z2 + (_LOG_TAIL - _HALF_Z2) / np.sqrt(1 + singletons)
    is_even = often % 2 == 0  # odd counts above one would only help; without them the limit stays under the estimate
    gain = singletons * np.log1p(_DOWNWARD[:, 0]) + np.log1p(-(_DOWNWARD ** often[is_even])) @ frequency[is_even]
    return max(0.0, float(((gain - price) / _DOWNWARD[:, 0]).max()))
