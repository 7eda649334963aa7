"""The first tests of a campaign are the campaign with a smaller budget."""

import pytest
import torch
from torch import nn

import themis
from themis_lab.comparison.cells import describe_campaign
from themis_lab.comparison.plan import CampaignCell
from themis_lab.evaluation.cells import count_passes, count_tests, describe_prefix

CELL = CampaignCell("scheduled", 0.5, 0)
COUNTS = ("tests", "passes", "faults", "distinct_faults", "failing_seeds", "coverage", "by_seed")


@pytest.fixture(scope="module")
def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))


def campaign(net, **limits):
    inputs = torch.rand(40, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    free = {"max_tests": None, "coverage": None, "plateau": None, "round_size": 64}
    return themis.run(net, inputs, "gaussian", magnitude=0.5, **{**free, **limits})


def test_a_prefix_at_the_end_of_a_round_is_a_shorter_campaign(net):
    whole, short = campaign(net, max_tests=256), campaign(net, max_tests=128)
    prefix, described = describe_prefix(CELL, whole, 128), describe_campaign(CELL, short)
    assert described["distinct_faults"] > 0
    assert {name: prefix[name] for name in COUNTS} == {name: described[name] for name in COUNTS}


def test_passes_and_tests_are_converted_to_each_other(net):
    whole = campaign(net, max_tests=256, policy="random")
    assert count_passes(whole, 100) == 157  # 57 passes over clean seeds, then one per test
    assert count_tests(whole, 157) == 100
    assert count_tests(whole, 39) == 0
    assert count_tests(whole, 10_000) == 256


def test_no_test_means_no_fault(net):
    nothing = describe_prefix(CELL, campaign(net, max_tests=64), 0)
    assert nothing["distinct_faults"] == nothing["faults"] == 0
    assert nothing["by_seed"]["seed_id"] == []


def test_the_posterior_means_of_a_run_are_those_of_its_neurons(net):
    whole = campaign(net, max_tests=64)
    assert whole.posterior_means.shape == (whole.start.n_neurons,)
    assert (whole.posterior_means >= 0).all()
