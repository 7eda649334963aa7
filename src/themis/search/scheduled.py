"""The default search: seeds by their chance to show a new fault, theta by the kind of proposal that has paid off."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from themis import rng
from themis.measure.tests import Bools, Floats, Ints, Results, Tests
from themis.search.policy import FOR_KIND, FOR_PICK, FOR_SEED, SEARCH_STREAM, Space, State

Numbers = NDArray[np.float64]

KINDS = ("corner", "borrowed", "flip", "again", "near", "uniform theta")
"""Proposals of theta: a corner not tried yet; that of a fault of another seed; the seed's best with one coordinate
flipped to a bound; its best with new noise; one near its best; one drawn uniformly."""
HOPE = np.array([1.0, 0.9, 0.9, 0.5, 0.5, 0.5])
"""What each kind is thought to pay before it was tried, corners being 1: the strongest disturbances break most."""
DOUBT = 20
"""What is learnt from a round starts from so many tests that went as expected: no kind is given up for good."""
SURE = 6.0
"""New faults that each kind is taken to have shown beside those counted: less is left to chance when few were seen."""
MEMORY = 0.9
"""What a round's tallies of the kinds keep to the next: ten rounds count, since what pays off changes."""
WORTH = 5
"""Tests that the chance read off the margins is worth; from then on a seed's own count of faults outweighs it."""
CLEAN_WORTH = 0.25
"""Tests that a clean margin is worth: noise moves seeds apart about twice as far as it moves a seed's own tests."""
SPENT = 0.3
"""What a further test of a seed is worth whose corners were all tried, where there is no noise."""
AT_ONCE = 2
"""Tests of one seed in a round, at most, where it has half as many tests as there are seeds, else more in proportion:
what is read off margins may be wrong."""
MOST_FAULTS, MOST_ONCE = 32, 16
"""Faults of a seed, and outcomes seen once, that are told apart."""
DROPPED, STRIDE = 0.25, 0.5
"""Where tests are dropped for being another picture, corners are drawn in, a round by at most this power of e, until a
quarter of them is dropped: the strongest disturbances that count lie at that edge."""
REMEMBERED = 1000
"""Thetas of faults that are offered to other seeds, the latest ones."""


class Scheduled:
    """The tests with the largest chance of a new fault, each the next for its seed.

    The chance that a test breaks: margins of a seed scatter like a normal variable around a mean, of which its clean
    margin, less the usual fall, is the first reading; how many spreads the mean is above 0 becomes a chance by a
    logistic curve that is fitted as the campaign goes; a seed's own count of faults then outweighs it. The chance that
    the fault is new: what was seen of seeds with as many faults, and as many outcomes seen once, as Good and Turing
    have it. Only tests of the search count here: those of the uniform stream are weaker.
    """

    climbs = False

    def init(self, space: Space) -> None:
        self.space = space
        n, dimensions = len(space.seeds), len(space.low)
        counts = {name: np.zeros(n, dtype=np.int64) for name in ("tests", "broke", "faults", "once", "corners")}
        self.state: State = {
            **counts,  # of the search; faults of both streams, outcomes seen once, corners tried
            "total_margin": np.zeros(n),
            "scatter": np.zeros(3),  # tests, their margins' summed fall below the clean ones, summed squared surprise
            "margin": space.margin.astype(np.float32).copy(),  # the smallest seen
            "theta": np.tile(space.high, (n, 1)).astype(np.float32),  # where it was seen
            "curve": np.array([0.0, -1.7]),  # the logit of a chance, and its fall a spread: the normal curve's
            "precision": np.diag([1.0, 4.0]),  # how sure that is
            "first": np.array(-1),  # number of the first test proposed last
            "spreads": np.zeros(0),  # of these tests: how many spreads their seeds' means were above 0
            "met": np.zeros((MOST_FAULTS, MOST_ONCE)),  # faults of seeds with so many faults and outcomes seen once
            "new": np.zeros((MOST_FAULTS, MOST_ONCE)),  # those of them that were new
            "known": np.zeros(0, dtype=np.int64),  # distinct faults, as seed and outcome in one number, ascending
            "times": np.zeros(0, dtype=np.int64),  # how often each was seen
            "fault_theta": np.zeros((0, dimensions), dtype=np.float32),
            "fault_answer": np.zeros(0, dtype=np.int64),  # the clean answer of its seed
            "seen": np.zeros(0, dtype=np.int64),  # tests as seed and theta in one number, where there is no noise
            "reach": np.ones(()),  # how far out corners lie: 1 is the bounds
            "tried": np.zeros(len(KINDS)),
            "paid": np.zeros(len(KINDS)),
        }

    # Which seeds

    def chances(self) -> Numbers:
        """Each seed's chance to break in its next test."""
        state = self.state
        level, slope = state["curve"]
        read = _logistic(level + slope * self._spreads_above())
        chances: Numbers = (WORTH * read + state["broke"]) / (WORTH + state["tests"])
        return chances

    def _spreads_above(self) -> Numbers:
        """How many spreads each seed's next margin is expected above 0."""
        state = self.state
        n, fall, surprise = state["scatter"]
        # A first guess: the typical seed rarely breaks.
        spread = np.sqrt(surprise / n) if n else np.median(self.space.margin) / 4
        doubt = np.sqrt(1 + 1 / (CLEAN_WORTH + state["tests"]))
        above: Numbers = (self._expected(fall / max(n, 1)) / (max(float(spread), 1e-12) * doubt)).clip(-6, 6)
        return above

    def _expected(self, fall: float) -> Numbers:
        state = self.state
        first = CLEAN_WORTH * (self.space.margin - fall)
        expected: Numbers = (first + state["total_margin"]) / (CLEAN_WORTH + state["tests"])
        return expected

    def _novelty(self) -> Numbers:
        """The chance that a fault is new, by the faults of its seed so far and its outcomes seen once."""
        state = self.state
        usual = 1 / (1 + np.arange(MOST_FAULTS))[:, None]
        novelty: Numbers = (state["new"] + DOUBT / 2 * usual) / (state["met"] + DOUBT / 2)
        return novelty

    def values(self, depth: int) -> Numbers:
        """The chance of a new fault in each seed's next tests of a round, `[seeds, depth]`: it falls."""
        state, chances, novelty = self.state, self.chances()[:, None], self._novelty()
        further = np.arange(depth)
        known = WORTH + state["tests"][:, None]
        breaks = chances * known / (known + further * (1 - chances))
        faults = np.minimum(np.rint(state["faults"][:, None] + further * chances).astype(np.int64), MOST_FAULTS - 1)
        values: Numbers = breaks * novelty[faults, np.minimum(state["once"], MOST_ONCE - 1)[:, None]]
        if not self.space.is_random:  # a corner breaks a seed or never will
            values *= np.where(state["corners"][:, None] + further < self._n_corners(), 1, SPENT)
        return values

    def _n_corners(self) -> int:
        space = self.space
        return 1 << int(((space.low != space.identity) & (space.high != space.identity)).sum().clip(max=62))

    def _choose_seeds(self, number: Ints) -> Ints:
        """The positions of the most valuable tests, ascending; of equals any."""
        n, n_seeds = len(number), len(self.space.seeds)
        depth = max(AT_ONCE, 2 * AT_ONCE * n // n_seeds, -(-n // n_seeds))
        values = self.values(depth).ravel()
        values = values * (
            1 + 1e-6 * self.space.uniform(FOR_SEED, SEARCH_STREAM, int(number[0]), np.arange(len(values)))
        )
        best = np.argpartition(-values, n - 1)[:n] if n < len(values) else np.arange(n) % len(values)
        return np.sort(best // depth)

    # Which theta

    def propose(self, number: Ints) -> Tests:
        state, space = self.state, self.space
        position = self._choose_seeds(number)
        state["first"], state["spreads"] = np.array(number[0]), self._spreads_above()[position]
        chosen = self._choose_kinds(number)
        if not len(state["fault_theta"]):
            chosen[chosen == 1] = 0
        if not space.is_random:
            chosen[chosen == 3] = 0
        theta = space.uniform_theta(SEARCH_STREAM, number)
        borrowed, flip, again, near = (chosen == k for k in (1, 2, 3, 4))
        theta[borrowed] = self._borrowed(position[borrowed], number[borrowed])
        theta[flip] = self._flipped(state["theta"][position[flip]], number[flip])
        theta[again] = state["theta"][position[again]]
        theta[near] = self._near(state["theta"][position[near]], number[near])
        repeated = (chosen > 0) & np.isin(_keys(space.seeds[position], theta), state["seen"])
        chosen[repeated] = 0
        corner = chosen == 0
        theta[corner], is_new = self._corners(position[corner], number[corner])
        state["tried"] = MEMORY * state["tried"] + np.bincount(chosen, minlength=len(KINDS))
        state["paid"] = MEMORY * state["paid"]
        kind = np.array(KINDS)[chosen]
        kind[np.flatnonzero(corner)[~is_new]] = "draw"
        return space.tests(number, position, theta, kind)

    def _choose_kinds(self, number: Ints) -> Ints:
        """The kind of each test: the one that pays most, as far as is known (Thompson's sampling)."""
        from scipy.special import ndtri

        tried, paid = self.state["tried"], self.state["paid"]
        average = (paid.sum() + 1) / (tried.sum() + DOUBT)
        expected = paid + DOUBT * average * HOPE
        # What a kind pays a test has a gamma distribution; its logarithm is about normal.
        draws = np.stack(
            [ndtri(self.space.uniform(FOR_KIND, k, number).clip(1e-9, 1 - 1e-9)) for k in range(len(KINDS))], 1
        )
        chosen: Ints = (np.log(expected / (tried + DOUBT)) + draws / np.sqrt(expected + SURE)).argmax(1)
        return chosen

    def _borrowed(self, position: Ints, number: Ints) -> Floats:
        """Thetas of faults, of seeds with the same clean answer where there are any."""
        state, answer = self.state, self.space.answer[position]
        order = np.argsort(state["fault_answer"], kind="stable")
        low, high = (np.searchsorted(state["fault_answer"][order], answer, side=side) for side in ("left", "right"))
        low, high = np.where(low < high, low, 0), np.where(low < high, high, len(order))
        pick = low + (self.space.uniform(FOR_PICK, -1, number) * (high - low)).astype(np.int64)
        theta: Floats = state["fault_theta"][order[pick]]
        return theta

    def _corners(self, position: Ints, number: Ints) -> tuple[Floats, Bools]:
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

    def _near(self, theta: Floats, number: Ints) -> Floats:
        """Each theta moved, by up to half of its range down to a 32nd."""
        space = self.space
        step = 2.0 ** -(1 + 5 * space.uniform(FOR_PICK, -5, number))
        moves = [2 * space.uniform(FOR_PICK, -6 - k, number) - 1 for k in range(theta.shape[1])]
        moved: Floats = (theta + step[:, None] * np.stack(moves, -1) * space.reach).astype(np.float32)
        return moved.clip(space.low, space.high)

    def _flipped(self, theta: Floats, number: Ints) -> Floats:
        """Each theta with one coordinate sent to a bound."""
        dimension = (self.space.uniform(FOR_PICK, -2, number) * theta.shape[1]).astype(np.int64)
        rows = np.arange(len(theta))
        flipped = theta.copy()
        flipped[rows, dimension] = self.space.corners(number)[rows, dimension]
        return flipped

    # What came of them

    def observe(self, tests: Tests, results: Results) -> None:
        state, run = self.state, results.was_run
        is_own = len(tests) > 0 and tests.number[0] == state["first"]
        own = run & (tests.kind != "redrawn") if is_own else np.zeros(len(tests), dtype=bool)
        at_corner = np.isin(tests.kind, ("corner", "draw"))
        if at_corner.any():
            pull = STRIDE * (DROPPED - (~run[at_corner]).mean())
            state["reach"] = np.minimum(state["reach"] * np.exp(pull), 1.0)
        if own.any():
            self._fit_curve(state["spreads"][own], results.is_fault[own])
            self._learn_margins(tests[own], results[own])
        tests, results = tests[run], results[run]
        position = self.space.position(tests.seed)
        # In order of falling margin, so that a seed tested twice keeps the smaller one.
        order = np.argsort(-results.margin, kind="stable")
        order = order[results.margin[order] < state["margin"][position[order]]]
        state["margin"][position[order]] = results.margin[order]
        state["theta"][position[order]] = tests.theta[order]
        if not self.space.is_random:
            state["seen"] = np.concatenate([state["seen"], _keys(tests.seed, tests.theta)])
        self._learn_faults(tests[results.is_fault], position[results.is_fault], results.outcome[results.is_fault])

    def _fit_curve(self, spreads: Numbers, broke: Bools) -> None:
        """Newton's steps to the likeliest logistic curve, given what was known of it before; older rounds fade."""
        state, rows = self.state, np.stack([np.ones_like(spreads), spreads], 1)
        before, precision = state["curve"], 0.95 * state["precision"]
        curve = before.copy()
        for _ in range(4):
            chance = _logistic(rows @ curve)
            slope = rows.T @ (broke - chance) - precision @ (curve - before)
            curvature = (rows * (chance * (1 - chance))[:, None]).T @ rows + precision
            curve = curve + np.linalg.solve(curvature, slope).clip(-2, 2)
        state["curve"], state["precision"] = curve, curvature

    def _learn_margins(self, tests: Tests, results: Results) -> None:
        state, limit = self.state, float(np.abs(self.space.margin).max())
        position = self.space.position(tests.seed)
        margin = results.margin.clip(-limit, limit)  # an output that is not finite, or wild, is one fault and not more
        state["scatter"][:2] += len(margin), (self.space.margin[position] - margin).sum()
        n, fall, _ = state["scatter"]
        expected = self._expected(fall / n)[position]
        state["scatter"][2] += ((margin - expected) ** 2 / (1 + 1 / (CLEAN_WORTH + state["tests"][position]))).sum()
        np.add.at(state["total_margin"], position, margin)
        np.add.at(state["tests"], position, 1)
        np.add.at(state["broke"], position[results.is_fault], 1)

    def _learn_faults(self, faults: Tests, position: Ints, outcome: Ints) -> None:
        """Count faults of both streams; a round's are judged by what was known of their seeds before it."""
        state = self.state
        state["fault_theta"] = np.concatenate([state["fault_theta"], faults.theta])[-REMEMBERED:]
        state["fault_answer"] = np.concatenate([state["fault_answer"], self.space.answer[position]])[-REMEMBERED:]
        cell = (
            np.minimum(state["faults"][position], MOST_FAULTS - 1),
            np.minimum(state["once"][position], MOST_ONCE - 1),
        )
        np.add.at(state["met"], cell, 1)
        keys, first, times = np.unique(position << 32 | outcome & 0xFFFFFFFF, return_index=True, return_counts=True)
        place = np.searchsorted(state["known"], keys).clip(max=max(len(state["known"]) - 1, 0))
        is_new = np.ones(len(keys), dtype=bool) if not len(state["known"]) else state["known"][place] != keys
        np.add.at(state["new"], tuple(each[first[is_new]] for each in cell), 1)
        state["paid"] += [(faults.kind[first[is_new]] == kind).sum() for kind in KINDS]
        np.add.at(state["once"], position[first[is_new & (times == 1)]], 1)
        np.add.at(state["once"], position[first[~is_new][state["times"][place[~is_new]] == 1]], -1)
        state["times"][place[~is_new]] += times[~is_new]
        known = np.concatenate([state["known"], keys[is_new]])
        order = np.argsort(known)
        state["known"], state["times"] = known[order], np.concatenate([state["times"], times[is_new]])[order]
        np.add.at(state["faults"], position, 1)


def _logistic(x: Numbers) -> Numbers:
    result: Numbers = 1 / (1 + np.exp(-np.clip(x, -30, 30)))
    return result


def _keys(seed: Ints, theta: Floats) -> Ints:
    """Seed and theta in one number."""
    return rng.mix(seed, *np.ascontiguousarray(theta).view(np.int32).astype(np.int64).T)
