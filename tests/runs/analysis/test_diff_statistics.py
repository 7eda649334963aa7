"""The test of a difference and its interval: against references, and by simulation on seeds that are alike."""

import numpy as np
import pytest
from scipy import stats

from themis.judge.risk import mean_p_value
from themis.runs.analysis.compare import VERSION_SIGNIFICANCE, mcnemar, paired_rates


def has_difference(tests, before, after, comparisons=1):
    """The verdict of `paired_rates` without its intervals, which take most of the time; a test below compares them."""
    return comparisons * mean_p_value((tests + after - before) / (2 * tests), 0.5) < VERSION_SIGNIFICANCE


@pytest.mark.parametrize(("one", "other"), [(0, 0), (1, 0), (3, 9), (10, 10), (2, 40), (0, 200)])
def test_mcnemar_is_the_exact_binomial_test(one, other):
    expected = min(1.0, 2 * stats.binom.cdf(min(one, other), one + other, 0.5))
    assert mcnemar(one, other) == pytest.approx(expected, rel=1e-9)
    assert mcnemar(other, one) == mcnemar(one, other)


def test_with_one_test_per_seed_the_interval_contains_newcombes():
    # 50 pairs: 36 both, 12 only before, 2 only after; by the score method -0.3404 to -0.0569 (Newcombe 1998, example).
    before = np.array([1] * 48 + [0] * 2)
    after = np.array([1] * 36 + [0] * 12 + [1] * 2)
    paired = paired_rates(np.ones(50, dtype=np.int64), before, after)
    gap = paired.difference
    assert (paired.before.value, paired.after.value) == (0.96, 0.76)
    assert gap.value == pytest.approx(-0.2)
    assert gap.low <= -0.3404 + 0.005
    assert gap.high >= -0.0569 - 0.005
    assert gap.high - gap.low < 1.25 * (0.3404 - 0.0569)


@pytest.mark.parametrize("n_failing", [10, 50, 90])
def test_equal_counts_have_no_difference_and_a_narrow_interval_that_is_not_empty(n_failing):
    faults = np.array([0] * (100 - n_failing) + [2] * n_failing)
    gap = paired_rates(np.full(100, 2), faults, faults).difference
    assert gap.value == 0
    limit = 1 - 0.025 ** (1 / 100)  # of the share of seeds that differ, if none of 100 does
    assert (gap.low, gap.high) == pytest.approx((-limit, limit), abs=1e-4)
    none = paired_rates(np.full(100, 2), np.zeros(100, dtype=int), np.zeros(100, dtype=int)).difference
    assert (none.value, none.low < 0 < none.high) == (0, True)


@pytest.mark.parametrize("share", [0.01, 0.03, 0.1])
def test_intervals_cover_if_only_few_seeds_differ(share):
    """Half of the seeds always fail under both models; a few more fail only after."""
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(200):
        before = (rng.random(100) < 0.5).astype(int)
        is_hit = rng.random(100) < share
        failed = (np.where(is_hit, 0, before), np.where(is_hit, 1, before))
        gap = paired_rates(np.ones(100, dtype=np.int64), *failed).difference
        held += gap.low <= share <= gap.high
    assert held / 200 >= 0.94


def draw(rng, n_seeds, n_tests, shift):
    """Faults a seed of two models whose weak seeds are mostly the same ones."""
    weak = rng.beta(0.3, 2.0, n_seeds)
    own = np.clip(weak + rng.normal(0, 0.05, (2, n_seeds)), 0, 1)
    own[1] = np.clip(own[1] + shift * rng.random(n_seeds), 0, 1)
    tests = np.full(n_seeds, n_tests)
    return tests, rng.binomial(tests, own[0]), rng.binomial(tests, own[1]), float((own[1] - own[0]).mean())


@pytest.mark.parametrize("n_tests", [1, 5])
def test_intervals_cover_and_chance_is_not_called_a_difference(n_tests):
    rng = np.random.default_rng(n_tests)
    held, called, found = 0, 0, 0
    for _ in range(200):
        called += has_difference(*draw(rng, 100, n_tests, 0.0)[:3])
        tests, before, after, truth = draw(rng, 100, n_tests, 0.3)
        paired = paired_rates(tests, before, after)
        held += paired.difference.low <= truth <= paired.difference.high
        found += paired.difference.sign == 1
    assert held / 200 >= 0.95
    assert called / 200 <= 0.05
    assert found / 200 >= 0.5


@pytest.mark.parametrize("n_tests", [1, 4])
def test_the_verdict_the_p_value_and_the_interval_come_from_one_test(n_tests):
    rng = np.random.default_rng(n_tests)
    signs = set()
    for shift in np.linspace(-0.15, 0.15, 60):
        tests = np.full(80, n_tests)
        before, after = rng.binomial(tests, 0.2), rng.binomial(tests, 0.2 + shift)
        paired = paired_rates(tests, before, after)
        assert (
            (paired.p_value < VERSION_SIGNIFICANCE)
            == bool(paired.difference.sign)
            == has_difference(tests, before, after)
        )
        if n_tests == 1:
            expected = mcnemar(int((after > before).sum()), int((after < before).sum()))
            assert paired.p_value == pytest.approx(expected, abs=1e-5)
        signs.add(paired.difference.sign)
        both = paired_rates(tests, before, after, comparisons=10)
        assert (
            (both.p_value < VERSION_SIGNIFICANCE)
            == bool(both.difference.sign)
            == has_difference(tests, before, after, 10)
        )
        assert both.difference.high - both.difference.low > paired.difference.high - paired.difference.low
    assert signs == {-1, 0, 1}


def test_many_slightly_better_seeds_and_a_few_much_worse_ones_are_judged_by_the_interval():
    """McNemar's test over seeds saw 60 better and 20 worse (p = 0.00001), where the rate hardly differs."""
    tests = np.full(200, 10)
    before = np.array([1] * 60 + [0] * 140)
    after = np.array([0] * 180 + [3] * 20)
    paired = paired_rates(tests, before, after)
    assert mcnemar(20, 60) < 1e-4
    assert (paired.difference.sign, paired.difference.value) == (0, pytest.approx(0.0))
    assert paired.p_value > 0.5


def draw_suites(rng, n_suites, n_members, n_seeds, n_tests):
    """How many suites of two models without a difference have a member with one."""
    called = 0
    for _ in range(n_suites):
        members = [draw(rng, n_seeds, n_tests, 0.0)[:3] for _ in range(n_members)]
        called += any(has_difference(*member, comparisons=n_members) for member in members)
    return called / n_suites


def test_of_models_without_a_difference_at_most_one_in_twenty_is_called_better_or_worse():
    rng = np.random.default_rng(3)
    assert np.mean([has_difference(*draw(rng, 60, 2, 0.0)[:3]) for _ in range(500)]) <= 0.05
    assert draw_suites(rng, 100, 6, 60, 1) <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("n_seeds", [20, 100, 500])
@pytest.mark.parametrize("n_tests", [1, 4, 20])
def test_of_many_models_and_suites_without_a_difference_at_most_one_in_twenty_has_one(n_seeds, n_tests):
    rng = np.random.default_rng(n_seeds + n_tests)
    assert np.mean([has_difference(*draw(rng, n_seeds, n_tests, 0.0)[:3]) for _ in range(3000)]) <= 0.055
    assert draw_suites(rng, 400, 15, n_seeds, n_tests) <= 0.06
