"""`themis gate` and `themis retrain` promise: what chance could have done is not called shown."""

import numpy as np
import pytest

from themis.judge.risk import fault_rate
from themis.retraining.changes import paired
from themis.retraining.result import _gain
from themis.runs.display.text import CleanScores, Counts, write_verdict


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


class Outcome:
    """What a sentence on a gain needs."""

    name = "fog"

    def __init__(self, before, after):
        self.change = type("Change", (), {"disturbed": paired(before, after)})


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
        n_claimed += "may be due to chance" not in _gain(Outcome(before, after))
    assert n_claimed / 300 <= 0.075


def test_a_gain_that_is_there_is_claimed():
    rng = np.random.default_rng(3)
    before = rng.random(400)
    sentence = _gain(Outcome(before, before + 0.06 + rng.normal(0, 0.2, (3, 400))))
    assert "the disturbed score rose by" in sentence
    assert "may be due to chance" not in sentence
