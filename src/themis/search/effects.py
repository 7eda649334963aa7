"""Which corners of theta cost the seeds of each clean answer most of their margin.

A linear model predicts how much lower than expected the margin of a seed is at a corner: from the bound of each
dimension that can move towards either, and from each pair of them, since turning a digit may matter only together with
shifting it in a certain direction. Seeds with the same clean answer have a model of their own, whose prior is the
common one.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from themis.measure.tests import Bools, Floats, Ints, Tests
from themis.search.chances import FADING_TESTS, PRIOR_TESTS
from themis.search.policy import FOR_PICK, Numbers, Space, State

MAX_COMPARED_DIMENSIONS = 6
"""The number of such dimensions up to which corners are compared; with more, each seed takes them in random order."""
EXPLORATION_WEIGHT = 0.2
"""Standard deviations of the estimate by which the effect of a corner is varied at random: a fifth of what Thompson
sampling would take, since the next test of a seed takes another corner anyway."""
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
    """Which thetas have each dimension at a bound that is not its identity."""
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

    Of the corners not tried with a seed, it is the one with the largest effect. After the last one, they start again if
    there is noise; otherwise every further choice is the same.
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
    """How many tests before each one have the same seed."""
    order = position.argsort(kind="stable")
    ordered = position[order]
    turn = np.empty_like(position)
    turn[order] = np.arange(len(position)) - ordered.searchsorted(ordered)
    return turn


def _index(space: Space, theta: Floats) -> Ints:
    """The corners that thetas are at, one bit per dimension that can move towards either bound."""
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
