"""Grades at fixed levels: the share of wrong answers on the same seeds at every level, and the task's own score.

Intervals are about inputs like the graded seeds. Tests of one seed are alike at all levels and under all members, so
each seed counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from themis.compute import rng
from themis.judge.estimate import Estimate
from themis.judge.risk import TAIL_PROBABILITY, mean_estimate
from themis.measure.calculator import Calculator
from themis.measure.tests import Ints, Tests
from themis.suites.definition import SuiteMember
from themis.suites.folder import pack

N_DISTINCT = 100
"""Values that a mean is computed from are rounded to this many parts of their range; its limits hardly notice."""
FOR_SEEDS = 71
"""The purpose of random numbers that choose the seeds to grade."""


@dataclass(frozen=True)
class LevelGrade:
    """The answers of the graded seeds at one level."""

    level: str
    """The level, in words."""
    seeds: int
    errors: int
    """Answers that are faults by the oracle; seeds that are answered wrongly without a disturbance count too."""
    score: float | None
    """Accuracy, mean IoU or whatever the task is scored by; None without labels."""
    passes: int
    wrong: NDArray[np.int64] = field(repr=False, compare=False)
    """Which of the graded seeds are answered wrongly, 1 or 0."""
    score_name: str = ""
    """What the score is: accuracy, iou or map."""

    @property
    def error(self) -> float:
        """The share of wrong answers."""
        return self.errors / self.seeds


def graded_rows(n_seeds: int, most: int | None, random_seed: int) -> Ints:
    """The rows of the seeds to grade, ascending: all, or a random sample that is the same for every member."""
    if most is None or n_seeds <= most:
        return np.arange(n_seeds)
    order = np.argsort(rng.uniform(random_seed, FOR_SEEDS, np.arange(n_seeds)), kind="stable")
    rows: Ints = np.sort(order[:most])
    return rows


def grade_clean(calculator: Calculator, rows: Ints) -> LevelGrade:
    """The grade without a disturbance, from the clean sweep."""
    at, clean = torch.from_numpy(rows).to(calculator.device), calculator.clean
    outputs, labels = clean.outputs[at], None if clean.labels is None else clean.labels[at]
    wrong = clean.compare(at, outputs, None).is_fault.cpu().numpy().astype(np.int64)
    name, score = _score(calculator, outputs, labels)
    return LevelGrade("clean", len(rows), int(wrong.sum()), score, 0, wrong, name)


def grade_member(calculator: Calculator, member: SuiteMember, rows: Ints, random_seed: int) -> list[LevelGrade]:
    """Run one test per seed and level. The noise seed of a test is the id of its seed.

    calculator: one that has swept the clean inputs, for any perturbation.
    """
    calculator = calculator.under(member.perturbation)
    seed_id = calculator.seeds.seed_id.numpy()[rows]
    grades = []
    for level in member.levels:
        theta = level.draw(member.perturbation, seed_id, random_seed)
        tests = Tests(np.arange(len(rows)), rows, theta, seed_id, np.full(len(rows), "level"))
        grades.append(_grade_tests(calculator, tests, str(level)))
    return grades


def _grade_tests(calculator: Calculator, tests: Tests, level: str) -> LevelGrade:
    """The grade of tests; labels move with the pictures."""
    before, wrong, outputs, labels = calculator.passes, [], [], []
    for first in range(0, len(tests), calculator.chunk):
        chunk = tests[first : first + calculator.chunk]
        at = torch.from_numpy(chunk.seed).to(calculator.device)
        answers = calculator.run_chunk(chunk, calculator.chunk)
        with torch.no_grad():
            wrong.append(calculator.clean.compare(at, answers.outputs, answers.motion).is_fault.cpu())
            outputs.append(answers.outputs)
            if calculator.clean.labels is not None:
                moved = calculator.clean.labels[at]
                labels.append(calculator.clean.oracle.move_labels(moved, answers.motion) if answers.motion else moved)
    errors = torch.cat(wrong).numpy().astype(np.int64)
    name, score = _score(calculator, torch.cat(outputs), torch.cat(labels) if labels else None)
    return LevelGrade(level, len(tests), int(errors.sum()), score, calculator.passes - before, errors, name)


def _score(calculator: Calculator, outputs: torch.Tensor, labels: torch.Tensor | None) -> tuple[str, float | None]:
    """The task's own score and its name; more is better. None without labels, or in tasks that have only an error."""
    scores = {} if labels is None else calculator.clean.oracle.grade(outputs, labels)
    return next(((name, float(score)) for name, score in scores.items() if name != "error"), ("", None))


def mean_score(scores: Sequence[Sequence[float]], clean: float) -> tuple[float, float | None]:
    """The mean score under corruption (mPC), over the levels and then over the corruptions, and its ratio to the clean
    score (rPC), which is None if that is 0.

    scores: by corruption and level, such as average precision or accuracy.
    """
    mean = float(np.mean([np.mean(levels) for levels in scores]))
    return mean, mean / clean if clean else None


def corruption_errors(errors: dict[str, list[float]], baseline: dict[str, list[float]]) -> dict[str, float | None]:
    """The corruption error of each corruption: the sum of the errors over its levels, relative to the baseline's."""
    return {name: _ratio(sum(levels), sum(baseline[name])) for name, levels in errors.items()}


def relative_corruption_errors(
    errors: dict[str, list[float]], clean: float, baseline: dict[str, list[float]], baseline_clean: float
) -> dict[str, float | None]:
    """The same for what a corruption adds to the clean error."""
    return {
        name: _ratio(sum(e - clean for e in levels), sum(e - baseline_clean for e in baseline[name]))
        for name, levels in errors.items()
    }


def _ratio(of: float, by: float) -> float | None:
    """A ratio; None if the baseline makes no errors, or adds none, to compare with."""
    return of / by if by > 0 else None


def plain_grade(grade: LevelGrade) -> dict[str, Any]:
    """A grade as JSON has it."""
    return {**vars(grade), "error": grade.error, "wrong": pack(grade.wrong)}


@dataclass(frozen=True)
class SeedValues:
    """A value of each graded seed, and the range that it may have."""

    values: NDArray[np.float64]
    low: float
    high: float

    def mean(self, tail: float = TAIL_PROBABILITY) -> Estimate:
        """Their mean, with Gaffke's limits."""
        width, value = self.high - self.low, float(self.values.mean())
        if width <= 0:
            return Estimate(value, value, value)
        of = mean_estimate((_rounded(self.values) - self.low) / width, tail)
        low, high = (value + width * (end - of.value) for end in (of.low, of.high))
        return Estimate(value, max(self.low, low), min(self.high, high))


def mean_ratio(of: Sequence[SeedValues], by: Sequence[SeedValues | float], *, is_paired: bool) -> Estimate:
    """The mean of the ratios of means, such as mCE, with its interval; a number in `by` has no error.

    The ratios are linearised to one value per seed of each side. If both sides have the same seeds, `is_paired`, these
    add up per seed; otherwise the limits of the two sides are joined in quadrature.
    """
    n, below = len(of), [float(np.mean(each.values)) if isinstance(each, SeedValues) else each for each in by]
    ratios = [float(each.values.mean()) / base for each, base in zip(of, below, strict=True)]
    own = _sum([_times(each, 1 / (n * base)) for each, base in zip(of, below, strict=True)])
    moved = [
        _times(SeedValues(each.values - base, each.low - base, each.high - base), -ratio / (n * base))
        for each, base, ratio in zip(by, below, ratios, strict=True)
        if isinstance(each, SeedValues)
    ]
    if not moved:
        return own.mean()
    return _sum([own, *moved]).mean() if is_paired else joined(own.mean(), _sum(moved).mean())


def _rounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The values on a grid of their range: the time that limits take grows with the number of distinct values."""
    step = float(np.ptp(values)) / N_DISTINCT
    if step == 0 or len(np.unique(values)) <= N_DISTINCT:
        return values
    grid: NDArray[np.float64] = values.min() + np.round((values - values.min()) / step) * step
    return grid.clip(values.min(), values.max())


def joined(first: Estimate, second: Estimate) -> Estimate:
    """The sum of two estimates that are independent: the distances of their limits add up in quadrature."""
    value = first.value + second.value
    down, up = (
        float(np.hypot(*(getattr(each, end) - each.value for each in (first, second)))) for end in ("low", "high")
    )
    return Estimate(value, value - down, value + up)


def _times(of: SeedValues, factor: float) -> SeedValues:
    ends = sorted((of.low * factor, of.high * factor))
    return SeedValues(of.values * factor, *ends)


def _sum(parts: Sequence[SeedValues]) -> SeedValues:
    values = np.sum([part.values for part in parts], axis=0)
    return SeedValues(values, sum(part.low for part in parts), sum(part.high for part in parts))
