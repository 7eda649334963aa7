"""How many tests the next round has."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from themis.campaign import Campaign

ROUND_SIZE = 640
"""Tests a round, unless five chunks are more."""
LEAST_ROUND, ROUNDS = 160, 20
"""Under a policy that follows a criterion: the fewest tests of a round, and rounds that a budget is cut into."""


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
