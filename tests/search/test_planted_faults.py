"""Models with a small failing region that touches no bound; see also `benchmarks/search.py --planted`."""

import itertools

import pytest
import torch
from hidden import HIDDEN, TRIGGERED

SHARES = {"trigger patch": (2e-4, 5e-4), "narrow angles": (0.01, 0.021), "rare angles": (4e-4, 6e-4)}
"""The share of all seeds and theta that breaks."""

cases = pytest.mark.parametrize("make", HIDDEN, ids=lambda make: make.__name__)


@cases
def test_the_hidden_region_has_the_stated_size_and_does_not_touch_the_bounds(make):
    hidden = make()
    low, high = SHARES[hidden.name]
    assert low < hidden.share(200_000) < high
    ends = [(each.low, each.identity, each.high) for each in hidden.perturbation.theta]
    corners = torch.tensor([*itertools.product(*ends)])
    seed = torch.arange(len(hidden.inputs)).repeat_interleave(len(corners))
    assert not hidden.breaks(seed, corners.repeat(len(hidden.inputs), 1)).any()


@cases
def test_only_the_hidden_region_breaks_the_model(make):
    """No test has another wrong answer, so that every fault is the hidden one."""
    hidden = make()
    seed, theta = hidden.draw(20_000)
    answers = hidden.answers(seed, theta)
    assert ((answers == hidden.labels[seed]) | (answers == TRIGGERED)).all()


@cases
def test_scheduled_finds_the_hidden_region(make):
    hidden = make()
    assert sum(hidden.finds("scheduled", random_seed) for random_seed in range(20)) >= 19


@cases
@pytest.mark.slow
def test_scheduled_finds_the_hidden_region_in_95_of_100_campaigns(make):
    hidden = make()
    found = {
        policy: sum(hidden.finds(policy, random_seed) for random_seed in range(100))
        for policy in ("scheduled", "random")
    }
    print(f"{hidden.name}, {hidden.passes:,} passes, campaigns of 100 that found it: {found}")
    assert found["scheduled"] >= 95
