"""When a campaign stops, and why."""

from __future__ import annotations

from math import inf

from themis.campaign.criterion import CampaignCriterion
from themis.judge.estimate import Estimate
from themis.judge.reach import CAUTION
from themis.runs.run import Round
from themis.settings import MAX_RISK, Settings
from themis.text import counted, percent


def is_little_left(goal: float | None, recall: float | None, risk: Estimate | None) -> bool:
    """Whether a search has found about all within its reach; always if `goal` is None.

    `recall` is None if no fault was found. `risk` is the residual risk, None without uniform tests.
    """
    if goal is None:
        return True
    return (risk is None or risk.high <= MAX_RISK) and (recall is None or recall >= goal)


def stop_reason(
    settings: Settings,
    rounds: list[Round],
    cost: int,
    criterion: CampaignCriterion | None = None,
    *,
    covers_neurons: bool = True,
) -> tuple[str, str] | None:
    """Why to stop after these rounds, as one word and a clause; None to continue. `cost` is the passes per test.

    The coverage that counts is that of the criterion that guides the search if there is one, else that of the
    sensitivities. Reaching it is a reason to stop only if little is left to find. A model without hidden layers
    (`covers_neurons` is False) has no coverage goal: little left to find is then reason enough.
    """
    if not rounds:
        return None
    last, goal = rounds[-1], settings.coverage or inf
    if not is_little_left(settings.recall, last.recall, last.residual_risk):
        goal = inf
    if criterion is not None and criterion.leads:
        score = last.criterion_score or 0
        if criterion.criterion.laws.bounded and score >= goal:
            return (
                "coverage",
                f"{criterion.name} {percent(score)} reached the goal of {percent(goal)}{_little_left(settings, last)}",
            )
    elif not covers_neurons:
        if goal < inf and settings.recall is not None and last.residual_risk is not None:
            return "found", _little_left(settings, last).removeprefix(", and ")
    elif last.coverage.sampled >= goal:
        return "coverage", (
            f"coverage {percent(last.coverage.sampled)} of the sampled neurons reached the goal of "
            f"{percent(goal)}, confirmed by Markov chains{_little_left(settings, last)}"
        )
    if settings.max_tests is not None and last.tests >= settings.max_tests:
        return "tests", f"the budget of {counted(settings.max_tests, 'test')} is spent"
    if settings.max_passes is not None and last.passes + cost > settings.max_passes:
        return "passes", f"the budget of {counted(settings.max_passes, 'pass', 'passes')} is spent"
    if settings.max_seconds is not None and last.seconds >= settings.max_seconds:
        return "seconds", f"the budget of {settings.max_seconds:g} s is spent"
    if settings.plateau is not None and len(rounds) > settings.plateau:
        before = rounds[-1 - settings.plateau]
        if before.distinct_faults == last.distinct_faults and _is_flat(before, last, criterion, covers_neurons):
            measures_coverage = covers_neurons or (criterion is not None and criterion.leads)
            coverage = " and no more coverage" if measures_coverage else ""
            return "plateau", f"{counted(settings.plateau, 'round')} brought no new distinct fault{coverage}"
    return None


def _little_left(settings: Settings, last: Round) -> str:
    """A clause that says how little is left to find."""
    if settings.recall is None:
        return ""
    risk = "" if last.residual_risk is None else f"the residual risk is at most {percent(last.residual_risk.high, 2)}"
    if last.recall is None:
        return f", and no fault was found{': ' * bool(risk)}{risk}"
    found = f"{percent(last.recall)} or more of the distinct faults within reach were found"
    probability = f"with a probability of {percent(CAUTION, 0)}"
    return f", and little is left to find: {probability}, {found}{', and ' * bool(risk)}{risk}"


def _is_flat(before: Round, last: Round, criterion: CampaignCriterion | None, covers_neurons: bool) -> bool:
    if criterion is not None and criterion.leads:
        return (before.criterion_score or 0) >= (last.criterion_score or 0)
    if not covers_neurons:
        return True
    return before.coverage.all >= last.coverage.all and before.coverage.sampled >= last.coverage.sampled
