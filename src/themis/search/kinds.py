"""Kinds of proposal of theta, and which of them pay: Thompson's sampling, in new faults a pass."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from themis.measure.tests import Ints
from themis.search.ascent import ASCENTS
from themis.search.chances import DOUBT, MEMORY
from themis.search.policy import FOR_KIND, Space, State

Numbers = NDArray[np.float64]

KINDS = ("corner", "sweep", "borrowed", "flip", "again", "near", "uniform theta", *ASCENTS)
"""A corner not tried yet; the same of the seed that has had the fewest, whatever its chances; the theta of a fault of
another seed; the seed's best with one coordinate flipped to a bound; its best with new noise; one near its best, or
near one that nearly broke another seed; one drawn uniformly; a step up the gradient of the margin's fall, or of what
open neurons show."""
CORNER, SWEEP, BORROWED, FLIP, AGAIN, NEAR, UNIFORM, PLAIN, _ = range(len(KINDS))
"""Those from PLAIN on climb."""
HOPE = np.array([1.0, 0.9, 0.9, 0.9, 0.5, 0.5, 0.5, 1.0, 1.0])
"""What a test of each kind is thought to pay before it was tried, corners being 1: the strongest disturbances break
most. What it pays a pass is less where there is a backward pass to be paid."""
SURE = 6.0
"""New faults that each kind is taken to have shown beside those counted: less is left to chance when few were seen."""
CLIMBERS = 16
"""Tests that climb the same: so many together, or none, since they are run on their own."""
TRIAL, FIRST_TRIAL = 0.01, 0.1
"""Share of the passes that each way to climb gets without having earned it; the larger one while nothing broke."""


def before_kinds() -> State:
    """What is known at first."""
    return {
        "tried": np.zeros(len(KINDS)),  # in passes, fading
        "paid": np.zeros(len(KINDS)),  # in new faults, fading
        "spent": np.zeros(1 + len(ASCENTS)),  # passes of all kinds, and of each that climbs
    }


def choose_kinds(state: State, space: Space, number: Ints) -> Ints:
    """The kind of each test: the one that pays most a pass, as far as is known."""
    from scipy.special import ndtri

    tried, paid = state["tried"], state["paid"]
    average = (paid.sum() + 1) / (tried.sum() + DOUBT)
    expected = paid + DOUBT * average * HOPE / _cost(space)
    can_climb = space.gradient_cost is not None and len(number) >= len(ASCENTS) * CLIMBERS
    n = len(KINDS) if can_climb else PLAIN
    # What a kind pays has a gamma distribution; its logarithm is about normal.
    draws = ndtri(space.uniforms(FOR_KIND, range(n), number).clip(1e-9, 1 - 1e-9))
    scores = np.log(expected / (tried + DOUBT))[:n] + draws / np.sqrt(expected + SURE)[:n]
    chosen: Ints = scores[:, :PLAIN].argmax(1)
    if n > PLAIN:
        _choose_ascents(state, space, chosen, scores.argmax(1))
    return chosen


def count_kinds(state: State, space: Space, chosen: Ints) -> None:
    """Tests of the kinds `chosen` are paid for."""
    passes = np.bincount(chosen, minlength=len(KINDS)) * _cost(space)
    kept = np.exp(-len(chosen) / MEMORY)
    state["tried"], state["paid"] = kept * state["tried"] + passes, kept * state["paid"]
    state["spent"] += [passes.sum(), *passes[PLAIN:]]


def pay_kinds(state: State, kind: NDArray[np.str_], pay: Numbers) -> None:
    """What tests of each kind have brought."""
    state["paid"] += [pay[kind == each].sum() for each in KINDS]


def _choose_ascents(state: State, space: Space, chosen: Ints, best: Ints) -> None:
    """Let tests climb where that is the best that is known, or due for a trial."""
    share = TRIAL if len(state["known"]) else FIRST_TRIAL
    cost = CLIMBERS * _cost(space)[-1]
    for which in range(len(ASCENTS)):
        rows = np.flatnonzero(best == PLAIN + which)
        if len(rows) < CLIMBERS:
            is_due = state["spent"][1 + which] + cost <= share * (state["spent"][0] + len(chosen))
            n = len(ASCENTS) * CLIMBERS  # rows spread over all, since seeds ascend
            rows = (which + len(ASCENTS) * np.arange(CLIMBERS if is_due else 0)) * len(chosen) // n
        chosen[rows] = PLAIN + which


def _cost(space: Space) -> Numbers:
    """Passes of a test, by kind, in those of a test that does not climb."""
    return np.repeat([1.0, space.gradient_cost or 1.0], [PLAIN, len(ASCENTS)])
