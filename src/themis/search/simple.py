"""The simple policies: random testing, the baseline of every search, and corners."""

import numpy as np

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


class Corners(Policy):
    """Tests every seed equally often with the strongest disturbances."""

    def init(self, space: Space) -> None:
        self.space = space
        self.state: State = {"walked": np.zeros((), dtype=np.int64)}

    def propose(self, number: Ints) -> Tests:
        position = self.space.cycle(int(self.state["walked"]), len(number))
        self.state["walked"] += len(number)
        return self.space.tests(number, position, self.space.corners(number), "corner")

    def observe(self, tests: Tests, results: Results) -> None:
        pass
