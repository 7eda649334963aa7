"""Whether a mean error of a suite is within a limit, decided by as few graded seeds as it takes.

The number of graded seeds doubles from look to look until the interval of the figure lies on one side of the limit.
How many looks there can be is known beforehand, and each has an equal part of the 5%: all intervals together hold with
95%, so that one that ends the suite does, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from themis.errors import UsageError
from themis.judge.estimate import Estimate, describe_share
from themis.settings import FAILS, HOLDS, UNDECIDED
from themis.suites.options import read_claim
from themis.text import counted

if TYPE_CHECKING:
    from themis.suites.result import Baseline, SuiteRun

FIRST_LOOK = 50
"""Seeds that are at least graded before the first look, if there are as many."""


@dataclass(frozen=True)
class SuiteDecision:
    """The verdict on a claim about a mean error, with a probability of a wrong one of at most 5%."""

    claim: str
    looks: int
    """How many looks there can be; a graded figure has one of as many parts of the 5%."""
    verdict: str = UNDECIDED
    """holds, does not hold, or undecided."""
    seeds: int = 0
    passes: int = 0
    """Those of all looks."""
    figure: Estimate | None = None
    """The mean error that the claim is about; its interval holds at all looks together."""

    @property
    def clause(self) -> str:
        """The verdict and what it is based on."""
        found = "nothing was graded" if self.figure is None else describe_share(self.figure)
        verdict = f"{self.verdict} (certain at 95%)" if self.verdict != UNDECIDED else f"is {self.verdict}"
        return f"{self.claim} {verdict}: {found} on {counted(self.seeds, 'seed')}"


def looks(n_seeds: int) -> list[int]:
    """The numbers of graded seeds at which the suite looks: all, half of them and so on, the fewest first."""
    counts = [n_seeds]
    while counts[0] >= 2 * FIRST_LOOK:
        counts.insert(0, counts[0] // 2)
    return counts


def verdict(figure: Estimate, limit: float) -> str:
    """Whether a figure is within a limit, if its interval lies on one side of it."""
    return HOLDS if figure.high <= limit else FAILS if figure.low > limit else UNDECIDED


def decide_suite(suite: SuiteRun, before: SuiteDecision, baseline: Baseline | None) -> SuiteDecision:
    """The verdict by what a suite has graded so far. before: that of the look before."""
    name, limit = read_claim(before.claim)
    if name == "mce":
        errors = suite.corruption_errors(baseline)
        if errors.mce is None or errors.mce_interval is None:
            raise UsageError(
                f"mce needs a baseline that makes errors, but {errors.baseline} makes none: choose another"
            )
        figure = Estimate(errors.mce, *errors.mce_interval)
    else:
        assert suite.mean_error is not None
        figure = suite.mean_error
    levels = [grade for grades in suite.grades.levels.values() for grade in grades]
    passes = before.passes + sum(grade.passes for grade in levels)
    return replace(before, verdict=verdict(figure, limit), seeds=levels[0].seeds, passes=passes, figure=figure)
