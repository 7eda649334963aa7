"""What changed between two models that were examined in the same way: before and after, with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from themis.judge.estimate import Estimate
from themis.retraining.examine import Column, Reading
from themis.text import percent


@dataclass(frozen=True)
class Shift:
    """A measurement before and after, a mean over random seeds, with 95% intervals of the paired difference."""

    before: float
    after: float
    least: float
    most: float
    """After, over random seeds."""
    over_seeds: Estimate | None
    """Over judge seeds: normal interval of the difference of each seed, a mean over random seeds. None if all agree."""
    over_runs: Estimate | None
    """Over random seeds: Student's t interval; None if there is only one, or if all agree."""
    combined: Estimate | None
    """Over judge seeds and random seeds, as far as either is known; None if neither is."""

    @property
    def difference(self) -> float:
        return self.after - self.before


@dataclass(frozen=True)
class Changes:
    """What a retraining changed on the judge seeds, under one perturbation."""

    perturbation: str
    n_seeds: int
    n_runs: int
    clean: Shift
    disturbed: Shift
    clean_error: Shift | None
    """The mean absolute error, for regression."""
    disturbed_error: Shift | None
    distinct_faults: Shift | None
    """Found by a campaign on the judge seeds; None if there was none."""
    failing_seeds: Shift | None
    held: Shift | None
    """The share of judge seeds that are answered correctly and withstood the campaign."""
    n_old: int
    mended: tuple[float, float, float] | None
    """The share of old faults that are now answered correctly: mean, least and most."""
    words: str
    """Where the faults went, as a sentence; empty if it is unknown."""


def changes(before: Reading, after: Sequence[Reading]) -> Changes:
    """What changed from one examination to others on the same seeds, after trainings with different random seeds."""

    def shift(column: str, scale: float = 1) -> Shift | None:
        columns = [getattr(reading, column) for reading in (before, *after)]
        return None if any(each is None for each in columns) else paired(columns[0], np.stack(columns[1:]), scale)

    n_seeds, means = len(before.seed_id), ("clean", "disturbed", "clean_error", "disturbed_error", "held")
    shifts: dict[str, Any] = {name: shift(name) for name in means}
    shifts |= {"distinct_faults": shift("distinct", n_seeds), "failing_seeds": shift("failing", n_seeds)}
    mended = [float(reading.mended.mean()) for reading in after if reading.mended is not None and len(reading.mended)]
    share = (float(np.mean(mended)), min(mended), max(mended)) if mended else None
    n_old = 0 if after[0].mended is None else len(after[0].mended)
    return Changes(
        perturbation=before.perturbation,
        n_seeds=n_seeds,
        n_runs=len(after),
        n_old=n_old,
        mended=share,
        words=describe_faults(share, n_old, shifts["distinct_faults"]),
        **shifts,
    )


def paired(before: Column, after: Column, scale: float = 1) -> Shift:
    """The shift of a mean over seeds, times `scale`; `before [seeds]`, `after [runs, seeds]`."""
    means, first = after.mean(1) * scale, float(before.mean() * scale)
    over_seeds, over_runs = normal_interval((after.mean(0) - before) * scale), t_interval(means - first)
    ends = float(means.mean()), float(means.min()), float(means.max())
    return Shift(first, *ends, over_seeds, over_runs, combine(over_seeds, over_runs))


def corruption_error(before: Sequence[Reading], after: Sequence[Sequence[Reading]]) -> Shift | None:
    """The mean corruption error (mCE), relative to the original model, which is 1 before.

    None if that makes no errors. after: `[perturbations][runs]`.
    """
    pairs = [
        (1 - old.disturbed, 1 - np.stack([reading.disturbed for reading in new]))
        for old, new in zip(before, after, strict=True)
        if (old.disturbed < 1).any()
    ]
    return paired(np.ones(len(pairs[0][0])), relative_errors(pairs)) if pairs else None


def relative_errors(pairs: Sequence[tuple[Column, Column]]) -> Column:
    """What each judge seed adds to the mean corruption error of each run, `[runs, seeds]`.

    Errors under each perturbation are divided by those of the original model, and averaged over perturbations; the
    ratios are linearised to one value per judge seed. pairs: by perturbation, errors before `[seeds]` and after.
    """
    values = []
    for old, new in pairs:
        ratio = new.mean(1, keepdims=True) / old.mean()
        values.append(ratio + (new - ratio * old) / old.mean())
    mean: Column = np.mean(values, 0)
    return mean


def normal_interval(values: Column) -> Estimate | None:
    """The mean of independent values, one per seed, and 1.96 standard errors to either side; None if all agree."""
    return _interval(values, 1.96)


def t_interval(values: Column) -> Estimate | None:
    """The mean of a few independent values, one per random seed, with Student's t interval; None if all agree."""
    from scipy.special import stdtrit

    return _interval(values, float(stdtrit(max(1, len(values) - 1), 0.975)))


def _interval(values: Column, quantile: float) -> Estimate | None:
    """Values without any variation do not say how much there is: an interval of zero width would claim to know."""
    if len(values) < 2:
        return None
    spread, mean = float(values.std(ddof=1)), float(values.mean())
    if spread <= 1e-9 * (1 + abs(mean)):  # but for rounding, all agree
        return None
    reach = quantile * spread / math.sqrt(len(values))
    return Estimate(mean, mean - reach, mean + reach)


def combine(over_seeds: Estimate | None, over_runs: Estimate | None) -> Estimate | None:
    """The interval over judge seeds and trainings together: the squares of both reaches are added.

    What a training and a seed have only together counts in both, so the interval is slightly too wide.
    """
    known = [estimate for estimate in (over_seeds, over_runs) if estimate is not None]
    if not known:
        return None
    value, reach = known[0].value, math.hypot(*(estimate.high - estimate.value for estimate in known))
    return Estimate(value, value - reach, value + reach)


def describe_faults(mended: tuple[float, float, float] | None, n_old: int, distinct: Shift | None) -> str:
    """Where the faults went, as a sentence: old ones answered correctly now, and those of a new campaign."""
    if mended is None or distinct is None or n_old < 10:  # fewer would say little
        return ""
    text = (
        f"{percent(mended[0])} of {n_old:,} old faults are now answered correctly, and a new campaign finds "
        f"{distinct.after:,.0f} distinct faults after {distinct.before:,.0f} before"
    )
    have_moved = mended[0] >= 0.5 and distinct.after >= 0.9 * distinct.before  # most are mended, yet as many are left
    return f"{text}: the faults have moved elsewhere." if have_moved else f"{text}."
