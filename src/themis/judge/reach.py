"""How many distinct faults and failing seeds a search would still find: those within reach of four times its tests.

What counts is the discovery curve of the campaign itself, uniform tests and search together, so the forecast includes
how the search learns. Estimators of species richness from a random sample (Chao1 and its kin) know nothing of that, and
were worse on real campaigns (`benchmarks/discovery.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from themis.judge.estimate import Estimate

FACTOR = 4
"""Within reach is what this many times the tests would find."""
PRIOR = 0.5
"""Added to the findings of the last doubling: having found nothing does not mean a rate of zero (Jeffreys' prior)."""
TREND, TREND_TESTS = 0.4, 15
"""How far the trend of the last two doublings continues over the next two, and the number of findings in them that
earns half of that. On real curves each doubling finds about as much as the one before."""
FORECAST_SPREAD = 0.5
"""Standard deviation of the logarithm of what real campaigns find about this rule, beyond the chance in the counts."""
CAUTION = 0.75
"""`Reach.recall` takes this quantile of what is still to be found."""


@dataclass(frozen=True)
class Reach:
    """A forecast of what the same search would have found after `FACTOR` times the tests.

    What is still to be found is a negative binomial variable with this mean and shape, and at most `n_left`.
    """

    found: int
    n_tests: int
    mean: float
    shape: float
    n_left: int | None = None

    def quantile(self, share: float) -> int:
        """The smallest number that what is still to be found exceeds with a probability of at most `1 - share`."""
        from scipy.special import betainc

        odds = self.shape / (self.shape + self.mean)
        low, high = -1, 1
        while betainc(self.shape, high + 1, odds) < share:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if betainc(self.shape, middle + 1, odds) < share else (low, middle)
        return high if self.n_left is None else min(high, self.n_left)

    @property
    def estimate(self) -> Estimate:
        """What is within reach, found or not."""
        value, low, high = (float(self.found + self.quantile(share)) for share in (0.5, 0.025, 0.975))
        return Estimate(value, low, high)

    @property
    def recall(self) -> float | None:
        """The share of what is within reach that was found, this or more with probability `CAUTION`; None if none."""
        return self.found / (self.found + self.quantile(CAUTION)) if self.found else None

    def tests_to(self, share: float) -> int:
        """How many more tests find this share of what is within reach, if each doubling finds the same."""
        missing = self.quantile(0.5)
        needed = share * (self.found + missing) - self.found
        if needed <= 0:
            return 0
        growth = float(FACTOR) ** (needed / missing)
        more: int = math.ceil(self.n_tests * (growth - 1))
        return more


def forecast(found_at: Iterable[int], n_tests: int, n_all: int | None = None) -> Reach:
    """What is within reach after `n_tests` tests; `found_at` are the tests that found something for the first time.

    Let n1 and n2 be the findings of the last two doublings, the tests in (T/4, T/2] and (T/2, T]. The next two
    doublings find `2 n2 (n2/n1)**w`, where the weight w of the trend is small unless the counts are large. `n_all` is
    the number that can be found at all, such as the number of seeds: what is left of it becomes harder to find.
    """
    numbers = np.fromiter(found_at, dtype=np.int64)
    found = len(numbers)
    recent = int((numbers >= n_tests / 2).sum())
    before = int((numbers >= n_tests / 4).sum()) - recent
    weight = TREND * (recent + before) / (recent + before + TREND_TESTS)
    trend = ((recent + 0.5) / (before + 0.5)) ** weight
    mean = 2 * (recent + PRIOR) * trend * math.exp(FORECAST_SPREAD**2 / 2)  # the rule holds for the median
    n_left = None
    if n_all is not None:
        n_left = max(0, n_all - found)
        chance = min(1.0, mean / 2 / max(n_left + recent, 1))  # per doubling, of each that is left
        mean = n_left * (1 - (1 - chance) ** 2)
    spread = (1 + 1 / (recent + PRIOR)) * math.exp(FORECAST_SPREAD**2) - 1
    return Reach(found, n_tests, max(mean, 1e-9), 1 / spread, n_left)
