"""What paired tests can tell: McNemar's exact test, and an interval for the difference of two fault rates."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from themis.judge.estimate import Estimate
from themis.judge.risk import fault_rate

Counts = NDArray[np.int64]
LEVEL = 0.05
"""A difference is one where luck alone would show as large a one less often than this."""


def mcnemar(n_one: int, n_other: int) -> float:
    """McNemar's exact test, two-sided: how often luck splits these discordant pairs as unevenly, or more."""
    from scipy.special import bdtr

    n = n_one + n_other
    return 1.0 if n == 0 else float(min(1.0, 2 * bdtr(min(n_one, n_other), n, 0.5)))


def rates(tests: Counts, before: Counts, after: Counts) -> tuple[Estimate, Estimate, Estimate]:
    """The fault rates before and after, and their difference; counts of tests and faults a seed, of the same tests.

    The interval of the difference is Newcombe's: the distances of both rates' limits, squared and added, less what the
    rates share by their correlation over seeds. The limits are those of `fault_rate`, so tests of one seed may be
    alike; with one test a seed they are Clopper and Pearson's.
    """
    one, other = fault_rate(tests, before), fault_rate(tests, after)
    assert one is not None  # every seed has a test
    assert other is not None
    shared = _correlation(before / tests, after / tests)
    value = other.value - one.value
    below = _added(other.value - other.low, one.high - one.value, shared)
    above = _added(other.high - other.value, one.value - one.low, shared)
    return one, other, Estimate(value, max(-1.0, value - below), min(1.0, value + above))


def _correlation(a: NDArray[Any], b: NDArray[Any]) -> float:
    spread = float(a.std() * b.std())
    return 0.0 if spread == 0 else float(((a - a.mean()) * (b - b.mean())).mean()) / spread


def _added(a: float, b: float, shared: float) -> float:
    return sqrt(max(0.0, a * a - 2 * shared * a * b + b * b))
