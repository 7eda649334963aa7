"""The frontier of a retraining: disturbed score against clean score, over the share of the way to the new weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from themis.experiments.retraining.heldout import HeldOutScore

SHARES = (0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.0)
"""Shares of the way from the old weights to the trained ones that are measured."""
FEARED_LOSS = 0.02
"""The most that trained weights lost of the clean score in any measurement of this recipe."""
N_PRIOR = 100
"""How many seeds the feared loss counts as."""
ROUNDING = 1e-9


Fall = tuple[float, int]
"""The fall of a score, and the number of seeds that show it."""


@dataclass(frozen=True)
class FrontierPoint:
    """The weights at one share of the way, measured on held-out seeds."""

    share: float
    clean: float
    """Score on clean inputs, 0..1."""
    disturbed: float
    """Score on disturbed inputs, a mean over perturbations."""
    lost: float
    """By how much the clean score falls, as estimated by `estimate_loss`; negative if it rises."""
    by_perturbation: dict[str, float]
    """The disturbed score by perturbation."""
    loss: float
    """Mean of the clean and the disturbed loss."""
    falls: tuple[Fall, ...] = ()
    """The fall of the clean score as measured: on the searched seeds held out, and on all seeds held out."""


def choose_point(points: Sequence[FrontierPoint], tolerance: float) -> int:
    """The index of the point with the highest disturbed score whose clean score falls by at most `tolerance`.

    The first point is the original model, which is always within the tolerance.
    """
    within = [k for k, point in enumerate(points) if not k or point.lost <= tolerance + ROUNDING]
    return max(within, key=lambda k: (points[k].disturbed, -points[k].loss))


def measure_falls(before: HeldOutScore, after: HeldOutScore) -> tuple[Fall, ...]:
    """The fall of the clean score on the searched seeds held out, and on all seeds held out."""
    return (
        (before.part_scores[0] - after.part_scores[0], before.part_counts[0]),
        (before.score - after.score, sum(before.part_counts)),
    )


def estimate_loss(falls: Sequence[Fall], share: float) -> float:
    """By how much the clean score falls, on the searched seeds held out or on all seeds held out, whichever is more.

    Clean seeds that the model knows by heart must not hide what others lose. A fall is reduced by its standard error:
    one lost seed may be chance. A few seeds say little, so each estimate is drawn towards `FEARED_LOSS`, which grows
    with the square of the share, as if `N_PRIOR` more seeds had shown it.
    """
    prior = N_PRIOR * FEARED_LOSS * share**2
    return max((beyond_chance(fall, n) * n + prior) / (n + N_PRIOR) for fall, n in falls)


def beyond_chance(fall: float, n: int) -> float:
    """A fall on `n` seeds less its standard error, but not less than 0; a rise is as measured."""
    return fall if fall <= 0 else max(0.0, fall - math.sqrt(fall / n))


def join_frontiers(frontiers: Sequence[Sequence[FrontierPoint]]) -> tuple[FrontierPoint, ...]:
    """The mean frontier of trainings that held out different seeds, whose falls count together."""
    joined = []
    for points in zip(*frontiers, strict=True):
        share, names = points[0].share, points[0].by_perturbation
        falls = tuple(_join_falls(same) for same in zip(*(point.falls for point in points), strict=True))
        joined.append(
            FrontierPoint(
                share,
                fmean(point.clean for point in points),
                fmean(point.disturbed for point in points),
                estimate_loss(falls, share),
                {name: fmean(point.by_perturbation[name] for point in points) for name in names},
                fmean(point.loss for point in points),
                falls,
            )
        )
    return tuple(joined)


def _join_falls(falls: Sequence[Fall]) -> Fall:
    n = sum(count for _, count in falls)
    return sum(fall * count for fall, count in falls) / n, n


def next_point(points: Sequence[FrontierPoint], chosen: int) -> int | None:
    """The index of the next point that gains more than the chosen one; None if there is none."""
    better = (k for k in range(chosen + 1, len(points)) if points[k].disturbed > points[chosen].disturbed + ROUNDING)
    return next(better, None)
