"""How the tests of a suite are divided: a share for every member, then step by step where faults and doubt are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from themis.suites.definition import SuiteMember

MIN_STEP = 100
SHARE, DISCOVERY, UNCERTAINTY = "share", "discovery", "uncertainty"
"""Why a member gets tests: its fixed share, most new faults expected, or a fault rate that is hardly known."""
SMALL_RATE = 0.01
"""Fault rates below this need not be known more exactly than this one."""
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
    """What the division of the budget depends on, after a member's last step."""

    tests: int
    is_open: bool
    """Whether more tests would be run: its campaign has neither reached its goal nor come to a plateau."""
    residual_risk: float
    """The upper end of its interval: the chance that the next random test shows a fault that was not seen yet."""
    uncertainty: float
    """The width of the interval of the fault rate, relative to the rate, or to `SMALL_RATE` if that is larger."""

    @staticmethod
    def of(summary: dict[str, Any] | None) -> MemberProgress:
        """From the summary of a campaign; None if it has not begun."""
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
    """The next adaptive step after `n_steps` of them; None if the budget is spent or no member has more to do.

    Odd steps go to the member in which a random test is most likely to show a new fault, at the upper end of its
    interval, so that little tested members count as promising; even ones to that whose fault rate is known worst.
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

    chosen = max(candidates, key=gain)  # the first of equals
    # A step is as large as a member's share on average, so that it changes what is known.
    step = max(MIN_STEP, round(max_tests * max(share, 0.25) / len(members)))
    tests = progress[chosen.name].tests + min(left, step)
    return BudgetStep(chosen.name, tests if chosen.max_tests is None else min(tests, chosen.max_tests), reason)
