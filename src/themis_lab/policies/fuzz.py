"""The fuzzer of coverage-guided tools: mutate a test that raised the criterion, and keep the child if it does too."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from themis.measure.tests import Ints, Results, Tests
from themis.search.policy import FOR_KIND, FOR_PICK, FOR_SEED, SEARCH_STREAM, Policy, Space, State

FIRST_WEIGHT, MIN_WEIGHT, FADING_MUTATIONS = 0.8, 0.3, 5
"""DeepHunter's power schedule: the weight of a parent starts at 0.8 and falls by 1/5 per mutation, down to 0.3."""
KEEP_SHARE = 0.5
"""Probability that a child keeps a dimension of its parent's theta; otherwise a new value is drawn."""


class Fuzz(Policy):
    """Keeps a queue of tests, initially the clean seeds; each proposal is a child of one of them.

    Parents are drawn by DeepHunter's power schedule. A child keeps about half of its parent's theta and draws the rest
    as `random` does, with noise of its own. Tests therefore stay inside the bounds of one perturbation, whereas the
    original tools pile mutations on pictures. A child that raises the criterion without a fault joins the queue.
    """

    is_guided = True

    def init(self, space: Space) -> None:
        self.space = space
        self.state: State = {
            "position": np.arange(len(space.seeds)),
            "theta": np.tile(space.identity, (len(space.seeds), 1)).astype(np.float32),
            "mutated": np.zeros(len(space.seeds), dtype=np.int64),
            "is_clean": np.ones(len(space.seeds), dtype=bool),
        }

    def weights(self) -> NDArray[np.float64]:
        """The probability of each test in the queue to be the next parent, up to a factor."""
        weights: NDArray[np.float64] = np.maximum(FIRST_WEIGHT - self.state["mutated"] / FADING_MUTATIONS, MIN_WEIGHT)
        return weights

    def propose(self, number: Ints) -> Tests:
        state, space = self.state, self.space
        cumulative = np.cumsum(self.weights())
        draw = space.uniform(FOR_SEED, SEARCH_STREAM, number) * cumulative[-1]
        parent = np.searchsorted(cumulative, draw, side="right").clip(max=len(cumulative) - 1)
        np.add.at(state["mutated"], parent, 1)
        n_dimensions = len(space.low)
        is_kept = np.stack([space.uniform(FOR_KIND, k, number) < KEEP_SHARE for k in range(n_dimensions)], -1)
        if not space.is_random:  # without noise, the same theta would be the same test
            redrawn = (space.uniform(FOR_PICK, number) * n_dimensions).astype(np.int64)
            is_kept[np.arange(len(number)), redrawn] = False
        is_clean = state["is_clean"][parent]
        is_kept[is_clean] = False
        theta = np.where(is_kept, state["theta"][parent], space.uniform_theta(SEARCH_STREAM, number))
        return space.tests(number, state["position"][parent], theta, np.where(is_clean, "first", "mutant"))

    def observe(self, tests: Tests, results: Results) -> None:
        if results.raised is None:
            return
        joins = results.raised & ~results.is_fault
        n, state = int(joins.sum()), self.state
        new: State = {
            "position": self.space.position(tests.seed[joins]),
            "theta": tests.theta[joins],
            "mutated": np.zeros(n, dtype=np.int64),
            "is_clean": np.zeros(n, dtype=bool),
        }
        self.state = {name: np.concatenate([state[name], rows]) for name, rows in new.items()}
