"""Fault detection capability: the correlation of error rate and faults over magnitudes, with bootstrap intervals.

There are two error rates, at full strength and over the box of theta that techniques search, and they rank techniques
differently: a lead in r is one only if both show it.

Seeds and campaigns are resampled, never magnitudes. One resample serves every magnitude and technique, so differences
between techniques are paired. Counts are means over campaigns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from themis.report.table import NO_VALUE, format_number

Array = NDArray[np.float64]
Scale = tuple[Callable[[Array], Array], Callable[[Array], Array]]
"""A transform to a scale on which resamples spread evenly, and its inverse."""

MIN_SPAN = 0.10
"""The least span of the error rates of a grid, even without any one of them."""
QUANTILE = 1.96
"""The quantile of the normal distribution for 95%."""
LARGEST_R = 1 - 1e-9
"""The correlation beyond which Fisher's transform is cut off."""
MIN_FAULTS = 10
"""The fewest distinct faults per campaign, over all magnitudes, for which an r is defined."""
MAX_UNDEFINED = 0.05
"""The largest share of undefined resamples; beyond it neither an interval nor an r is defined."""
MIN_RELATIVE_SPREAD = 1e-12
"""Numbers count as equal if their spread is below this share of the mean."""


def correlate(rates: Array, counts: Array) -> Array:
    """Pearson's r over the last dimension, `[...]`; NaN if all rates or all counts are equal."""
    x, y = (values - values.mean(-1, keepdims=True) for values in np.broadcast_arrays(rates, counts))
    sizes = [np.sqrt((values * values).sum(-1)) for values in (x, y)]
    is_flat = [
        size <= MIN_RELATIVE_SPREAD * (1 + np.abs(values).max(-1))
        for size, values in zip(sizes, (rates, counts), strict=True)
    ]
    with np.errstate(divide="ignore", invalid="ignore"):
        r = (x * y).sum(-1) / (sizes[0] * sizes[1])
    return np.where(is_flat[0] | is_flat[1], np.nan, np.clip(r, -1, 1))


def why_degenerate(rates: Array) -> str | None:
    """Why these error rates `[magnitudes]` do not allow a correlation; None if they do."""
    if len(rates) < 3:
        return f"{len(rates)} magnitude{'s are' if len(rates) > 1 else ' is'} too few to correlate"
    span = float(np.ptp(rates))
    if span < MIN_SPAN:
        return f"its error rates span {span:.3f}, less than {MIN_SPAN:.2f}"
    spans = [float(np.ptp(np.delete(rates, k))) for k in range(len(rates))]
    if min(spans) < MIN_SPAN:
        return (
            f"it depends on one magnitude: without it the error rates span {min(spans):.3f}, less than {MIN_SPAN:.2f}"
        )
    return None


@dataclass(frozen=True)
class Weights:
    """How often each resample draws each seed and campaign: `[resamples, seeds]` and so on; every row has mean 1."""

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

        Seeds without any fault may be left out of `counts`.
        """
        by_campaign = np.tensordot(self.search[:, : counts.shape[-1]], counts, (1, -1))
        mean: Array = np.einsum("b...c,bc->b...", by_campaign, self.campaigns) / counts.shape[-2]
        return mean


@dataclass(frozen=True)
class ResampledEstimate:
    """A value with its 95% interval by resampling; NaN where it is undefined."""

    value: float
    low: float
    high: float

    @staticmethod
    def of(value: float, samples: Array, scale: Scale | None = None) -> ResampledEstimate:
        """The interval extends 1.96 standard deviations of the resamples to either side of the value, on the scale.

        It is centred on the value rather than on the resamples, whose own noise lowers a correlation. It is undefined
        if more than 5% of the resamples are, and if all of them agree: a sample without any variation does not say how
        much there is.
        """
        transform, invert = scale or (_identity, _identity)
        with np.errstate(divide="ignore", invalid="ignore"):
            centre, spread = transform(np.asarray(value)), transform(samples)
        defined = spread[np.isfinite(spread)]
        if not np.isfinite(centre) or len(samples) - len(defined) > MAX_UNDEFINED * len(samples):
            return ResampledEstimate(float(value), np.nan, np.nan)
        reach = QUANTILE * defined.std()
        if reach <= MIN_RELATIVE_SPREAD * (1 + abs(float(centre))):
            return ResampledEstimate(float(value), np.nan, np.nan)
        return ResampledEstimate(float(value), float(invert(centre - reach)), float(invert(centre + reach)))

    def as_list(self) -> list[float | None]:
        """Plain data, with None for undefined numbers."""
        return [float(number) if np.isfinite(number) else None for number in (self.value, self.low, self.high)]


@dataclass(frozen=True)
class Measured:
    """One statistic of every technique, and its resamples `[resamples, techniques]`."""

    values: Array
    samples: Array
    scale: Scale | None = None

    def estimate(self, k: int) -> ResampledEstimate:
        return ResampledEstimate.of(self.values[k], self.samples[:, k], self.scale)

    def best_rivals(self, k: int) -> list[int]:
        """The best of the other techniques, several if they are equal; empty if none has a value."""
        rivals = self.values.copy()
        rivals[k] = np.nan
        return [] if np.isnan(rivals).all() else np.flatnonzero(rivals == np.nanmax(rivals)).tolist()

    def difference(self, k: int, rivals: list[int]) -> ResampledEstimate:
        """The difference from the mean of the rivals, paired."""
        mean, means = self.values[rivals].mean(), self.samples[:, rivals].mean(1)
        return ResampledEstimate.of(self.values[k] - mean, self.samples[:, k] - means)

    def ratio(self, k: int, rival: int) -> ResampledEstimate:
        """The ratio to a rival, paired."""
        with np.errstate(divide="ignore", invalid="ignore"):
            value, samples = (numbers[..., k] / numbers[..., rival] for numbers in (self.values, self.samples))
        return ResampledEstimate.of(float(value), samples, LOGARITHMIC)


def measure_correlation(errors: Array, counts: Array, weights: Weights, distinct: Array | None = None) -> Measured:
    """The r of each technique; errors `[magnitudes, judge seeds]`, counts `[techniques, magnitudes, campaigns, seeds]`.

    distinct: the counts of distinct faults, if `counts` are others. A technique with too few of them, or with too many
    undefined resamples, has no r.
    """
    values = correlate(errors.mean(1), counts.sum(-1).mean(-1))
    samples = correlate(weights.rates(errors)[:, None], weights.counts(counts))
    n_distinct = (counts if distinct is None else distinct).sum((1, 3)).mean(-1)
    is_unfounded = (n_distinct < MIN_FAULTS) | (np.isnan(samples).mean(0) > MAX_UNDEFINED)
    return Measured(np.where(is_unfounded, np.nan, values), samples, FISHER)


def agreed_lead(*differences: list[float | None] | None) -> str | None:
    """`ahead` or `behind` if the intervals of all differences (value, low, high) exclude zero on the same side."""
    signs = set()
    for difference in differences:
        _, low, high = difference or (None, None, None)
        signs.add(None if low is None or high is None else int(low > 0) - int(high < 0))
    return {1: "ahead", -1: "behind"}.get(signs.pop() or 0) if len(signs) == 1 else None


def measure_total(counts: Array, weights: Weights) -> Measured:
    """The count of every technique per campaign, over all magnitudes."""
    return Measured(counts.sum(-1).mean(-1).sum(-1), weights.counts(counts).sum(-1))


def _identity(values: Array) -> Array:
    return values


def _fisher(r: Array) -> Array:
    z: Array = np.arctanh(np.clip(r, -LARGEST_R, LARGEST_R))
    return z


FISHER: Scale = (_fisher, np.tanh)
LOGARITHMIC: Scale = (np.log, np.exp)


def format_estimate(estimate: Sequence[float | None] | None, digits: int = 3, *, signed: bool = False) -> str:
    """A value with its interval, such as 0.95 (0.90..0.98); `estimate` is value, low and high."""
    value, low, high = estimate or (None, None, None)
    if value is None:
        return NO_VALUE
    text = format_number(value, digits, signed=signed)
    if low is None or high is None:
        return text
    return f"{text} ({format_number(low, digits, signed=signed)}..{format_number(high, digits, signed=signed)})"


def format_spread(
    values: Iterable[float | None], middle: Callable[[list[float]], float], digits: int = 2, *, signed: bool = False
) -> str:
    """The mean or median of the values that exist, with the lowest and the highest if there are several."""
    known = [value for value in values if value is not None]
    ends = (min(known), max(known)) if len(known) > 1 else (None, None)
    return format_estimate([middle(known), *ends], digits, signed=signed) if known else NO_VALUE
