"""McNemar's test and the interval of a difference: against references, and by simulation on seeds that are alike."""

import numpy as np
import pytest
from scipy import stats

from themis.runs.diff.statistics import LEVEL, mcnemar, rates


@pytest.mark.parametrize(("one", "other"), [(0, 0), (1, 0), (3, 9), (10, 10), (2, 40), (0, 200)])
def test_mcnemar_is_the_exact_binomial_test(one, other):
    expected = stats.binomtest(one, one + other).pvalue if one + other else 1.0
    assert mcnemar(one, other) == pytest.approx(expected, rel=1e-9)
    assert mcnemar(other, one) == mcnemar(one, other)


def test_with_one_test_per_seed_the_interval_contains_newcombes():
    # 50 pairs: 36 both, 12 only before, 2 only after; by the score method -0.3404 to -0.0569 (Newcombe 1998, example).
    before = np.array([1] * 48 + [0] * 2)
    after = np.array([1] * 36 + [0] * 12 + [1] * 2)
    one, other, gap = rates(np.ones(50, dtype=np.int64), before, after)
    assert (one.value, other.value) == (0.96, 0.76)
    assert gap.value == pytest.approx(-0.2)
    assert gap.low <= -0.3404 + 0.005
    assert gap.high >= -0.0569 - 0.005
    assert gap.high - gap.low < 1.25 * (0.3404 - 0.0569)


@pytest.mark.parametrize("n_failing", [10, 50, 90])
def test_equal_counts_have_no_difference_and_a_narrow_interval_that_is_not_empty(n_failing):
    faults = np.array([0] * (100 - n_failing) + [2] * n_failing)
    _, _, gap = rates(np.full(100, 2), faults, faults)
    assert gap.value == 0
    limit = 1 - 0.025 ** (1 / 100)  # of the share of seeds that differ, if none of 100 does
    assert (gap.low, gap.high) == pytest.approx((-limit, limit), abs=1e-4)
    _, _, none = rates(np.full(100, 2), np.zeros(100, dtype=int), np.zeros(100, dtype=int))
    assert (none.value, none.low < 0 < none.high) == (0, True)


@pytest.mark.parametrize("share", [0.01, 0.03, 0.1])
def test_intervals_cover_if_only_few_seeds_differ(share):
    """Half of the seeds always fail under both models; a few more fail only after."""
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(200):
        before = (rng.random(100) < 0.5).astype(int)
        is_hit = rng.random(100) < share
        _, _, gap = rates(np.ones(100, dtype=np.int64), np.where(is_hit, 0, before), np.where(is_hit, 1, before))
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
    for _ in range(150):
        tests, before, after, _ = draw(rng, 100, n_tests, 0.0)
        called += mcnemar(int((after > before).sum()), int((after < before).sum())) < LEVEL
        tests, before, after, truth = draw(rng, 100, n_tests, 0.3)
        _, _, gap = rates(tests, before, after)
        held += gap.low <= truth <= gap.high
        found += mcnemar(int((after > before).sum()), int((after < before).sum())) < LEVEL
    assert held / 150 >= 0.93
    assert called / 150 <= 0.08
    assert found / 150 >= 0.5
