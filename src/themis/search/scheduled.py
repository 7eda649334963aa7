"""The default search: seeds near their breaking point first, theta from what has broken the model before."""

from __future__ import annotations

import numpy as np

from themis.measure.tests import Floats, Ints, Results, Tests
from themis.search.policy import FOR_KIND, FOR_PICK, FOR_SEED, SEARCH_STREAM, Space, State

FAILED_WEIGHT = 0.05
"""A seed that has failed can only show a further wrong outcome: it is tried a twentieth as often."""
SHARPNESS = 4.0
"""How much a small margin counts: a seed at half the median margin is chosen exp(2) times as often as one at it."""
REMEMBERED = 1000
"""Thetas of faults that are offered to other seeds, the latest ones."""


class Scheduled:
    """Seeds weighted by the smallest margin seen; theta by thirds: a corner, another seed's fault, its own best.

    "Its own best" is the theta of the seed's smallest margin with one coordinate flipped to a bound.
    """

    climbs = False

    def init(self, space: Space) -> None:
        self.space = space
        n, dimensions = len(space.seeds), len(space.low)
        self.state: State = {
            "margin": space.margin.astype(np.float32).copy(),
            "theta": np.tile(space.high, (n, 1)).astype(np.float32),
            "has_failed": np.zeros(n, dtype=bool),
            "fault_theta": np.zeros((0, dimensions), dtype=np.float32),
        }

    def weights(self) -> Floats:
        """How often each seed is chosen, relative to the others."""
        margin, has_failed = self.state["margin"].clip(min=0), self.state["has_failed"]
        if has_failed.all():
            return np.ones_like(margin)
        typical = max(float(np.median(margin[~has_failed])), 1e-12)
        weight = np.exp(-SHARPNESS * margin / typical) + 1e-4  # no seed is given up for good
        return np.where(has_failed, FAILED_WEIGHT * weight[~has_failed].mean(), weight)

    def propose(self, number: Ints) -> Tests:
        state, space = self.state, self.space
        cumulative = np.cumsum(self.weights(), dtype=np.float64)
        # One uniform number shifts an even comb over the weights: fewer accidents than drawing each seed by itself.
        comb = (np.arange(len(number)) + space.uniform(FOR_SEED, SEARCH_STREAM, int(number[0]))) / len(number)
        position = np.searchsorted(cumulative, comb * cumulative[-1], side="right").clip(max=len(space.seeds) - 1)
        choice = space.uniform(FOR_KIND, number)
        theta, kind = space.corners(number), np.full(len(number), "corner", dtype="<U8")
        own = choice >= 2 / 3
        theta[own] = self._flipped(state["theta"][position], number)[own]
        kind[own] = "flip"
        borrowed = (choice >= 1 / 3) & ~own
        if len(state["fault_theta"]) and borrowed.any():
            pick = (space.uniform(FOR_PICK, -1, number) * len(state["fault_theta"])).astype(np.int64)
            theta[borrowed] = state["fault_theta"][pick][borrowed]
            kind[borrowed] = "borrowed"
        return space.tests(number, position, theta, kind)

    def _flipped(self, theta: Floats, number: Ints) -> Floats:
        """Each theta with one coordinate sent to a bound."""
        dimension = (self.space.uniform(FOR_PICK, -2, number) * theta.shape[1]).astype(np.int64)
        rows = np.arange(len(theta))
        flipped = theta.copy()
        flipped[rows, dimension] = self.space.corners(number)[rows, dimension]
        return flipped

    def observe(self, tests: Tests, results: Results) -> None:
        state = self.state
        position = self.space.position(tests.seed)
        # In order of falling margin, so that a seed tested twice keeps the smaller one.
        order = np.argsort(-results.margin, kind="stable")
        order = order[results.margin[order] < state["margin"][position[order]]]
        state["margin"][position[order]] = results.margin[order]
        state["theta"][position[order]] = tests.theta[order]
        state["has_failed"][position[results.is_fault]] = True
        state["fault_theta"] = np.concatenate([state["fault_theta"], tests.theta[results.is_fault]])[-REMEMBERED:]
