"""The policy of the paper."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from themis.measure.tests import Ints, Results, Tests
from themis.search import Policy, Space
from themis.search.kinds import step_uphill
from themis.search.policy import State


class Paper(Policy):
    """One ascent per seed: the forward pass that scores a test is the one whose backward pass moves its theta.

    An ascent keeps its noise. At a bound it continues with new noise; without noise, or without a gradient, it starts
    again at a theta drawn uniformly.
    """

    needs_gradient = True

    def init(self, space: Space) -> None:
        self.space = space
        n, dimensions = len(space.seeds), len(space.low)
        self.state: State = {
            "walked": np.zeros((), dtype=np.int64),
            "theta": np.zeros((n, dimensions), dtype=np.float32),
            "noise_seed": np.zeros(n, dtype=np.int64),
            "is_climbing": np.zeros(n, dtype=bool),
            "is_at_bound": np.zeros(n, dtype=bool),
        }

    def propose(self, number: Ints) -> Tests:
        state, space = self.state, self.space
        position = (int(state["walked"]) + np.arange(len(number))) % len(space.seeds)
        state["walked"] += len(number)
        drawn = space.tests(number, position, space.uniform_theta(number), "draw")
        is_first = np.arange(len(number)) < len(space.seeds)  # a seed takes one step at a time
        climbing, at_bound = (is_first & state[name][position] for name in ("is_climbing", "is_at_bound"))
        return replace(
            drawn,
            theta=np.where((climbing | at_bound)[:, None], state["theta"][position], drawn.theta),
            noise_seed=np.where(climbing, state["noise_seed"][position], drawn.noise_seed),
            kind=np.select([climbing, at_bound], ["ascent", "bound"], "draw"),
        )

    def observe(self, tests: Tests, results: Results) -> None:
        if results.gradient is None:
            return
        state, space = self.state, self.space
        position = space.position(tests.seed)
        theta, moved, has_way_up = step_uphill(tests.theta, results.gradient, space)
        state["theta"][position] = theta
        state["noise_seed"][position] = tests.noise_seed
        state["is_climbing"][position] = moved
        state["is_at_bound"][position] = ~moved & has_way_up & space.is_random
