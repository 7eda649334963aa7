"""Corners: every dimension of theta at one of its bounds, for all seeds in turn."""

from __future__ import annotations

import numpy as np

from themis.measure.tests import Ints, Results, Tests
from themis.search.policy import Policy, Space, State


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
