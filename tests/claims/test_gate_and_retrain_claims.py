"""`themis gate` and `themis retrain` promise: what chance could have done is not called shown."""

import numpy as np
import pytest

from themis.data.slices import SliceColumn
from themis.judge.risk import fault_rate
from themis.report.gates.gates import check_slices
from themis.retraining.changes import paired
from themis.retraining.result import _gain
from themis.runs.display.text import CleanScores, Counts, write_verdict
from themis.runs.estimates import SlicedSeeds
from themis.runs.run import worst_slices


@pytest.mark.parametrize(("alpha", "beta"), [(0.1, 1.9), (5.0, 95.0), (0.02, 0.38)])
@pytest.mark.parametrize("n_tests", [1, 5])
def test_a_model_whose_fault_rate_is_at_the_limit_rarely_passes_the_gate(alpha, beta, n_tests):
    """`max_fault_rate` checks the upper end of the interval: a model at the limit passes at most one time in forty."""
    rng, limit, n_passed = np.random.default_rng(0), alpha / (alpha + beta), 0
    for _ in range(300):
        own = rng.beta(alpha, beta, 200)  # the seeds' own fault rates
        rate = fault_rate(np.full(200, n_tests), rng.binomial(n_tests, own))
        n_passed += rate.high <= limit
    assert n_passed / 300 <= 0.045  # 0.025 plus what 300 draws may add


def gate_slices(chances, seed, n_seeds=2000, n_tests=2500, limit=0.05):
    """The gates and the worst of 13 slices: ten classes with these fault rates, and the weather in three sizes."""
    rng = np.random.default_rng(seed)
    number = rng.permutation(np.arange(n_seeds) % 10)
    own = chances[number]
    own = rng.beta(own, 1 - own) if seed % 2 else own  # seeds that are much or not at all alike
    tests = rng.multinomial(n_tests, np.full(n_seeds, 1 / n_seeds))
    seeds = SlicedSeeds(np.arange(n_seeds), number, np.ones(n_seeds))
    weather = SliceColumn("weather", ("sun", "rain", "fog"), rng.choice(3, n_seeds, p=[0.8, 0.19, 0.01]))
    faults = rng.binomial(tests, own)
    slices = seeds.rates([*seeds.columns("class", None), weather], tests, faults)
    worst = [rate.name for rate in worst_slices(slices, fault_rate(tests, faults))]
    return {result.gate: result for result in check_slices(limit, slices)}, worst


def hold_slices(n_campaigns):
    """The share of campaigns whose gate fails if all slices are at the limit, and is as it should be if one is not."""
    at_limit, planted = np.full(10, 0.05), np.full(10, 0.02)
    planted[7] = 0.15
    n_false = n_found = 0
    for seed in range(n_campaigns):
        equal, worst = gate_slices(at_limit, seed)
        n_false += bool(worst) or any(not result.has_passed for result in equal.values())
        found, worst = gate_slices(planted, seed)
        failed = {gate for gate, result in found.items() if not result.has_passed}
        n_found += failed == {"max_fault_rate[class 7]"} and worst == ["class 7"]
        assert found["max_fault_rate[weather fog]"].word == "skipped"
    return n_false / n_campaigns, n_found / n_campaigns


def test_slices_at_the_limit_rarely_fail_and_one_at_three_times_the_limit_does():
    share_false, share_found = hold_slices(20)
    assert share_false <= 0.1  # 0.05 plus what 20 campaigns may add
    assert share_found >= 0.9


@pytest.mark.slow
def test_slices_at_the_limit_fail_at_most_one_time_in_twenty():
    share_false, share_found = hold_slices(600)
    assert share_false <= 0.05
    assert share_found >= 0.9


def test_without_a_fault_the_stated_upper_limit_holds():
    """No fault in n seeds: "at least x% under random disturbance" is wrong at most one time in twenty."""
    rng, n_wrong, n_stated = np.random.default_rng(1), 0, 0
    for _ in range(2000):
        rate = rng.uniform(0, 0.05)
        faults = rng.binomial(1, rate, 100)
        if faults.sum():
            continue
        estimate = fault_rate(np.ones(100, dtype=int), faults)
        counts = Counts(100, 0, 100, 0, 0, 0, 100, 100, 10, 1)
        verdict = write_verdict("fog", "changed", counts, CleanScores(None, None, None, None), estimate)
        assert "(95%: at least 96.3%)" in verdict.text
        n_stated += 1
        n_wrong += 1 - rate < 0.963
    assert n_stated > 300
    assert n_wrong / n_stated <= 0.05 + 0.03


@pytest.mark.parametrize("n_runs", [1, 3])
@pytest.mark.parametrize("spread", [0.0, 0.01])
def test_a_gain_that_is_none_is_said_to_be_due_to_chance(n_runs, spread):
    """If training changes nothing on average, 19 of 20 sentences say that the difference may be due to chance.

    One training does not show how much trainings vary, which the closing words of a retraining say.
    """
    rng, n_claimed = np.random.default_rng(2), 0
    for _ in range(300):
        before = rng.random(400)
        shifts = rng.normal(0, spread if n_runs > 1 else 0.0, (n_runs, 1))
        after = before + shifts + rng.normal(0, 0.2, (n_runs, 400))
        n_claimed += "may be due to chance" not in _gain("noise", paired(before, after))
    assert n_claimed / 300 <= 0.075


def test_a_gain_that_is_there_is_claimed():
    rng = np.random.default_rng(3)
    before = rng.random(400)
    sentence = _gain("noise", paired(before, before + 0.06 + rng.normal(0, 0.2, (3, 400))))
    assert "the disturbed score rose by" in sentence
    assert "may be due to chance" not in sentence
