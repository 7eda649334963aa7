"""Rain, snow and drops on the lens."""

import pytest
import torch
import torch.nn.functional as F

from themis.perturb.context import Context
from themis.perturb.perturbation import perturb
from themis.perturb.weather import WEATHER

BY_NAME = {each.name: each for each in WEATHER if each.name in ("rain", "snow", "raindrops")}


def fall(name, pictures, seed=0, **theta):
    """Disturb with the given theta, the others at their identity."""
    known = BY_NAME[name].theta
    assert set(theta) <= {each.name for each in known}
    values = torch.tensor([[theta.get(each.name, each.identity) for each in known]], dtype=pictures.dtype)
    seeds = torch.arange(len(pictures)) + seed
    return perturb(BY_NAME[name], pictures, values.repeat(len(pictures), 1), seeds, Context())


def flat(value=0.0, n=4, side=96, channels=1):
    return torch.full((n, channels, side, side), value)


def slopes(pictures):
    """Central differences down and across, without the margin."""
    down = (pictures[:, :, 2:, 1:-1] - pictures[:, :, :-2, 1:-1]) / 2
    across = (pictures[:, :, 1:-1, 2:] - pictures[:, :, 1:-1, :-2]) / 2
    return down, across


@pytest.mark.parametrize("angle", [-30.0, 0.0, 20.0])
def test_streaks_lean_by_the_angle(angle):
    seen = fall("rain", flat(n=8, side=200), density=0.6, length=0.3, angle=angle)
    down, across = slopes(F.avg_pool2d(F.avg_pool2d(seen, 3, 1), 3, 1))
    # The structure tensor's main axis lies across the streaks.
    lean = 0.5 * torch.atan2(2 * (down * across).sum(), (across * across - down * down).sum())
    assert float(torch.rad2deg(lean)) == pytest.approx(angle, abs=2.5)


def test_longer_streaks_are_longer():
    def likeness(length):
        seen = fall("rain", flat(n=8), density=0.5, length=length).flatten(0, 1)
        return float((seen[:, 12:] * seen[:, :-12]).sum() / (seen * seen).sum())

    short, middle, long = (likeness(length) for length in (0.1, 0.2, 0.3))
    assert short < middle < long
    assert long > short + 0.2


@pytest.mark.parametrize("name", ["rain", "snow"])
def test_precipitation_only_grows_with_density(name):
    few, some, many = (fall(name, flat(), density=density) for density in (0.2, 0.5, 1.0))
    assert bool((few <= some + 1e-6).all())
    assert bool((some <= many + 1e-6).all())
    assert 0 < few.mean() < some.mean() < many.mean()


@pytest.mark.parametrize("name", ["rain", "snow", "raindrops"])
def test_without_drops_the_other_theta_have_no_effect(name):
    pictures = torch.rand(3, 3, 96, 80)
    others = {each.name: each.high for each in BY_NAME[name].theta[1:]}
    assert torch.allclose(fall(name, pictures, **others), pictures, atol=1e-6)


def test_far_rain_veils_with_grey():
    veiled = fall("rain", flat(0.0, n=16), density=1.0, depth=1.0)
    near = fall("rain", flat(0.0, n=16), density=1.0, depth=0.0)
    assert float(near.amin()) == 0
    assert float(veiled.amin()) == pytest.approx(0.3 * 0.6, abs=0.01)


def test_rain_lightens_the_dark_and_dims_the_bright():
    assert bool((fall("rain", flat(0.1), density=1.0, depth=1.0) >= 0.1).all())
    assert bool((fall("rain", flat(1.0), density=1.0, depth=1.0) <= 1.0).all())
    assert float(fall("rain", flat(1.0), density=1.0, depth=1.0).mean()) < 0.95


def test_opacity_is_brightness():
    half, whole = (fall("snow", flat(), density=0.5, brightness=brightness) for brightness in (0.5, 1.0))
    plain = 0.5 * 0.25 * 0.9  # the veil
    assert float(whole.max()) == pytest.approx(1.0, abs=0.05)
    torch.testing.assert_close(half - plain, (whole - plain) / 2)


def test_larger_flakes_cover_more():
    small, large = (fall("snow", flat(), density=0.8, size=size) for size in (0.008, 0.02))
    assert float((large > 0.5).float().mean()) > 2 * float((small > 0.5).float().mean())


@pytest.mark.parametrize("name", ["rain", "snow"])
def test_it_looks_the_same_at_any_resolution(name):
    theta = {each.name: (each.low + each.high) / 2 for each in BY_NAME[name].theta}
    means = [float(fall(name, flat(n=16, side=side), **theta).mean()) for side in (100, 200, 400)]
    assert max(means) < 1.25 * min(means)


@pytest.mark.parametrize("name", list(BY_NAME))
def test_water_has_no_colour(name):
    ends = {each.name: each.high for each in BY_NAME[name].theta}
    seen = fall(name, flat(0.3, channels=3), **ends)
    assert torch.equal(seen[:, 0], seen[:, 1])
    assert torch.equal(seen[:, 0], seen[:, 2])


def ramp(n=6, side=128):
    """Brighter downwards, by 0.1 over the height."""
    line = 0.05 + 0.1 * (torch.arange(side, dtype=torch.float64) + 0.5) / side
    return line.view(1, 1, -1, 1).expand(n, 1, side, side).contiguous()


def test_a_drop_shows_the_scene_upside_down():
    theta = {"count": 12, "radius": 0.1}
    clear, bent = (fall("raindrops", ramp(), **theta, refraction=bend) for bend in (0.0, 3.0))
    steepest = slopes(bent - clear)[0].amin()
    slope = 0.1 / 128
    # Seen at y - 3 * (y - middle): the slope turns from 1 to -2, whatever light the drop transmits.
    assert float(steepest) < -2.5 * slope


def test_the_displacement_is_proportional_to_the_refraction():
    theta = {"count": 8, "radius": 0.06, "x": 0.0, "y": 0.0}
    inner = (slice(None), slice(None), slice(32, -32), slice(None))
    none, one, two = (fall("raindrops", ramp(), **theta, refraction=bend)[inner] for bend in (0.0, 1.0, 2.0))
    torch.testing.assert_close(two - one, one - none, atol=1e-6, rtol=0)
    assert float((one - none).abs().max()) > 0.002


def test_more_drops_cover_more_of_the_lens():
    shares = []
    for count in (1.0, 4.0, 12.0):
        changed = fall("raindrops", flat(0.5, n=32), count=count, radius=0.09) != 0.5
        shares.append(float(changed.float().mean()))
    assert 0 < shares[0] < shares[1] < shares[2] < 0.6


@pytest.mark.parametrize(("x", "y"), [(-0.5, 0.0), (0.5, 0.0), (0.0, -0.5), (0.0, 0.5)])
def test_drops_gather_around_the_requested_centre(x, y):
    changed = (fall("raindrops", flat(0.5, n=32), count=4, radius=0.09, x=x, y=y) - 0.5).abs().sum((0, 1))
    at = (torch.arange(96) + 0.5) / 96 - 0.5
    centre_x, centre_y = (float((changed.sum(dim) * at).sum() / changed.sum()) for dim in (0, 1))
    assert centre_x == pytest.approx(0.3 * x, abs=0.12)
    assert centre_y == pytest.approx(0.3 * y, abs=0.12)
    assert centre_x * x + centre_y * y > 0.03
