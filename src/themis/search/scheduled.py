"""The default search: seeds by their chance to show a new fault, theta by the kind of proposal that has paid off."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from themis import rng
from themis.measure.tests import Floats, Ints, Results, Tests
from themis.search.policy import FOR_KIND, FOR_PICK, FOR_SEED, SEARCH_STREAM, Space, State

KINDS = ("corner", "borrowed", "flip")
WORTH = 5
"""Tests that the chance read off the margins is worth; from then on a seed's own count of faults outweighs it."""
CLEAN_WORTH = 0.25
"""Tests that a clean margin is worth: noise moves seeds apart about twice as far as it moves a seed's own tests."""
MEMORY = 0.9
"""What a round's tallies of the kinds keep to the next: ten rounds count, since what pays off changes."""
DOUBT = 20
"""What is learnt from a round starts from so many tests that went as expected: no kind is given up for good."""
DROPPED, STRIDE = 0.25, 0.5
"""Where tests are dropped for being another picture, corners are drawn in, a round by at most this power of e, until a
quarter of them is dropped: the strongest disturbances that count lie at that edge."""
REMEMBERED = 1000
"""Thetas of faults that are offered to other seeds, the latest ones."""


class Scheduled:
    """Seeds in proportion to their chance of a new fault; theta a corner, another seed's fault, or its own best.

    Margins of a seed scatter like a normal variable around a mean, of which its clean margin, less the usual fall, is
    the first reading. After j faults of a seed the next has a new outcome with chance `a / (a + j)`, and a is learnt.
    "Its own best" is the theta of its smallest margin with one coordinate flipped to a bound.
    """

    climbs = False

    def init(self, space: Space) -> None:
        self.space = space
        n, dimensions = len(space.seeds), len(space.low)
        self.state: State = {
            "tests": np.zeros(n, dtype=np.int64),
            "faults": np.zeros(n, dtype=np.int64),
            "total_margin": np.zeros(n),
            "scatter": np.zeros(3),  # tests, their margins' summed fall below the clean ones, summed squared surprise
            "novelty": np.ones(()),  # the a of a / (a + j)
            "margin": space.margin.astype(np.float32).copy(),  # the smallest seen
            "theta": np.tile(space.high, (n, 1)).astype(np.float32),  # where it was seen
            "corners": np.zeros(n, dtype=np.int64),  # tried so far
            "reach": np.ones(()),  # how far out corners lie: 1 is the bounds
            "fault_theta": np.zeros((0, dimensions), dtype=np.float32),
            "known": np.zeros(0, dtype=np.int64),  # distinct faults, as seed and outcome in one number
            "seen": np.zeros(0, dtype=np.int64),  # tests as seed and theta in one number, where there is no noise
            "tried": np.zeros(len(KINDS)),
            "paid": np.zeros(len(KINDS)),
        }

    def weights(self) -> NDArray[np.float64]:
        """Each seed's chance to show a new wrong outcome in its next test."""
        from scipy.special import ndtr

        state = self.state
        n_tests, n_faults = state["tests"], state["faults"]
        breaks = ndtr(-self._expected() / (self._spread() * np.sqrt(1 + 1 / (CLEAN_WORTH + n_tests))))
        chance = (WORTH * breaks + n_faults) / (WORTH + n_tests)
        weights: NDArray[np.float64] = chance * self._is_new(n_faults) + 1e-6
        return weights

    def _is_new(self, n_faults: Ints) -> NDArray[np.float64]:
        """The chance that the next fault of a seed with so many has a new outcome."""
        novelty = self.state["novelty"]
        chance: NDArray[np.float64] = novelty / (novelty + n_faults)
        return chance

    def _expected(self) -> NDArray[np.float64]:
        """Each seed's margin in its next test."""
        state = self.state
        n, fall, _ = state["scatter"]
        first = CLEAN_WORTH * (self.space.margin - fall / max(n, 1))
        expected: NDArray[np.float64] = (first + state["total_margin"]) / (CLEAN_WORTH + state["tests"])
        return expected

    def _spread(self) -> float:
        n, _, surprise = self.state["scatter"]
        if n:
            return max(float(np.sqrt(surprise / n)), 1e-12)
        return max(float(np.median(self.space.margin)) / 4, 1e-12)  # a first guess: the typical seed rarely breaks

    def propose(self, number: Ints) -> Tests:
        state, space = self.state, self.space
        cumulative = np.cumsum(self.weights())
        # One uniform number shifts an even comb over the weights: fewer accidents than drawing each seed by itself.
        comb = (np.arange(len(number)) + space.uniform(FOR_SEED, SEARCH_STREAM, int(number[0]))) / len(number)
        position = np.searchsorted(cumulative, comb * cumulative[-1], side="right").clip(max=len(space.seeds) - 1)
        share = np.cumsum(self._rates() ** 2)
        chosen = np.searchsorted(share, space.uniform(FOR_KIND, number) * share[-1], side="right").clip(max=2)
        if not len(state["fault_theta"]):
            chosen[chosen == 1] = 0
        theta = np.empty((len(number), len(space.low)), dtype=np.float32)
        borrowed, flip = chosen == 1, chosen == 2
        pick = (space.uniform(FOR_PICK, -1, number[borrowed]) * len(state["fault_theta"])).astype(np.int64)
        theta[borrowed] = state["fault_theta"][pick]
        theta[flip] = self._flipped(state["theta"][position[flip]], number[flip])
        repeated = (borrowed | flip) & np.isin(_keys(space.seeds[position], theta), state["seen"])
        state["tried"] = MEMORY * state["tried"] + np.bincount(chosen, minlength=len(KINDS))
        state["tried"][0] += repeated.sum()
        state["paid"] = MEMORY * state["paid"]
        chosen[repeated] = 0
        corner = chosen == 0
        theta[corner], is_new = self._corners(position[corner], number[corner])
        kind = np.array(KINDS, "<U8")[chosen]
        kind[np.flatnonzero(corner)[~is_new]] = "draw"
        return space.tests(number, position, theta, kind)

    def _rates(self) -> NDArray[np.float64]:
        """New faults a test, by kind."""
        tried, paid = self.state["tried"], self.state["paid"]
        average = (paid.sum() + 1) / (tried.sum() + DOUBT)
        rates: NDArray[np.float64] = (paid + DOUBT * average) / (tried + DOUBT)
        return rates

    def _corners(self, position: Ints, number: Ints) -> tuple[Floats, NDArray[np.bool_]]:
        """The next corner of each seed (`position` ascends), in an order of its own; which of them are new tests.

        Where there is no noise and every corner has been tried, theta is drawn uniformly instead.
        """
        space, tried = self.space, self.state["corners"]
        turn = tried[position] + np.arange(len(position)) - np.searchsorted(position, position)
        np.add.at(tried, position, 1)
        free = np.flatnonzero((space.low != space.identity) & (space.high != space.identity))[:62]
        n_corners = 1 << len(free)
        seed_id = space.seed_id[position]
        first, stride = ((space.uniform(FOR_PICK, k, seed_id) * n_corners).astype(np.int64) for k in (-3, -4))
        index = (first + turn * (stride | 1)) % n_corners  # an odd stride visits all before it repeats one
        theta = space.corners(number)
        theta[:, free] = np.where(index[:, None] >> np.arange(len(free)) & 1, space.high[free], space.low[free])
        is_new = (turn < n_corners) | space.is_random
        theta = np.where(is_new[:, None], theta, space.uniform_theta(SEARCH_STREAM, number))
        if self.state["reach"] < 1:
            theta = (space.identity + self.state["reach"] * (theta - space.identity)).astype(np.float32)
        return theta, is_new

    def _flipped(self, theta: Floats, number: Ints) -> Floats:
        """Each theta with one coordinate sent to a bound."""
        dimension = (self.space.uniform(FOR_PICK, -2, number) * theta.shape[1]).astype(np.int64)
        rows = np.arange(len(theta))
        flipped = theta.copy()
        flipped[rows, dimension] = self.space.corners(number)[rows, dimension]
        return flipped

    def observe(self, tests: Tests, results: Results) -> None:
        state, space, run = self.state, self.space, results.was_run
        at_corner = np.isin(tests.kind, ("corner", "draw"))
        if at_corner.any():
            pull = STRIDE * (DROPPED - (~run[at_corner]).mean())
            state["reach"] = np.minimum(state["reach"] * np.exp(pull), 1.0)
        tests, results = tests[run], results[run]
        position = space.position(tests.seed)
        # In order of falling margin, so that a seed tested twice keeps the smaller one.
        order = np.argsort(-results.margin, kind="stable")
        order = order[results.margin[order] < state["margin"][position[order]]]
        state["margin"][position[order]] = results.margin[order]
        state["theta"][position[order]] = tests.theta[order]
        if not space.is_random:
            state["seen"] = np.concatenate([state["seen"], _keys(tests.seed, tests.theta)])
        self._learn_margins(position, results.margin)
        self._learn_faults(tests[results.is_fault], position[results.is_fault], results.outcome[results.is_fault])

    def _learn_margins(self, position: Ints, margin: Floats) -> None:
        state, limit = self.state, float(np.abs(self.space.margin).max())
        margin = margin.clip(-limit, limit)  # an output that is not finite, or wild, is one fault and not more
        state["scatter"][:2] += len(margin), (self.space.margin[position] - margin).sum()
        surprise = (margin - self._expected()[position]) ** 2 / (1 + 1 / (CLEAN_WORTH + state["tests"][position]))
        state["scatter"][2] += surprise.sum()
        np.add.at(state["total_margin"], position, margin)
        np.add.at(state["tests"], position, 1)

    def _learn_faults(self, faults: Tests, position: Ints, outcome: Ints) -> None:
        state = self.state
        state["fault_theta"] = np.concatenate([state["fault_theta"], faults.theta])[-REMEMBERED:]
        keys, first = np.unique(position << 32 | outcome & 0xFFFFFFFF, return_index=True)
        first = first[~np.isin(keys, state["known"])]
        state["known"] = np.concatenate([state["known"], (position << 32 | outcome & 0xFFFFFFFF)[first]])
        state["paid"] += [(faults.kind[first] == kind).sum() for kind in KINDS]
        before = state["faults"][position]
        expected, found = self._is_new(before[before > 0]).sum(), (before[first] > 0).sum()
        state["novelty"] = (state["novelty"] * (found + DOUBT) / (expected + DOUBT)).clip(0.01, 100)
        np.add.at(state["faults"], position, 1)


def _keys(seed: Ints, theta: Floats) -> Ints:
    """Seed and theta in one number."""
    return rng.mix(seed, *np.ascontiguousarray(theta).view(np.int32).astype(np.int64).T)
