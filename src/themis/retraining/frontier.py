"""The frontier: scores on held-out seeds over the share of the way to the trained weights, and the point to go to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot
from statistics import NormalDist, fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from themis.measure.tests import Ints
from themis.oracle import Changed, Multilabel, Oracle, Regression, Threshold, Wrong
from themis.perturb import Perturbation
from themis.retraining.batches import FOR_TEST, BatchSplit, Disturber, theta_at, uniform_shares, walk
from themis.retraining.grading import CHUNK, Loss, expected_grades, grade
from themis.retraining.material import Material
from themis.retraining.recipe import Recipe
from themis.target.target import Target

SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Shares of the way from the old weights to the trained ones that are measured; between them, scores hardly bend."""
MAX_TESTS, MAX_TESTS_PER_SEED = 2_000, 20
"""Uniform tests of the held-out seeds after each epoch, in all and per seed and perturbation, at most."""
N_ATTACKS = 256
"""Number of tests if each costs passes of its own: an attack is computed again for the model of each epoch."""
MAX_CLEAN = 10_000
"""Held-out seeds on which the clean score is measured, at most."""
SMOOTHED = (Changed, Wrong, Threshold, Multilabel, Regression)
"""Tasks with `expected_grades`; the grades of others are means over pixels or points, or only the user knows them."""


@dataclass(frozen=True)
class FrontierPoint:
    """The weights at one share of the way, on held-out seeds: measured, or interpolated between two that were."""

    share: float
    clean: float
    """Score on clean inputs, 0..1."""
    disturbed: float
    """Score on disturbed inputs, a mean over perturbations."""
    by_perturbation: dict[str, float]
    """The disturbed score by perturbation."""
    loss: float
    """Mean of the clean and the disturbed loss."""
    lost: float
    """By how much the clean score is expected to fall, from the searched seeds held out; negative if it rises."""
    lost_error: float
    """The standard error of this estimate."""
    n_seeds: int
    """The number of these seeds."""


def mean_fall(before: Tensor, after: Tensor, groups: Ints | None) -> tuple[float, float]:
    """The mean fall of the grades of seeds, and its standard error; the seeds of a group fall together."""
    falls = (before - after).numpy()
    numbers = np.arange(len(falls)) if groups is None else np.unique(groups, return_inverse=True)[1]
    totals = np.bincount(numbers, falls - falls.mean())
    return float(falls.mean()), float(np.linalg.norm(totals)) / len(falls)


def believable_fall(expected: tuple[float, float], counted: tuple[float, float], n: int) -> tuple[float, float]:
    """The expected fall of the clean score, kept within two standard errors of the counted one, and its error.

    Both are means over `n` seeds with their standard errors. If a model is certain but sometimes wrong, calibration
    makes it look far less certain, and its expected score can be far from its score. No answer may have changed by
    chance, so the counted fall always has room for one.
    """
    reach = 2 * hypot(counted[1], 1 / n)
    return min(max(expected[0], counted[0] - reach), counted[0] + reach), expected[1]


def point_at(points: Sequence[FrontierPoint], share: float) -> FrontierPoint:
    """The point at a share of the way."""
    after = next(k for k, point in enumerate(points) if point.share >= share)
    high, low = points[after], points[max(0, after - 1)]
    if high.share == share:
        return high
    part = (share - low.share) / (high.share - low.share)

    def between(start: float, end: float) -> float:
        return start + part * (end - start)

    names = ("clean", "disturbed", "loss", "lost", "lost_error")
    measured: dict[str, Any] = {name: between(getattr(low, name), getattr(high, name)) for name in names}
    scores = {name: between(low.by_perturbation[name], score) for name, score in high.by_perturbation.items()}
    return replace(high, share=share, by_perturbation=scores, **measured)


def choose_share(points: Sequence[FrontierPoint], tolerance: float, confidence: float = 0.5) -> float:
    """The share with the highest disturbed score at which the clean score falls by at most `tolerance`.

    confidence: how likely that must be; 0.5 is the best estimate. The original model is always within the tolerance.
    """
    errors = NormalDist().inv_cdf(confidence)
    most = tolerance + 1e-9  # rounding must not exclude a fall of exactly the tolerance
    shares = sorted({*(percent / 100 for percent in range(101)), *(point.share for point in points)})
    candidates = [point_at(points, share) for share in shares]
    within = [point for point in candidates if not point.share or point.lost + errors * point.lost_error <= most]
    return max(within, key=lambda point: (point.disturbed, -point.loss)).share


def join_frontiers(frontiers: Sequence[Sequence[FrontierPoint]]) -> tuple[FrontierPoint, ...]:
    """The mean frontier of trainings; each seed that they held out counts alike for the expected fall."""
    joined = []
    for points in zip(*frontiers, strict=True):
        n_seeds = sum(point.n_seeds for point in points)
        weights = [point.n_seeds / n_seeds for point in points]
        columns = zip(*((point.clean, point.disturbed, point.loss) for point in points), strict=True)
        clean, disturbed, loss = map(fmean, columns)
        scores = {name: fmean(point.by_perturbation[name] for point in points) for name in points[0].by_perturbation}
        lost = fmean((point.lost for point in points), weights)
        error = hypot(*(weight * point.lost_error for weight, point in zip(weights, points, strict=True)))
        joined.append(FrontierPoint(points[0].share, clean, disturbed, scores, loss, lost, error, n_seeds))
    return tuple(joined)


def is_still_rising(points: Sequence[FrontierPoint]) -> bool:
    """Whether the disturbed score rises at the end at least half as fast as on the whole way: more training may pay."""
    first, *_, before, last = points
    gain = last.disturbed - first.disturbed
    return gain > 0 and last.disturbed - before.disturbed >= gain / 2 * (last.share - before.share) / last.share


class CleanScore(NamedTuple):
    """What the held-out seeds show of a model on clean inputs."""

    score: float
    loss: float
    errors: tuple[float, ...]
    """One minus the score, on searched seeds and on clean seeds, which a model may know by heart; if there are any."""
    grades: Tensor
    """Those of the searched seeds, or of the clean ones if there are no others."""
    expected: Tensor
    """The expected grades of the same seeds."""


class HeldOut:
    """Runs the same tests of the held-out seeds after every epoch, with theta drawn uniformly."""

    def __init__(
        self,
        target: Target,
        material: Material,
        split: BatchSplit,
        perturbations: Mapping[str, Perturbation],
        oracle: Oracle,
        loss: Loss | None,
        recipe: Recipe,
    ) -> None:
        """loss: None if only the model itself returns it, in training mode; 1 minus the grade then stands for it."""
        self.target, self.oracle, self.loss, self.perturbations = target, oracle, loss, perturbations
        held = [material.pool[split.held_pool], material.clean[split.held_clean]]
        self.seeds = Disturber(target, [(seeds, torch.arange(len(seeds))) for seeds in held], oracle)
        n, n_pool, random_seed = len(self.seeds), len(held[0]), recipe.random_seed
        self.tests: dict[str, tuple[Tensor, ...]] = {}
        for name, perturbation in perturbations.items():
            n_tests = N_ATTACKS if perturbation.passes else min(MAX_TESTS // len(perturbations), MAX_TESTS_PER_SEED * n)
            rows = walk(n, 0, n_tests, random_seed, FOR_TEST)
            seed_id = self.seeds.seed_id.numpy()[rows]
            shares, noise_seed = uniform_shares(perturbation, seed_id, np.arange(n_tests), random_seed, FOR_TEST)
            tests = (rows, theta_at(perturbation, shares), noise_seed)
            self.tests[name] = tuple(torch.from_numpy(column).to(target.device) for column in tests)
        clean_rows = torch.from_numpy(walk(n, 0, min(n, MAX_CLEAN), random_seed, FOR_TEST))
        parts = [clean_rows[clean_rows < n_pool], clean_rows[clean_rows >= n_pool]]
        self.clean_parts = [rows.to(target.device) for rows in parts if len(rows)]
        """Rows of searched and of clean seeds, if there are any."""
        self.groups = None if split.held_groups is None else split.held_groups[parts[0] if n_pool else parts[1]]
        """What the seeds of the first part belong to; None if each stands for itself."""

    def answer(self) -> Tensor:
        """The target's outputs for two clean inputs, in the mode that its module is in."""
        rows = self.clean_parts[0][:2]
        return self.seeds.forward(self.target, self.seeds.take(rows), rows)

    def clean(self) -> CleanScore:
        """The score of the target on the clean inputs."""
        parts = [self._measure(rows) for rows in self.clean_parts]
        scores, losses = [float(grades.mean()) for grades, _, _ in parts], [loss for _, loss, _ in parts]
        score, loss = (float(np.average(each, weights=list(map(len, self.clean_parts)))) for each in (scores, losses))
        return CleanScore(score, loss, tuple(1 - score for score in scores), parts[0][0], parts[0][2])

    def point(self, share: float, clean: CleanScore, before: CleanScore) -> FrontierPoint:
        """The target, whose clean score is given, as a point of the frontier that begins at the score `before`."""
        measured = {
            name: self._measure(rows, self.perturbations[name], *tests) for name, (rows, *tests) in self.tests.items()
        }
        scores = {name: float(grades.mean()) for name, (grades, _, _) in measured.items()}
        loss = (clean.loss + fmean(loss for _, loss, _ in measured.values())) / 2
        n, counted = len(clean.grades), mean_fall(before.grades, clean.grades, self.groups)
        fall = believable_fall(mean_fall(before.expected, clean.expected, self.groups), counted, n)
        return FrontierPoint(share, clean.score, fmean(scores.values()), scores, loss, *fall, n)

    def _measure(
        self, rows: Tensor, perturbation: Perturbation | None = None, *tests: Tensor
    ) -> tuple[Tensor, float, Tensor]:
        """Grades, the mean loss, and the expected grades of clean inputs."""
        oracle, total, answers = self.oracle, 0.0, []
        is_smoothed = perturbation is None and isinstance(oracle, SMOOTHED)
        with self.target.opened(), torch.no_grad():
            for chunk in torch.split(torch.arange(len(rows)), CHUNK):
                seeds = rows[chunk]
                if perturbation is None:
                    inputs, labels = self.seeds.take(seeds), self.seeds.labels[seeds]
                else:
                    inputs, labels = self.seeds(perturbation, seeds, *(column[chunk] for column in tests))
                outputs = self.seeds.forward(self.target, inputs, seeds).float()
                grades = grade(oracle, outputs, labels).double().cpu()
                loss = 1 - grades if self.loss is None else self.loss(outputs, labels).double()
                total += float(loss.mean()) * len(chunk)
                answers.append((grades, outputs, labels) if is_smoothed else (grades,))
        all_grades, *kept = (torch.cat(column) for column in zip(*answers, strict=True))
        return all_grades, total / len(rows), expected_grades(oracle, *kept) if is_smoothed else all_grades
