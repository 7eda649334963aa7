"""The report, `themis shrink` and `themis diff` promise: intervals hold, and luck is not called a difference."""

from itertools import combinations

import numpy as np
import pytest
import torch
from torch import nn

import themis
from themis.judge.estimate import share
from themis.runs.analysis.compare import TECHNIQUE_SIGNIFICANCE, mcnemar, paired_rates
from themis.runs.analysis.groups import _describe_share
from themis.runs.analysis.shrink import Robustness


@pytest.mark.parametrize("rate", [0.005, 0.05, 0.3, 0.9])
@pytest.mark.parametrize("n_tests", [10, 60, 300])
def test_the_fault_rate_of_a_part_of_theta_lies_in_its_interval(rate, n_tests):
    """Uniform tests draw seed and theta independently, so those of a part are independent for these seeds."""
    rng = np.random.default_rng(0)
    hits = 0
    for faults in rng.binomial(n_tests, rate, 1000).tolist():
        rated = share(faults, n_tests)
        assert rated.low <= rated.value <= rated.high
        assert rated.high > rated.low  # never an interval of zero width
        hits += rated.low <= rate <= rated.high
    assert hits / 1000 >= 0.91  # Wilson's interval holds for 95% on average over rates


@pytest.mark.parametrize("n", [10, 30, 300])
@pytest.mark.parametrize("scale", [0.4, 1.3])
def test_the_strength_at_which_half_of_the_seeds_break_lies_in_its_interval(n, scale):
    """ "Half of the seeds have broken at strength x (95% interval a to b)", where strengths above 1 are not known."""
    rng, hits, median = np.random.default_rng(n), 0, scale * np.log(2)
    for _ in range(300):
        strengths = rng.exponential(scale, n)
        curve = Robustness(np.where(strengths < 1, strengths, np.inf))
        low, high = curve.median_interval
        hits += (low is None or low <= median) and (high is None or median <= high)
    assert hits / 300 >= 0.92


def test_curves_have_no_interval_of_zero_width():
    for failed, withstood in (([], 30), ([0.2] * 30, 0), ([0.1, 0.1, 0.5], 4), (np.linspace(0.1, 0.9, 9), 1)):
        curve = Robustness(np.array([*failed, *[np.inf] * withstood]))
        for strength in (0.05, 0.1, 0.2, 0.5, 1.0):
            estimate = curve.at(strength)
            assert estimate.low < estimate.high
            assert estimate.low <= estimate.value <= estimate.high


def test_two_models_that_behave_alike_have_an_interval_around_zero():
    rng = np.random.default_rng(0)
    for n_tests in (1, 4):
        faults = rng.binomial(n_tests, 0.5, 60)
        gap = paired_rates(np.full(60, n_tests), faults, faults).difference
        assert gap.low < 0 < gap.high


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["random", "scheduled"])
def test_the_luck_of_one_technique_is_not_called_a_difference_of_two(policy):
    """Two runs of one technique with other random seeds: "broke more" is said for at most about one pair in twenty."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)).eval()
    inputs = torch.rand(150, 1, 4, 4)
    broken = []
    for random_seed in range(40):
        options = {"policy": policy, "max_tests": 450, "round_size": 90, "random_seed": random_seed}
        run = themis.run(net, inputs, "gaussian", magnitude=0.3, coverage=None, **options)
        broken.append({fault.seed_id for fault in run.faults})
    called = [mcnemar(len(a - b), len(b - a)) < TECHNIQUE_SIGNIFICANCE for a, b in combinations(broken, 2)]
    assert np.mean(called) <= 0.08


def test_a_share_is_printed_as_100_percent_only_if_it_is_exactly_that():
    curve = Robustness(np.array([0.04, *[np.inf] * 4999]))
    assert curve.rows()[0][2].startswith(">99.9% (")
    assert _describe_share(1.0) == ""
    assert _describe_share(0.996) == " (>99%)"
