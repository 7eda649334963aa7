"""Grades at fixed levels: the share of wrong answers on the same seeds at every level, and the task's own score.

Intervals are for inputs like the graded seeds. The tests of one seed, at any level and under any member, are alike, so
each seed counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import betaincinv

from themis.compute import rng
from themis.judge.estimate import Estimate
from themis.judge.risk import TAIL_PROBABILITY, mean_estimate
from themis.measure.calculator import Calculator
from themis.measure.runner import LocalMeasurer, Measurer
from themis.measure.tests import Ints, Tests
from themis.suites.definition import SuiteMember
from themis.suites.folder import pack, unpack

Interval = tuple[float, float]
"""The ends of a 95% interval."""
MAX_DISTINCT = 100
"""Values are rounded to this many steps of their range before limits are computed, which hardly changes the limits."""
FOR_SEEDS = 71
"""The purpose of random numbers that choose the seeds to grade."""


@dataclass(frozen=True)
class LevelGrade:
    """The answers of the graded seeds at one level."""

    level: str
    seeds: int
    errors: int
    """Answers that are faults by the oracle, including those to seeds that are answered wrongly when clean."""
    score: float | None
    """The score of the task, such as accuracy or mean IoU; None without labels."""
    passes: int
    wrong: NDArray[np.int64] = field(repr=False, compare=False)
    """1 for each graded seed that is answered wrongly, otherwise 0."""
    score_name: str = ""
    """accuracy, iou or map."""

    @property
    def error(self) -> float:
        """The share of wrong answers."""
        return self.errors / self.seeds


def graded_rows(n_seeds: int, most: int | None, random_seed: int) -> Ints:
    """The ascending rows of the seeds to grade: all, or a random sample that is the same for every member."""
    if most is None or n_seeds <= most:
        return np.arange(n_seeds)
    order = np.argsort(rng.uniform(random_seed, FOR_SEEDS, np.arange(n_seeds)), kind="stable")
    rows: Ints = np.sort(order[:most])
    return rows


def grade_clean(calculator: Calculator, rows: Ints) -> LevelGrade:
    """The grade without a disturbance, from the clean sweep."""
    at = torch.from_numpy(rows).to(calculator.device)
    return replace(grade_outputs(calculator, rows, calculator.clean.outputs[at], "clean"), passes=0)


def grade_outputs(calculator: Calculator, rows: Ints, outputs: torch.Tensor, level: str) -> LevelGrade:
    """The grade of one output per seed in `rows`, for disturbances that do not move the content of an input."""
    at, clean = torch.from_numpy(rows).to(calculator.device), calculator.clean
    wrong = clean.compare(at, outputs, None).is_fault.cpu().numpy().astype(np.int64)
    name, score = _score(calculator, outputs, None if clean.labels is None else clean.labels[at])
    return LevelGrade(level, len(rows), int(wrong.sum()), score, len(rows), wrong, name)


def grade_member(
    calculator: Calculator, member: SuiteMember, rows: Ints, random_seed: int, measurer: Measurer | None = None
) -> list[LevelGrade]:
    """Run one test per seed and level on a swept calculator; the noise seed of a test is the id of its seed.

    measurer: the measurer that swept the calculator; by default a local one.
    """
    measurer = measurer or LocalMeasurer(calculator)
    calculator = calculator.with_perturbation(member.perturbation)
    seed_id = calculator.seeds.seed_id.numpy()[rows]
    grades = []
    for level in member.levels:
        theta = level.draw(member.perturbation, seed_id, random_seed)
        tests = Tests(np.arange(len(rows)), rows, theta, seed_id, np.full(len(rows), "level"))
        grades.append(_grade_tests(measurer, calculator, tests, str(level)))
    return grades


def _grade_tests(measurer: Measurer, calculator: Calculator, tests: Tests, level: str) -> LevelGrade:
    before, chunks = calculator.passes, list(measurer.grade(calculator, tests))
    errors = torch.cat([chunk.is_fault for chunk in chunks]).cpu().numpy().astype(np.int64)
    labels = [chunk.labels for chunk in chunks if chunk.labels is not None]
    outputs = torch.cat([chunk.outputs for chunk in chunks])
    name, score = _score(calculator, outputs, torch.cat(labels) if labels else None)
    return LevelGrade(level, len(tests), int(errors.sum()), score, calculator.passes - before, errors, name)


def _score(calculator: Calculator, outputs: torch.Tensor, labels: torch.Tensor | None) -> tuple[str, float | None]:
    """The name and value of the task's own score, of which more is better; None without labels or such a score."""
    scores = {} if labels is None else calculator.clean.oracle.grade(outputs, labels)
    return next(((name, float(score)) for name, score in scores.items() if name != "error"), ("", None))


def plain_grade(grade: LevelGrade) -> dict[str, Any]:
    """A grade as plain data for JSON."""
    return {**vars(grade), "error": grade.error, "wrong": pack(grade.wrong)}


def read_grade(plain: dict[str, Any]) -> LevelGrade:
    """A grade from JSON."""
    known = {name: plain[name] for name in LevelGrade.__dataclass_fields__ if name in plain}
    return LevelGrade(**{**known, "wrong": unpack(plain["wrong"], plain["seeds"])})


@dataclass(frozen=True)
class SuiteGrades:
    """The grades of a suite: of each graded member at its levels, and on clean inputs."""

    levels: dict[str, list[LevelGrade]]
    clean: LevelGrade | None
    """None if no member has levels."""
    tail: float = TAIL_PROBABILITY
    """The probability that a limit of an interval is wrong, divided by the number of looks at a claim."""

    @staticmethod
    def of(record: dict[str, Any]) -> SuiteGrades:
        """The grades of `suite.json`."""
        levels = {name: [read_grade(grade) for grade in grades] for name, grades in record["grades"].items() if grades}
        tail = TAIL_PROBABILITY / (record.get("decision") or {"looks": 1})["looks"]
        return SuiteGrades(levels, None if record["clean"] is None else read_grade(record["clean"]), tail)

    @cached_property
    def errors(self) -> dict[str, list[float]]:
        """The share of wrong answers by member and level."""
        return {name: [grade.error for grade in grades] for name, grades in self.levels.items()}

    @cached_property
    def level_errors(self) -> dict[str, list[Estimate]]:
        """The share of wrong answers by member and level, with intervals."""
        return {
            name: [_share(grade.errors, grade.seeds, self.tail) for grade in grades]
            for name, grades in self.levels.items()
        }

    @cached_property
    def wrong(self) -> dict[str, NDArray[np.int64]]:
        """By member, the number of levels at which each graded seed is answered wrongly `[seeds]`."""
        return {name: np.sum([grade.wrong for grade in grades], axis=0) for name, grades in self.levels.items()}

    def shares(self, names: Sequence[str]) -> NDArray[np.float64]:
        """The share of wrong answers to each seed `[seeds]`, averaged over levels and then over members."""
        shares: NDArray[np.float64] = np.mean([self.wrong[name] / len(self.levels[name]) for name in names], axis=0)
        return shares

    @cached_property
    def member_errors(self) -> dict[str, Estimate]:
        """The mean error over the levels of each member, with its interval."""
        return {name: mean_estimate(self.shares([name]), self.tail) for name in self.levels}

    @cached_property
    def mean_error(self) -> Estimate | None:
        """The mean error over the levels of all members, with its interval; None without levels."""
        return mean_estimate(self.shares([*self.levels]), self.tail) if self.levels else None

    @property
    def score_name(self) -> str:
        """The name of the score, in words."""
        name = "" if self.clean is None else self.clean.score_name
        return {"map": "mean average precision", "iou": "mean IoU"}.get(name, name or "score")

    @property
    def mean_score(self) -> float | None:
        """The mean score over levels and members (mPC): accuracy, IoU or average precision; None without labels."""
        scores = [[grade.score for grade in grades] for grades in self.levels.values()]
        if self.clean is None or self.clean.score is None or not scores:
            return None
        return float(np.mean([np.mean(levels) for levels in scores]))  # type: ignore[arg-type]

    @property
    def relative_score(self) -> float | None:
        """The mean score as a share of the clean score (rPC); None if the clean score is 0."""
        score, clean = self.mean_score, self.clean
        return None if score is None or clean is None or not clean.score else score / clean.score


def mean_corruption_error(
    grades: SuiteGrades, baseline: SuiteGrades | dict[str, list[float]], *, is_paired: bool
) -> tuple[dict[str, float | None], float | None, Interval | None]:
    """The corruption errors: the errors of each member, relative to a baseline; their mean (mCE), and its interval.

    baseline: the grades of another model, or its errors by member and level, which are taken as exact. A member under
    which it makes no errors gets None and does not count. The ratios are linearised to one value per seed of each side.
    If both sides have the same seeds (`is_paired`), these values add up per seed; otherwise they are independent.
    """
    others = baseline.errors if isinstance(baseline, SuiteGrades) else baseline
    by = {name: sum(others[name]) for name in grades.errors}
    ratios = {name: sum(levels) / by[name] if by[name] > 0 else None for name, levels in grades.errors.items()}
    names = [name for name, ratio in ratios.items() if ratio is not None]
    if not names:
        return ratios, None, None
    mean = float(np.mean([ratios[name] for name in names]))
    below, n_levels = (np.array([of[name] for name in names]) for of in (by, {k: len(e) for k, e in others.items()}))
    weight = 1 / (len(names) * below)
    own = SeedValues(weight @ [grades.wrong[name] for name in names], 0.0, float(weight @ n_levels))
    if not isinstance(baseline, SuiteGrades):
        return ratios, mean, ends(own.mean(grades.tail))
    slope = weight * np.array([ratios[name] for name in names])
    base = SeedValues(
        slope @ (below[:, None] - [baseline.wrong[name] for name in names]),
        float(slope @ (below - n_levels)),
        float(slope @ below),
    )
    if is_paired:
        together = SeedValues(own.values + base.values, own.low + base.low, own.high + base.high).mean(grades.tail)
    else:
        together = joined(own.mean(grades.tail), base.mean(grades.tail))
    return ratios, mean, ends(together)


def ends(estimate: Estimate | None) -> Interval | None:
    """The interval of an estimate that may be unknown."""
    return None if estimate is None else (estimate.low, estimate.high)


def _share(n: int, of: int, tail: float) -> Estimate:
    """A share with Clopper-Pearson limits."""
    low = float(betaincinv(n, of - n + 1, tail)) if n else 0.0
    high = float(betaincinv(n + 1, of - n, 1 - tail)) if n < of else 1.0
    return Estimate(n / of, low, high)


@dataclass(frozen=True)
class SeedValues:
    """A value of each graded seed, and the range that it may have."""

    values: NDArray[np.float64]
    low: float
    high: float

    def mean(self, tail: float = TAIL_PROBABILITY) -> Estimate:
        """The mean of the values, with Gaffke's limits."""
        width, value = self.high - self.low, float(self.values.mean())
        if width <= 0:
            return Estimate(value, value, value)
        of = mean_estimate((_rounded(self.values) - self.low) / width, tail)
        low, high = (value + width * (end - of.value) for end in (of.low, of.high))
        return Estimate(value, max(self.low, low), min(self.high, high))


def _rounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The values rounded to a grid, because the time for limits grows with the number of distinct values."""
    step = float(np.ptp(values)) / MAX_DISTINCT
    if step == 0 or len(np.unique(values)) <= MAX_DISTINCT:
        return values
    grid: NDArray[np.float64] = values.min() + np.round((values - values.min()) / step) * step
    return grid.clip(values.min(), values.max())


def joined(first: Estimate, second: Estimate) -> Estimate:
    """The sum of two independent estimates; the distances of their limits are added in quadrature."""
    value = first.value + second.value
    down, up = (
        float(np.hypot(*(getattr(each, end) - each.value for each in (first, second)))) for end in ("low", "high")
    )
    return Estimate(value, value - down, value + up)
