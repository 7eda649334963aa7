"""Portions, ascents and budgets in real campaigns."""

import numpy as np
import pytest
import torch
from torch import nn

import themis
from themis import Perturbation, Target, Theta
from themis.campaign.loop import EARLY_PORTION
from themis.search.scheduled import Scheduled

pytestmark = pytest.mark.quick

INPUTS = torch.rand(60, 8, generator=torch.Generator().manual_seed(0))
NET = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
UNLIMITED = {"coverage": None, "plateau": None}
HELD = Target(NET, bounds=(-1e9, 1e9))


def moved(function):
    """A perturbation of one dimension that is too weak to break anything, so that ascents get their trial."""
    return Perturbation("moved", (Theta("by", 0, 1),), function, is_random=False)


class Numpy(nn.Module):
    """Leaves the graph in the middle."""

    def __init__(self):
        super().__init__()
        self.net = NET

    def forward(self, x):
        return self.net(torch.from_numpy(x.numpy()))


WAYS = {
    "detached": (NET, lambda x, t, rng, context: x + 1e-6 * t.detach()),
    "whole numbers": (NET, lambda x, t, rng, context: x + 1e-6 * t.long()),
    "a step": (NET, lambda x, t, rng, context: x + torch.where(t > 0.5, 1e-6, 0.0)),
    "numpy": (NET, lambda x, t, rng, context: x + 1e-6 * torch.from_numpy(t.numpy())),
    "a model that leaves the graph": (Numpy(), lambda x, t, rng, context: x + 1e-6 * t),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_campaign_continues_if_nothing_has_a_gradient_in_theta(way):
    net, function = WAYS[way]
    run = themis.run(Target(net, bounds=(-1e9, 1e9)), INPUTS, moved(function), max_tests=2_000, **UNLIMITED)
    assert run.rounds[-1].tests == 2_000


class Watched(Scheduled):
    """Records its proposals."""

    def __init__(self):
        self.proposed, self.climbing = [], []

    def propose(self, number):
        tests = super().propose(number)
        self.proposed.append(tests)
        self.climbing.append(self.state["is_climbing"].sum())
        return tests


def test_a_policy_learns_after_each_portion():
    policy = Watched()
    themis.run(HELD, INPUTS, moved(WAYS["detached"][1]), policy=policy, max_tests=1_280, **UNLIMITED)
    sizes = [len(each) for each in policy.proposed]
    # Both streams have their shares at 16, 32, 64, 128, 256 and 512 tests.
    assert sizes[:7] == [13, 13, 25, 51, 103, EARLY_PORTION, 77]
    assert sizes[7:9] == [EARLY_PORTION] * 2
    assert sum(sizes) == 1_280 - round(0.2 * 1_280)
    numbers = np.concatenate([each.number for each in policy.proposed])
    assert (np.diff(numbers) > 0).all()


def test_ascents_end_at_a_test_that_was_already_run():
    theta = (Theta("a", -1, 1), Theta("b", -1, 1))
    weak = Perturbation("weak", theta, lambda x, t, rng, context: x + 1e-6 * t.sum(1, keepdim=True), is_random=False)
    policy = Watched()
    run = themis.run(HELD, INPUTS, weak, policy=policy, max_tests=6_000, **UNLIMITED)
    last = np.concatenate([each.kind for each in policy.proposed[-8:]])
    assert (last == "sensitivity ascent").any()
    assert run.kinds["sensitivity ascent"]["tests"] > 50
    seeds = {seed for each in policy.proposed for seed in each.seed[each.kind == "margin ascent"].tolist()}
    assert max(seeds) > 40  # not only the first seeds


class Overflowing(nn.Module):
    """Has no finite answer for some inputs."""

    def __init__(self):
        super().__init__()
        self.net = NET

    def forward(self, x):
        return self.net(x) / (x[:, :1] < 1.3)


OPTIONS = [{}, {"clean_memory_gib": 0.0}, {"uniform_share": 1.0}, {"policy": "paper"}, {"round_size": 7}]


@pytest.mark.parametrize("net", [NET, Overflowing()], ids=["finite", "overflowing"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options), "default"))
def test_the_budget_of_passes_is_never_exceeded(net, options):
    """If some outputs are not finite, the other tests of their chunk are run again, which is counted."""
    n = 601 if "round_size" in options else 3_001
    weak = moved(lambda x, t, rng, context: x + (t if net is not NET else 1e-6 * t))
    target = Target(net, bounds=(-1e9, 1e9))
    run = themis.run(target, INPUTS, weak, max_passes=n, max_tests=None, **UNLIMITED, **options)
    assert run.stop_reason == "passes"
    assert n - 4 <= run.rounds[-1].passes <= n
    assert any(fault.answer < 0 for fault in run.faults) == (net is not NET)


@pytest.mark.parametrize("round_size", [1, 2, 3, 640])
def test_the_uniform_stream_has_its_share_in_rounds_of_any_size(round_size):
    weak = moved(lambda x, t, rng, context: x + 1e-6 * t)
    run = themis.run(HELD, INPUTS, weak, max_tests=60, round_size=round_size, **UNLIMITED)
    assert run.kinds["uniform"]["tests"] == 12
    assert run.fault_rate is not None
