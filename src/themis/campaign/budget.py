"""Budgets: how many tests the next round has, and how many of them a policy proposes at a time."""

from __future__ import annotations

from math import log2

import numpy as np
from numpy.typing import NDArray

from themis.search.ascent import ASCENTS
from themis.settings import Settings

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


def affordable(kind: NDArray[np.str_], passes_left: int | None, cost: int, ascent_cost: int) -> int:
    """How many of the first tests, given their kinds, the remaining passes suffice for.

    `ascent_cost` is the cost of ascent tests.
    """
    if passes_left is None:
        return len(kind)
    costs = np.where(np.isin(kind, ASCENTS), ascent_cost, cost)
    return int(np.searchsorted(costs.cumsum(), passes_left, side="right"))


def round_size(settings: Settings, default: int, *, n_tests: int, passes: int, cost: int, elapsed: float) -> int:
    """The size of the next round; smaller if a budget is nearly spent.

    `n_tests`, `passes` and `elapsed` (seconds) are spent so far, `cost` is the number of passes per test.
    """
    size = settings.round_size or default
    if settings.max_tests is not None:
        size = min(size, settings.max_tests - n_tests)
    if settings.max_passes is not None:
        size = min(size, (settings.max_passes - passes) // cost)
    if settings.max_seconds is not None and n_tests:
        size = min(size, int(n_tests / elapsed * (settings.max_seconds - elapsed)))
    return max(1, size)


def default_round_size(settings: Settings, chunk: int, n_tests: int, *, follows_criterion: bool) -> int:
    """About ROUND_SIZE tests or more, so that both streams fill their chunks; fewer under a guiding criterion.

    `n_tests` were run so far.
    """
    n_chunks = 1 if settings.uniform_share in (0, 1) else 5
    size = max(ROUND_SIZE, n_chunks * chunk)
    if not follows_criterion:
        return size * max(1, n_tests // (ROUND_SHARE * size))
    budget = settings.max_tests or settings.max_passes or ROUNDS * ROUND_SIZE
    return min(size, max(LEAST_ROUND, budget // ROUNDS))
