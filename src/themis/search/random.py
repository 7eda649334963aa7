"""Random testing: the baseline that every search must beat."""

from __future__ import annotations

from themis.measure.tests import Ints, Results, Tests
from themis.search.policy import SEARCH_STREAM, Policy, Space, State


class Random(Policy):
    """Draws seed and theta uniformly."""

    def init(self, space: Space) -> None:
        self.space = space
        self.state: State = {}

    def propose(self, number: Ints) -> Tests:
        return self.space.uniform_tests(number, SEARCH_STREAM, number)

    def observe(self, tests: Tests, results: Results) -> None:
        pass
