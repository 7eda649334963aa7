"""Climbs of single seeds: theta moved along a gradient, a step a test, with the noise kept."""

from __future__ import annotations

import numpy as np

from themis.measure.tests import Bools, Floats, Ints, Results, Tests
from themis.search.policy import Space, State

ASCENTS = {"margin ascent": "margin", "sensitivity ascent": "sensitivity"}
"""Kinds of proposal that climb, and what: how near the answer is to another, or what neurons show that are open yet."""
STEP = 0.2
"""Length of a step, as a share of theta's range. The paper gives none; a fifth crosses the range in five tests."""
STUCK = 1e-6
"""A step shorter than this share of the range moves nothing."""


def step_uphill(theta: Floats, gradient: Floats, space: Space) -> tuple[Floats, Bools, Bools]:
    """Each theta one step along its gradient, inside the bounds; which of them moved; which have a way up at all."""
    uphill = gradient * space.reach  # in shares of the range, so that no unit outweighs another
    steepest = np.abs(uphill).max(1, keepdims=True)
    direction = np.divide(uphill, steepest, out=np.zeros_like(uphill), where=steepest > 0)
    moved = (theta + STEP * direction * space.reach).clip(space.low, space.high).astype(np.float32)
    return moved, np.abs((moved - theta) / space.reach).max(1) > STUCK, steepest[:, 0] > 0


def no_climbs(n_seeds: int, n_dimensions: int) -> State:
    """The state before the first climb: by what is climbed and seed, whether one is under way and its next test."""
    n = len(ASCENTS)
    return {
        "is_climbing": np.zeros((n, n_seeds), dtype=bool),
        "climb_theta": np.zeros((n, n_seeds, n_dimensions), dtype=np.float32),
        "climb_noise": np.zeros((n, n_seeds), dtype=np.int64),
    }


def follow(state: State, space: Space, tests: Tests, results: Results) -> None:
    """Move the climbs that `tests` were a step of: a climb ends at the top, or where it broke the seed."""
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
    """`n` positions for the next step: seeds that are climbing, then some of `others`; each once."""
    climbing = np.flatnonzero(state["is_climbing"][which])[:n]
    return np.concatenate([climbing, np.setdiff1d(others, climbing)[: n - len(climbing)]])
