"""Slices: their intervals take into account that tests share seeds."""

import numpy as np
import pytest

from themis.data.slices import SliceColumn
from themis.judge.estimate import share


def column(n_seeds):
    return SliceColumn("half", ("0", "1"), np.arange(n_seeds) % 2)


def test_tests_that_agree_within_each_seed_count_once():
    tests, failing = np.full(200, 5), np.repeat([0, 0, 1, 1], 50)
    assert column(200).counts(tests, 5 * failing) == [[500, 250], [500, 250]]
    assert column(200).independent_tests(tests, 5 * failing) == [99, 99]  # n - 1: the variance is estimated
    assert column(200).independent_tests(tests, 0 * failing) == [100, 100]
    assert column(200).independent_tests(0 * tests, 0 * failing) == [0, 0]


def test_seeds_without_a_value_are_left_out():
    halves = SliceColumn("half", ("0", "1"), np.array([0, 0, 1, -1]))
    tests, faults = np.array([4, 4, 4, 4]), np.array([0, 0, 0, 4])
    assert halves.counts(tests, faults) == [[8, 0], [4, 0]]
    assert halves.independent_tests(tests, faults) == [2, 1]


@pytest.mark.parametrize("spread", [0.0, 0.3], ids=["independent", "by seed"])
def test_the_interval_contains_the_true_share(spread):
    rng = np.random.default_rng(0)
    is_inside, widths = [], []
    for _ in range(500):
        chance = 0.4 + spread * rng.choice([-1, 1], 120)
        tests, faults = np.full(120, 5), rng.binomial(5, chance)
        (n, found), _ = column(120).counts(tests, faults)
        rate = share(found, n, column(120).independent_tests(tests, faults)[0])
        is_inside.append(rate.low <= 0.4 <= rate.high)
        widths.append((rate.high - rate.low) / (share(found, n).high - share(found, n).low))
    assert np.mean(is_inside) >= 0.92
    assert 1 <= np.median(widths) < 1.05 if spread == 0 else np.median(widths) > 1.2
