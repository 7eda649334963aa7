"""Dividing the tests of a suite: a fixed share for every member, then step by step to the most promising members."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from themis.suites.definition import SuiteMember

MIN_STEP_TESTS = 100
SHARE, DISCOVERY, UNCERTAINTY = "share", "discovery", "uncertainty"
"""Why a member gets tests: its fixed share, the new faults expected, or the uncertainty of its fault rate."""
SMALL_RATE = 0.01
"""Fault rates below this are treated as this one when the relative uncertainty is computed."""
OPEN_REASONS = ("tests", "user", "error")
"""Stop reasons after which a campaign has more to do."""


@dataclass(frozen=True)
class BudgetStep:
    """The next part of the budget: a member continues until it has run this many tests in all."""

    member: str
    max_tests: int
    reason: str


@dataclass(frozen=True)
class MemberProgress:
    """The state of a member after its last step, on which the division of the budget depends."""

    tests: int
    is_open: bool
    """Whether the campaign can run more tests: it has neither reached its goal nor a plateau."""
    residual_risk: float
    """The upper limit of the probability that the next random test shows a new fault."""
    uncertainty: float
    """The width of the interval of the fault rate, relative to the rate, or to `SMALL_RATE` if that is larger."""

    @staticmethod
    def of(summary: dict[str, Any] | None) -> MemberProgress:
        """The progress according to the summary of a campaign; None if it has not begun."""
        if summary is None:
            return MemberProgress(0, True, 1.0, 1.0)
        risk, rate = summary["residual_risk"], summary["fault_rate"]
        return MemberProgress(
            summary["tests"],
            summary["stop_reason"] in OPEN_REASONS,
            1.0 if risk is None else risk["high"],
            1.0 if rate is None else (rate["high"] - rate["low"]) / max(rate["value"], SMALL_RATE),
        )


def fixed_steps(members: Sequence[SuiteMember], max_tests: int, share: float) -> list[BudgetStep]:
    """The first step of every member: a share of the budget, divided by weight."""
    total = sum(member.weight for member in members)
    steps = []
    for member in members:
        n = max(1, round(max_tests * share * member.weight / total))
        steps.append(BudgetStep(member.name, n if member.max_tests is None else min(n, member.max_tests), SHARE))
    return steps


def next_step(
    members: Sequence[SuiteMember], progress: dict[str, MemberProgress], n_steps: int, max_tests: int, share: float
) -> BudgetStep | None:
    """The adaptive step that follows `n_steps` others; None if the budget is spent or no member can continue.

    Odd steps go to the member with the largest upper limit of the probability of a new fault, so that members with few
    tests count as promising; even steps go to the member with the most uncertain fault rate.
    """
    left = max_tests - sum(member.tests for member in progress.values())
    candidates = [
        member
        for member in members
        if progress[member.name].is_open
        and (member.max_tests is None or progress[member.name].tests < member.max_tests)
    ]
    if left <= 0 or not candidates:
        return None
    reason = UNCERTAINTY if n_steps % 2 else DISCOVERY

    def gain(member: SuiteMember) -> float:
        of = progress[member.name]
        return member.weight * (of.uncertainty if reason == UNCERTAINTY else of.residual_risk)

    chosen = max(candidates, key=gain)  # the first one of equal members
    # A step is as large as the average fixed share of a member, so that it makes a difference.
    step = max(MIN_STEP_TESTS, round(max_tests * max(share, 0.25) / len(members)))
    tests = progress[chosen.name].tests + min(left, step)
    return BudgetStep(chosen.name, tests if chosen.max_tests is None else min(tests, chosen.max_tests), reason)
