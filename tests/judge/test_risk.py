"""Fault rate and residual risk: closed forms, edges, and a few simulated campaigns."""

from dataclasses import astuple

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from simulation import (
    DESIGNS,
    HIDDEN,
    INPUTS,
    MISSING,
    SEARCHES,
    fault_campaigns,
    holds,
    risk_campaigns,
    searching_campaigns,
    textbook_rate,
)

from themis.errors import UsageError
from themis.judge.risk import fault_rate, fault_rates, residual_risk, seeds_to_exceed, unseen_mass

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("n_faults", "n_tests"), [(0, 1), (1, 1), (2, 5), (0, 100), (3, 100), (1000, 1000), (17, 1000)]
)
def test_with_one_test_per_seed_the_rate_has_the_binomial_interval(n_faults, n_tests):
    faults = np.arange(n_tests) < n_faults
    rate = fault_rate(np.ones(n_tests, dtype=int), faults.astype(int))
    expected = binomtest(n_faults, n_tests).proportion_ci(0.95)
    assert rate.value == n_faults / n_tests
    assert rate.low == pytest.approx(expected.low, abs=2e-6)
    assert rate.high == pytest.approx(expected.high, abs=2e-6)


def test_rates_of_several_groups_are_those_of_each():
    rng = np.random.default_rng(0)
    groups = [(np.array([3, 0, 5, 1]), np.array([1, 0, 5, 0]), weight) for weight in (None, np.array([1, 2, 0.5, 1]))]
    for n in (1, 2, 30, 400):
        tests = rng.integers(0, 9, n)
        groups.append((tests, rng.binomial(tests, rng.beta(0.3, 0.7, n)), None))
    groups.append((np.zeros(3, dtype=int), np.zeros(3, dtype=int), None))
    for group, together in zip(groups, fault_rates(groups, 0.01), strict=True):
        alone = fault_rate(*group, tail=0.01)
        assert (together is None) == (alone is None)
        if alone is not None:
            assert astuple(together) == pytest.approx(astuple(alone), abs=1e-9)
    assert together is None


@pytest.mark.parametrize("tests_a_seed", [1, 7, 1000])
def test_without_a_fault_only_the_number_of_seeds_counts(tests_a_seed):
    rate = fault_rate([tests_a_seed] * 50, [0] * 50)
    assert (rate.value, rate.low) == (0, 0)
    assert rate.high == pytest.approx(1 - 0.025 ** (1 / 50), abs=1e-6)


def test_rates_of_passing_and_failing_mirror_each_other():
    tests, faults = np.array([3, 8, 1, 12, 5]), np.array([0, 8, 1, 3, 0])
    fails, passes = fault_rate(tests, faults), fault_rate(tests, tests - faults)
    assert fails.low == pytest.approx(1 - passes.high, abs=1e-9)
    assert fails.high == pytest.approx(1 - passes.low, abs=1e-9)


def test_the_upper_limit_is_a_quantile_of_the_bayesian_bootstrap_with_one_more_failing_seed():
    tests, faults = np.array([7, 3, 9, 20]), np.array([1, 2, 0, 5])
    weights = np.random.default_rng(0).exponential(size=(1_000_000, 5))
    mixtures = weights @ np.append(faults / tests, 1.0) / weights.sum(1)
    assert fault_rate(tests, faults).high == pytest.approx(np.quantile(mixtures, 0.975), abs=1e-3)


def test_the_same_faults_on_fewer_seeds_give_a_wider_interval():
    spread = fault_rate([10] * 100, [1] * 40 + [0] * 60)
    clustered = fault_rate([10] * 100, [10] * 4 + [0] * 96)
    assert spread.value == clustered.value
    assert clustered.high - clustered.low > 1.5 * (spread.high - spread.low)


def test_seeds_without_a_test_do_not_count():
    assert fault_rate([4, 0, 6, 0], [1, 0, 0, 0]) == fault_rate(torch.tensor([4, 6]), torch.tensor([1, 0]))
    assert fault_rate([0, 0], [0, 0]) is None
    assert fault_rate([], []) is None


def test_many_seeds_with_many_tests_are_handled():
    rng = np.random.default_rng(0)
    tests = rng.poisson(60, 3000)
    faults = rng.binomial(tests, rng.beta(0.1, 1, 3000))
    rate = fault_rate(tests, faults)
    assert 0.08 < rate.low < rate.value < rate.high < 0.11


def test_more_faults_than_tests_are_rejected():
    with pytest.raises(UsageError, match="one count per seed"):
        fault_rate([1, 2], [2, 0])
    with pytest.raises(UsageError, match="at most"):
        unseen_mass([3, 4], 6)
    with pytest.raises(UsageError, match="not negative"):
        unseen_mass([-1], 6)


@pytest.mark.parametrize("n_tests", [1, 10, 5000])
def test_without_a_fault_the_risk_is_below_the_rule_of_three(n_tests):
    risk = unseen_mass([], n_tests)
    assert (risk.value, risk.low) == (0, 0)
    assert risk.high == pytest.approx(1 - 0.025 ** (1 / n_tests), abs=1e-9)
    assert unseen_mass([], 0) is None


def test_the_risk_is_the_share_of_singletons():
    risk = unseen_mass(torch.tensor([1, 1, 5, 2, 0, 1]), 200)
    assert risk.value == 3 / 200
    assert risk == unseen_mass([5, 2, 1, 1, 1], 200)
    assert risk.low <= risk.value < risk.high


def test_with_many_singletons_the_interval_is_estys():
    risk = unseen_mass([1] * 4000 + [2] * 1500 + [3] * 300, 1_000_000)
    half = 1.96 * (4000 + 2 * 1500) ** 0.5 / 1_000_000
    assert risk.high - risk.value == pytest.approx(half, rel=0.05)
    assert risk.value - risk.low == pytest.approx(half, rel=0.05)


def test_frequent_faults_leave_the_risk_of_no_fault():
    risk = unseen_mass([50, 80, 60], 1000)
    assert (risk.value, risk.low) == (0, 0)
    assert risk.high == pytest.approx(3.7e-3, rel=0.01)


def test_a_few_singletons_do_not_prove_that_anything_is_missing():
    assert unseen_mass([1, 1, 1], 1000).low == 0
    assert unseen_mass([1] * 30, 1000).low > 0.01
    assert unseen_mass([3] * 1000, 10_000).low == 0  # surprising, but nothing was seen exactly once


@pytest.mark.parametrize("name", ["every shade", "few always fail", "a hidden few"])
@pytest.mark.parametrize("design", [DESIGNS[2], DESIGNS[4], DESIGNS[5]])
def test_fault_rate_intervals_hold_in_a_short_simulation(name, design):
    assert holds(fault_campaigns(INPUTS[name], *design, 80)) >= 0.93


def test_the_textbook_interval_does_not_hold_if_tests_share_seeds():
    assert holds(fault_campaigns(INPUTS["few always fail"], 50, 1000, 80, stated=textbook_rate)) < 0.6


@pytest.mark.parametrize("name", MISSING)
def test_intervals_of_the_unseen_mass_hold_in_a_short_simulation(name):
    assert holds(risk_campaigns(*MISSING[name], 100)) >= 0.93


def test_what_the_search_has_seen_is_not_a_residual_risk():
    times, first = [1, 1, 1, 2], [60, 70, 80, 90]
    stated = residual_risk(times, first, [True] * 4, [False, True, True, False], n_tests=100)
    assert stated.value == 1 / 50
    assert stated.value < unseen_mass(times, 100).value < unseen_mass(times, 50).value


def test_faults_of_the_earlier_half_are_known():
    assert residual_risk([1, 1], [10, 49], [True, True], [False, False], n_tests=100).value == 0
    assert residual_risk([1, 1], [10, 50], [True, True], [False, False], n_tests=100).value == 1 / 50


def test_the_upper_limit_counts_the_tests_that_showed_something_new():
    times, first, is_searched = [1] * 8, [*range(0, 80, 10)], [True] * 8
    stated = residual_risk(times, first, [True] * 4 + [False] * 4, is_searched, n_tests=80)
    assert (stated.value, stated.low) == (0, 0)
    assert stated.high == pytest.approx(binomtest(0, 40).proportion_ci(0.95).high)
    stated = residual_risk(times, first, [False] * 4 + [True] * 4, is_searched, n_tests=80)
    assert stated.high == pytest.approx(binomtest(4, 80).proportion_ci(0.95).high)


@pytest.mark.parametrize("n_tests", [1, 2, 10, 5000])
def test_without_a_fault_all_uniform_tests_limit_the_residual_risk(n_tests):
    stated = residual_risk([], [], [], [], n_tests=n_tests)
    assert (stated.value, stated.low) == (0, 0)
    assert stated.high == pytest.approx(1 - 0.025 ** (1 / n_tests), abs=1e-9)
    assert residual_risk([], [], [], [], n_tests=0) is None


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", HIDDEN)
def test_residual_risk_intervals_hold_in_a_short_simulation(name, search):
    assert holds(searching_campaigns(HIDDEN[name], SEARCHES[search], 60)) >= 0.93


@pytest.mark.parametrize(("limit", "tail"), [(0.05, 0.05 / 13), (0.1, 0.01), (0.3, 0.025)])
def test_as_many_seeds_as_it_takes_exceed_a_limit(limit, tail):
    """At three times the limit; only numbers of seeds of which that is a whole number are tried."""
    rate = 3 * limit
    least = seeds_to_exceed(limit, rate, tail)
    for n in range(20, 400, 20):
        faults = (np.arange(n) < round(rate * n)).astype(int)
        assert (fault_rate(np.ones(n, dtype=int), faults, tail=tail).low > limit) == (n >= least)
    assert 1 < least < 400
