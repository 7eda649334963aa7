"""Is the hard thing found? Models with a planted weakness, and the same models mended."""

import pytest
import torch
from torch import nn

import themis
from themis import Perturbation, Target, Theta
from themis.perturb.perturbation import column

SIZE = 12


class Halves(nn.Module):
    """Says which half of the centre is brighter, whatever happens around it or to the overall brightness."""

    def __init__(self, weakness=None):
        super().__init__()
        self.detect = nn.Conv2d(1, 4, 3, padding=1)
        self.weakness = weakness

    def forward(self, x):
        centre = x[:, 0, 4:8, 4:8]
        margin = 20 * (centre[..., :2].mean((1, 2)) - centre[..., 2:].mean((1, 2)))
        margin = margin + 0 * torch.relu(self.detect(x)).mean((1, 2, 3))  # neurons that see everything
        if self.weakness is not None:
            margin = torch.where(self.weakness(x), -margin, margin)
        return torch.stack([margin, -margin], 1)


def patch(inputs, theta, rng, context):
    """A bright 3x3 patch that walks around the border; theta: where (0..1 of the way round) and how bright."""
    way = 4 * (SIZE - 3)
    steps = (theta[:, 0] * way).clamp(max=way - 1e-3)
    side, along = steps // (SIZE - 3), steps % (SIZE - 3)
    last = torch.full_like(along, SIZE - 3)
    top = torch.stack([0 * along, along, last, last - along], 1).gather(1, side.long()[:, None]).squeeze(1)
    left = torch.stack([along, last, last - along, 0 * along], 1).gather(1, side.long()[:, None]).squeeze(1)
    grid = torch.arange(SIZE, device=inputs.device, dtype=inputs.dtype)
    rows = (2 - (grid - top[:, None] - 1).abs()).clamp(0, 1)
    columns = (2 - (grid - left[:, None] - 1).abs()).clamp(0, 1)
    mask = rows[:, None, :, None] * columns[:, None, None, :] * column(theta, 1, inputs)
    return inputs * (1 - mask) + mask


def brightness(inputs, theta, rng, context):
    return inputs + column(theta, 0, inputs)


PATCH = Perturbation("patch", (Theta("where", 0, 1), Theta("strength", 0, 1)), patch, is_random=False)
BRIGHTNESS = Perturbation("brightness", (Theta("shift", -0.3, 0.3),), brightness, is_random=False)


def trigger(x):
    """A bright lower right corner."""
    return x[:, 0, -3:, -3:].mean((1, 2)) > 0.8


def band(x):
    """A narrow band of overall brightness: 0.012 wide, a fiftieth of what theta reaches."""
    return (x.mean((1, 2, 3)) - 0.70).abs() < 0.006


def seeds(n=200):
    rng = torch.Generator().manual_seed(0)
    inputs = torch.rand(n, 1, SIZE, SIZE, generator=rng) * 0.2 + 0.4
    bright = torch.rand(n, generator=rng) < 0.5
    inputs[bright, :, 4:8, 4:6] += 0.1
    inputs[~bright, :, 4:8, 6:8] += 0.1
    return inputs, (~bright).long()


@pytest.mark.parametrize(("perturbation", "weakness"), [(PATCH, trigger), (BRIGHTNESS, band)], ids=["trigger", "band"])
@pytest.mark.parametrize("policy", ["random", "scheduled"])
def test_a_planted_weakness_is_found_and_a_mended_model_is_clean(perturbation, weakness, policy):
    torch.manual_seed(0)
    options = {"policy": policy, "max_tests": 3000, "coverage": 1.0, "plateau": None, "tolerance": 1e-9}
    weak, mended = Halves(weakness), Halves()
    broken = themis.run(Target(weak), seeds(), perturbation, **options)
    assert broken.rounds[-1].distinct_faults >= (3 if policy == "random" else 10)
    for fault in broken.faults:
        assert weakness(fault.replay().inputs[None]).item()
    assert broken.fault_rate.low > 0
    clean = themis.run(Target(mended), seeds(), perturbation, **options)
    assert clean.rounds[-1].tests == 3000
    assert len(clean.faults) == 0
    assert clean.fault_rate.high < 0.03
    assert clean.residual_risk.high < 0.01
    assert clean.fault_rate.value == 0
