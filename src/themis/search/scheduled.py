"""The default search: seeds by their chance of a new fault, theta by the kind of proposal that has paid off."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from themis.compute import rng
from themis.measure.tests import Bools, Floats, Ints, Results, Tests
from themis.search.ascent import ASCENTS, climbers, follow, no_climbs
from themis.search.chances import (
    are_in,
    before_tests,
    kept_margin,
    learn_faults,
    learn_margins,
    spreads_above,
    values,
)
from themis.search.compiled import Compiled
from themis.search.effects import (
    are_compared,
    at_corners,
    before_corners,
    choose_corners,
    learn_corners,
    turns,
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
    pay_faults,
    pay_kinds,
)
from themis.search.policy import FOR_PICK, FOR_SEED, SEARCH_STREAM, Numbers, Policy, Space, State

TESTS_PER_SEED, WARM_UP_TESTS = 2, 100
"""Maximum number of tests per seed in a portion with half as many tests as seeds, more in proportion in larger ones:
estimates from margins may be wrong. It is one until `WARM_UP_TESTS` tests have shown how well they predict faults."""
DROPPED_SHARE, MAX_CORNER_STEP = 0.25, 0.5
"""If tests are dropped for being too dissimilar, corners are moved inwards, per portion by at most this power of e,
until a quarter of them is dropped: the strongest admissible disturbances lie at that edge."""
N_REMEMBERED_FAULTS = 1000
"""The number of most recent distinct faults whose theta is offered to other seeds."""
BORROWED_JITTER = 1 / 64
"""Maximum share of its range by which a fault's theta is moved for another seed, so that faults of one cause show its
extent and not only the first theta that revealed it."""
N_LEADING_SEEDS = 10
"""The number of seeds closest to breaking whose best theta is tried on other seeds."""
KIND_NAMES = np.array(KINDS)
AT_CORNER = ("corner", "sweep", "draw")
FOR_BORROWED, FOR_DIMENSION, FOR_STEP, FOR_LEAD, FOR_LEADING, FOR_MOVE = -1, -2, -5, -7, -8, -9
"""The uses of the random numbers of the purpose FOR_PICK that a test has: whose theta is borrowed, which dimension is
flipped, how long a step is, which seed leads, whether its theta is taken, and the moves along the dimensions, from
FOR_MOVE downwards. The numbers from 0 upwards decide the bounds of a corner."""


@dataclass(frozen=True)
class Picks:
    """The random numbers of the purpose FOR_PICK of some tests, drawn at once, `[tests, numbers]`."""

    draws: Numbers
    n_dimensions: int

    @staticmethod
    def of(space: Space, number: Ints) -> Picks:
        """Those of the tests `number`."""
        n = len(space.low)
        return Picks(space.uniforms(FOR_PICK, range(FOR_MOVE - n + 1, n), number), n)

    def __getitem__(self, rows: Ints) -> Picks:
        """Those of some of the tests."""
        return Picks(self.draws[rows], self.n_dimensions)

    def __len__(self) -> int:
        return len(self.draws)

    def number(self, use: int) -> Numbers:
        """One number per test."""
        return self.draws[:, use - FOR_MOVE + self.n_dimensions - 1]

    @property
    def moves(self) -> Numbers:
        """One number per test and dimension."""
        return self.draws[:, : self.n_dimensions][:, ::-1]

    @property
    def bounds(self) -> Numbers:
        """One number per test and dimension, for the bounds of a corner."""
        return self.draws[:, -self.n_dimensions :]


class Scheduled(Policy):
    """Proposes the tests with the largest chance of a new fault, of the kinds that pay off."""

    uses_gradient = True
    former_names = {  # noqa: RUF012
        "once": "seen_once",
        "surprise": "squared_shortfall",
        "kin": "answer_index",
        "fallen": "margin_losses",
        "frail": "answer_faults",
        "met": "seen_faults",
        "new": "new_faults",
        "reach": "corner_scale",
    }

    def init(self, space: Space) -> None:
        self.space = space
        n, dimensions = len(space.seeds), len(space.low)
        self._every_seed = np.arange(n)
        self._ties = space.uniform(FOR_SEED, -1, self._every_seed)
        n_corners = 1 << len(space.free_dimensions)
        # The first corner of each seed and the stride to the next one, if corners are not compared.
        self._walks = tuple((space.uniform(FOR_PICK, k, space.seed_id) * n_corners).astype(np.int64) for k in (-3, -4))
        self.state: State = {
            **before_tests(space),
            **before_kinds(),
            **before_corners(space),
            **no_climbs(n, dimensions),
            "theta": np.tile(space.high, (n, 1)).astype(np.float32),  # at which the smallest margin was seen
            "fault_theta": np.zeros((0, dimensions), dtype=np.float32),
            "fault_answer": np.zeros(0, dtype=np.int64),  # the clean answer of its seed
            "seen": np.zeros(0, dtype=np.int64),  # without noise: the tests run so far, one number each, ascending
            "corner_scale": np.ones(()),  # how far out the corners are, as a share of the way to the bounds
            "first": np.array(-1),  # number of the first test of the last proposal
            "spreads": np.zeros(0),  # of these tests: what `spreads_above` predicted
        }
        self._compiled = Compiled.of(space, self.state)

    def propose(self, number: Ints) -> Tests:
        state, space = self.state, self.space
        chosen = choose_kinds(state, space, number)
        position, spreads = self._positions(chosen, int(number[0]))
        position = self._climbers(position, chosen)
        if not len(state["fault_theta"]):
            chosen[chosen == BORROWED] = CORNER
        if not space.is_random:
            chosen[chosen == AGAIN] = CORNER
        theta = self._thetas(chosen, position, number)
        noise_seed = self._climb(chosen, position, theta)
        if len(state["seen"]):
            repeated = (chosen > SWEEP) & are_in(_keys(space.seeds[position], theta), state["seen"])
            chosen[repeated], theta[repeated] = CORNER, space.corners(number[repeated])
        is_corner = chosen <= SWEEP
        corner = is_corner.nonzero()[0]
        if are_compared(space):
            self._visit(position[~is_corner], theta[~is_corner])
        count_kinds(state, space, chosen)
        kind = KIND_NAMES[chosen]
        if len(space.free_dimensions) or not space.is_random:  # else there is one corner, with new noise each time
            theta[corner], is_new = self._corners(position[corner], number[corner], theta[corner])
            kind[corner[~is_new]] = "draw"
        np.add.at(state["corners"], position[corner], 1)
        if state["corner_scale"].item() < 1:
            theta[corner] = space.identity + state["corner_scale"] * (theta[corner] - space.identity)
        if noise_seed is not None:  # ascents come last, each kind by itself
            order = np.argsort(np.maximum(chosen, PLAIN - 1), kind="stable")
            position, theta, kind, noise_seed = position[order], theta[order], kind[order], noise_seed[order]
        state["first"], state["spreads"] = np.array(number[0]), spreads[position]
        tests = space.tests(number, position, theta, kind)
        if noise_seed is None:
            return tests
        return replace(tests, noise_seed=np.where(noise_seed < 0, tests.noise_seed, noise_seed))

    def observe(self, tests: Tests, results: Results) -> None:
        state, space = self.state, self.space
        self._move_corners(tests.kind, results.is_dropped)
        follow(state, space, tests, results)
        position = space.position(tests.seed)
        if len(tests) and tests.number[0] == state["first"]:
            spreads = state["spreads"][: len(tests)]
            if space.is_random and results.is_dropped is None:
                self._learn(tests, position, results, spreads)
            elif (own := results.was_run & (tests.kind != "redrawn")).any():
                self._learn(tests[own], position[own], results[own], spreads[own])
        if results.is_dropped is not None:
            run = results.was_run
            tests, results, position = tests[run], results[run], position[run]
        self._visit(position, tests.theta)
        if not len(state["known"]):  # until the first fault, credit the lost share of the margin
            nearer = (state["margin"][position] - results.margin).clip(min=0)
            pay_kinds(state, tests.kind, nearer / np.maximum(space.margin[position], 1e-12))
        self._keep_least(tests.theta, position, results.margin)
        if not space.is_random:
            state["seen"] = _merged(state["seen"], np.sort(_keys(tests.seed, tests.theta)))
        at = results.is_fault.nonzero()[0]
        if len(at):
            self._observe_faults(tests, at, position[at], results.outcome[at])

    def _keep_least(self, theta: Floats, position: Ints, margin: Floats) -> None:
        """Keep the smallest margin of each seed, and theta at which it was seen."""
        state = self.state
        if self._compiled is not None:
            self._compiled.keep_least(state, theta, position, margin)
            return
        # In descending order of margin, so that a seed tested twice keeps the smaller one.
        lower = (margin < state["margin"][position]).nonzero()[0]
        lower = lower[np.argsort(-margin[lower], kind="stable")]
        state["margin"][position[lower]] = margin[lower]
        state["theta"][position[lower]] = theta[lower]

    def _learn(self, tests: Tests, position: Ints, results: Results, spreads: Numbers) -> None:
        """Learn from tests that were proposed and run."""
        shortfall = learn_margins(self.state, self.space, position, results, spreads, self._compiled)
        if are_compared(self.space):
            at = at_corners(self.space, tests.theta) | _are_any(tests.kind, AT_CORNER[:2])
            learn_corners(self.state, self.space, tests[at], shortfall[at])

    def _move_corners(self, kind: NDArray[np.str_], is_dropped: Bools | None) -> None:
        """Move corners inwards if too many tests at them were dropped, or outwards again."""
        if is_dropped is None and self.state["corner_scale"].item() == 1:
            return
        at_corner = _are_any(kind, AT_CORNER)
        if at_corner.any():
            dropped = 0.0 if is_dropped is None else is_dropped[at_corner].mean()
            pull = MAX_CORNER_STEP * (DROPPED_SHARE - dropped)
            self.state["corner_scale"] = np.minimum(self.state["corner_scale"] * np.exp(pull), 1.0)

    def _observe_faults(self, tests: Tests, at: Ints, position: Ints, outcome: Ints) -> None:
        """Learn from the tests `at`, which are faults."""
        state = self.state
        if not len(state["known"]):  # from now on only faults are credited
            state["tried"], state["paid"] = np.zeros(len(KINDS)), np.zeros(len(KINDS))
        new = learn_faults(state, position, outcome, self._compiled)
        if not len(new):
            return
        at, answer = at[new], self.space.answer[position[new]]
        state["fault_theta"] = np.concatenate([state["fault_theta"], tests.theta[at]])[-N_REMEMBERED_FAULTS:]
        state["fault_answer"] = np.concatenate([state["fault_answer"], answer])[-N_REMEMBERED_FAULTS:]
        pay_faults(state, tests.kind[at])

    # Which seeds

    def _positions(self, chosen: Ints, first: int) -> tuple[Ints, Numbers]:
        """The seed of each test, and what `spreads_above` predicts for all seeds.

        Sweeps take the seeds with the fewest corners tried, ties are broken at random.
        """
        is_sweep, n_seeds = chosen == SWEEP, len(self.space.seeds)
        n_sweeps = int(np.count_nonzero(is_sweep))
        best, spreads = self._choose_seeds(len(chosen) - n_sweeps, first)
        if not n_sweeps:
            return best, spreads
        position = np.empty_like(chosen)
        position[~is_sweep] = best
        rank = self.state["corners"] + np.bincount(best, minlength=n_seeds) + self._ties
        least = _least(rank, n_sweeps)
        position[is_sweep] = least if n_sweeps <= n_seeds else np.resize(least, n_sweeps)
        return position, spreads

    def _choose_seeds(self, n: int, first: int) -> tuple[Ints, Numbers]:
        """The positions of the `n` most valuable tests, ascending, and `spreads_above`; ties are broken at random."""
        state, space, n_seeds = self.state, self.space, len(self.space.seeds)
        n_tests = state["margin_losses"][0].sum()  # those of each clean answer
        depth = 1 if n_tests < WARM_UP_TESTS else max(TESTS_PER_SEED, 2 * TESTS_PER_SEED * n // n_seeds)
        depth = max(depth, -(-n // n_seeds))
        if self._compiled is not None:
            return self._compiled.choose_seeds(state, depth, n, first)
        draw, spreads = space.uniform(FOR_SEED, SEARCH_STREAM, first, self._every_seed), spreads_above(state, space)
        less = values(state, space, depth, spreads) * -(1 + 1e-6 * draw)
        best = less.ravel().argpartition(n - 1)[:n] if 0 < n < less.size else np.arange(n) % less.size
        best %= n_seeds
        best.sort()
        return best, spreads

    def _climbers(self, position: Ints, chosen: Ints) -> Ints:
        """Replace the seeds of ascent tests by those whose ascent is in progress."""
        if not np.count_nonzero(chosen >= PLAIN):
            return position
        for which in range(len(ASCENTS)):
            rows = np.flatnonzero(chosen == PLAIN + which)
            if not len(rows):
                continue
            found = climbers(self.state, which, len(rows), position[rows])
            chosen[rows[len(found) :]] = CORNER  # a seed takes one step at a time
            position[rows[: len(found)]] = found
        return position

    # Which theta

    def _climb(self, chosen: Ints, position: Ints, theta: Floats) -> Ints | None:
        """Replace thetas of ascents in progress; the noise seeds of those, -1 for other tests, None without ascents."""
        state, rows = self.state, (chosen >= PLAIN).nonzero()[0]
        if not len(rows):
            return None
        which, seeds = chosen[rows] - PLAIN, position[rows]
        is_on = state["is_climbing"][which, seeds]
        rows, which, seeds = rows[is_on], which[is_on], seeds[is_on]
        noise_seed = np.full(len(chosen), -1)
        theta[rows], noise_seed[rows] = state["climb_theta"][which, seeds], state["climb_noise"][which, seeds]
        state["is_climbing"][which, seeds] = False  # until its step has been run
        return noise_seed

    def _thetas(self, chosen: Ints, position: Ints, number: Ints) -> Floats:
        """Theta by kind: at bounds drawn at random for corners, and the first step of an ascent near a good theta."""
        if self._compiled is not None:
            return self._compiled.thetas(self.state, chosen, position, number)
        best, picks = self.state["theta"][position], Picks.of(self.space, number)
        theta = best.copy()
        rows = np.flatnonzero(chosen <= SWEEP)
        theta[rows] = self.space.corners_by(picks[rows].bounds)
        rows = np.flatnonzero(chosen == BORROWED)
        theta[rows] = self._borrowed(position[rows], picks[rows])
        rows = np.flatnonzero(chosen == FLIP)
        theta[rows] = self._flipped(best[rows], picks[rows])
        rows = np.flatnonzero(chosen == UNIFORM)
        theta[rows] = self.space.uniform_theta(SEARCH_STREAM, number[rows])
        rows = np.flatnonzero((chosen == NEAR) | (chosen >= PLAIN))
        theta[rows] = self._near(position[rows], picks[rows])
        return theta

    def _borrowed(self, position: Ints, picks: Picks) -> Floats:
        """Thetas of faults, preferably of seeds with the same clean answer; slightly moved unless at a bound."""
        state, answer = self.state, self.space.answer[position]
        order = np.argsort(state["fault_answer"], kind="stable")
        answers = state["fault_answer"][order]
        low, high = (answers.searchsorted(answer, side) for side in ("left", "right"))
        low, high = np.where(low < high, low, 0), np.where(low < high, high, len(order))
        pick = low + (picks.number(FOR_BORROWED) * (high - low)).astype(np.int64)
        theta: Floats = state["fault_theta"][order[pick]]
        is_inside = (theta > self.space.low) & (theta < self.space.high)
        return np.where(is_inside, self._moved(theta, np.full(len(theta), BORROWED_JITTER), picks), theta)

    def _corners(self, position: Ints, number: Ints, theta: Floats) -> tuple[Floats, Bools]:
        """The next corner of each seed, and which of them are new tests; `theta` is at bounds drawn at random.

        If there is no noise and every corner has been tried, theta is drawn uniformly instead.
        """
        space, free = self.space, self.space.free_dimensions
        if are_compared(space):
            index, is_new = choose_corners(self.state, space, position, number)
        else:
            n_corners, turn = 1 << len(free), turns(position) + self.state["corners"][position]
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
        """Remember which corners seeds are tested at."""
        if are_compared(self.space):
            at = at_corners(self.space, theta)
            visit_corners(self.state, self.space, position[at], theta[at])

    def _near(self, position: Ints, picks: Picks) -> Floats:
        """Each seed's best theta, or half of the time that of a leading seed, moved by 1/64 to 1/2 of its range."""
        leads = _least(kept_margin(self.state, self.space), N_LEADING_SEEDS)
        lead = leads[(picks.number(FOR_LEAD) * len(leads)).astype(np.int64)]
        theta = self.state["theta"][np.where(picks.number(FOR_LEADING) < 0.5, lead, position)]
        return self._moved(theta, 2.0 ** -(1 + 5 * picks.number(FOR_STEP)), picks)

    def _moved(self, theta: Floats, step: Numbers, picks: Picks) -> Floats:
        """Each theta moved in every dimension by at most `step`, a share of the range."""
        space = self.space
        moved: Floats = (theta + step[:, None] * (2 * picks.moves - 1) * space.width).astype(np.float32)
        return np.minimum(np.maximum(moved, space.low), space.high)

    def _flipped(self, theta: Floats, picks: Picks) -> Floats:
        """Each theta with one coordinate moved to a bound."""
        dimension = (picks.number(FOR_DIMENSION) * theta.shape[1]).astype(np.int64)
        rows = np.arange(len(theta))
        flipped = theta.copy()
        flipped[rows, dimension] = self.space.corners_by(picks.bounds)[rows, dimension]
        return flipped


def _keys(seed: Ints, theta: Floats) -> Ints:
    """Seed and theta combined into one number."""
    return rng.mix(seed, *np.ascontiguousarray(theta).view(np.int32).astype(np.int64).T)


def _are_any(kind: NDArray[np.str_], names: tuple[str, ...]) -> Bools:
    """Which kinds are among `names`."""
    are: Bools = kind == names[0]
    for name in names[1:]:
        are |= kind == name
    return are


def _merged(known: Ints, new: Ints) -> Ints:
    """All numbers of two ascending arrays, ascending; much faster than to sort them."""
    place = known.searchsorted(new) + np.arange(len(new))
    merged = np.empty(len(known) + len(new), dtype=np.int64)
    is_old = np.ones(len(merged), dtype=bool)
    is_old[place] = False
    merged[place], merged[is_old] = new, known
    return merged


def _least(numbers: Numbers, n: int) -> Ints:
    """The positions of the `n` smallest numbers, as the first `n` of a stable sort."""
    if len(numbers) > n:
        few: Ints = (numbers <= np.partition(numbers, n - 1)[n - 1]).nonzero()[0]
        if len(few):  # none if even the smallest numbers include a NaN
            return few[numbers[few].argsort(kind="stable")][:n]
    return numbers.argsort(kind="stable")[:n]
