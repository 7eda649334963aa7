"""The default search: the seeds most likely to have a new fault, and the kinds of proposals that have paid off."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from themis.compute import rng
from themis.measure.tests import Bools, Floats, Ints, Results, Tests
from themis.search import kinds
from themis.search.arithmetic import Arithmetic, are_in, before_tests, least
from themis.search.compiled import Compiled
from themis.search.kinds import AGAIN, ASCENTS, BORROWED, CORNER, FIRST_ASCENT, KINDS, SWEEP
from themis.search.policy import FOR_PICK, FOR_SEED, SEARCH_STREAM, Numbers, Policy, Space, State

TESTS_PER_SEED, WARM_UP_TESTS = 2, 100
"""Most tests per seed in a portion with half as many tests as seeds, in proportion in larger portions, because
estimates from margins may be wrong. It is 1 until `WARM_UP_TESTS` tests have shown how well margins predict faults."""
DROPPED_SHARE, MAX_CORNER_STEP = 0.25, 0.5
"""If tests at corners are dropped as too dissimilar, corners move inwards, by at most e to this power per portion,
until a quarter of the tests is dropped: the strongest disturbances that are allowed are there."""
N_REMEMBERED_FAULTS = 1000
"""The number of most recent distinct faults whose theta is offered to other seeds."""
KIND_NAMES = np.array(KINDS)
AT_CORNER = ("corner", "sweep", "draw")


class Scheduled(Policy):
    """Proposes the tests with the largest chance of a new fault, of the kinds that pay off."""

    uses_gradient = can_be_ahead = True

    def init(self, space: Space) -> None:
        self.space = space
        n, dimensions = len(space.seeds), len(space.low)
        self._ties = space.uniform(FOR_SEED, -1, np.arange(n))
        n_corners = 1 << len(space.free_dimensions)
        # The first corner of each seed and the stride to the next one, if corners are not compared.
        self._walks = tuple((space.uniform(FOR_PICK, k, space.seed_id) * n_corners).astype(np.int64) for k in (-3, -4))
        self.state: State = {
            **before_tests(space),
            **kinds.before_kinds(),
            **kinds.before_corners(space),
            **kinds.no_climbs(n, dimensions),
            "theta": np.tile(space.high, (n, 1)).astype(np.float32),  # at which the smallest margin was seen
            "fault_theta": np.zeros((0, dimensions), dtype=np.float32),
            "fault_answer": np.zeros(0, dtype=np.int64),  # the clean answer of its seed
            "seen": np.zeros(0, dtype=np.int64),  # without noise: the tests run so far, one number each, ascending
            "corner_scale": np.ones(()),  # how far out the corners are, as a share of the way to the bounds
            "waiting": np.zeros((0, 4)),  # tests not observed yet: number, position, kind, and what `spreads_above` was
        }
        self._arithmetic = Compiled.of(space, self.state) or Arithmetic(space)
        self._compares_corners = kinds.are_compared(space)

    def propose(self, number: Ints) -> Tests:
        state, space = self.state, self.space
        state["waiting"] = state["waiting"][state["waiting"][:, 0] < number[0]]  # a budget has cut off the others
        chosen = kinds.choose_kinds(state, space, number, self._arithmetic)
        position, spreads = self._positions(chosen, int(number[0]))
        position = self._climbers(position, chosen)
        if not len(state["fault_theta"]):
            chosen[chosen == BORROWED] = CORNER
        if not space.is_random:
            chosen[chosen == AGAIN] = CORNER
        theta = self._arithmetic.thetas(state, chosen, position, number)
        noise_seed = self._climb(chosen, position, theta)
        if len(state["seen"]):
            repeated = (chosen > SWEEP) & are_in(_keys(space.seeds[position], theta), state["seen"])
            chosen[repeated], theta[repeated] = CORNER, space.corners(number[repeated])
        is_corner = chosen <= SWEEP
        corner = is_corner.nonzero()[0]
        if self._compares_corners:
            self._visit(position[~is_corner], theta[~is_corner])
        kind = KIND_NAMES[chosen]
        if len(space.free_dimensions) or not space.is_random:  # else there is one corner, with new noise each time
            theta[corner], is_new = self._corners(position[corner], number[corner], theta[corner])
            kind[corner[~is_new]] = "draw"
        np.add.at(state["corners"], position[corner], 1)
        if state["corner_scale"].item() < 1:
            theta[corner] = space.identity + state["corner_scale"] * (theta[corner] - space.identity)
        if noise_seed is not None:  # ascents come last, each kind by itself
            order = np.argsort(np.maximum(chosen, FIRST_ASCENT - 1), kind="stable")
            position, theta, kind = position[order], theta[order], kind[order]
            chosen, noise_seed = chosen[order], noise_seed[order]
        proposed = np.stack([number, position, chosen, spreads[position]], 1)
        state["waiting"] = np.concatenate([state["waiting"], proposed])
        tests = space.tests(number, position, theta, kind)
        if noise_seed is None:
            return tests
        return replace(tests, noise_seed=np.where(noise_seed < 0, tests.noise_seed, noise_seed))

    def observe(self, tests: Tests, results: Results) -> None:
        state, space = self.state, self.space
        if results.is_dropped is not None or state["corner_scale"].item() != 1:
            self._move_corners(tests.kind, results.is_dropped)
        kinds.follow(state, space, tests, results)
        position = space.position(tests.seed)
        is_here = np.isin(state["waiting"][:, 0], tests.number)
        if is_here.any():
            number, seed, kind, spreads = state["waiting"][is_here].T
            state["waiting"] = state["waiting"][~is_here]
            at = tests.number.searchsorted(number)
            # Uniform tests may have the numbers of tests that a budget has cut off.
            is_own = (tests.kind[at] == "redrawn") | (position[at] == seed)
            kinds.count_kinds(state, space, kind[is_own].astype(np.int64))
            is_own &= results.was_run[at] & (tests.kind[at] != "redrawn")
            if is_own.any():
                own = np.isin(np.arange(len(tests)), at[is_own])
                self._learn(tests[own], position[own], results[own], spreads[is_own])
        if results.is_dropped is not None:
            run = results.was_run
            tests, results, position = tests[run], results[run], position[run]
        if self._compares_corners:
            self._visit(position, tests.theta)
        if not len(state["known"]):  # until the first fault, credit the lost share of the margin
            nearer = (state["margin"][position] - results.margin).clip(min=0)
            kinds.pay_kinds(state, tests.kind, nearer / np.maximum(space.margin[position], 1e-12))
        self._arithmetic.keep_least(state, tests.theta, position, results.margin)
        if not space.is_random:
            new = np.sort(_keys(tests.seed, tests.theta))
            state["seen"] = np.insert(state["seen"], state["seen"].searchsorted(new), new)
        at = results.is_fault.nonzero()[0]
        if len(at):
            self._observe_faults(tests, at, position[at], results.outcome[at])

    def _learn(self, tests: Tests, position: Ints, results: Results, spreads: Numbers) -> None:
        """Learn from tests that were proposed and run."""
        shortfall = self._arithmetic.learn_margins(self.state, position, results, spreads)
        if self._compares_corners:
            at = kinds.at_corners(self.space, tests.theta) | np.isin(tests.kind, AT_CORNER[:2])
            kinds.learn_corners(self.state, self.space, tests[at], shortfall[at])

    def _move_corners(self, kind: NDArray[np.str_], is_dropped: Bools | None) -> None:
        """Move corners inwards if too many tests at them were dropped, or outwards again."""
        at_corner = np.isin(kind, AT_CORNER)
        if at_corner.any():
            dropped = 0.0 if is_dropped is None else is_dropped[at_corner].mean()
            pull = MAX_CORNER_STEP * (DROPPED_SHARE - dropped)
            self.state["corner_scale"] = np.minimum(self.state["corner_scale"] * np.exp(pull), 1.0)

    def _observe_faults(self, tests: Tests, at: Ints, position: Ints, outcome: Ints) -> None:
        """Learn from the tests `at`, which are faults."""
        state = self.state
        if not len(state["known"]):  # from now on only faults are credited
            state["tried"], state["paid"] = np.zeros(len(KINDS)), np.zeros(len(KINDS))
        new = self._arithmetic.learn_faults(state, position, outcome)
        if not len(new):
            return
        at, answer = at[new], self.space.answer[position[new]]
        state["fault_theta"] = np.concatenate([state["fault_theta"], tests.theta[at]])[-N_REMEMBERED_FAULTS:]
        state["fault_answer"] = np.concatenate([state["fault_answer"], answer])[-N_REMEMBERED_FAULTS:]
        kinds.pay_kinds(state, tests.kind[at], np.ones(len(at)))

    def _positions(self, chosen: Ints, first: int) -> tuple[Ints, Numbers]:
        """The seed of each test, and the expected margins of all seeds, see `Arithmetic.spreads_above`.

        Sweeps use the seeds with the fewest corners tried, with ties broken at random; others the most valuable seeds.
        """
        is_sweep, n_seeds = chosen == SWEEP, len(self.space.seeds)
        n_sweeps = int(np.count_nonzero(is_sweep))
        n = len(chosen) - n_sweeps
        self.state["ahead"] = np.bincount(self.state["waiting"][:, 1].astype(np.int64), minlength=n_seeds)
        n_tests = self.state["margin_losses"][0].sum()  # those of each clean answer
        depth = 1 if n_tests < WARM_UP_TESTS else max(TESTS_PER_SEED, 2 * TESTS_PER_SEED * n // n_seeds)
        best, spreads = self._arithmetic.choose_seeds(self.state, max(depth, -(-n // n_seeds)), n, first)
        if not n_sweeps:
            return best, spreads
        position = np.empty_like(chosen)
        position[~is_sweep] = best
        rank = self.state["corners"] + np.bincount(best, minlength=n_seeds) + self._ties
        position[is_sweep] = np.resize(least(rank, n_sweeps), n_sweeps)
        return position, spreads

    def _climbers(self, position: Ints, chosen: Ints) -> Ints:
        """Replace the seeds of ascent tests by those whose ascent is in progress."""
        if not np.count_nonzero(chosen >= FIRST_ASCENT):
            return position
        for which in range(len(ASCENTS)):
            rows = np.flatnonzero(chosen == FIRST_ASCENT + which)
            if not len(rows):
                continue
            found = kinds.climbers(self.state, which, len(rows), position[rows])
            chosen[rows[len(found) :]] = CORNER  # a seed takes one step at a time
            position[rows[: len(found)]] = found
        return position

    def _climb(self, chosen: Ints, position: Ints, theta: Floats) -> Ints | None:
        """Set the thetas of ascents in progress. Returns their noise seeds, -1 for other tests; None without
        ascents."""
        state, rows = self.state, (chosen >= FIRST_ASCENT).nonzero()[0]
        if not len(rows):
            return None
        which, seeds = chosen[rows] - FIRST_ASCENT, position[rows]
        is_on = state["is_climbing"][which, seeds]
        rows, which, seeds = rows[is_on], which[is_on], seeds[is_on]
        noise_seed = np.full(len(chosen), -1)
        theta[rows], noise_seed[rows] = state["climb_theta"][which, seeds], state["climb_noise"][which, seeds]
        state["is_climbing"][which, seeds] = False  # until its step has been run
        return noise_seed

    def _corners(self, position: Ints, number: Ints, theta: Floats) -> tuple[Floats, Bools]:
        """The next corner of each seed, and which are new tests; `theta` is at random corners.

        If there is no noise and every corner has been tried, theta is drawn uniformly instead.
        """
        space, free = self.space, self.space.free_dimensions
        if self._compares_corners:
            index, is_new = kinds.choose_corners(self.state, space, position, number)
        else:
            n_corners, turn = 1 << len(free), kinds.turns(position) + self.state["corners"][position]
            first, stride = self._walks
            # An odd stride visits all corners before it repeats one.
            index = (first[position] + turn * (stride[position] | 1)) % n_corners
            is_new = turn < n_corners
        theta[:, free] = np.where(index[:, None] >> np.arange(len(free)) & 1, space.high[free], space.low[free])
        if space.is_random:
            is_new[:] = True
        elif not is_new.all():
            theta[~is_new] = space.uniform_theta(SEARCH_STREAM, number[~is_new])
        return theta, is_new

    def _visit(self, position: Ints, theta: Floats) -> None:
        """Remember the corners at which seeds are tested."""
        at = kinds.at_corners(self.space, theta)
        kinds.visit_corners(self.state, self.space, position[at], theta[at])


def _keys(seed: Ints, theta: Floats) -> Ints:
    """Seed and theta combined into one number."""
    return rng.mix(seed, *np.ascontiguousarray(theta).view(np.int32).astype(np.int64).T)
