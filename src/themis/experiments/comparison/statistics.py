"""Fault detection capability: the correlation over magnitudes of error rate and faults, with intervals by resampling.

Seeds and campaigns are drawn again, never magnitudes, and one draw serves every magnitude and technique, so that
differences between techniques are paired. Counts are means over campaigns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Scale = tuple[Callable[[Array], Array], Callable[[Array], Array]]
"""To a scale on which resamples spread evenly, and back."""

LEAST_SPAN = 0.10
"""Of the error rates of a grid, also without any one of them."""
QUANTILE = 1.96
"""Of the normal distribution, for 95%."""
LARGEST = 1 - 1e-9
"""Correlation beyond which Fisher's transform is cut off."""
LEAST_FAULTS = 10
"""Distinct faults a campaign, over all magnitudes, that an r must rest on."""
MOST_UNDEFINED = 0.05
"""Share of resamples; beyond it there is no interval, and no r."""
FLAT = 1e-12
"""Spread, as a share of the mean, under which numbers are all the same."""


def correlate(rates: Array, counts: Array) -> Array:
    """Pearson's r over the last dimension, `[...]`; NaN where rates or counts are all the same."""
    x, y = (each - each.mean(-1, keepdims=True) for each in np.broadcast_arrays(rates, counts))
    sizes = [np.sqrt((each * each).sum(-1)) for each in (x, y)]
    is_flat = [size <= FLAT * (1 + np.abs(of).max(-1)) for size, of in zip(sizes, (rates, counts), strict=True)]
    with np.errstate(divide="ignore", invalid="ignore"):
        r = (x * y).sum(-1) / (sizes[0] * sizes[1])
    return np.where(is_flat[0] | is_flat[1], np.nan, np.clip(r, -1, 1))


def why_degenerate(rates: Array) -> str | None:
    """Why nothing can be said from these error rates `[magnitudes]`; None if something can."""
    if len(rates) < 3:
        return f"{len(rates)} magnitude{'s are' if len(rates) > 1 else ' is'} too few to correlate"
    span = float(np.ptp(rates))
    if span < LEAST_SPAN:
        return f"its error rates span {span:.3f}, under {LEAST_SPAN:.2f}"
    spans = [float(np.ptp(np.delete(rates, k))) for k in range(len(rates))]
    if min(spans) < LEAST_SPAN:
        return f"it hangs on one magnitude: without it the error rates span {min(spans):.3f}, under {LEAST_SPAN:.2f}"
    return None


@dataclass(frozen=True)
class Weights:
    """How often each resample draws each seed and campaign: `[resamples, seeds]` and so on; each row has mean 1."""

    search: Array
    judge: Array
    campaigns: Array

    @staticmethod
    def draw(n_resamples: int, n_search: int, n_judge: int, n_campaigns: int, random_seed: int) -> Weights:
        generator = np.random.default_rng(random_seed)

        def times(n: int) -> Array:
            return generator.multinomial(n, np.full(n, 1 / n), size=n_resamples).astype(np.float64)

        return Weights(times(n_search), times(n_judge), times(n_campaigns))

    def rates(self, errors: Array) -> Array:
        """Error rates `[resamples, magnitudes]` from errors `[magnitudes, judge seeds]`."""
        rates: Array = self.judge @ errors.T / errors.shape[1]
        return rates

    def counts(self, counts: Array) -> Array:
        """Mean counts `[resamples, techniques, magnitudes]` from `[techniques, magnitudes, campaigns, seeds]`.

        The seeds may be fewer than are drawn: the others had no fault anywhere.
        """
        by_campaign = np.tensordot(self.search[:, : counts.shape[-1]], counts, (1, -1))
        mean: Array = np.einsum("b...c,bc->b...", by_campaign, self.campaigns) / counts.shape[-2]
        return mean


@dataclass(frozen=True)
class Figure:
    """A figure with its 95% interval; NaN where it is undefined."""

    value: float
    low: float
    high: float

    @staticmethod
    def of(value: float, samples: Array, scale: Scale | None = None) -> Figure:
        """The interval is the value and 1.96 times the spread of its resamples to either side, on a scale of its own.

        Around the value, not the middle of the resamples: those add noise of their own, which lowers a correlation.
        There is none where over 5% of the resamples are undefined.
        """
        there, back = scale or (_same, _same)
        with np.errstate(divide="ignore", invalid="ignore"):
            middle, spread = there(np.asarray(value)), there(samples)
        defined = spread[np.isfinite(spread)]
        if not np.isfinite(middle) or len(samples) - len(defined) > MOST_UNDEFINED * len(samples):
            return Figure(float(value), np.nan, np.nan)
        reach = QUANTILE * defined.std()
        return Figure(float(value), float(back(middle - reach)), float(back(middle + reach)))

    def as_list(self) -> list[float | None]:
        """Plain data; what is undefined is None."""
        return [float(each) if np.isfinite(each) else None for each in (self.value, self.low, self.high)]


@dataclass(frozen=True)
class Measured:
    """One figure of every technique, and its resamples `[resamples, techniques]`."""

    values: Array
    samples: Array
    scale: Scale | None = None

    def figure(self, k: int) -> Figure:
        return Figure.of(self.values[k], self.samples[:, k], self.scale)

    def best_rivals(self, k: int) -> list[int]:
        """The best of the other techniques, several where they are equal; none if none has a value."""
        others = self.values.copy()
        others[k] = np.nan
        return [] if np.isnan(others).all() else np.flatnonzero(others == np.nanmax(others)).tolist()

    def difference(self, k: int, others: list[int]) -> Figure:
        """From the mean of others, paired."""
        mean, means = self.values[others].mean(), self.samples[:, others].mean(1)
        return Figure.of(self.values[k] - mean, self.samples[:, k] - means)

    def ratio(self, k: int, rival: int) -> Figure:
        """To a rival, paired."""
        with np.errstate(divide="ignore", invalid="ignore"):
            value, samples = (each[..., k] / each[..., rival] for each in (self.values, self.samples))
        return Figure.of(float(value), samples, LOGARITHMIC)


def measure_correlation(errors: Array, counts: Array, weights: Weights, distinct: Array | None = None) -> Measured:
    """Each technique's r; errors `[magnitudes, judge seeds]`, counts `[techniques, magnitudes, campaigns, seeds]`.

    distinct: the distinct faults among those counted, if it is not these. Too few of them, or too many resamples
    without an r, and there is none.
    """
    values = correlate(errors.mean(1), counts.sum(-1).mean(-1))
    samples = correlate(weights.rates(errors)[:, None], weights.counts(counts))
    carried = (counts if distinct is None else distinct).sum((1, 3)).mean(-1)
    is_unfounded = (carried < LEAST_FAULTS) | (np.isnan(samples).mean(0) > MOST_UNDEFINED)
    return Measured(np.where(is_unfounded, np.nan, values), samples, FISHER)


def measure_total(counts: Array, weights: Weights) -> Measured:
    """Each technique's count over all magnitudes, a campaign."""
    return Measured(counts.sum(-1).mean(-1).sum(-1), weights.counts(counts).sum(-1))


def _same(values: Array) -> Array:
    return values


def _fisher(r: Array) -> Array:
    z: Array = np.arctanh(np.clip(r, -LARGEST, LARGEST))
    return z


FISHER: Scale = (_fisher, np.tanh)
LOGARITHMIC: Scale = (np.log, np.exp)
