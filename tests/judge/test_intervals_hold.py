"""95% intervals contain the true value in at least 93% of simulated campaigns; those of textbooks do not."""

import pytest
from simulation import (
    DESIGNS,
    HIDDEN,
    INPUTS,
    MISSING,
    NETWORKS,
    REVIEWED,
    SEARCHES,
    Network,
    coverage_campaigns,
    fault_campaigns,
    holds,
    profile_campaigns,
    review_campaigns,
    risk_campaigns,
    searching_campaigns,
    textbook_coverage,
    textbook_rate,
    textbook_risk,
    weighted_campaigns,
)

pytestmark = pytest.mark.slow
LEAST = 0.93


@pytest.mark.parametrize("design", DESIGNS, ids=str)
@pytest.mark.parametrize("name", INPUTS)
def test_fault_rate_intervals_hold(name, design):
    assert holds(fault_campaigns(INPUTS[name], *design, 400)) >= LEAST


@pytest.mark.parametrize("name", MISSING)
def test_intervals_of_the_unseen_mass_hold(name):
    assert holds(risk_campaigns(*MISSING[name], 2000)) >= LEAST


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", HIDDEN)
def test_residual_risk_intervals_hold(name, search):
    assert holds(searching_campaigns(HIDDEN[name], SEARCHES[search], 500)) >= LEAST


@pytest.mark.parametrize("design", [(1000, 2000), (200, 2000), (50, 1000), (20, 1000)], ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_coverage_intervals_hold(name, design):
    assert holds(coverage_campaigns(NETWORKS[name], *design, 200, 100, 100)) >= LEAST


@pytest.mark.parametrize("name", ["hard seeds, spreads scattered", "hard seeds, nearly covered", "no hard seeds"])
def test_coverage_intervals_hold_for_many_neurons_from_a_panel(name):
    assert holds(coverage_campaigns(NETWORKS[name], 1000, 1000, 200, 1000, 200)) >= LEAST


@pytest.mark.parametrize("name", ["every shade", "few always fail", "a hidden few", "half always fail"])
def test_the_binomial_interval_does_not_hold_if_tests_share_seeds(name):
    assert holds(fault_campaigns(INPUTS[name], 200, 10_000, 400, stated=textbook_rate)) < 0.6


@pytest.mark.parametrize("name", ["very many, tiny", "few tests", "one, about as rare as 1 in n"])
def test_estys_normal_interval_does_not_hold_for_few_singletons(name):
    assert holds(risk_campaigns(*MISSING[name], 2000, stated=textbook_risk)) < 0.9


@pytest.mark.parametrize("network", [Network(hard=0.8), NETWORKS["the same, under the limit"]], ids=str)
def test_the_plain_jackknife_of_coverage_does_not_hold(network):
    assert holds(coverage_campaigns(network, 50, 1000, 200, 100, 100, stated=textbook_coverage)) < 0.9


PROFILES = ("beta(1,8)", "lognormal(-1.5,0.5)", "triangular(0,0.3,1)", "histogram(0,0.1,0.4,1,70,25,5)")


@pytest.mark.parametrize("shares", [None, (0.9, 0.1)], ids=["all seeds alike", "weighted seeds"])
@pytest.mark.parametrize("profile", PROFILES)
def test_fault_rates_in_operation_hold(profile, shares):
    assert holds(profile_campaigns(profile, shares, 400)) >= 0.95


@pytest.mark.parametrize("profile", PROFILES)
def test_fault_rates_of_weighted_tests_hold(profile):
    assert holds(weighted_campaigns(profile, 400)) >= 0.95


@pytest.mark.parametrize("design", [(1000, 2000, 60, 0.0), (100, 2000, 60, 0.1), (30, 600, 30, 0.0)], ids=str)
@pytest.mark.parametrize("name", REVIEWED)
def test_rates_of_valid_faults_hold(name, design):
    assert holds(review_campaigns(REVIEWED[name], *design, 400)) >= 0.95
