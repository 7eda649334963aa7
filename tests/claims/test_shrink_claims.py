"""`themis shrink` promises: the theta it names breaks the model, and it claims no more than it tried."""

import numpy as np
import pytest
import torch
from torch import nn

import themis
from themis import Perturbation, Target, Theta
from themis.perturb.perturbation import column
from themis.runs.analysis.shrink import BISECTIONS, DROP_SLACK, shrink

INPUTS = torch.rand(60, 1, 4, 4, generator=torch.Generator().manual_seed(0)) * 0.2 + 0.1


class Bands(nn.Module):
    """Says 1 where the mean of an input lies in one of several bands, so a stronger disturbance may be harmless."""

    def __init__(self, *bands):
        super().__init__()
        self.relu, self.bands = nn.ReLU(), bands

    def forward(self, x):
        mean = self.relu(x).flatten(1).mean(1)
        over = torch.stack([width - (mean - middle).abs() for middle, width in self.bands]).amax(0)
        return torch.stack([-over, over], 1)


def moved(inputs, theta, rng, context):
    """Up by one dimension, down by half of the other."""
    return inputs + column(theta, 0, inputs) - 0.5 * column(theta, 1, inputs)


MOVED = Perturbation("moved", (Theta("up", 0, 0.7), Theta("down", 0, 0.3)), moved, is_random=False)


@pytest.fixture(scope="module", params=[((0.7, 0.3),), ((0.45, 0.03), (0.8, 0.05))], ids=["threshold", "bands"])
def shrunk(request):
    """Shrunk faults, and whether a test breaks the model by brute force."""
    net = Bands(*request.param).eval()
    run = themis.run(Target(net), INPUTS, MOVED, policy="random", max_tests=600, coverage=None)

    def breaks(seed_id, up, down):
        with torch.no_grad():
            inputs = (INPUTS[seed_id] + np.float32(up) - 0.5 * np.float32(down)).clamp(0, 1)
            return bool(net(inputs[None]).argmax() == 1)

    return shrink(run, most=30), breaks, len(request.param) == 1


def test_every_theta_that_is_named_breaks_the_model(shrunk):
    faults, breaks, _ = shrunk
    assert len(faults) >= 20
    for fault in faults:
        assert breaks(fault.seed_id, **fault.after)
        assert fault.strength <= fault.strength_before + 1e-6
        assert "needed in full" not in fault.sentence  # other thetas were not tried


def test_a_dimension_that_is_not_needed_is_not_needed(shrunk):
    """It is at its identity in the theta that breaks the model; that does not mean that it has no effect."""
    faults, _, _ = shrunk
    named = [fault for fault in faults if "down" in fault.not_needed]
    assert named
    for fault in named:
        assert fault.after["down"] == 0
        assert fault.sentence.endswith("down is not needed")


def test_if_one_boundary_separates_faults_the_smallest_strength_is_found(shrunk):
    """Compared with a fine grid on the line from the identity, without the dimension that only hinders."""
    faults, breaks, is_threshold = shrunk
    if not is_threshold:
        pytest.skip("several boundaries")
    for fault in faults:
        smallest = next(up for up in np.linspace(0, 0.7, 3000) if breaks(fault.seed_id, up, 0.0))
        assert fault.after["up"] == pytest.approx(smallest, rel=DROP_SLACK + 2.0**-BISECTIONS, abs=2 * 0.7 / 3000)
