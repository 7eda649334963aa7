"""Statistics of paired tests: McNemar's exact test, and an interval for the difference of two fault rates."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from themis.judge.estimate import Estimate
from themis.judge.risk import fault_rate

Counts = NDArray[np.int64]
LEVEL = 0.05
"""A difference counts if chance alone would produce one at least as large less often than this."""


def mcnemar(n_first: int, n_second: int) -> float:
    """McNemar's exact test, two-sided: the probability of splitting the discordant pairs at least as unevenly."""
    from scipy.special import bdtr

    n = n_first + n_second
    return 1.0 if n == 0 else float(min(1.0, 2 * bdtr(min(n_first, n_second), n, 0.5)))


def rates(tests: Counts, before: Counts, after: Counts) -> tuple[Estimate, Estimate, Estimate]:
    """The fault rates before and after, and their difference, from tests and faults per seed of the same tests.

    The limits of the difference are those that `fault_rate` has for a mean, here of the seeds' own differences.
    So tests of one seed may be dependent, and if no seed differs, the interval is not empty: among n seeds, the share
    that differs may be as large as Clopper and Pearson's limit of 0 among n.
    """
    rate_before, rate_after = fault_rate(tests, before), fault_rate(tests, after)
    share = fault_rate(2 * tests, tests + after - before)  # (1 + difference) / 2
    assert rate_before is not None  # every seed has a test
    assert rate_after is not None
    assert share is not None
    value = rate_after.value - rate_before.value
    low, high = (2 * limit - 1 for limit in (share.low, share.high))
    return rate_before, rate_after, Estimate(value, min(value, low), max(value, high))
