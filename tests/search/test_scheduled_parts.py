"""The fast parts of policy `scheduled` give the results of plain ones."""

from dataclasses import replace

import numpy as np
import pytest

from themis.perturb import choose_perturbation
from themis.search.arithmetic import least
from themis.search.kinds import KINDS, pay_kinds, turns
from themis.search.policy import Novelty, Space

pytestmark = pytest.mark.quick


def make_space(perturbation, n_seeds=30):
    margin = np.linspace(0.1, 1, n_seeds, dtype=np.float32)
    seeds = np.arange(n_seeds)
    return Space.of(choose_perturbation(perturbation), seeds, seeds, margin, 7)


def test_the_smallest_numbers_are_those_of_a_stable_sort():
    draws = np.random.default_rng()
    for n in (1, 9, 10, 11, 500):
        numbers = draws.integers(0, max(2, n // 5), n) / 7.0  # with ties
        np.testing.assert_array_equal(least(numbers, 10), np.argsort(numbers, kind="stable")[:10])
    numbers[3] = np.nan
    np.testing.assert_array_equal(least(numbers, 10), np.argsort(numbers, kind="stable")[:10])


def test_positions_are_the_places_of_usable_seeds():
    seeds = np.sort(np.random.default_rng().choice(500, 60, replace=False))
    space = replace(make_space("gaussian"), seeds=seeds)
    np.testing.assert_array_equal(space.position(seeds[::-1]), np.arange(60)[::-1])


def test_kinds_are_paid_for_their_new_faults():
    state = {"paid": np.full(len(KINDS), 0.1)}
    pay_kinds(
        state, np.array(["near", "uniform", "near", "corner"]), np.ones(4)
    )  # tests of the uniform stream have no kind here
    expected = {"near": 2.1, "corner": 1.1}
    np.testing.assert_array_equal(state["paid"], [expected.get(name, 0.1) for name in KINDS])


def test_turns_count_earlier_tests_of_the_same_seed():
    position = np.random.default_rng().integers(0, 9, 60)
    expected = [int((position[:k] == seed).sum()) for k, seed in enumerate(position)]
    np.testing.assert_array_equal(turns(position), expected)


@pytest.mark.parametrize("perturbation", ["gaussian", "fog"])
def test_no_test_is_repeated_within_a_portion_or_later(perturbation):
    space = make_space(perturbation)
    novelty = Novelty(space)
    once = novelty.ensure(space.uniform_tests(np.arange(20), 0, np.arange(20)))
    keys = novelty._keys(once).tolist()
    assert set(novelty.state.tolist()) == set(keys)
    fresh = space.uniform_tests(np.arange(20, 30), 0, np.arange(20, 30))
    twice = fresh[np.array([0, 1, 1, 2])]
    ensured = novelty.ensure(twice)
    assert novelty._keys(ensured)[[0, 1, 3]].tolist() == novelty._keys(twice)[[0, 1, 3]].tolist()
    assert set(novelty.state.tolist()) >= {*keys, *novelty._keys(ensured).tolist()}


@pytest.mark.parametrize("perturbation", ["gaussian", "fog"])
def test_tests_are_changed_if_and_only_if_they_are_repeated(perturbation):
    space, random = make_space(perturbation), np.random.default_rng()
    novelty, seen, n_repeated = Novelty(space), set(), 0
    for _ in range(20):
        counter = random.integers(0, 150, random.integers(1, 30))
        tests = replace(space.uniform_tests(counter, 0, counter), number=random.integers(1000, 10**9, len(counter)))
        ensured = novelty.ensure(tests)
        before, after = (novelty._keys(each).tolist() for each in (tests, ensured))
        for old, new in zip(before, after, strict=True):
            assert (new != old) == (old in seen)
            n_repeated += old in seen
            seen.add(old)
        seen.update(after)
        assert set(novelty.state.tolist()) == seen
        if random.random() < 0.3:  # as if the campaign had been resumed
            state = novelty.state.copy()
            novelty = Novelty(space)
            novelty.state = state
    assert n_repeated > 20
