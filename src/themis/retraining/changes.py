"""What changed between two models that were examined in the same way: before and after, with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from themis.errors import UsageError
from themis.judge.estimate import Estimate
from themis.retraining.examine import Column, Reading
from themis.text import percent

MIN_RELATIVE_SPREAD = 1e-9
"""The spread, relative to the mean, below which values count as equal."""
NORMAL_QUANTILE = 1.96
"""The quantile of the normal distribution for 95%."""
MENDED_SHARE = 0.5
"""The share of old faults that must now be answered correctly for them to count as mended."""
AS_MANY_SHARE = 0.9
"""A new campaign that finds at least this share of the earlier number of faults finds about as many."""
MIN_OLD_FAULTS = 10
"""With fewer old faults than this there is no verdict on where they went."""


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
    strength: Shift | None
    """The smallest strength that breaks a seed, which is the area under the robustness curve; None if not measured."""
    verdict: str
    """`mended`, `moved` (there are as many faults elsewhere), `kept`, or empty if it is unknown."""
    words: str
    """The verdict as a sentence."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def changes(before: Reading, after: Reading | Sequence[Reading]) -> Changes:
    """What changed from one examination to another, or to several that differ in the random seed of the training."""
    many = [after] if isinstance(after, Reading) else list(after)
    for reading in many:
        if (reading.perturbation, reading.random_seed, reading.draws) != (
            before.perturbation,
            before.random_seed,
            before.draws,
        ):
            raise UsageError(
                "readings must be of the same perturbation, random seed and draws to be paired, got "
                f"{before.perturbation}, {before.random_seed}, {before.draws} and {reading.perturbation}, "
                f"{reading.random_seed}, {reading.draws}: examine both in the same way"
            )
        if not np.array_equal(reading.seed_id, before.seed_id):
            raise UsageError(
                "readings must be of the same judge seeds to be paired, but they differ: use one judge part"
            )
    if not many:
        raise UsageError("changes need a reading after the training, got none: pass at least one")

    def shift(column: Callable[[Reading], Column | None], *, is_sum: bool = False) -> Shift | None:
        first, columns = column(before), [column(reading) for reading in many]
        known = [values for values in columns if values is not None]
        if first is None or len(known) < len(many):
            return None
        return paired(first, np.stack(known), len(first) if is_sum else 1)

    distinct = shift(lambda reading: None if reading.found is None else reading.found.distinct, is_sum=True)
    mended = [float(reading.mended.mean()) for reading in many if reading.mended is not None and len(reading.mended)]
    share = (float(np.mean(mended)), min(mended), max(mended)) if mended else None
    n_old = 0 if many[0].mended is None else len(many[0].mended)
    verdict, words = fault_verdict(share, n_old, distinct)
    return Changes(
        before.perturbation,
        len(before.seed_id),
        len(many),
        paired(before.clean, np.stack([reading.clean for reading in many])),
        paired(before.disturbed, np.stack([reading.disturbed for reading in many])),
        shift(lambda reading: reading.clean_error),
        shift(lambda reading: reading.disturbed_error),
        distinct,
        shift(_failing, is_sum=True),
        shift(lambda reading: None if reading.found is None else reading.found.held),
        n_old,
        share,
        shift(lambda reading: reading.strength),
        verdict,
        words,
    )


def _failing(reading: Reading) -> Column | None:
    """Whether each judge seed failed in the campaign, as numbers."""
    return None if reading.found is None else (reading.found.distinct > 0).astype(np.float64)


def paired(before: Column, after: Column, scale: float = 1) -> Shift:
    """The shift of a mean over seeds, times `scale`; `before [seeds]`, `after [runs, seeds]`."""
    means = after.mean(1) * scale
    first = float(before.mean() * scale)
    over_seeds, over_runs = normal_interval((after.mean(0) - before) * scale), t_interval(means - first)
    return Shift(
        first,
        float(means.mean()),
        float(means.min()),
        float(means.max()),
        over_seeds,
        over_runs,
        combine(over_seeds, over_runs),
    )


def normal_interval(values: Column) -> Estimate | None:
    """The mean of independent values, one per seed, and 1.96 standard errors to either side; None if all agree."""
    return _interval(values, NORMAL_QUANTILE) if len(values) > 1 else None


def t_interval(values: Column) -> Estimate | None:
    """The mean of a few independent values, one per random seed, with Student's t interval; None if all agree."""
    if len(values) < 2:
        return None
    from scipy.stats import t

    return _interval(values, float(t.ppf(0.975, len(values) - 1)))


def _interval(values: Column, quantile: float) -> Estimate | None:
    """Values without any variation do not say how much there is: an interval of zero width would claim to know."""
    spread, mean = float(values.std(ddof=1)), float(values.mean())
    if spread <= MIN_RELATIVE_SPREAD * (1 + abs(mean)):
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


def fault_verdict(mended: tuple[float, float, float] | None, n_old: int, distinct: Shift | None) -> tuple[str, str]:
    """Whether faults were mended or moved, from the old faults answered correctly and those of a new campaign."""
    if mended is None or distinct is None or n_old < MIN_OLD_FAULTS:
        return "", ""
    text = f"{percent(mended[0])} of {n_old:,} old faults are now answered correctly, and a new campaign finds "
    counts = f"{distinct.after:,.0f} distinct faults after {distinct.before:,.0f} before"
    if distinct.after < AS_MANY_SHARE * distinct.before:
        return "mended", f"{text}{counts}."
    sure = distinct.combined if distinct.over_runs is not None else None
    if sure is not None and sure.high < 0:
        return "mended", f"{text}fewer, {counts}: a small part was mended."
    if mended[0] >= MENDED_SHARE:
        return "moved", f"{text}about as many, {counts}: the faults have moved elsewhere."
    return "kept", f"{text}about as many, {counts}: little was mended."
