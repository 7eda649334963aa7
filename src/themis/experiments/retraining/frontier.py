"""The frontier of a retraining: disturbed score against clean score, over the share of the way to the new weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from themis.experiments.retraining.heldout import HeldOutScore

SHARES = (0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.0)
"""Shares of the way from the old weights to the trained ones that are measured."""
FEARED_LOSS = 0.02
"""The most that trained weights lost of the clean score in any measurement of this recipe."""
N_PRIOR = 100
"""How many seeds the feared loss counts as."""
ROUNDING = 1e-9


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


def choose_point(points: Sequence[FrontierPoint], tolerance: float) -> int:
    """The index of the point with the highest disturbed score whose clean score falls by at most `tolerance`.

    The first point is the original model, which is always within the tolerance.
    """
    within = [k for k, point in enumerate(points) if not k or point.lost <= tolerance + ROUNDING]
    return max(within, key=lambda k: (points[k].disturbed, -points[k].loss))


def estimate_loss(before: HeldOutScore, after: HeldOutScore, share: float) -> float:
    """By how much the clean score falls, on the searched seeds held out or on all seeds held out, whichever is more.

    Clean seeds that the model knows by heart must not hide what others lose. A few seeds say little, so each estimate
    is drawn towards `FEARED_LOSS`, which grows with the square of the share, as if `N_PRIOR` more seeds had shown it.
    """
    prior = N_PRIOR * FEARED_LOSS * share**2
    falls = (
        (before.part_scores[0] - after.part_scores[0], before.part_counts[0]),
        (before.score - after.score, sum(before.part_counts)),
    )
    return max((fall * n + prior) / (n + N_PRIOR) for fall, n in falls)


def next_point(points: Sequence[FrontierPoint], chosen: int) -> int | None:
    """The index of the next point that gains more than the chosen one; None if there is none."""
    better = (k for k in range(chosen + 1, len(points)) if points[k].disturbed > points[chosen].disturbed + ROUNDING)
    return next(better, None)
