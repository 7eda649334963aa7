"""Objectives: what the next tests of the search maximise by gradient ascent on theta, if anything."""

from __future__ import annotations

from torch import Tensor

from themis.campaign.criterion import CampaignCriterion
from themis.measure.calculator import Calculator
from themis.measure.fold import Objective
from themis.measure.tests import Tests
from themis.search import Policy
from themis.search.ascent import MARGIN_ASCENT, SENSITIVITY_ASCENT


def choose_objective(
    tests: Tests,
    policy: Policy,
    criterion: CampaignCriterion | None,
    calculator: Calculator,
    open_neurons: Tensor,
    scale: Tensor | None,
) -> tuple[Tests, Objective | None]:
    """The first tests that share one objective, and that objective; None if they have none."""
    if policy.needs_gradient:
        joint = criterion and criterion.objective(policy, calculator, int(tests.number[0]))
        return tests, joint or Objective(open_neurons, scale, MARGIN_ASCENT)
    ascends = (tests.kind == MARGIN_ASCENT) | (tests.kind == SENSITIVITY_ASCENT)
    others = (ascends != ascends[0]).nonzero()[0]
    alike = tests[: others[0]] if len(others) else tests
    return alike, Objective(open_neurons, scale, MARGIN_ASCENT) if ascends[0] else None
