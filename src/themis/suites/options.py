"""The options of a suite: its budget, how it is divided, and how many seeds are graded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from themis.errors import UsageError
from themis.options import check_known, check_numbers, check_rules, option
from themis.settings import Settings, read_claim

TESTS_PER_MEMBER = 1000
"""Tests of a suite per member, by default."""
MEMBER_DEFAULTS = {"uniform_share": 0.5, "max_stored": 100}
"""Settings with another default in a suite: its table has fault rates, which need uniform tests, and its members share
a disk."""
UNSUPPORTED_OPTIONS = {
    "magnitude": "give it to a member: {perturb: gaussian, magnitude: 0.2}",
    "max_passes": "the budget of a suite is max_tests",
    "criterion": "test one perturbation with a criterion with themis run",
    "train_inputs": "it is for criteria, which a suite does not have",
}
"""Settings of a campaign that a suite does not take, and what to do instead."""


@dataclass(frozen=True)
class SuiteOptions:
    """How the budget of a suite is divided, and how it is graded."""

    max_tests: int | None = option(None, f"tests of the whole suite (default: {TESTS_PER_MEMBER:,} per member)")
    max_seconds: float | None = option(
        None, "stop after this many seconds; the same command, or themis resume, continues the suite"
    )
    share: float = option(0.5, "share of the tests divided among all members by weight; the rest is adaptive")
    level_seeds: int | None = option(1000, "seeds that are graded at each level, a random sample; null grades all")
    decide: str | None = option(
        None,
        "a claim to decide at 95% on as few graded seeds as it takes, instead of running campaigns: mean_error<=0.3, "
        "or mce<=0.8 with a baseline; exit code 0, 1 or 4 (undecided)",
    )

    def __post_init__(self) -> None:
        check_numbers(self)
        rules = {
            "max_tests": (self.max_tests is None or self.max_tests > 0, "be positive, or None"),
            "max_seconds": (self.max_seconds is None or self.max_seconds > 0, "be positive, or None"),
            "share": (0 < self.share <= 1, "lie above 0 and up to 1"),
            "level_seeds": (self.level_seeds is None or self.level_seeds > 0, "be positive, or None for all"),
        }
        if self.decide is not None:
            figure, limit = read_claim(self.decide)
            rules["decide"] = (
                figure in ("mce", "mean_error") and limit > 0,
                "be mce<=X or mean_error<=X with X above 0",
            )
        check_rules(self, rules)


def read_options(options: dict[str, Any]) -> tuple[SuiteOptions, Settings]:
    """The options of a suite and the settings of its campaigns; refuses unknown options."""
    for name, remedy in UNSUPPORTED_OPTIONS.items():
        if options.get(name) is not None:
            raise UsageError(f"a suite does not take {name}: {remedy}")
    of_suite = {name: options[name] for name in SuiteOptions.__dataclass_fields__ if name in options}
    rest = {name: value for name, value in options.items() if name not in of_suite}
    check_known(Settings, rest)
    return SuiteOptions(**of_suite), Settings.of(**{**MEMBER_DEFAULTS, **rest})
