"""How a campaign goes on: how large the next round is, which tests are due, what a budget allows, and when to stop."""

from __future__ import annotations

from math import inf, log2

import numpy as np

from themis.campaign.criterion import CampaignCriterion
from themis.campaign.setup import Setup
from themis.campaign.state import State
from themis.judge.estimate import Estimate
from themis.judge.reach import CAUTION
from themis.measure.tests import Tests
from themis.runs.run import Round
from themis.search.ascent import ASCENTS
from themis.settings import MAX_RISK, Settings
from themis.text import counted, percent

ROUND_SIZE, ROUND_SHARE = 640, 32
"""Tests per round, unless five chunks are more, or this part of the tests run so far: the longer a campaign, the less a
single test changes what is known."""
LEAST_ROUND, ROUNDS = 160, 20
"""If the policy follows a criterion: the smallest round, and the number of rounds that a budget is divided into."""
FIRST_PORTION, PORTION, PORTIONS = 16, 128, 8
"""Tests that a policy proposes before it learns their results: at first 16, then as many as have been run, up to 128,
then a chunk, then an eighth of the tests run so far, in powers of 2. It learns as often as that changes what it knows,
at little cost."""
LAST_STAGE = 512
"""Up to this number of tests, both streams take short turns, so that a campaign of any length has searched; the policy
then learns from the uniform tests at once."""


def why_to_stop(setup: Setup, state: State) -> tuple[str, str] | None:
    """Why to stop now, see `stop_reason`."""
    return stop_reason(
        setup.settings, state.rounds, _test_cost(setup, state), setup.criterion, covers_neurons=setup.covers_neurons
    )


def next_round_size(setup: Setup, state: State, n_tests: int) -> int:
    """The number of tests of the round that begins after `n_tests` tests; smaller if a budget is nearly spent."""
    settings = setup.settings
    size = settings.round_size or _default_round_size(setup, state, n_tests)
    if settings.max_tests is not None:
        size = min(size, settings.max_tests - n_tests)
    if settings.max_passes is not None:
        size = min(size, (settings.max_passes - _passes_after(setup, state, n_tests)) // _test_cost(setup, state))
    if settings.max_seconds is not None and n_tests:
        elapsed = state.clock.elapsed()
        size = min(size, int(n_tests / elapsed * (settings.max_seconds - elapsed)))
    return max(1, size)


def uniform_tests_due(setup: Setup, first: int, n_uniform: int, end: int) -> Tests:
    """The tests, numbered from `first`, that the uniform stream lacks to have its share of the first `end` tests."""
    n_due = max(0, min(end - first, round(end * setup.settings.uniform_share) - n_uniform))
    return setup.uniform_tests(first, n_uniform, n_due) if n_due else setup.uniform_tests(0, 0, 0)


def search_tests(setup: Setup, state: State, first: int, end: int) -> Tests:
    """The tests that the policy proposes next, numbered from `first` and up to `end`."""
    # A seed takes one step of an ascent at a time, because the next one depends on its gradient.
    is_ascent = state.policy.needs_gradient
    most = len(setup.space.seeds) if is_ascent else portion(end - first, first, setup.calculator.chunk)
    return state.policy.propose(np.arange(first, min(end, first + most)))


def n_affordable(setup: Setup, state: State, *portions: Tests) -> int:
    """How many of the first tests of some portions the remaining passes suffice for."""
    n_tests, left = sum(map(len, portions)), passes_left(setup, state)
    cost, ascent_cost = _test_cost(setup, state), setup.calculator.cost(needs_gradient=True)
    if left is None or n_tests * max(cost, ascent_cost) <= left:
        return n_tests
    kind = np.concatenate([tests.kind for tests in portions])
    costs = np.where(np.isin(kind, ASCENTS), ascent_cost, cost)
    return int(np.searchsorted(costs.cumsum(), left, side="right"))


def is_spent(setup: Setup, state: State, n_tests: int) -> bool:
    """Whether no test can follow the first `n_tests`."""
    max_tests, max_passes = setup.settings.max_tests, setup.settings.max_passes
    passes = _passes_after(setup, state, n_tests) + _test_cost(setup, state)
    return (max_tests is not None and n_tests >= max_tests) or (max_passes is not None and passes > max_passes)


def passes_left(setup: Setup, state: State) -> int | None:
    """The passes that are left of the budget; None if there is none."""
    return None if setup.settings.max_passes is None else setup.settings.max_passes - state.passes


def _passes_after(setup: Setup, state: State, n_tests: int) -> int:
    """The passes spent after `n_tests` tests, if those that have not been run take no gradient."""
    return state.passes + (n_tests - state.tally.tests) * _test_cost(setup, state)


def _test_cost(setup: Setup, state: State) -> int:
    """Passes per test of the policy."""
    return setup.calculator.cost(state.policy.needs_gradient, len(state.policy.rivals))


def _default_round_size(setup: Setup, state: State, n_tests: int) -> int:
    """About ROUND_SIZE tests or more, so that both streams fill their chunks; fewer under a guiding criterion."""
    settings = setup.settings
    if state.policy.needs_gradient:
        return len(setup.space.seeds)
    n_chunks = 1 if settings.uniform_share in (0, 1) else 5
    size = max(ROUND_SIZE, n_chunks * setup.calculator.chunk)
    if setup.criterion is None or not setup.criterion.leads:
        return size * max(1, n_tests // (ROUND_SHARE * size))
    budget = settings.max_tests or settings.max_passes or ROUNDS * ROUND_SIZE
    return min(size, max(LEAST_ROUND, budget // ROUNDS))


def stage_end(n_tests: int, round_end: int, uniform_share: float) -> int:
    """The number of tests at which the uniform stream next has exactly its share; it runs first, then the policy.

    The first stages end at 16, 32, 64, ... tests, later ones at the end of the round.
    """
    end = max(FIRST_PORTION, 1 << n_tests.bit_length())
    return round_end if uniform_share in (0, 1) or end > LAST_STAGE else min(end, round_end)


def portion(n: int, n_tests: int, chunk: int) -> int:
    """How many of the `n` tests that a stage has left the policy proposes next, after `n_tests` tests."""
    grown = n_tests / PORTIONS
    if grown >= PORTION:
        return min(n, max(chunk, PORTION << int(log2(grown / PORTION))))
    return min(n, PORTION, max(FIRST_PORTION, n_tests))


def is_little_left(goal: float | None, recall: float | None, risk: Estimate | None) -> bool:
    """Whether a search has found about all within its reach; always if `goal` is None.

    `recall` is None if no fault was found. `risk` is the residual risk, None without uniform tests.
    """
    if goal is None:
        return True
    return (risk is None or risk.high <= MAX_RISK) and (recall is None or recall >= goal)


def stop_reason(  # noqa: C901 (one branch per case)
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
