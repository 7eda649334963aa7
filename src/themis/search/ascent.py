"""Gradient ascent of single seeds: theta moves along a gradient, one step per test, with the same noise."""

from __future__ import annotations

import numpy as np

from themis.measure.tests import Bools, Floats, Ints, Results, Tests
from themis.search.policy import Space, State

MARGIN_ASCENT, SENSITIVITY_ASCENT = ASCENTS = ("margin ascent", "sensitivity ascent")
"""Kinds of proposal that need a gradient: of the loss of margin, or of the sensitivity of open neurons."""
STEP = 0.2
"""Length of a step as a share of theta's range. The paper gives none; a fifth crosses the range in five tests."""
STUCK = 1e-6
"""A step shorter than this share of the range moves nothing."""


def step_uphill(theta: Floats, gradient: Floats, space: Space) -> tuple[Floats, Bools, Bools]:
    """Each theta one step along its gradient, inside the bounds; which ones moved, and which have a gradient."""
    uphill = gradient * space.width  # in shares of the range, so that no unit outweighs another
    steepest = np.abs(uphill).max(1, keepdims=True)
    direction = np.divide(uphill, steepest, out=np.zeros_like(uphill), where=steepest > 0)
    moved = (theta + STEP * direction * space.width).clip(space.low, space.high).astype(np.float32)
    return moved, np.abs((moved - theta) / space.width).max(1) > STUCK, steepest[:, 0] > 0


def no_climbs(n_seeds: int, n_dimensions: int) -> State:
    """The state before the first ascent: by kind and seed, whether one is in progress, and its next test."""
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
    """`n` positions for the next step: seeds whose ascent is in progress, then some of `others`; each at most once."""
    climbing = np.flatnonzero(state["is_climbing"][which])[:n]
    return np.concatenate([climbing, np.setdiff1d(others, climbing)[: n - len(climbing)]])
