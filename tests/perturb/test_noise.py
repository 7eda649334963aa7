"""Noise: what its strength means, and what it leaves unchanged."""

import pytest
import torch

from themis.compute.rng import Rng
from themis.perturb import Context, perturb
from themis.perturb.camera import CAMERA
from themis.perturb.noise import NOISE
from themis.perturb.perturbation import combine

BY_NAME = {each.name: each for each in (*NOISE, *CAMERA)}


def noisy(name, inputs, value, bounds=(0.0, 1.0)):
    theta = torch.full((len(inputs), 1), value)
    return perturb(BY_NAME[name], inputs, theta, torch.arange(len(inputs)) + 3, Context(bounds))


def test_gaussian_is_the_draw_times_sigma_and_span():
    inputs = torch.rand(3, 2, 5, 7) * 100 + 50
    expected = inputs + Rng(torch.arange(3) + 3).normal(2, 5, 7) * torch.tensor(0.1 * 255.0)
    assert torch.equal(noisy("gaussian", inputs, 0.1, (0.0, 255.0)), expected.clamp(0, 255))


@pytest.mark.parametrize(("name", "power"), [("gaussian", 0.0), ("shot", 0.5), ("speckle", 1.0)])
@pytest.mark.parametrize("level", [0.2, 0.5])
def test_noise_grows_with_this_power_of_the_signal(name, power, level):
    change = noisy(name, torch.full((1, 3, 200, 200), level), 0.05) - level
    assert change.mean().abs() < 1e-3
    torch.testing.assert_close(change.std(), torch.tensor(0.05 * level**power), rtol=0.02, atol=0)


@pytest.mark.parametrize("name", ["shot", "speckle"])
def test_the_signal_is_measured_from_the_lower_bound(name):
    inputs = torch.rand(2, 3, 9, 9)
    shifted = noisy(name, inputs * 4 - 2, 0.1, (-2.0, 2.0))
    torch.testing.assert_close(shifted, noisy(name, inputs, 0.1) * 4 - 2, atol=1e-5, rtol=0)
    dark = torch.zeros(1, 1, 30, 30)
    assert noisy(name, dark, 0.2).max() < 1e-3


@pytest.mark.parametrize("name", ["impulse", "salt_and_pepper"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.6, 1.0])
def test_the_share_of_pixels_is_hit_with_all_their_channels(name, share):
    inputs = torch.full((1, 3, 300, 300), 0.5)
    is_hit = noisy(name, inputs, share) != inputs
    assert (is_hit.any(1) != is_hit.all(1)).float().mean() < 1e-3
    torch.testing.assert_close(is_hit[:, 0].float().mean(), torch.tensor(share), rtol=0.12, atol=0)


@pytest.mark.parametrize("name", ["impulse", "salt_and_pepper"])
def test_each_value_of_a_row_is_hit_independently(name):
    inputs = torch.full((2000, 4), 20.0)
    is_hit = noisy(name, inputs, 0.3, (10.0, 40.0)) != inputs
    torch.testing.assert_close(is_hit.float().mean(0), torch.full((4,), 0.3), atol=0.05, rtol=0)
    assert is_hit.any(1).float().mean() > 0.7


def test_salt_is_as_common_as_pepper():
    values = noisy("salt_and_pepper", torch.full((1, 1, 300, 300), 100.0), 0.2, (50.0, 250.0))
    n_salt, n_pepper = (values == 250).sum(), (values == 50).sum()
    assert abs(n_salt / n_pepper - 1) < 0.05
    is_between = (values != 50) & (values != 100) & (values != 250)
    assert is_between.sum() < 0.2 * (n_salt + n_pepper), "few lie on the ramp"


def test_impulses_take_all_values():
    values = noisy("impulse", torch.full((1, 3, 200, 200), 0.5), 1.0)
    counts = torch.histc(values, 10, 0, 1) / values.numel()
    torch.testing.assert_close(counts, torch.full((10,), 0.1), atol=0.01, rtol=0)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_the_slope_of_the_share_is_that_of_the_mean(share):
    theta = torch.full((1, 1), share, requires_grad=True)
    context = Context()
    mean = perturb(BY_NAME["salt_and_pepper"], torch.zeros(1, 1, 500, 500), theta, torch.tensor([1]), context).mean()
    (slope,) = torch.autograd.grad(mean, theta)
    torch.testing.assert_close(slope, torch.full((1, 1), 0.5), rtol=0.1, atol=0)


def test_photon_noise_on_black_keeps_the_slope_of_earlier_perturbations():
    both = combine(BY_NAME["exposure"], BY_NAME["shot"])
    theta = torch.tensor([[1.0, 0.1]], requires_grad=True)
    made = perturb(both, torch.zeros(1, 3, 4, 4), theta, torch.tensor([1]), Context())
    (slope,) = torch.autograd.grad(made.sum(), theta)
    assert bool(slope.isfinite().all())
