"""The kinds of proposals for theta and which of them pay off, ascents, and the order in which corners are tried.

Thompson sampling of new faults per pass decides which kinds pay off.

Corners: a linear model predicts how much lower than expected the margin of a seed is at a corner. Its terms are the
bounds of the dimensions that can move in both directions, and pairs of them, since rotating a digit may matter only
together with shifting it in a certain direction. There is one model per clean answer; its prior is the common model.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from themis.measure.tests import Bools, Floats, Ints, Results, Tests
from themis.search.policy import FOR_PICK, Numbers, Space, State

if TYPE_CHECKING:
    from themis.search.arithmetic import Arithmetic
    from themis.search.compiled import Compiled

FADING_TESTS = 1_500
"""Tests over which knowledge of kinds and margins fades by a factor of e, since what pays off changes."""
PRIOR_TESTS = 20
"""Pseudo-tests with the expected results, the prior of the estimates for a kind or an answer (half as many for
novelty), so that nothing is ruled out for good."""

MARGIN_ASCENT, SENSITIVITY_ASCENT = ASCENTS = ("margin ascent", "sensitivity ascent")
"""Kinds of proposals that need a gradient: that of the loss of margin, or of the sensitivity of open neurons."""
ASCENT_STEP = 0.2
"""Length of a step as a share of theta's range. The paper gives none; a fifth crosses the range in five tests."""
MIN_STEP = 1e-6
"""A step shorter than this share of the range moves nothing."""


def step_uphill(theta: Floats, gradient: Floats, space: Space) -> tuple[Floats, Bools, Bools]:
    """Move each theta one step along its gradient, inside the bounds; also return which moved, and which have a
    gradient."""
    uphill = gradient * space.width  # in shares of the range, so that no unit outweighs another
    steepest = np.abs(uphill).max(1, keepdims=True)
    direction = np.divide(uphill, steepest, out=np.zeros_like(uphill), where=steepest > 0)
    moved = (theta + ASCENT_STEP * direction * space.width).clip(space.low, space.high).astype(np.float32)
    return moved, np.abs((moved - theta) / space.width).max(1) > MIN_STEP, steepest[:, 0] > 0


def no_climbs(n_seeds: int, n_dimensions: int) -> State:
    """The state before the first ascent: by kind and seed, whether an ascent is in progress, and its next test."""
    n = len(ASCENTS)
    return {
        "is_climbing": np.zeros((n, n_seeds), dtype=bool),
        "climb_theta": np.zeros((n, n_seeds, n_dimensions), dtype=np.float32),
        "climb_noise": np.zeros((n, n_seeds), dtype=np.int64),
    }


def follow(state: State, space: Space, tests: Tests, results: Results) -> None:
    """Advance the ascents that `tests` were steps of; an ascent ends at a maximum, or when it has broken the seed."""
    if results.gradient is None:
        return
    for which, kind in enumerate(ASCENTS):
        at = tests.kind == kind
        if at.any():
            position = space.position(tests.seed[at])
            theta, has_moved, _ = step_uphill(tests.theta[at], results.gradient[at], space)
            state["is_climbing"][which, position] = has_moved & ~results.is_fault[at]
            state["climb_theta"][which, position] = theta
            state["climb_noise"][which, position] = tests.noise_seed[at]


def climbers(state: State, which: int, n: int, others: Ints) -> Ints:
    """`n` distinct positions for the next step: those of seeds with an ascent in progress first, then some of
    `others`."""
    climbing = np.flatnonzero(state["is_climbing"][which])[:n]
    return np.concatenate([climbing, np.setdiff1d(others, climbing)[: n - len(climbing)]])


KINDS = ("corner", "sweep", "borrowed", "flip", "again", "near", "uniform theta", *ASCENTS)
"""In order: a corner that the seed has not tried; the same for the seed with the fewest corners tried, whatever its
chances; the theta of another seed's fault; the seed's best theta with one coordinate moved to a bound; its best theta
with new noise; a theta near its best, or near one that almost broke another seed; a theta drawn uniformly; one step of
gradient ascent on the loss of margin, or on the sensitivity of open neurons."""
NUMBERS = {name: number for number, name in enumerate(KINDS)}
CORNER, SWEEP, BORROWED, FLIP, AGAIN, NEAR, UNIFORM, FIRST_ASCENT, _ = range(len(KINDS))
"""Kinds from `FIRST_ASCENT` upwards need a gradient."""
PRIOR_RETURN = np.array([1.0, 0.6, 0.9, 0.7, 0.5, 0.5, 0.5, 1.0, 1.0])
"""Prior return per test of each kind, relative to corners. The strongest disturbances break most seeds, and seeds with
small margins break more often than those of a sweep. A backward pass lowers the return per pass."""
FIRST_FADING_PASSES = 200
"""Passes over which the returns of kinds fade at first; later, half of all passes so far, up to `FADING_TESTS`. The
first tests use the weakest seeds, so that their returns say little about the kinds."""
ASCENT_GROUP = 16
"""Ascent tests are proposed in groups of at least this size, because they are run separately."""
TRIAL_SHARE, FIRST_TRIAL_SHARE = 0.01, 0.1
"""Share of passes for trials of each kind of ascent; the larger share applies until the first fault."""


def before_kinds() -> State:
    """What is known before the first test."""
    return {
        "tried": np.zeros(len(KINDS)),  # in passes, fading
        "paid": np.zeros(len(KINDS)),  # in new faults, fading
        "spent": np.zeros(1 + len(ASCENTS)),  # passes of all kinds together, and of each kind of ascent
    }


def choose_kinds(state: State, space: Space, number: Ints, arithmetic: Arithmetic | Compiled) -> Ints:
    """The kind of each test: the one with the largest sampled return per pass."""
    has_gradient = space.gradient_cost is not None and len(number) >= len(ASCENTS) * ASCENT_GROUP
    n, costs = len(KINDS) if has_gradient else FIRST_ASCENT, _costs(space.gradient_cost)
    chosen, best = arithmetic.sample_kinds(number, state, PRIOR_RETURN, costs, n)
    if has_gradient:
        _choose_ascents(state, space, chosen, best)
    return chosen


def count_kinds(state: State, space: Space, chosen: Ints) -> None:
    """Charge the passes of tests of the kinds `chosen`."""
    passes = np.bincount(chosen, minlength=len(KINDS)) * _costs(space.gradient_cost)
    kept = np.exp(-len(chosen) / min(max(float(state["spent"][0]) / 2, FIRST_FADING_PASSES), FADING_TESTS))
    state["tried"], state["paid"] = kept * state["tried"] + passes, kept * state["paid"]
    state["spent"][0] += passes.sum()
    state["spent"][1:] += passes[FIRST_ASCENT:]


def pay_kinds(state: State, kind: NDArray[np.str_], pay: Numbers) -> None:
    """Credit each kind with the return of its tests."""
    for name in set(kind.tolist()) & NUMBERS.keys():
        state["paid"][NUMBERS[name]] += pay[kind == name].sum()


def _choose_ascents(state: State, space: Space, chosen: Ints, best: Ints) -> None:
    """Replace some tests by ascents if an ascent has the best sampled return, or is due for a trial."""
    share = TRIAL_SHARE if len(state["known"]) else FIRST_TRIAL_SHARE
    cost, spent = ASCENT_GROUP * float(_costs(space.gradient_cost)[-1]), state["spent"].tolist()
    for which in range(len(ASCENTS)):
        rows = (best == FIRST_ASCENT + which).nonzero()[0]
        if len(rows) < ASCENT_GROUP:
            if spent[1 + which] + cost > share * (spent[0] + len(chosen)):
                continue
            n = len(ASCENTS) * ASCENT_GROUP  # spread over all rows, since seeds are in ascending order
            rows = (which + len(ASCENTS) * np.arange(ASCENT_GROUP)) * len(chosen) // n
        chosen[rows] = FIRST_ASCENT + which


@cache
def _costs(gradient_cost: float | None) -> Numbers:
    """The cost of a test of each kind, relative to one without a gradient."""
    return np.array([1.0] * FIRST_ASCENT + [gradient_cost or 1.0] * len(ASCENTS))


MAX_COMPARED_DIMENSIONS = 6
"""Corners are compared if at most this many dimensions can move in both directions; otherwise each seed tries them in
random order."""
EXPLORATION_WEIGHT = 0.2
"""Random variation of the effect of a corner, in standard deviations of the estimate. It is a fifth of that of Thompson
sampling, since the next test of a seed is at another corner anyway."""
MAX_SHORTFALL = 3.0
"""Standard deviations to which shortfalls are clipped."""


def before_corners(space: Space) -> State:
    """What is known before the first test."""
    n_terms = _terms(len(space.free_dimensions)).shape[1] if are_compared(space) else 0
    return {
        # By answer: the sums of products of terms, and of terms and shortfalls.
        "corner_sums": np.zeros((len(np.unique(space.answer)), n_terms, n_terms + 1)),
        # The corners at which each seed was tested, one bit each.
        "visited": np.zeros(len(space.seeds), dtype=np.int64),
    }


def are_compared(space: Space) -> bool:
    """Whether there is more than one corner, but few enough to compare them."""
    return 0 < len(space.free_dimensions) <= MAX_COMPARED_DIMENSIONS


def at_corners(space: Space, theta: Floats) -> Bools:
    """Which thetas have all dimensions at bounds that are not the identity."""
    is_far = ((theta == space.low) | (theta == space.high)) & (theta != space.identity)
    are: Bools = is_far.all(1)
    return are


def learn_corners(state: State, space: Space, tests: Tests, shortfall: Numbers) -> None:
    """Learn how much lower than expected margins at corners were, in standard deviations."""
    position, index = space.position(tests.seed), _index(space, tests.theta)
    terms = _terms(len(space.free_dimensions))[index]
    both = np.concatenate([terms, shortfall.clip(-MAX_SHORTFALL, MAX_SHORTFALL)[:, None]], 1)
    state["corner_sums"] *= np.exp(-len(tests) / FADING_TESTS)
    answers = state["answer_index"][position]
    for answer in np.unique(answers):
        is_own = answers == answer
        state["corner_sums"][answer] += terms[is_own].T @ both[is_own]


def visit_corners(state: State, space: Space, position: Ints, theta: Floats) -> None:
    """Remember the corners at which seeds are tested."""
    np.bitwise_or.at(state["visited"], position, np.int64(1) << _index(space, theta))


def choose_corners(state: State, space: Space, position: Ints, number: Ints) -> tuple[Ints, Bools]:
    """The corner of each test, one bit per dimension, and whether its seed has not been tested there.

    It is the corner with the largest effect among those that its seed has not tried. When all have been tried, they are
    tried again if there is noise; otherwise every further choice is the same.
    """
    terms = _terms(len(space.free_dimensions))
    answers, place = np.unique(state["answer_index"][position], return_inverse=True)
    mean, deviation = _effects(state["corner_sums"], answers, terms)
    draws = 2 * space.uniforms(FOR_PICK, range(-101, -101 - len(terms), -1), number) - 1
    scores = mean[place] + EXPLORATION_WEIGHT * np.sqrt(3) * deviation[place] * draws
    bits = np.int64(1) << np.arange(len(terms))
    every = np.bitwise_or.reduce(bits)
    chosen, is_new = np.empty(len(position), dtype=np.int64), np.ones(len(position), dtype=bool)
    turn = turns(position)
    for k in range(int(turn.max(initial=-1)) + 1):  # the tests of a seed, one after the other
        rows = (turn == k).nonzero()[0]
        visited = state["visited"][position[rows]]
        is_new[rows] = visited != every
        if space.is_random:
            visited = np.where(is_new[rows], visited, 0)
        chosen[rows] = np.where(visited[:, None] & bits, -np.inf, scores[rows]).argmax(1)
        state["visited"][position[rows]] = visited | bits[chosen[rows]]
    return chosen, is_new


def turns(position: Ints) -> Ints:
    """The number of earlier tests of the same seed, for each test."""
    order = position.argsort(kind="stable")
    ordered = position[order]
    turn = np.empty_like(position)
    turn[order] = np.arange(len(position)) - ordered.searchsorted(ordered)
    return turn


def _index(space: Space, theta: Floats) -> Ints:
    """The corners of thetas, with one bit per dimension that can move in both directions."""
    free = space.free_dimensions
    index: Ints = ((theta[:, free] > space.identity[free]).astype(np.int64) << np.arange(len(free))).sum(1)
    return index


@cache
def _terms(n: int) -> Numbers:
    """The terms of the model at each corner of `n` dimensions, `[corners, terms]`.

    They are a constant, the bounds as -1 or 1, and their pairs.
    """
    bounds = 2.0 * (np.arange(1 << n)[:, None] >> np.arange(n) & 1) - 1
    first, second = np.triu_indices(n, 1)
    return np.concatenate([np.ones((1 << n, 1)), bounds, bounds[:, first] * bounds[:, second]], 1)


def _effects(sums: Numbers, answers: Ints, terms: Numbers) -> tuple[Numbers, Numbers]:
    """The expected effect of each corner on seeds of the clean answers `answers`, and its standard deviation."""
    n = terms.shape[1]
    prior, total = PRIOR_TESTS * np.eye(n), sums.sum(0)
    common = np.linalg.solve(total[:, :n] + prior, total[:, n])
    covariance = np.linalg.inv(sums[answers][:, :, :n] + prior)
    models = (covariance @ (sums[answers][:, :, n] + PRIOR_TESTS * common)[:, :, None])[:, :, 0]
    deviation: Numbers = np.sqrt((terms @ covariance * terms).sum(-1))
    return models @ terms.T, deviation
