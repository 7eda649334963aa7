"""The search against a reference: two similar models disagree where both are about to change their answer."""

from dataclasses import replace

import numpy as np

from themis.measure.tests import NEAR_TIE, Bools, Floats, Ints, Results, Tests
from themis.search.policy import FOR_KIND, SEARCH_STREAM, Policy, Space, State

MAX_STEPS = 24
"""Steps on a line after which its ends are too close for another test between them."""
CORNER_SHARE = 0.75
"""Share of first tests of lines at a corner of theta; the others are drawn uniformly."""
MIN_PART = 0.1
"""Least share of the line that a step leaves on either side."""


class Boundary(Policy):
    """Looks for a test that changes the answer of a seed, then for the place between the two where the answer changes.

    On this line the models change their answers at two places, and disagree between them. Every second step halves the
    line; the others divide it in proportion to the margins at its ends. All tests of a line have the same noise. A line
    ends with a fault, or when the margin is so small that rounding decides.
    """

    def init(self, space: Space) -> None:
        self.space = space
        n, dimensions = len(space.seeds), len(space.low)
        self._start = space.identity.clip(space.low, space.high)
        self.state: State = {
            "steps": np.zeros(n, dtype=np.int64),  # 0: the seed has no line
            "lines": np.zeros(n, dtype=np.int64),  # finished lines, and first tests that did not start a line
            "margin": space.margin.astype(np.float32),  # the smallest margin of a first test
            "noise_seed": np.zeros(n, dtype=np.int64),
            "near": np.tile(self._start, (n, 1)),  # the end with the answer of the seed
            "far": np.zeros((n, dimensions), dtype=np.float32),  # the end with another one
            "near_margin": np.zeros(n, dtype=np.float32),
            "far_margin": np.zeros(n, dtype=np.float32),
        }

    def propose(self, number: Ints) -> Tests:
        state, space, n = self.state, self.space, len(number)
        open_lines = np.flatnonzero(state["steps"])
        open_lines = open_lines[np.argsort(-state["steps"][open_lines], kind="stable")][:n]
        worth = state["margin"] * (1 + state["lines"])
        worth[open_lines] = np.inf
        others = np.resize(np.argsort(worth, kind="stable"), n - len(open_lines))
        position = np.concatenate([open_lines, others])
        is_corner = space.uniform(FOR_KIND, number) < CORNER_SHARE
        theta = np.where(is_corner[:, None], space.corners(number), space.uniform_theta(SEARCH_STREAM, number))
        tests = space.tests(number, position, theta.astype(np.float32), np.where(is_corner, "corner", "uniform theta"))
        noise_seed, kind = tests.noise_seed.copy(), tests.kind.astype("<U16")
        first = slice(len(open_lines))
        tests.theta[first], noise_seed[first], kind[first] = (
            self._between(open_lines),
            state["noise_seed"][open_lines],
            "between",
        )
        return replace(tests, noise_seed=noise_seed, kind=kind)

    def _between(self, at: Ints) -> Floats:
        """The next theta on the lines of some seeds."""
        state = self.state
        near, far = state["near_margin"][at], state["far_margin"][at]
        by_margin = np.divide(near, near + far, out=np.full_like(near, 0.5), where=near + far > 0)
        part = np.where(state["steps"][at] % 2, by_margin.clip(MIN_PART, 1 - MIN_PART), 0.5)[:, None]
        theta: Floats = (state["near"][at] + part * (state["far"][at] - state["near"][at])).astype(np.float32)
        return np.minimum(np.maximum(theta, self.space.low), self.space.high)

    def observe(self, tests: Tests, results: Results) -> None:
        state, position = self.state, self.space.position(tests.seed)
        is_step = (tests.kind == "between") & (state["steps"][position] > 0)
        is_step &= tests.noise_seed == state["noise_seed"][position]
        self._step(position[is_step], tests.theta[is_step], results[is_step])
        is_first = ~is_step & results.was_run
        self._begin(position[is_first], tests[is_first], results[is_first])

    def _step(self, position: Ints, theta: Floats, results: Results) -> None:
        """Move one end of each line to its test; a fault ends the line."""
        state = self.state
        is_near = results.outcome == self.space.answer[position]
        for end, rows in (("near", is_near), ("far", ~is_near)):
            state[end][position[rows]] = theta[rows]
            state[f"{end}_margin"][position[rows]] = results.margin[rows]
        state["steps"][position] += 1
        is_short = (results.margin < NEAR_TIE) | (state["steps"][position] > MAX_STEPS)
        self._end(position[results.is_fault | ~results.was_run | is_short])

    def _begin(self, position: Ints, tests: Tests, results: Results) -> None:
        """Begin a line at each test that changed the answer, unless its seed already has a line."""
        state, space = self.state, self.space
        np.minimum.at(state["margin"], position, np.abs(results.margin))
        begins: Bools = (
            (results.outcome != space.answer[position]) & ~results.is_fault & (state["steps"][position] == 0)
        )
        self._end(position[~begins & (state["steps"][position] == 0)])
        at, rows = np.unique(position[begins], return_index=True)
        state["near"][at], state["near_margin"][at] = self._start, space.margin[at]
        state["far"][at], state["far_margin"][at] = tests.theta[begins][rows], results.margin[begins][rows]
        state["noise_seed"][at], state["steps"][at] = tests.noise_seed[begins][rows], 1

    def _end(self, position: Ints) -> None:
        self.state["steps"][position] = 0
        np.add.at(self.state["lines"], position, 1)
