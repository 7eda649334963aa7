"""Each seed's chance of a new fault in its next test, learned as the campaign proceeds.

The chance that a test breaks the seed: the margins of a seed scatter like a normal variable around a mean. The first
estimate of that mean is the clean margin minus the usual loss of margin among seeds with the same clean answer. The
number of standard deviations between the mean and 0 becomes a chance through a logistic curve, which is fitted as the
campaign proceeds and shifted for answers that break more or less often than others. A seed's own count of faults
gradually outweighs this estimate. Only tests of the search stream count here, because uniform tests are weaker.

The chance that the fault is new is estimated from faults of both streams, of seeds with as many faults and as many
outcomes seen once, in the manner of Good and Turing. A seed's first fault counts twice, as a distinct fault and as a
failing seed.
"""

from __future__ import annotations

import numpy as np

from themis.measure.tests import Bools, Ints, Results
from themis.search.compiled import Compiled
from themis.search.policy import Numbers, Space, State

FADING_TESTS = 1_500
"""Tests over which what was learned about kinds and margins fades by a factor of e, since what pays off changes."""
LEAST_PRECISION = 1e-6
"""What is left of the curve's precision however long no test breaks."""
PRIOR_TESTS = 20
"""Pseudo-tests that went as expected, from which the estimates for a kind or an answer start (half as many for
novelty), so that nothing is ruled out for good."""
ESTIMATE_WEIGHT = 5
"""Weight, in tests, of the chance estimated from margins; with more tests, its own count of faults outweighs it."""
ANSWER_PRIOR_FAULTS = 5
"""Weight, in faults, of the prior that seeds with the same clean answer break as often as their margins suggest."""
CLEAN_MARGIN_WEIGHT = 0.25
"""Weight of a clean margin, in tests: seeds differ about twice as much as the tests of one seed do."""
REPEAT_VALUE = 0.3
"""Relative value of another test of a seed whose corners have all been tried, if there is no noise."""
FIRST_FAULT_BONUS = 1.0
"""Additional value of the first fault of a seed: it is a failing seed too, whose other outcomes may follow."""
KEPT_MARGIN_OFFSET = 0.03
"""Until the first fault, a test is worth more the less of its margin a seed has kept: up to 1 / KEPT_MARGIN_OFFSET."""
MAX_SEED_FAULTS, MAX_SEEN_ONCE = 32, 16
"""Numbers of faults of a seed, and of outcomes seen once, up to which they are distinguished."""
PRIOR_NEW_FAULTS = PRIOR_TESTS / 2 * (1 / (1 + np.arange(MAX_SEED_FAULTS)))[:, None]
"""Pseudo-faults that are new: of a seed with `n` faults, one in `n + 1`."""


def before_tests(space: Space) -> State:
    """What is known before the first test."""
    n = len(space.seeds)
    answers, answer_index = np.unique(space.answer, return_inverse=True)
    counts = {name: np.zeros(n, dtype=np.int64) for name in ("tests", "broke", "faults", "seen_once", "corners")}
    return {
        **counts,  # of the search stream; faults of both streams, outcomes seen once, corners tried
        "total_margin": np.zeros(n),
        "margin": space.margin.astype(np.float32).copy(),  # the smallest seen
        "squared_shortfall": np.zeros(()),  # summed over tests
        "curve": np.array([0.0, -1.7]),  # logit and slope, those of the normal curve
        "precision": np.diag([1.0, 4.0]),  # of the curve
        "answer_index": answer_index.astype(np.int64),  # seeds with the same clean answer share a number
        "margin_losses": np.zeros((2, len(answers))),  # by answer: tests, and their summed loss of margin
        "answer_faults": np.zeros((2, len(answers))),  # by answer: faults, and faults expected from margins alone
        "seen_faults": np.zeros((MAX_SEED_FAULTS, MAX_SEEN_ONCE)),  # by faults of the seed, and outcomes seen once
        "new_faults": np.zeros((MAX_SEED_FAULTS, MAX_SEEN_ONCE)),  # the new ones among them
        "known": np.zeros(0, dtype=np.int64),  # distinct faults, as seed and outcome in one number, ascending
        "times": np.zeros(0, dtype=np.int64),  # how often each was seen
    }


def values(state: State, space: Space, depth: int, spreads: Numbers) -> Numbers:
    """The weighted chance of a new fault in each seed's next tests, `[depth, seeds]`.

    `spreads` is what `spreads_above` returns.
    """
    level, slope = state["curve"].tolist()
    read = _logistic(level + slope * spreads + _frailty(state))
    known = ESTIMATE_WEIGHT + state["tests"]
    chances = (ESTIMATE_WEIGHT * read + state["broke"]) / known
    further = np.arange(depth)[:, None]
    worth: Numbers = chances * known / (known + further * (1 - chances))
    faults = np.minimum(np.rint(state["faults"] + further * chances).astype(np.int64), MAX_SEED_FAULTS - 1)
    worth *= _fault_values(state).take(faults * MAX_SEEN_ONCE + np.minimum(state["seen_once"], MAX_SEEN_ONCE - 1))
    if not len(state["known"]):
        worth /= KEPT_MARGIN_OFFSET + kept_margin(state, space).clip(min=0)
    if not space.is_random:  # without noise, trying a corner again gives the same result
        worth *= np.where(state["corners"] + further < 1 << len(space.free_dimensions), 1, REPEAT_VALUE)
    return worth


def spreads_above(state: State, space: Space) -> Numbers:
    """How many standard deviations above 0 each seed's next margin is expected to be."""
    n = state["margin_losses"][0].sum()
    # At first, assume that the typical seed rarely breaks.
    spread = np.sqrt(state["squared_shortfall"] / n) if n else np.median(space.margin) / 4
    inflation = np.sqrt(1 + 1 / (CLEAN_MARGIN_WEIGHT + state["tests"]))
    above: Numbers = (_expected(state, space) / (max(float(spread), 1e-12) * inflation)).clip(-6, 6)
    return above


def kept_margin(state: State, space: Space) -> Numbers:
    """The smallest margin of each seed so far, as a share of its clean margin."""
    kept: Numbers = state["margin"] / np.maximum(space.margin, 1e-12)
    return kept


def learn_margins(
    state: State,
    space: Space,
    position: Ints,
    results: Results,
    spreads: Numbers,
    compiled: Compiled | None = None,
) -> Numbers:
    """Learn from tests of the search stream; `spreads` is what `spreads_above` predicted for them.

    `position` are the positions of their seeds.

    Returns how much lower than expected the margins were, in standard deviations.
    """
    if compiled is not None:
        return compiled.learn_margins(state, position, results, spreads)
    limit = float(np.abs(space.margin).max())
    _fit_curve(state, spreads, results.is_fault, position)
    margin = results.margin.clip(-limit, limit)  # an extreme output counts as one fault
    state["margin_losses"] += _by_answer(state, position, np.ones(len(margin)), space.margin[position] - margin)
    expected = _expected(state, space)[position]
    inflation = 1 + 1 / (CLEAN_MARGIN_WEIGHT + state["tests"][position])
    state["squared_shortfall"] += ((margin - expected) ** 2 / inflation).sum()
    spread = np.sqrt(state["squared_shortfall"] / state["margin_losses"][0].sum() * inflation)
    shortfall: Numbers = (expected - margin) / np.maximum(spread, 1e-12)
    np.add.at(state["total_margin"], position, margin)
    np.add.at(state["tests"], position, 1)
    np.add.at(state["broke"], position[results.is_fault], 1)
    return shortfall


def learn_faults(state: State, position: Ints, outcome: Ints, compiled: Compiled | None = None) -> Ints:
    """Learn from faults of both streams, given what was known of their seeds before. Returns which are new."""
    key = position << 32 | outcome & 0xFFFFFFFF
    if compiled is not None:
        return compiled.learn_faults(state, position, key)
    seen_once = np.minimum(state["seen_once"][position], MAX_SEEN_ONCE - 1)
    cell = np.minimum(state["faults"][position], MAX_SEED_FAULTS - 1) * MAX_SEEN_ONCE + seen_once
    seen, new_ones = (state[name].reshape(-1) for name in ("seen_faults", "new_faults"))
    np.add.at(seen, cell, 1)
    keys, first, times = _distinct(key)
    is_new = ~are_in(keys, state["known"])
    new: Ints = first[is_new]
    is_old = ~is_new
    place = state["known"].searchsorted(keys[is_old])
    np.add.at(new_ones, cell[new], 1)
    np.add.at(state["seen_once"], position[first[is_new & (times == 1)]], 1)
    np.add.at(state["seen_once"], position[first[is_old][state["times"][place] == 1]], -1)
    state["times"][place] += times[is_old]
    if len(new):
        known = np.concatenate([state["known"], keys[is_new]])
        order = known.argsort()
        state["known"], state["times"] = known[order], np.concatenate([state["times"], times[is_new]])[order]
    np.add.at(state["faults"], position, 1)
    return new


def _distinct(keys: Ints) -> tuple[Ints, Ints, Ints]:
    """The distinct keys, ascending, where each is found first, and how often; `np.unique` in a third of its time."""
    order = keys.argsort(kind="stable")
    ordered = keys[order]
    is_first = np.ones(len(keys), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    starts = is_first.nonzero()[0]
    times = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=times[:-1])
    times[-1:] = len(keys) - starts[-1:]
    return ordered[starts], order[starts], times


def are_in(keys: Ints, known: Ints) -> Bools:
    """Which keys are in `known`, which must be ascending."""
    if not len(known):
        return np.zeros(len(keys), dtype=bool)
    are: Bools = known[np.minimum(known.searchsorted(keys), len(known) - 1)] == keys
    return are


def _by_answer(state: State, position: Ints, first: Numbers | Bools, second: Numbers) -> Numbers:
    """Two numbers per test, summed by the clean answer of the test's seed."""
    index, n = state["answer_index"][position], state["margin_losses"].shape[1]
    return np.array([np.bincount(index, column, n) for column in (first, second)])


def _fault_values(state: State) -> Numbers:
    """The value of a fault, by the number of faults of its seed and of outcomes seen once.

    It is the chance that the fault is new, and more if it is the first one.
    """
    values: Numbers = (state["new_faults"] + PRIOR_NEW_FAULTS) / (state["seen_faults"] + PRIOR_TESTS / 2)
    values[0] *= 1 + FIRST_FAULT_BONUS
    return values


def _expected(state: State, space: Space) -> Numbers:
    """Each seed's mean margin."""
    tests, losses = state["margin_losses"]
    usual = losses.sum() / max(tests.sum(), 1)
    fall = ((losses + PRIOR_TESTS * usual) / (tests + PRIOR_TESTS))[state["answer_index"]]
    first = CLEAN_MARGIN_WEIGHT * (space.margin - fall)
    expected: Numbers = (first + state["total_margin"]) / (CLEAN_MARGIN_WEIGHT + state["tests"])
    return expected


def _frailty(state: State) -> Numbers:
    """How much more often seeds of each clean answer break than their margins suggest, as a logit."""
    broke, expected = state["answer_faults"]
    frailty: Numbers = np.log((broke + ANSWER_PRIOR_FAULTS) / (expected + ANSWER_PRIOR_FAULTS))[state["answer_index"]]
    return frailty


def _fit_curve(state: State, spreads: Numbers, broke: Bools, position: Ints) -> None:
    """Newton steps to the most likely logistic curve, starting from the previous estimate, which fades."""
    fading = float(np.exp(-len(spreads) / FADING_TESTS))
    frailty = _frailty(state)[position]
    first, second = before = state["curve"].tolist()
    (p11, p12), (_, p22) = (fading * state["precision"]).tolist()
    p11, p22 = max(p11, LEAST_PRECISION), max(p22, LEAST_PRECISION)
    for _ in range(4):
        chance = _logistic(first + second * spreads + frailty)
        missed, weight = broke - chance, chance * (1 - chance)
        weighted = weight * spreads
        moved = first - before[0], second - before[1]
        slope1 = float(missed.sum()) - p11 * moved[0] - p12 * moved[1]
        slope2 = float(missed @ spreads) - p12 * moved[0] - p22 * moved[1]
        c11, c12, c22 = float(weight.sum()) + p11, float(weighted.sum()) + p12, float(weighted @ spreads) + p22
        ratio = c12 / c11
        step = (slope2 - ratio * slope1) / max(c22 - ratio * c12, LEAST_PRECISION)
        first += min(max((slope1 - c12 * step) / c11, -2.0), 2.0)
        second += min(max(step, -2.0), 2.0)
    state["curve"], state["precision"] = np.array([first, second]), np.array([[c11, c12], [c12, c22]])
    expected = _logistic(first + second * spreads)
    state["answer_faults"] = fading * state["answer_faults"] + _by_answer(state, position, broke, expected)


def _logistic(x: Numbers) -> Numbers:
    """The logistic function of `x`, which is overwritten."""
    np.minimum(x, 30, out=x)
    np.maximum(x, -30, out=x)
    np.negative(x, out=x)
    np.exp(x, out=x)
    x += 1
    return np.divide(1, x, out=x)
