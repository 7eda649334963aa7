"""Statistics of paired tests: McNemar's exact test, and an interval for the difference of two fault rates."""

from __future__ import annotations

from math import sqrt
from typing import Any

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

    The interval of the difference is Newcombe's: the distances to both rates' limits, squared and added, less what the
    rates share by their correlation over seeds. The limits are those of `fault_rate`, so tests of one seed may be
    dependent; with one test per seed they are those of Clopper and Pearson.
    """
    rate_before, rate_after = fault_rate(tests, before), fault_rate(tests, after)
    assert rate_before is not None  # every seed has a test
    assert rate_after is not None
    correlation = _correlation(before / tests, after / tests)
    value = rate_after.value - rate_before.value
    below = _combine(rate_after.value - rate_after.low, rate_before.high - rate_before.value, correlation)
    above = _combine(rate_after.high - rate_after.value, rate_before.value - rate_before.low, correlation)
    return rate_before, rate_after, Estimate(value, max(-1.0, value - below), min(1.0, value + above))


def _correlation(a: NDArray[Any], b: NDArray[Any]) -> float:
    spread = float(a.std() * b.std())
    return 0.0 if spread == 0 else float(((a - a.mean()) * (b - b.mean())).mean()) / spread


def _combine(a: float, b: float, correlation: float) -> float:
    return sqrt(max(0.0, a * a - 2 * correlation * a * b + b * b))
