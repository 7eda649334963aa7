"""Coverage: the rule, the sampler, dead and unseen neurons, the forecast."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from themis.judge.coverage import MIN_UNMOVED_TESTS, Rule, Sample, cover, exact, sample_neurons
from themis.measure.moments import Moments
from themis.target.activations import Layer

pytestmark = pytest.mark.quick


def moments(spread, count, mean=1.0):
    spread = torch.as_tensor(spread, dtype=torch.float64)
    return Moments(torch.tensor(count), torch.full_like(spread, mean), spread**2 * (count - 1))


def judge(m, is_dead=None, layers=None, **options):
    n = len(m.mean)
    is_dead = torch.zeros(n, dtype=torch.bool) if is_dead is None else is_dead
    layers = layers or [Layer("all", (n,), 0, n, None)]
    rule, goal = options.pop("rule", Rule()), options.pop("goal", 1.0)
    return cover(m, layers, is_dead=is_dead, rule=rule, goal=goal, sample=Sample(**{"k": 1000, **options}))


@pytest.mark.parametrize("draws", [400, 4000, 40_000])
def test_more_draws_do_not_increase_coverage(draws):
    m = moments(torch.linspace(0.1, 3, 500), 1000)
    point = Rule(draws=draws, alpha=None)
    expected = Rule(alpha=None).converged(exact(m), m)
    assert torch.equal(point.converged(exact(m, draws=draws), m), expected)


def test_a_neuron_converges_after_about_a_thousand_times_its_variance():
    for spread in (0.5, 1.0, 3.0):
        for count, is_converged in ((950 * spread**2, False), (1100 * spread**2, True)):
            m = moments([spread], int(count))
            assert bool(Rule().converged(exact(m), m)) is is_converged


def test_the_upper_bound_is_a_little_above_the_point_value():
    m = moments([1.0], 1000)
    factor = float(Rule().mcse_bound(exact(m)) / exact(m).mcse)
    assert factor == pytest.approx(1.019, abs=1e-3)
    assert Rule(alpha=None).mcse_bound(exact(m)) == exact(m).mcse


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_nothing_converges_before_the_fourth_test(count):
    m = Moments(torch.tensor(count), torch.ones(2).double(), torch.zeros(2).double())
    assert not Rule().converged(exact(m), m).any()


def test_a_neuron_that_never_moved_is_unseen_until_three_thousand_tests():
    for count, is_converged in ((MIN_UNMOVED_TESTS - 1, False), (MIN_UNMOVED_TESTS, True)):
        coverage, _ = judge(moments([0.0], count, mean=0.0))
        assert coverage.all == coverage.sampled == float(is_converged)
        assert coverage.n_unseen == (not is_converged)


def test_dead_neurons_are_left_out_of_both_counts_and_counted():
    m = moments([0.1, 0.1, 9.0, 0.0], 100)
    coverage, still_open = judge(m, is_dead=torch.tensor([False, False, False, True]))
    assert coverage.all == coverage.sampled == pytest.approx(2 / 3)
    assert (coverage.n_dead, coverage.n_neurons) == (1, 4)
    assert still_open.tolist() == [2]


def test_coverage_by_layer():
    layers = [Layer("a", (2,), 0, 2, None), Layer("b", (3,), 2, 3, None), Layer("c", (1,), 5, 1, None)]
    m = moments([0.1, 9.0, 0.1, 0.1, 9.0, 0.0], 100)
    dead = torch.tensor([False] * 5 + [True])
    coverage, _ = judge(m, dead, layers)
    assert coverage.by_layer == pytest.approx({"a": 1 / 2, "b": 2 / 3, "c": 1.0})


def test_the_sample_is_evenly_spaced_in_stable_order_of_variance():
    variance = torch.tensor([5.0, 1.0, 1.0, 3.0, 2.0, 4.0, 1.0])
    assert sample_neurons(variance, 3).tolist() == [6, 3, 0]  # at 2, 4 and 6 of 1 2 6 4 3 5 0
    assert sample_neurons(variance, 7).tolist() == [1, 2, 6, 4, 3, 5, 0]
    assert sorted(sample_neurons(variance, 100).tolist()) == list(range(7))


@pytest.mark.parametrize("kind", ["different", "still", "ties", "unknown", "all unknown"])
def test_the_sample_is_that_of_a_stable_sort(kind):
    rng = np.random.default_rng()
    n, k = int(rng.integers(100, 3000)), int(rng.integers(1, 100))
    numbers = rng.random(n) ** rng.integers(1, 40)
    is_some = rng.random(n) < 0.4
    variance = {
        "different": numbers,
        "still": np.where(is_some, rng.choice([0.0, -0.0], n), numbers),
        "ties": numbers.round(1),
        "unknown": np.where(is_some, np.inf, numbers),
        "all unknown": np.full(n, np.inf),
    }[kind]
    places = -(-np.arange(1, k + 1) * n // k) - 1
    expected = np.argsort(variance, kind="stable")[places]
    assert sample_neurons(torch.from_numpy(variance), k).tolist() == expected.tolist()


@given(st.integers(1, 400), st.integers(1, 60), st.integers(0, 10**6), st.sampled_from([50, 500, 4000]))
def test_coverage_of_the_sample_is_within_1_k_of_that_of_all_neurons(n, k, seed, count):
    rng = torch.Generator().manual_seed(seed)
    m = moments(torch.rand(n, generator=rng) * 2, count)
    unseen = torch.rand(n, generator=rng) < 0.2
    moved_alike = torch.rand(n, generator=rng) < 0.2  # by the same amount in every test
    m = Moments(m.count, m.mean.masked_fill(unseen, 0.0), m.m2.masked_fill(unseen | moved_alike, 0.0))
    dead = torch.rand(n, generator=rng) < 0.1
    named, _ = judge(m, dead, k=k)
    unnamed, nobody = judge(m, dead, k=k, names_neurons=False)
    assert nobody is None
    assert unnamed.sampled == named.sampled
    assert unnamed.all == named.all
    if count >= MIN_UNMOVED_TESTS:
        assert abs(named.sampled - named.all) <= 1 / k + 1e-12


def test_neurons_that_move_by_a_constant_come_first_in_the_order_of_the_sampler():
    m = Moments(torch.tensor(100), torch.tensor([0.0, 0, 0, 0, 0, 1, 1]).double(), torch.zeros(7).double())
    m.m2[5] = 1e6
    assert judge(m)[0].sampled == pytest.approx(1 / 7)


def test_the_forecast_is_when_the_goal_is_reached():
    spread = torch.linspace(0.1, 2.0, 1000)
    for goal in (0.5, 1.0):
        coverage, _ = judge(moments(spread, 500), goal=goal)
        then = 500 + coverage.forecast
        assert judge(moments(spread, then + 3), goal=goal)[0].sampled >= goal
        assert judge(moments(spread, int(then * 0.97)), goal=goal)[0].sampled < goal
    assert judge(moments(spread, 5))[0].forecast is None
    assert judge(moments(spread, 10**6))[0].forecast == 0
    assert math.isfinite(judge(moments([0.0], 50, mean=0.0))[0].forecast)
