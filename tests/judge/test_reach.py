"""What is within reach of a search: the forecast of its discovery curve, small counts, and simulated curves."""

import numpy as np
import pytest
from scipy.stats import nbinom

from themis.judge.risk import REACH_FACTOR, RECALL_QUANTILE, forecast

pytestmark = pytest.mark.quick


def steady(per_doubling, n_tests):
    """A curve that finds the same in each doubling of the tests."""
    return n_tests * 0.5 ** (np.arange(8 * per_doubling) / per_doubling) - 1e-6


def test_a_search_that_finds_the_same_in_each_doubling_is_expected_to_continue():
    reach = forecast(steady(50, 4096), 4096)
    assert reach.found == 400
    assert reach.estimate.value == pytest.approx(500, abs=10)
    assert reach.estimate.low < 450 < 560 < reach.estimate.high


def test_a_trend_continues_only_as_far_as_counts_support_it():
    def mean(before, recent):
        steady = forecast([30] * recent + [60] * recent, 100).mean
        return forecast([30] * before + [60] * recent, 100).mean / steady

    assert mean(100, 25) < mean(8, 2) < 1 < mean(2, 8) < mean(25, 100)
    assert mean(100, 25) > 0.25  # the rate falls, but not as fast as in the last doubling


def test_without_a_fault_nothing_is_recalled_and_the_upper_limit_is_not_zero():
    reach = forecast([], 1000)
    assert (reach.estimate.value, reach.estimate.low) == (0, 0)
    assert 3 <= reach.estimate.high <= 12
    assert reach.recall is None
    assert reach.tests_to(0.95) == 0


@pytest.mark.parametrize("n", [1, 2, 5, 20, 300])
def test_a_search_that_has_stopped_finding_is_nearly_done_but_never_certain(n):
    reach = forecast([10] * n, 10_000)
    assert reach.estimate.value == reach.estimate.low == n
    assert reach.estimate.high > n
    assert reach.recall == n / (n + reach.quantile(RECALL_QUANTILE)) < 1


def test_no_more_seeds_can_fail_than_there_are():
    assert forecast([90] * 95, 100, 100).estimate.high == 100
    assert forecast([90] * 100, 100, 100).recall == 1
    some, free = forecast(steady(20, 1000), 1000, 200), forecast(steady(20, 1000), 1000)
    assert some.mean < free.mean


@pytest.mark.parametrize("share", [0.025, 0.25, 0.5, 0.75, 0.975])
@pytest.mark.parametrize("n", [0, 1, 7, 60, 2000])
def test_quantiles_are_those_of_the_negative_binomial_distribution(share, n):
    reach = forecast([60] * n + [40] * 10, 100)
    assert reach.quantile(share) == nbinom.ppf(share, reach.shape, reach.shape / (reach.shape + reach.mean))


def test_the_tests_to_find_nearly_all_lie_within_the_forecast():
    reach = forecast(steady(50, 4096), 4096)
    assert 0 < reach.tests_to(0.9) < reach.tests_to(0.95) < reach.tests_to(1.0) == (REACH_FACTOR - 1) * 4096
    assert reach.tests_to(0.5) == 0


def curve(rng, kind, n_tests):
    """The tests that first show each of many faults, found at rates of this kind; about as many in each doubling."""
    n = 3000
    rates = {
        "alike": np.full(n, 2 / n_tests),
        "all shades": np.exp(rng.uniform(np.log(0.01), np.log(100), n)) / n_tests,
        "few": np.exp(rng.uniform(np.log(0.01), np.log(100), 12)) / n_tests,
        "rare": np.exp(rng.uniform(np.log(1e-4), np.log(1), n)) / n_tests,
        "none": np.zeros(0),
    }[kind]
    return rng.exponential(1 / rates)


def test_the_end_of_a_search_for_faults_that_are_all_alike_comes_as_a_surprise():
    found_at = curve(np.random.default_rng(0), "alike", 2000)
    stated, truth = forecast(found_at[found_at < 2000], 2000).estimate, (found_at < 8000).sum()
    assert truth < stated.value < 1.4 * truth  # the curve does not show it, so more is expected than there is


@pytest.mark.parametrize("kind", ["all shades", "few", "rare", "none"])
def test_the_interval_holds_what_four_times_the_tests_find_in_a_simulation(kind):
    rng, n_tests = np.random.default_rng(0), 2000
    held = []
    for _ in range(60):
        found_at = curve(rng, kind, n_tests)
        stated = forecast(found_at[found_at < n_tests], n_tests).estimate
        held.append(stated.low <= (found_at < REACH_FACTOR * n_tests).sum() <= stated.high)
    assert np.mean(held) >= 0.93
