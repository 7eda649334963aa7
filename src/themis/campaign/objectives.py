"""What the next tests of a search climb, if anything, and what comes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from themis.errors import ThemisError
from themis.measure.fold import Objective
from themis.measure.tests import Results, Tests
from themis.search.ascent import ASCENTS

if TYPE_CHECKING:
    from themis.campaign.loop import Campaign


def measure_next(campaign: Campaign, tests: Tests, stream: str) -> Results:
    """What came of the first chunk of `tests`; without gradients where model or perturbation have none after all."""
    calculator, into, objective = campaign.calculator, campaign.moments[stream], None
    if stream == "search":
        tests, objective = aimed(campaign, tests)
    try:
        return calculator.measure(tests, into, objective)
    except (RuntimeError, TypeError, ValueError, ThemisError):
        if objective is None or campaign.policy.climbs:
            raise
    return calculator.measure(tests, into)  # if it was not the gradient, it raises again


def aimed(campaign: Campaign, tests: Tests) -> tuple[Tests, Objective | None]:
    """Those of the first tests that climb the same, and what it is; None where they climb nothing."""
    open_neurons = Objective(campaign.open_neurons, campaign.scale)
    if campaign.policy.climbs:
        joint = campaign.guide and campaign.guide.objective(campaign.policy, campaign.calculator, int(tests.number[0]))
        return tests, joint or open_neurons
    climbed = [ASCENTS.get(kind) for kind in tests.kind[: campaign.calculator.chunk].tolist()]
    n = next((k for k, each in enumerate(climbed) if each != climbed[0]), len(climbed))
    objectives = {None: None, "margin": campaign.calculator.margin_objective(), "sensitivity": open_neurons}
    return tests[:n], objectives[climbed[0]]
