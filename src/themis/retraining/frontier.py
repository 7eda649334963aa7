"""The frontier of a retraining: disturbed score against clean score, over the share of the way to the new weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.retraining.batches import HeldOutScore

SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0)
"""Shares of the way from the old weights to the trained ones that are measured."""
PRIOR_LOSS = (0.007, 0.013)
"""The linear and the cubic part of the clean loss before any seed is measured: together about the most that we saw."""
PRIOR_SPREADS = (0.006, 0.012)
"""Their standard deviations."""
MUCH_TO_LEARN, WIDE_SPREADS = 0.1, (0.1, 0.1)
"""The probability that the old model has much to learn, and the standard deviations of both parts, around 0, then."""
PRIOR_CHANGED_SHARE = 0.03
"""The share of the clean answers that becomes right or wrong on the whole way, before any seed is measured."""
N_PRIOR_SEEDS = 100
"""How many seeds that share counts as."""
MOST_EVIDENCE = 500.0
"""Logarithm of the odds at which nothing is left to decide."""
ROUNDING_ERROR = 1e-9


Floats = NDArray[np.float64]
Fall = tuple[float, float, int]
"""The mean fall of the grade of a clean seed, the mean of its square, and the number of seeds.

Seeds that belong together fall together: of a group, the total fall is squared, still divided by the number of seeds.
"""


@dataclass(frozen=True)
class FrontierPoint:
    """The weights at one share of the way, measured on held-out seeds."""

    share: float
    clean: float
    """Score on clean inputs, 0..1."""
    disturbed: float
    """Score on disturbed inputs, a mean over perturbations."""
    by_perturbation: dict[str, float]
    """The disturbed score by perturbation."""
    loss: float
    """Mean of the clean and the disturbed loss."""
    falls: tuple[Fall, ...] = ()
    """The fall of the clean score as measured: on the searched seeds held out, which decide, and on all held out."""
    lost: float = 0.0
    """By how much the clean score falls, as estimated by `estimate_losses`; negative if it rises."""


def choose_point(points: Sequence[FrontierPoint], tolerance: float) -> int:
    """The index of the point with the highest disturbed score whose clean score falls by at most `tolerance`.

    The first point is the original model, which is always within the tolerance.
    """
    within = [k for k, point in enumerate(points) if not k or point.lost <= tolerance + ROUNDING_ERROR]
    return max(within, key=lambda k: (points[k].disturbed, -points[k].loss))


def measure_falls(before: HeldOutScore, after: HeldOutScore) -> tuple[Fall, ...]:
    """The fall of the clean grades on the searched seeds held out, and on all seeds held out."""
    parts = [old - new for old, new in zip(before.grades, after.grades, strict=True)]
    groups = after.groups or torch.split(torch.arange(sum(map(len, parts))), [len(part) for part in parts])
    return _fall(parts[0], groups[0]), _fall(torch.cat(parts), torch.cat(groups))


def _fall(falls: Tensor, groups: Tensor) -> Fall:
    """The fall of some seeds, which belong to groups."""
    number = torch.unique(groups, return_inverse=True)[1]
    totals = torch.zeros(len(falls), dtype=falls.dtype).index_add_(0, number, falls)
    return float(falls.mean()), float(totals.square().sum()) / len(falls), len(falls)


def with_losses(points: Sequence[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    """Points with the estimated fall of the clean score, on the searched seeds held out.

    Clean seeds do not count, because a model may know them by heart: they hide what it loses on others, and what it
    forgets of them it does not lose on others.
    """
    losses = estimate_losses([point.share for point in points], [point.falls[0] for point in points])
    return tuple(replace(point, lost=lost) for point, lost in zip(points, losses, strict=True))


def estimate_losses(shares: Sequence[float], falls: Sequence[Fall]) -> list[float]:
    """By how much the clean score falls at each share, estimated from the falls at all shares together.

    The loss is a smooth curve, a * share + b * share**3: measured frontiers are flat at first and steep at the end. Its
    parameters are the means of their posterior distribution, so the tolerance is compared with the expected loss. An
    answer changes somewhere on the way, so what each step adds is nearly independent of earlier steps, with a variance
    in proportion to the length of the step. Beforehand a loss is likely, unless the old model has much to learn.
    """
    at = np.array(shares)
    powers = np.stack([at, at**3], 1)
    steps = np.flatnonzero(np.diff(at) > 0)
    terms, rises = np.diff(powers, axis=0)[steps], np.diff([mean for mean, _, _ in falls])[steps]
    _, changed, n = falls[-1]
    per_share = changed / max(shares[-1], ROUNDING_ERROR)
    variance = (per_share * n + PRIOR_CHANGED_SHARE * N_PRIOR_SEEDS) / (n + N_PRIOR_SEEDS) / n * np.diff(at)[steps]
    likely, log_likely = _posterior(terms, rises, variance, np.array(PRIOR_LOSS), np.array(PRIOR_SPREADS))
    free, log_free = _posterior(terms, rises, variance, np.zeros(2), np.array(WIDE_SPREADS))
    odds = MUCH_TO_LEARN / (1 - MUCH_TO_LEARN) * np.exp(min(log_free - log_likely, MOST_EVIDENCE))
    return [float(lost) for lost in powers @ (likely + odds * free) / (1 + odds)]


def _posterior(terms: Floats, rises: Floats, variance: Floats, mean: Floats, spread: Floats) -> tuple[Floats, float]:
    """The mean of normal parameters after `rises`, which are `terms` times them with errors, and the log evidence."""
    covariance = np.diag(variance) + (terms * spread**2) @ terms.T
    gap = rises - terms @ mean
    solved = np.linalg.solve(covariance, gap)
    log_evidence = -(float(gap @ solved) + float(np.linalg.slogdet(covariance)[1])) / 2
    return mean + spread**2 * (terms.T @ solved), log_evidence


def join_frontiers(frontiers: Sequence[Sequence[FrontierPoint]]) -> tuple[FrontierPoint, ...]:
    """The mean frontier of trainings that held out different seeds, whose falls count together."""
    joined = []
    for points in zip(*frontiers, strict=True):
        names = points[0].by_perturbation
        joined.append(
            FrontierPoint(
                points[0].share,
                fmean(point.clean for point in points),
                fmean(point.disturbed for point in points),
                {name: fmean(point.by_perturbation[name] for point in points) for name in names},
                fmean(point.loss for point in points),
                tuple(_join_falls(same) for same in zip(*(point.falls for point in points), strict=True)),
            )
        )
    return with_losses(joined)


def _join_falls(falls: Sequence[Fall]) -> Fall:
    counts = [count for _, _, count in falls]
    mean, square = (float(np.average([fall[k] for fall in falls], weights=counts)) for k in (0, 1))
    return mean, square, sum(counts)


def next_point(points: Sequence[FrontierPoint], chosen: int) -> int | None:
    """The index of the next point that gains more than the chosen one; None if there is none."""
    better = (
        k for k in range(chosen + 1, len(points)) if points[k].disturbed > points[chosen].disturbed + ROUNDING_ERROR
    )
    return next(better, None)


def is_still_rising(points: Sequence[FrontierPoint]) -> bool:
    """Whether the disturbed score rises at the end at least half as fast as on the whole way: more training may pay."""
    first, *_, before, last = points
    gain = last.disturbed - first.disturbed
    return gain > 0 and last.disturbed - before.disturbed >= gain / 2 * (last.share - before.share) / last.share
