"""Models with a small failing region that lies at no bound; `benchmarks/search.py --planted` says who finds it."""

import itertools

import pytest
import torch
from hidden import HIDDEN, TRIGGERED

SHARES = {"trigger patch": (2e-4, 5e-4), "narrow angles": (0.01, 0.021), "rare angles": (4e-4, 6e-4)}
"""Of all seeds and theta, the share that breaks."""

cases = pytest.mark.parametrize("make", HIDDEN, ids=lambda make: make.__name__)


@cases
def test_the_region_is_as_small_as_stated_and_nowhere_at_the_bounds(make):
    hidden = make()
    low, high = SHARES[hidden.name]
    assert low < hidden.share(200_000) < high
    ends = [(each.low, each.identity, each.high) for each in hidden.perturbation.theta]
    corners = torch.tensor([*itertools.product(*ends)])
    seed = torch.arange(len(hidden.inputs)).repeat_interleave(len(corners))
    assert not hidden.breaks(seed, corners.repeat(len(hidden.inputs), 1)).any()


@cases
def test_only_the_hidden_region_breaks_the_model(make):
    """No test shows another wrong answer, so a fault is the hidden one."""
    hidden = make()
    seed, theta = hidden.draw(20_000)
    answers = hidden.answers(seed, theta)
    assert ((answers == hidden.labels[seed]) | (answers == TRIGGERED)).all()


@cases
def test_scheduled_finds_it(make):
    hidden = make()
    assert sum(hidden.finds("scheduled", random_seed) for random_seed in range(20)) >= 19


@cases
@pytest.mark.slow
def test_scheduled_finds_it_in_95_of_100_campaigns(make):
    hidden = make()
    found = {
        policy: sum(hidden.finds(policy, random_seed) for random_seed in range(100))
        for policy in ("scheduled", "random")
    }
    print(f"{hidden.name}, {hidden.passes:,} passes, campaigns of 100 that found it: {found}")
    assert found["scheduled"] >= 95
