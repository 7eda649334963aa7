"""Statistics of paired tests: McNemar's exact test, and one test of the difference of two rates with its interval."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from themis.judge.estimate import Estimate
from themis.judge.risk import mean_estimate, mean_p_value

Counts = NDArray[np.int64]
LEVEL = 0.05
"""A difference counts if chance alone would produce one at least as large less often than this."""


def mcnemar(n_first: int, n_second: int) -> float:
    """McNemar's exact test, two-sided: the probability of splitting the discordant pairs at least as unevenly."""
    from scipy.special import bdtr

    n = n_first + n_second
    return 1.0 if n == 0 else float(min(1.0, 2 * bdtr(min(n_first, n_second), n, 0.5)))


@dataclass(frozen=True)
class PairedRates:
    """Two rates over the same seeds, and their difference; the p value and the interval are those of one test."""

    before: Estimate
    after: Estimate
    difference: Estimate
    """After minus before."""
    p_value: float


def paired_rates(tests: Counts, before: Counts, after: Counts, comparisons: int = 1) -> PairedRates:
    """The rates before and after, and the test of their difference, from tests and faults per seed of the same tests.

    The difference is tested as the mean of the seeds' own differences, which lie in -1..1, with Gaffke's limits: tests
    of one seed may be dependent. With one test per seed, this is McNemar's exact test. If no seed differs, the interval
    is not empty: the share that differs may be as large as Clopper and Pearson's limit of 0 among n.

    comparisons: how many differences are tested together. Their intervals hold together with 95% (Bonferroni), and p
    values are multiplied by this number.
    """
    rate_before, rate_after = (mean_estimate(faults / tests) for faults in (before, after))
    shares = (tests + after - before) / (2 * tests)  # (1 + difference) / 2
    share = mean_estimate(shares, LEVEL / 2 / comparisons)
    value = rate_after.value - rate_before.value
    low, high = (2 * limit - 1 for limit in (share.low, share.high))
    p_value = min(1.0, comparisons * mean_p_value(shares, 0.5))
    return PairedRates(rate_before, rate_after, Estimate(value, min(value, low), max(value, high)), p_value)
