"""How many tests the next round has, and how many of them a policy chooses at a time."""

from __future__ import annotations

from math import log2
from typing import TYPE_CHECKING

import numpy as np

from themis.measure.tests import Tests
from themis.search.ascent import ASCENTS

if TYPE_CHECKING:
    from themis.campaign.loop import Campaign

ROUND_SIZE = 640
"""Tests a round, unless five chunks are more."""
LEAST_ROUND, ROUNDS = 160, 20
"""Under a policy that follows a criterion: the fewest tests of a round, and rounds that a budget is cut into."""


PORTION, PORTIONS = 128, 8
"""Tests that a policy chooses before it learns what came of them: at first 128, then a chunk, then, in powers of 2, an
eighth of those that were run. It learns as often as that changes what it knows, and costs little."""


def portion(campaign: Campaign, n: int) -> int:
    """Of `n` tests of the search that a round has left, those that the policy chooses next."""
    if campaign.policy.climbs:  # one test of each seed
        return n
    grown = campaign.tally.tests / PORTIONS
    if grown < PORTION:
        return min(n, PORTION)
    return min(n, max(campaign.calculator.chunk, PORTION << int(log2(grown / PORTION))))


def affordable(campaign: Campaign, tests: Tests) -> int:
    """How many of the first tests there are passes left for."""
    if campaign.settings.max_passes is None:
        return len(tests)
    climbs = np.isin(tests.kind, list(ASCENTS))
    cost = np.where(climbs, campaign.calculator.cost(True), campaign.cost)
    left = campaign.settings.max_passes - campaign.calculator.passes
    return int(np.searchsorted(cost.cumsum(), left, side="right"))


def round_size(campaign: Campaign) -> int:
    """Tests of the next round: fewer where a budget is nearly spent."""
    settings, tests = campaign.settings, campaign.tally.tests
    size = settings.round_size or _usual(campaign)
    if settings.max_tests is not None:
        size = min(size, settings.max_tests - tests)
    if settings.max_passes is not None:
        size = min(size, (settings.max_passes - campaign.calculator.passes) // campaign.cost)
    if settings.max_seconds is not None and tests:
        rate = tests / campaign.elapsed()
        size = min(size, int(rate * (settings.max_seconds - campaign.elapsed())))
    return max(1, size)


def _usual(campaign: Campaign) -> int:
    settings = campaign.settings
    if campaign.policy.climbs:
        return len(campaign.space.seeds)
    whole = _whole_chunks(campaign.calculator.chunk, settings.uniform_share)
    if campaign.guide is None or not campaign.guide.leads:
        return whole
    return min(whole, max(LEAST_ROUND, (settings.max_tests or settings.max_passes or ROUNDS * ROUND_SIZE) // ROUNDS))


def _whole_chunks(chunk: int, uniform_share: float) -> int:
    """A round of about ROUND_SIZE tests or more in which both streams fill their chunks."""
    n_streams = 1 if uniform_share in (0, 1) else 5
    return max(ROUND_SIZE, n_streams * chunk)
