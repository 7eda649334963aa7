"""Grades at fixed levels: the share of wrong answers on the same seeds at every level, and the task's own score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from themis.compute import rng
from themis.measure.calculator import Calculator
from themis.measure.tests import Ints, Tests
from themis.suites.definition import SuiteMember

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
    score_name: str = ""
    """What the score is: accuracy, iou or map."""

    @property
    def error(self) -> float:
        """The share of wrong answers."""
        return self.errors / self.seeds


@dataclass(frozen=True)
class MemberGrades:
    """A member's levels, and for each graded seed at how many of them it was answered wrongly."""

    levels: tuple[LevelGrade, ...]
    errors_by_seed: NDArray[np.int64]


def graded_rows(n_seeds: int, most: int | None, random_seed: int) -> Ints:
    """The rows of the seeds to grade, ascending: all, or a random sample that is the same for every member."""
    if most is None or n_seeds <= most:
        return np.arange(n_seeds)
    order = np.argsort(rng.uniform(random_seed, FOR_SEEDS, np.arange(n_seeds)), kind="stable")
    rows: Ints = np.sort(order[:most])
    return rows


def grade_clean(calculator: Calculator, rows: Ints) -> tuple[LevelGrade, NDArray[np.int64]]:
    """The grade without a disturbance, from the clean sweep, and which of the seeds are answered wrongly."""
    at = torch.from_numpy(rows).to(calculator.device)
    outputs, labels = calculator.clean_outputs[at], None if calculator.labels is None else calculator.labels[at]
    wrong = calculator.compare(at, outputs, None).is_fault.cpu().numpy().astype(np.int64)
    name, score = _score(calculator, outputs, labels)
    return LevelGrade("clean", len(rows), int(wrong.sum()), score, 0, name), wrong


def grade_member(calculator: Calculator, member: SuiteMember, rows: Ints, random_seed: int) -> MemberGrades:
    """Run one test per seed and level. The noise seed of a test is the id of its seed.

    calculator: one that has swept the clean inputs, for any perturbation.
    """
    calculator = calculator.under(member.perturbation)
    seed_id = calculator.seeds.seed_id.numpy()[rows]
    errors = np.zeros(len(rows), dtype=np.int64)
    grades = []
    for level in member.levels:
        theta = level.draw(member.perturbation, seed_id, random_seed)
        tests = Tests(np.arange(len(rows)), rows, theta, seed_id, np.full(len(rows), "level"))
        grade, wrong = _grade_tests(calculator, tests, str(level))
        grades.append(grade)
        errors += wrong
    return MemberGrades(tuple(grades), errors)


def _grade_tests(calculator: Calculator, tests: Tests, level: str) -> tuple[LevelGrade, NDArray[np.int64]]:
    """The grade of tests, and which of them are answered wrongly; labels move with the pictures."""
    before, wrong, outputs, labels = calculator.passes, [], [], []
    for first in range(0, len(tests), calculator.chunk):
        chunk = tests[first : first + calculator.chunk]
        at = torch.from_numpy(chunk.seed).to(calculator.device)
        answers = calculator.run_chunk(chunk, calculator.chunk)
        with torch.no_grad():
            wrong.append(calculator.compare(at, answers.outputs, answers.motion).is_fault.cpu())
            outputs.append(answers.outputs)
            if calculator.labels is not None:
                moved = calculator.labels[at]
                labels.append(calculator.oracle.move_labels(moved, answers.motion) if answers.motion else moved)
    errors = torch.cat(wrong).numpy().astype(np.int64)
    name, score = _score(calculator, torch.cat(outputs), torch.cat(labels) if labels else None)
    return LevelGrade(level, len(tests), int(errors.sum()), score, calculator.passes - before, name), errors


def _score(calculator: Calculator, outputs: torch.Tensor, labels: torch.Tensor | None) -> tuple[str, float | None]:
    """The task's own score and its name; more is better. None without labels, or in tasks that have only an error."""
    scores = {} if labels is None else calculator.oracle.grade(outputs, labels)
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
    return {**vars(grade), "error": grade.error}
