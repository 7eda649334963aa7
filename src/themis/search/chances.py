"""Each seed's chance to show a new fault in its next test, learnt as the campaign goes.

The chance that a test breaks: margins of a seed scatter like a normal variable around a mean, of which its clean
margin, less the usual fall of seeds with the same clean answer, is the first reading; how many spreads the mean is
above 0 becomes a chance by a logistic curve that is fitted as the campaign goes, and moved for answers that break
oftener, or less, than others; a seed's own count of faults then outweighs it. The chance that the fault is new: what
was seen of seeds with as many faults, and as many outcomes seen once, as Good and Turing have it. Of the tests, only
those of the search count here: those of the uniform stream are weaker.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from themis.measure.tests import Bools, Ints, Results, Tests
from themis.search.policy import Space, State

Numbers = NDArray[np.float64]

MEMORY = 1_500
"""Tests over which what was learnt of kinds, and of margins, fades by a factor of e, since what pays off changes."""
DOUBT = 20
"""What is learnt of a kind, or of an answer, starts from so many tests that went as expected, and half as many of
novelty: nothing is given up for good."""
WORTH = 5
"""Tests that the chance read off the margins is worth; from then on a seed's own count of faults outweighs it."""
KIN = 5
"""Faults of seeds with the same clean answer from which it is believed that these break oftener, or less, than others
of their margin: so many that went as expected are counted beside them."""
CLEAN_WORTH = 0.25
"""Tests that a clean margin is worth: noise moves seeds apart about twice as far as it moves a seed's own tests."""
SPENT = 0.3
"""What a further test of a seed is worth whose corners were all tried, where there is no noise."""
EDGE = 0.03
"""While nothing has broken, a test is worth more the less of its margin a seed has kept: 1 / EDGE at the edge."""
MOST_FAULTS, MOST_ONCE = 32, 16
"""Faults of a seed, and outcomes seen once, that are told apart."""


def before_tests(space: Space) -> State:
    """What is known at first."""
    n = len(space.seeds)
    answers, kin = np.unique(space.answer, return_inverse=True)
    counts = {name: np.zeros(n, dtype=np.int64) for name in ("tests", "broke", "faults", "once", "corners")}
    return {
        **counts,  # of the search; faults of both streams, outcomes seen once, corners tried
        "total_margin": np.zeros(n),
        "margin": space.margin.astype(np.float32).copy(),  # the smallest seen
        "surprise": np.zeros(()),  # squared, summed over tests
        "curve": np.array([0.0, -1.7]),  # the logit of a chance, and its fall a spread: the normal curve's
        "precision": np.diag([1.0, 4.0]),  # how sure that is
        "kin": kin.astype(np.int64),  # seeds of one clean answer have one number
        "fallen": np.zeros((2, len(answers))),  # by answer: tests, and their margins' summed fall
        "frail": np.zeros((2, len(answers))),  # by answer: tests that broke, and what margins alone made expect
        "met": np.zeros((MOST_FAULTS, MOST_ONCE)),  # faults of seeds with so many faults and outcomes seen once
        "new": np.zeros((MOST_FAULTS, MOST_ONCE)),  # those of them that were new
        "known": np.zeros(0, dtype=np.int64),  # distinct faults, as seed and outcome in one number, ascending
        "times": np.zeros(0, dtype=np.int64),  # how often each was seen
    }


def values(state: State, space: Space, depth: int) -> Numbers:
    """The chance of a new fault in each seed's next tests, `[seeds, depth]`: it falls."""
    level, slope = state["curve"]
    read = _logistic(level + slope * spreads_above(state, space) + _frailty(state))
    chances = ((WORTH * read + state["broke"]) / (WORTH + state["tests"]))[:, None]
    further = np.arange(depth)
    known = WORTH + state["tests"][:, None]
    breaks = chances * known / (known + further * (1 - chances))
    faults = np.minimum(np.rint(state["faults"][:, None] + further * chances).astype(np.int64), MOST_FAULTS - 1)
    worth: Numbers = breaks * _novelty(state)[faults, np.minimum(state["once"], MOST_ONCE - 1)[:, None]]
    if not len(state["known"]):
        worth /= (EDGE + kept_margin(state, space).clip(min=0))[:, None]
    if not space.is_random:  # a corner breaks a seed or never will
        worth *= np.where(state["corners"][:, None] + further < 1 << len(free_dimensions(space)), 1, SPENT)
    return worth


def spreads_above(state: State, space: Space) -> Numbers:
    """How many spreads each seed's next margin is expected above 0."""
    n = state["fallen"][0].sum()
    # A first guess: the typical seed rarely breaks.
    spread = np.sqrt(state["surprise"] / n) if n else np.median(space.margin) / 4
    doubt = np.sqrt(1 + 1 / (CLEAN_WORTH + state["tests"]))
    above: Numbers = (_expected(state, space) / (max(float(spread), 1e-12) * doubt)).clip(-6, 6)
    return above


def kept_margin(state: State, space: Space) -> Numbers:
    """The smallest margin seen of each seed, as a share of its clean one."""
    kept: Numbers = state["margin"] / np.maximum(space.margin, 1e-12)
    return kept


def free_dimensions(space: Space) -> Ints:
    """The dimensions of theta with two bounds to go to; so many bits name a corner."""
    return np.flatnonzero((space.low != space.identity) & (space.high != space.identity))[:62]


def learn_margins(state: State, space: Space, tests: Tests, results: Results, spreads: Numbers) -> None:
    """From tests of the search, whose seeds' means were expected so many spreads above 0."""
    limit, position = float(np.abs(space.margin).max()), space.position(tests.seed)
    _fit_curve(state, spreads, results.is_fault, position)
    margin = results.margin.clip(-limit, limit)  # an output that is not finite, or wild, is one fault and not more
    state["fallen"] += _by_answer(state, position, np.ones(len(margin)), space.margin[position] - margin)
    expected = _expected(state, space)[position]
    state["surprise"] += ((margin - expected) ** 2 / (1 + 1 / (CLEAN_WORTH + state["tests"][position]))).sum()
    np.add.at(state["total_margin"], position, margin)
    np.add.at(state["tests"], position, 1)
    np.add.at(state["broke"], position[results.is_fault], 1)


def learn_faults(state: State, position: Ints, outcome: Ints) -> Ints:
    """From faults of both streams, each judged by what was known of its seed before; returns which are new."""
    cell = (np.minimum(state["faults"][position], MOST_FAULTS - 1), np.minimum(state["once"][position], MOST_ONCE - 1))
    np.add.at(state["met"], cell, 1)
    keys, first, times = np.unique(position << 32 | outcome & 0xFFFFFFFF, return_index=True, return_counts=True)
    is_new = ~are_in(keys, state["known"])
    new: Ints = first[is_new]
    old = first[~is_new]
    place = np.searchsorted(state["known"], keys[~is_new])
    np.add.at(state["new"], (cell[0][new], cell[1][new]), 1)
    np.add.at(state["once"], position[first[is_new & (times == 1)]], 1)
    np.add.at(state["once"], position[old[state["times"][place] == 1]], -1)
    state["times"][place] += times[~is_new]
    known = np.concatenate([state["known"], keys[is_new]])
    order = np.argsort(known)
    state["known"], state["times"] = known[order], np.concatenate([state["times"], times[is_new]])[order]
    np.add.at(state["faults"], position, 1)
    return new


def are_in(keys: Ints, known: Ints) -> Bools:
    """Which keys are among `known`, which ascends."""
    if not len(known):
        return np.zeros(len(keys), dtype=bool)
    are: Bools = known[np.searchsorted(known, keys).clip(max=len(known) - 1)] == keys
    return are


def _by_answer(state: State, position: Ints, first: Numbers | Bools, second: Numbers) -> Numbers:
    """Two numbers of each test, summed by the clean answers of their seeds."""
    kin, n = state["kin"][position], state["fallen"].shape[1]
    return np.stack([np.bincount(kin, each, n) for each in (first, second)])


def _novelty(state: State) -> Numbers:
    """The chance that a fault is new, by the faults of its seed so far and its outcomes seen once."""
    usual = 1 / (1 + np.arange(MOST_FAULTS))[:, None]
    novelty: Numbers = (state["new"] + DOUBT / 2 * usual) / (state["met"] + DOUBT / 2)
    return novelty


def _expected(state: State, space: Space) -> Numbers:
    """Each seed's mean margin."""
    tests, fallen = state["fallen"]
    usual = fallen.sum() / max(tests.sum(), 1)
    fall = ((fallen + DOUBT * usual) / (tests + DOUBT))[state["kin"]]
    first = CLEAN_WORTH * (space.margin - fall)
    expected: Numbers = (first + state["total_margin"]) / (CLEAN_WORTH + state["tests"])
    return expected


def _frailty(state: State) -> Numbers:
    """How much oftener seeds of each clean answer break than their margins say, as a logit."""
    broke, expected = state["frail"]
    frailty: Numbers = np.log((broke + KIN) / (expected + KIN))[state["kin"]]
    return frailty


def _fit_curve(state: State, spreads: Numbers, broke: Bools, position: Ints) -> None:
    """Newton's steps to the likeliest logistic curve, given what was known of it before, which fades."""
    rows = np.stack([np.ones_like(spreads), spreads], 1)
    fading = np.exp(-len(rows) / MEMORY)
    before, precision = state["curve"], fading * state["precision"]
    frailty, curve = _frailty(state)[position], before.copy()
    for _ in range(4):
        chance = _logistic(rows @ curve + frailty)
        slope = rows.T @ (broke - chance) - precision @ (curve - before)
        curvature = (rows * (chance * (1 - chance))[:, None]).T @ rows + precision
        curve = curve + np.linalg.solve(curvature, slope).clip(-2, 2)
    state["curve"], state["precision"] = curve, curvature
    state["frail"] = fading * state["frail"] + _by_answer(state, position, broke, _logistic(rows @ curve))


def _logistic(x: Numbers) -> Numbers:
    result: Numbers = 1 / (1 + np.exp(-np.clip(x, -30, 30)))
    return result
