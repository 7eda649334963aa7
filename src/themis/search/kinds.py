"""Kinds of proposals for theta, and which of them pay off: Thompson sampling of new faults per pass."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from themis.compute import native
from themis.measure.tests import Ints
from themis.search import compiled
from themis.search.ascent import ASCENTS
from themis.search.chances import FADING_TESTS, PRIOR_TESTS
from themis.search.policy import FOR_KIND, Numbers, Space, State

KINDS = ("corner", "sweep", "borrowed", "flip", "again", "near", "uniform theta", *ASCENTS)
"""A corner not tried yet; the same for the seed with the fewest corners tried, whatever its chances; the theta of
another seed's fault; the seed's best theta with one coordinate moved to a bound; its best theta with new noise; a theta
near its best, or near one that almost broke another seed; a theta drawn uniformly; one step of gradient ascent on the
loss of margin, or on the sensitivity of open neurons."""
NUMBERS = {name: number for number, name in enumerate(KINDS)}
CORNER, SWEEP, BORROWED, FLIP, AGAIN, NEAR, UNIFORM, PLAIN, _ = range(len(KINDS))
"""Kinds from PLAIN on need a gradient."""
PRIOR_RETURN = np.array([1.0, 0.6, 0.9, 0.7, 0.5, 0.5, 0.5, 1.0, 1.0])
"""Prior return of a test of each kind relative to corners: the strongest disturbances break most, and seeds with small
margins more often than those of a sweep. The return per pass is lower if a backward pass must be paid for."""
KIND_PRIOR_FAULTS = 6.0
"""Pseudo-faults added to those of each kind, which limit the randomness while few have been seen."""
FIRST_FADING_PASSES = 200
"""Passes over which the returns of kinds fade at first; later half of all passes so far, up to FADING_TESTS. The first
tests take the weakest seeds, so that their returns say little about the kinds."""
ASCENT_GROUP = 16
"""Ascent tests are proposed in groups of at least this size, because they are run separately."""
TRIAL_SHARE, FIRST_TRIAL_SHARE = 0.01, 0.1
"""Share of the passes that each kind of ascent gets on trial; the larger one applies until the first fault."""


def before_kinds() -> State:
    """What is known before the first test."""
    return {
        "tried": np.zeros(len(KINDS)),  # in passes, fading
        "paid": np.zeros(len(KINDS)),  # in new faults, fading
        "spent": np.zeros(1 + len(ASCENTS)),  # passes of all kinds together, and of each kind of ascent
    }


def choose_kinds(state: State, space: Space, number: Ints) -> Ints:
    """The kind of each test: the one with the largest sampled return per pass."""
    has_gradient = space.gradient_cost is not None and len(number) >= len(ASCENTS) * ASCENT_GROUP
    n, costs, library = len(KINDS) if has_gradient else PLAIN, _costs(space.gradient_cost), native.library()
    if library is None:
        chosen, best = sample_kinds(space, number, state, costs, n)
    else:
        chosen, best = compiled.sample_kinds(library, space, number, state, PRIOR_RETURN, costs, PLAIN, n)
    if has_gradient:
        _choose_ascents(state, space, chosen, best)
    return chosen


def sample_kinds(space: Space, number: Ints, state: State, costs: Numbers, n: int) -> tuple[Ints, Ints]:
    """For each test the kind with the largest sampled return per pass, without a gradient and among the first `n`."""
    from scipy.special import ndtri

    tried, paid = state["tried"], state["paid"]
    average = (paid.sum() + 1) / (tried.sum() + PRIOR_TESTS)
    expected = paid + PRIOR_TESTS * average * PRIOR_RETURN / costs
    # The return of a kind has a gamma distribution, whose logarithm is approximately normal.
    scores = space.uniforms(FOR_KIND, range(n), number).clip(1e-9, 1 - 1e-9)
    ndtri(scores, out=scores)
    scores /= np.sqrt(expected + KIND_PRIOR_FAULTS)[:n]
    scores += np.log(expected / (tried + PRIOR_TESTS))[:n]
    return scores[:, :PLAIN].argmax(1), scores.argmax(1)


def count_kinds(state: State, space: Space, chosen: Ints) -> None:
    """Charge the passes of tests of the kinds `chosen`."""
    passes = np.bincount(chosen, minlength=len(KINDS)) * _costs(space.gradient_cost)
    kept = np.exp(-len(chosen) / min(max(float(state["spent"][0]) / 2, FIRST_FADING_PASSES), FADING_TESTS))
    state["tried"], state["paid"] = kept * state["tried"] + passes, kept * state["paid"]
    state["spent"][0] += passes.sum()
    state["spent"][1:] += passes[PLAIN:]


def pay_kinds(state: State, kind: NDArray[np.str_], pay: Numbers) -> None:
    """Credit each kind with the return of its tests."""
    for name in set(kind.tolist()) & NUMBERS.keys():
        state["paid"][NUMBERS[name]] += pay[kind == name].sum()


def pay_faults(state: State, kind: NDArray[np.str_]) -> None:
    """Credit each kind with its new faults, given the kind of each."""
    names = kind.tolist()
    for name in set(names) & NUMBERS.keys():
        state["paid"][NUMBERS[name]] += names.count(name)


def _choose_ascents(state: State, space: Space, chosen: Ints, best: Ints) -> None:
    """Turn some tests into ascents if an ascent has the best sampled return, or is due for a trial."""
    share = TRIAL_SHARE if len(state["known"]) else FIRST_TRIAL_SHARE
    cost, spent = ASCENT_GROUP * float(_costs(space.gradient_cost)[-1]), state["spent"].tolist()
    for which in range(len(ASCENTS)):
        rows = (best == PLAIN + which).nonzero()[0]
        if len(rows) < ASCENT_GROUP:
            if spent[1 + which] + cost > share * (spent[0] + len(chosen)):
                continue
            n = len(ASCENTS) * ASCENT_GROUP  # spread over all rows, since seeds are in ascending order
            rows = (which + len(ASCENTS) * np.arange(ASCENT_GROUP)) * len(chosen) // n
        chosen[rows] = PLAIN + which


@cache
def _costs(gradient_cost: float | None) -> Numbers:
    """The cost of a test of each kind, relative to one without a gradient."""
    return np.array([1.0] * PLAIN + [gradient_cost or 1.0] * len(ASCENTS))
