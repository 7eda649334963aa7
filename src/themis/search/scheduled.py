"""The default search: seeds by their chance of a new fault, theta by the kind of proposal that has paid off."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from themis.compute import rng
from themis.measure.tests import Bools, Floats, Ints, Results, Tests
from themis.search.ascent import ASCENTS, climbers, follow, no_climbs
from themis.search.chances import (
    Numbers,
    are_in,
    before_tests,
    free_dimensions,
    kept_margin,
    learn_faults,
    learn_margins,
    spreads_above,
    values,
)
from themis.search.effects import (
    CORNER_STATE,
    are_compared,
    at_corners,
    before_corners,
    choose_corners,
    learn_corners,
    visit_corners,
)
from themis.search.kinds import (
    AGAIN,
    BORROWED,
    CORNER,
    FLIP,
    KINDS,
    NEAR,
    PLAIN,
    SWEEP,
    UNIFORM,
    before_kinds,
    choose_kinds,
    count_kinds,
    pay_kinds,
)
from themis.search.policy import FOR_PICK, FOR_SEED, SEARCH_STREAM, Policy, Space, State

AT_ONCE, WARM_UP = 2, 100
"""Maximum number of tests per seed in a portion with half as many tests as seeds, more in proportion in larger ones:
estimates from margins may be wrong. It is one until `WARM_UP` tests have shown how well they predict faults."""
DROPPED, STRIDE = 0.25, 0.5
"""If tests are dropped for being too dissimilar, corners are moved inwards, per portion by at most this power of e,
until a quarter of them is dropped: the strongest admissible disturbances lie at that edge."""
REMEMBERED = 1000
"""The number of most recent distinct faults whose theta is offered to other seeds."""
JITTER = 1 / 64
"""Maximum share of its range by which a fault's theta is moved for another seed, so that faults of one cause show its
extent and not only the first theta that revealed it."""
LEADS = 10
"""The number of seeds closest to breaking whose best theta is tried on other seeds."""


class Scheduled(Policy):
    """Proposes the tests with the largest chance of a new fault, of the kinds that pay off."""

    uses_gradient = True
    optional_state = CORNER_STATE

    def init(self, space: Space) -> None:
        self.space = space
        n, dimensions = len(space.seeds), len(space.low)
        self.state: State = {
            **before_tests(space),
            **before_kinds(),
            **before_corners(space),
            **no_climbs(n, dimensions),
            "theta": np.tile(space.high, (n, 1)).astype(np.float32),  # at which the smallest margin was seen
            "fault_theta": np.zeros((0, dimensions), dtype=np.float32),
            "fault_answer": np.zeros(0, dtype=np.int64),  # the clean answer of its seed
            "seen": np.zeros(0, dtype=np.int64),  # without noise: the tests run so far, one number each, ascending
            "reach": np.ones(()),  # how far out the corners are; 1 means at the bounds
            "first": np.array(-1),  # number of the first test of the last proposal
            "spreads": np.zeros(0),  # of these tests: what `spreads_above` predicted
        }

    def propose(self, number: Ints) -> Tests:
        state, space = self.state, self.space
        chosen = choose_kinds(state, space, number)
        position = self._climbers(self._positions(chosen, number), chosen)
        if not len(state["fault_theta"]):
            chosen[chosen == BORROWED] = CORNER
        if not space.is_random:
            chosen[chosen == AGAIN] = CORNER
        theta, noise_seed = self._thetas(chosen, position, number)
        repeated = (chosen > SWEEP) & (chosen < PLAIN) & are_in(_keys(space.seeds[position], theta), state["seen"])
        chosen[repeated] = CORNER
        corner = chosen <= SWEEP
        self._visit(position[~corner], theta[~corner])
        theta[corner], is_new = self._corners(position[corner], number[corner])
        count_kinds(state, space, chosen)
        kind = np.array(KINDS)[chosen]
        kind[np.flatnonzero(corner)[~is_new]] = "draw"
        # Ascents come last, each kind by itself.
        order = np.argsort(np.maximum(chosen, PLAIN - 1), kind="stable")
        state["first"], state["spreads"] = np.array(number[0]), spreads_above(state, space)[position[order]]
        tests = space.tests(number, position[order], theta[order], kind[order])
        return replace(tests, noise_seed=np.where(noise_seed[order] < 0, tests.noise_seed, noise_seed[order]))

    def observe(self, tests: Tests, results: Results) -> None:
        state, run = self.state, results.was_run
        at_corner = np.isin(tests.kind, ("corner", "sweep", "draw"))
        if at_corner.any():
            pull = STRIDE * (DROPPED - (~run[at_corner]).mean())
            state["reach"] = np.minimum(state["reach"] * np.exp(pull), 1.0)
        follow(state, self.space, tests, results)
        if len(tests) and tests.number[0] == state["first"]:
            own = run & (tests.kind != "redrawn")
            if own.any():
                spreads = state["spreads"][: len(tests)][own]
                shortfall = learn_margins(state, self.space, tests[own], results[own], spreads)
                if are_compared(self.space):
                    at = at_corners(self.space, tests.theta[own]) | np.isin(tests.kind[own], ("corner", "sweep"))
                    learn_corners(state, self.space, tests[own][at], shortfall[at])
        tests, results = tests[run], results[run]
        position = self.space.position(tests.seed)
        self._visit(position, tests.theta)
        if not len(state["known"]):  # until the first fault, credit the lost share of the margin
            nearer = (state["margin"][position] - results.margin).clip(min=0)
            pay_kinds(state, tests.kind, nearer / np.maximum(self.space.margin[position], 1e-12))
        # In descending order of margin, so that a seed tested twice keeps the smaller one.
        order = np.argsort(-results.margin, kind="stable")
        order = order[results.margin[order] < state["margin"][position[order]]]
        state["margin"][position[order]] = results.margin[order]
        state["theta"][position[order]] = tests.theta[order]
        if not self.space.is_random:
            state["seen"] = np.sort(np.concatenate([state["seen"], _keys(tests.seed, tests.theta)]), kind="stable")
        if results.is_fault.any():
            self._observe_faults(tests[results.is_fault], results.outcome[results.is_fault])

    def _observe_faults(self, faults: Tests, outcome: Ints) -> None:
        state, position = self.state, self.space.position(faults.seed)
        if not len(state["known"]):  # from now on only faults are credited
            state["tried"], state["paid"] = np.zeros(len(KINDS)), np.zeros(len(KINDS))
        new = learn_faults(state, position, outcome)
        state["fault_theta"] = np.concatenate([state["fault_theta"], faults.theta[new]])[-REMEMBERED:]
        state["fault_answer"] = np.concatenate([state["fault_answer"], self.space.answer[position[new]]])[-REMEMBERED:]
        pay_kinds(state, faults.kind[new], np.ones(len(new)))

    # Which seeds

    def _positions(self, chosen: Ints, number: Ints) -> Ints:
        """The seed of each test; sweeps take the seeds with the fewest corners tried, ties are broken at random."""
        is_sweep, n_seeds = chosen == SWEEP, len(self.space.seeds)
        position = np.empty_like(number)
        position[~is_sweep] = self._choose_seeds(len(number) - int(is_sweep.sum()), int(number[0]))
        corners = self.state["corners"] + np.bincount(position[~is_sweep], minlength=n_seeds)
        rank = corners + self.space.uniform(FOR_SEED, -1, np.arange(n_seeds))
        position[is_sweep] = np.argsort(rank)[np.arange(is_sweep.sum()) % n_seeds]
        return position

    def _choose_seeds(self, n: int, first: int) -> Ints:
        """The positions of the `n` most valuable tests, ascending; ties are broken at random."""
        n_seeds = len(self.space.seeds)
        depth = 1 if self.state["tests"].sum() < WARM_UP else max(AT_ONCE, 2 * AT_ONCE * n // n_seeds)
        depth = max(depth, -(-n // n_seeds))
        draw = self.space.uniform(FOR_SEED, SEARCH_STREAM, first, np.arange(n_seeds))
        worth = (values(self.state, self.space, depth) * (1 + 1e-6 * draw)[:, None]).ravel()
        best = np.argpartition(-worth, n - 1)[:n] if 0 < n < len(worth) else np.arange(n) % len(worth)
        return np.sort(best // depth)

    def _climbers(self, position: Ints, chosen: Ints) -> Ints:
        """Replace the seeds of ascent tests by those whose ascent is in progress."""
        for which in range(len(ASCENTS)):
            rows = np.flatnonzero(chosen == PLAIN + which)
            found = climbers(self.state, which, len(rows), position[rows])
            chosen[rows[len(found) :]] = CORNER  # a seed takes one step at a time
            position[rows[: len(found)]] = found
        return position

    # Which theta

    def _thetas(self, chosen: Ints, position: Ints, number: Ints) -> tuple[Floats, Ints]:
        """Theta by kind, except for corners; and the noise seeds of ascents, -1 for other tests."""
        state, best = self.state, self.state["theta"][position]
        theta, noise_seed = best.copy(), np.full(len(number), -1)
        borrowed, flip, near, uniform = (chosen == kind for kind in (BORROWED, FLIP, NEAR, UNIFORM))
        theta[uniform] = self.space.uniform_theta(SEARCH_STREAM, number[uniform])
        theta[borrowed] = self._borrowed(position[borrowed], number[borrowed])
        theta[flip] = self._flipped(best[flip], number[flip])
        theta[near] = self._near(position[near], number[near])
        for which in range(len(ASCENTS)):
            climbs = chosen == PLAIN + which
            if not climbs.any():
                continue
            seeds = position[climbs]
            is_on = state["is_climbing"][which, seeds]
            first = self._near(seeds, number[climbs])
            theta[climbs] = np.where(is_on[:, None], state["climb_theta"][which, seeds], first)
            noise_seed[climbs] = np.where(is_on, state["climb_noise"][which, seeds], -1)
            state["is_climbing"][which, seeds] = False  # until its step has been run
        return theta, noise_seed

    def _borrowed(self, position: Ints, number: Ints) -> Floats:
        """Thetas of faults, preferably of seeds with the same clean answer; slightly moved unless at a bound."""
        state, answer = self.state, self.space.answer[position]
        order = np.argsort(state["fault_answer"], kind="stable")
        low, high = (np.searchsorted(state["fault_answer"][order], answer, side=side) for side in ("left", "right"))
        low, high = np.where(low < high, low, 0), np.where(low < high, high, len(order))
        pick = low + (self.space.uniform(FOR_PICK, -1, number) * (high - low)).astype(np.int64)
        theta: Floats = state["fault_theta"][order[pick]]
        is_inside = (theta > self.space.low) & (theta < self.space.high)
        return np.where(is_inside, self._moved(theta, np.full(len(theta), JITTER), number), theta)

    def _corners(self, position: Ints, number: Ints) -> tuple[Floats, Bools]:
        """The next corner of each seed, and which of them are new tests.

        If there is no noise and every corner has been tried, theta is drawn uniformly instead.
        """
        space, tried = self.space, self.state["corners"]
        free = free_dimensions(space)
        n_corners = 1 << len(free)
        if are_compared(space):
            index, is_new = choose_corners(self.state, space, position, number)
        else:
            order = np.argsort(position, kind="stable")
            turn = np.empty_like(position)
            turn[order] = np.arange(len(position)) - np.searchsorted(position[order], position[order])
            turn += tried[position]
            seed_id = space.seed_id[position]
            first, stride = ((space.uniform(FOR_PICK, k, seed_id) * n_corners).astype(np.int64) for k in (-3, -4))
            index = (first + turn * (stride | 1)) % n_corners  # an odd stride visits all corners before it repeats one
            is_new = turn < n_corners
        np.add.at(tried, position, 1)
        theta = space.corners(number)
        theta[:, free] = np.where(index[:, None] >> np.arange(len(free)) & 1, space.high[free], space.low[free])
        is_new |= space.is_random
        theta[~is_new] = space.uniform_theta(SEARCH_STREAM, number[~is_new])
        if self.state["reach"] < 1:
            theta = (space.identity + self.state["reach"] * (theta - space.identity)).astype(np.float32)
        return theta, is_new

    def _visit(self, position: Ints, theta: Floats) -> None:
        """Remember which corners seeds are tested at."""
        if are_compared(self.space):
            at = at_corners(self.space, theta)
            visit_corners(self.state, self.space, position[at], theta[at])

    def _near(self, position: Ints, number: Ints) -> Floats:
        """Each seed's best theta, or half of the time that of a leading seed, moved by 1/64 to 1/2 of its range."""
        space, state = self.space, self.state
        leads = np.argsort(kept_margin(state, space), kind="stable")[:LEADS]
        lead = leads[(space.uniform(FOR_PICK, -7, number) * len(leads)).astype(np.int64)]
        theta = state["theta"][np.where(space.uniform(FOR_PICK, -8, number) < 0.5, lead, position)]
        return self._moved(theta, 2.0 ** -(1 + 5 * space.uniform(FOR_PICK, -5, number)), number)

    def _moved(self, theta: Floats, step: Numbers, number: Ints) -> Floats:
        """Each theta moved in every dimension by at most `step`, a share of the range."""
        space = self.space
        moves = 2 * space.uniforms(FOR_PICK, range(-9, -9 - theta.shape[1], -1), number) - 1
        moved: Floats = (theta + step[:, None] * moves * space.reach).astype(np.float32)
        return moved.clip(space.low, space.high)

    def _flipped(self, theta: Floats, number: Ints) -> Floats:
        """Each theta with one coordinate moved to a bound."""
        dimension = (self.space.uniform(FOR_PICK, -2, number) * theta.shape[1]).astype(np.int64)
        rows = np.arange(len(theta))
        flipped = theta.copy()
        flipped[rows, dimension] = self.space.corners(number)[rows, dimension]
        return flipped


def _keys(seed: Ints, theta: Floats) -> Ints:
    """Seed and theta combined into one number."""
    return rng.mix(seed, *np.ascontiguousarray(theta).view(np.int32).astype(np.int64).T)
