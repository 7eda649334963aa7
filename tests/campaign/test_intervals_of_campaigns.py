"""The intervals of complete campaigns contain the true values, on a model for which these are known."""

import numpy as np
import pytest
import torch
from torch import nn

import themis
from themis import Perturbation, Target, Theta
from themis.judge.coverage import Rule, exact
from themis.measure.moments import Moments
from themis.perturb.perturbation import column

CENTRE, HALF = 0.82, 0.03  # inputs whose first feature lies in this band are misclassified
LOW, HIGH, REACH = 0.3, 0.7, 0.2
N_SEEDS, N_TESTS, N_WIDE = 150, 1280, 60


def shift(inputs, theta, rng, context):
    return inputs + column(theta, 0, inputs)


SHIFT = Perturbation("shift", (Theta("by", -REACH, REACH),), shift, is_random=False)


class Band(nn.Module):
    """Answers 1 inside the band and 0 outside; a row of neurons with growing gain reads the inputs."""

    def __init__(self):
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        gains = torch.logspace(0.9, 1.6, N_WIDE)  # some converge within the budget, some do not
        self.wide = nn.Linear(2, N_WIDE)
        with torch.no_grad():
            feature = torch.randint(0, 2, (N_WIDE,), generator=rng)
            self.wide.weight.zero_()[torch.arange(N_WIDE), feature] = gains
            self.wide.bias.copy_(-gains * (0.4 + 0.2 * torch.rand(N_WIDE, generator=rng)))

    def forward(self, x):
        unused = torch.relu(self.wide(x)).sum(1) * 0
        distance = (x[:, 0] - CENTRE).abs()
        return torch.stack([distance - HALF + unused, HALF - distance], 1)


def fault_chance(first):
    """Probability that a uniform shift moves a seed into the band."""
    low = np.maximum(CENTRE - HALF - first, -REACH)
    high = np.minimum(CENTRE + HALF - first, REACH)
    return np.maximum(high - low, 0) / (2 * REACH)


def true_fault_rate():
    first = np.linspace(LOW, HIGH, 100_001)
    return fault_chance(first).mean()


def true_coverage(net):
    """Coverage if the spread of every neuron over all seeds and shifts were known."""
    rng = torch.Generator().manual_seed(1)
    x = LOW + (HIGH - LOW) * torch.rand(400_000, 2, generator=rng)
    moved = x + REACH * (2 * torch.rand(400_000, 1, generator=rng) - 1)
    with torch.no_grad():
        wide = (torch.relu(net.wide(moved)) - torch.relu(net.wide(x))).abs()
        output = (net(moved) - net(x)).abs()
    variance = torch.cat([wide, output], 1).double().var(0)
    known = Moments(torch.tensor(N_TESTS), torch.ones_like(variance), variance * (N_TESTS - 1))
    return float(Rule().converged(exact(known), known).double().mean())


def how_often_they_hold(n_campaigns, policy="random"):
    net = Band()
    rate, coverage = true_fault_rate(), true_coverage(net)
    assert 0.2 < coverage < 0.8
    held = []
    for k in range(n_campaigns):
        rng = torch.Generator().manual_seed(k)
        inputs = LOW + (HIGH - LOW) * torch.rand(N_SEEDS, 2, generator=rng)
        options = {"policy": policy, "max_tests": N_TESTS, "plateau": None, "coverage": None, "random_seed": k}
        result = themis.run(Target(net), inputs, SHIFT, **options)
        seen = {fault.seed_id for fault in result.faults}
        chances = fault_chance(inputs[:, 0].double().numpy())
        unseen = sum(chance for seed_id, chance in enumerate(chances) if seed_id not in seen) / N_SEEDS
        pairs = (result.fault_rate, rate), (result.residual_risk, unseen), (result.coverage_interval, coverage)
        held.append([stated.low <= truth <= stated.high for stated, truth in pairs])
    return np.mean(held, 0)


def test_intervals_of_a_few_campaigns_hold():
    assert (how_often_they_hold(25) >= 0.88).all()  # at most three of 25 miss


@pytest.mark.slow
def test_intervals_of_two_hundred_campaigns_hold():
    share = how_often_they_hold(200)
    print(f"fault rate {share[0]:.3f}, residual risk {share[1]:.3f}, coverage {share[2]:.3f}")
    assert (share >= 0.93).all()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["scheduled", "corners"])
def test_the_residual_risk_of_two_hundred_searching_campaigns_holds(policy):
    share = how_often_they_hold(200, policy)
    print(f"{policy}: residual risk {share[1]:.3f}")
    assert share[1] >= 0.93
