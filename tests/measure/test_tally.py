"""The counts of a campaign: which stream saw a fault, when, and how an earlier state is restored."""

import numpy as np
import pytest

from themis.measure.tests import Results, Tally, Tests

pytestmark = pytest.mark.quick


def add(tally, seeds, is_fault, *, is_uniform, is_dropped=None):
    """Add tests that have outcome 7 if they are faults."""
    n = len(seeds)
    number = np.arange(tally.tests, tally.tests + n)
    tests = Tests(number, np.array(seeds), np.zeros((n, 1), np.float32), number, np.array(["uniform"] * n))
    dropped = None if is_dropped is None else np.array(is_dropped)
    results = Results(np.array(is_fault), np.full(n, 7), np.ones(n, np.float32), None, is_dropped=dropped)
    tally.add(tests, results, is_uniform)


def filled():
    tally = Tally(6)
    add(tally, [0, 1, 2], [False, True, False], is_uniform=True, is_dropped=[True, False, False])
    add(tally, [1, 3, 3, 4], [True, True, True, False], is_uniform=False)
    add(tally, [3, 5, 1, 5], [True, True, True, True], is_uniform=True)
    return tally


def test_each_distinct_fault_has_the_test_that_found_it():
    tally = filled()
    assert tally.distinct == {(1, 7): 1, (3, 7): 4, (5, 7): 8}
    assert tally.failing_seeds == {1: 1, 3: 4, 5: 8}


def test_the_faults_of_the_uniform_stream_are_placed_among_its_tests_that_were_run():
    tally = filled()
    assert list(tally.uniform_times_seen) == [(1, 7), (3, 7), (5, 7)]
    times_seen, first_seen, is_new, is_searched = tally.uniform_columns()
    assert times_seen.tolist() == [2, 1, 2]
    assert first_seen.tolist() == [0, 2, 3]  # the dropped test has no place
    assert is_searched.tolist() == [True, True, False]
    assert is_new.tolist() == [True, False, True]  # the search found seed 3's fault first


def test_a_restored_tally_continues_as_the_original():
    original, restored = filled(), Tally(6)
    restored.restore(original.state())
    for tally in (original, restored):
        add(tally, [4, 2], [True, True], is_uniform=True)
    assert vars(restored).keys() == vars(original).keys()
    for name, value in vars(original).items():
        assert np.array_equal(getattr(restored, name), value), name
