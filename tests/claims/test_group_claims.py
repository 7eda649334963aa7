"""`themis groups` promises: every share is a count of faults, and what it mentions is not due to chance."""

import numpy as np
import pytest

from themis.runs.analysis.groups import (
    MIN_LAYER_GROWTH,
    MIN_THETA_GAP,
    SIGNIFICANCE_LEVEL,
    find_groups,
    growth_chance,
    interval,
    kuiper_chance,
)


@pytest.mark.parametrize("n", [2, 3, 5, 10, 30, 100])
def test_a_random_set_of_faults_has_no_unusual_theta_and_no_grown_layer(n):
    """Of random sets, at most about one in a hundred is said to lie in a range of theta or to change a layer."""
    rng, n_theta, n_layers = np.random.default_rng(n), 0, 0
    for _ in range(200):
        is_member = np.zeros(400, dtype=bool)
        is_member[rng.choice(400, n, replace=False)] = True
        theta, seed_id = rng.random(400), rng.integers(0, 150, 400)
        gap = interval(theta[is_member], theta[~is_member])[0]
        n_theta += gap >= MIN_THETA_GAP and kuiper_chance(gap, n, 400 - n) < SIGNIFICANCE_LEVEL
        shares = rng.dirichlet(np.ones(8), 150)[seed_id]  # faults of one seed are alike
        is_certain = growth_chance(shares, is_member, seed_id) * 8 < SIGNIFICANCE_LEVEL
        n_layers += (is_certain & (shares[is_member].mean(0) > MIN_LAYER_GROWTH * shares[~is_member].mean(0))).any()
    assert n_theta <= 8
    assert n_layers <= 8


def test_a_true_difference_is_mentioned():
    rng, found = np.random.default_rng(0), 0
    for _ in range(100):
        gap = interval(rng.uniform(0.8, 1, 10), rng.random(300))[0]
        found += gap >= MIN_THETA_GAP and kuiper_chance(gap, 10, 300) < SIGNIFICANCE_LEVEL
    assert found >= 95
    shares = rng.dirichlet(np.ones(8), 300)
    shares[:30, 2] += 0.3
    shares /= shares.sum(1, keepdims=True)
    is_member = np.arange(300) < 30
    assert growth_chance(shares, is_member, np.arange(300)).argmin() == 2
    assert growth_chance(shares, is_member, np.arange(300))[2] * 8 < SIGNIFICANCE_LEVEL


@pytest.mark.parametrize("statistic", [0.2, 0.3, 0.4, 0.6])
def test_the_chance_of_kuipers_statistic_agrees_with_permutations(statistic):
    rng, larger = np.random.default_rng(1), 0
    for _ in range(500):
        both = rng.random(80)
        cut = np.sort(both)
        ahead = (
            np.searchsorted(np.sort(both[:30]), cut, "right") / 30
            - np.searchsorted(np.sort(both[30:]), cut, "right") / 50
        )
        larger += ahead.max() - min(ahead.min(), 0) >= statistic
    assert kuiper_chance(statistic, 30, 50) == pytest.approx(larger / 500, abs=0.06)


@pytest.mark.parametrize("n", [30, 200, 1000])
def test_faults_without_structure_are_one_group(n):
    """Outcome, theta and layers that are independent of one another are not divided into groups."""
    n_groups = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        columns = {
            "id": np.arange(n),
            "answer": rng.integers(0, 5, n),
            "theta": rng.random((n, 2)).astype(np.float32),
            "signature": rng.dirichlet(np.ones(6), n).astype(np.float32),
        }
        n_groups.append(int(find_groups(columns).max()) + 1)
    assert n_groups == [1] * 5
