"""What changed between two models that were examined alike: each figure before and after, with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from themis.errors import UsageError
from themis.experiments.retraining.examine import Column, Reading
from themis.judge.estimate import Estimate
from themis.runs.run import percent

NORMAL = 1.96
"""Quantile of the normal distribution, for 95%."""
MENDED = 0.5
"""Share of the old faults that must be right now for them to count as mended."""
AS_MANY = 0.9
"""A fresh campaign that finds this share of the faults found before, or more, finds about as many."""
FEW = 10
"""Faults under which nothing is said of where they went."""


@dataclass(frozen=True)
class Shift:
    """A figure before and after; after is the mean over random seeds. Intervals are 95%, of the paired difference."""

    before: float
    after: float
    least: float
    most: float
    """Of the random seeds."""
    over_seeds: Estimate
    """Over judge seeds: each one's difference, a mean over random seeds; normal."""
    over_runs: Estimate | None
    """Over random seeds: Student's t; None where there is one."""

    @property
    def difference(self) -> float:
        return self.after - self.before


@dataclass(frozen=True)
class Changes:
    """One perturbation: what a retraining changed on the judge seeds."""

    perturbation: str
    n_seeds: int
    n_runs: int
    clean: Shift
    disturbed: Shift
    clean_error: Shift | None
    """Mean absolute error, in tasks whose answer is a number."""
    disturbed_error: Shift | None
    distinct_faults: Shift | None
    """Of a campaign on the judge seeds; None where none was run."""
    failing_seeds: Shift | None
    held: Shift | None
    """Share of the judge seeds that are answered rightly and withstood the campaign."""
    n_old: int
    mended: tuple[float, float, float] | None
    """Share of the old faults that are right now: mean, least and most."""
    verdict: str
    """mended, moved (the hole is elsewhere now), kept, or nothing where it cannot be said."""
    words: str
    """The verdict as a sentence."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def changes(before: Reading, after: Reading | Sequence[Reading]) -> Changes:
    """What changed from one examination to another, or to several that differ in the random seed of the training."""
    many = [after] if isinstance(after, Reading) else list(after)
    for each in many:
        if (each.perturbation, each.random_seed, each.draws) != (before.perturbation, before.random_seed, before.draws):
            raise UsageError(
                "readings must be of the same perturbation, random seed and draws to be paired, got "
                f"{before.perturbation}, {before.random_seed}, {before.draws} and {each.perturbation}, "
                f"{each.random_seed}, {each.draws}: examine both alike"
            )
        if not np.array_equal(each.seed_id, before.seed_id):
            raise UsageError("readings must be of the same judge seeds to be paired, they are not: examine both alike")
    if not many:
        raise UsageError("changes need a reading after the training, got none: give one or more")

    def shift(column: Callable[[Reading], Column | None], *, is_sum: bool = False) -> Shift | None:
        first, others = column(before), [column(each) for each in many]
        known = [each for each in others if each is not None]
        if first is None or len(known) < len(many):
            return None
        return paired(first, np.stack(known), len(first) if is_sum else 1)

    distinct = shift(lambda each: None if each.found is None else each.found.distinct, is_sum=True)
    mended = [float(each.mended.mean()) for each in many if each.mended is not None and len(each.mended)]
    share = (float(np.mean(mended)), min(mended), max(mended)) if mended else None
    n_old = 0 if many[0].mended is None else len(many[0].mended)
    verdict, words = judge_hole(share, n_old, distinct)
    return Changes(
        before.perturbation,
        len(before.seed_id),
        len(many),
        paired(before.clean, np.stack([each.clean for each in many])),
        paired(before.disturbed, np.stack([each.disturbed for each in many])),
        shift(lambda each: each.clean_error),
        shift(lambda each: each.disturbed_error),
        distinct,
        shift(lambda each: None if each.found is None else (each.found.distinct > 0).astype(np.float64), is_sum=True),
        shift(lambda each: None if each.found is None else each.found.held),
        n_old,
        share,
        verdict,
        words,
    )


def paired(before: Column, after: Column, scale: float = 1) -> Shift:
    """A figure that is the mean over seeds, times `scale`; `before [seeds]`, `after [runs, seeds]`."""
    means = after.mean(1) * scale
    first = float(before.mean() * scale)
    return Shift(
        first,
        float(means.mean()),
        float(means.min()),
        float(means.max()),
        normal_interval((after.mean(0) - before) * scale),
        t_interval(means - first),
    )


def normal_interval(values: Column) -> Estimate:
    """The mean of independent values, one a seed, and 1.96 standard errors to either side."""
    mean, n = float(values.mean()), len(values)
    reach = NORMAL * float(values.std(ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    return Estimate(mean, mean - reach, mean + reach)


def t_interval(values: Column) -> Estimate | None:
    """The mean of a few independent values, one a random seed, and Student's interval; None for one value."""
    n = len(values)
    if n < 2:
        return None
    from scipy.stats import t

    mean, reach = float(values.mean()), float(t.ppf(0.975, n - 1) * values.std(ddof=1) / math.sqrt(n))
    return Estimate(mean, mean - reach, mean + reach)


def judge_hole(mended: tuple[float, float, float] | None, n_old: int, distinct: Shift | None) -> tuple[str, str]:
    """Whether the hole was mended or moved: old faults that are right now beside what a fresh campaign finds."""
    if mended is None or distinct is None or n_old < FEW:
        return "", ""
    said = f"{percent(mended[0])} of {n_old:,} old faults are right now, and a fresh campaign finds "
    counts = f"{distinct.after:,.0f} distinct faults where it found {distinct.before:,.0f}"
    if distinct.after < AS_MANY * distinct.before:
        return "mended", f"{said}{counts}."
    sure = distinct.over_runs
    if sure is not None and sure.high < 0:
        return "mended", f"{said}fewer, {counts}: a small part was mended."
    if mended[0] >= MENDED:
        return "moved", f"{said}about as many, {counts}: the hole has moved."
    return "kept", f"{said}about as many, {counts}: little was mended."
