"""Fog, frost, glare, shadow and low light follow the physics of light."""

import math

import pytest
import torch
import torch.nn.functional as F

from themis.perturb.context import Context
from themis.perturb.perturbation import perturb
from themis.perturb.weather import WEATHER

BY_NAME = {each.name: each for each in WEATHER}


def under(name, pictures, seed=0, **theta):
    """Disturb with the given theta, the others at their identity."""
    known = BY_NAME[name].theta
    assert set(theta) <= {each.name for each in known}
    values = torch.tensor([[theta.get(each.name, each.identity) for each in known]], dtype=pictures.dtype)
    seeds = torch.arange(len(pictures)) + seed
    return perturb(BY_NAME[name], pictures, values.repeat(len(pictures), 1), seeds, Context())


def flat(value, n=4, side=96, channels=1):
    return torch.full((n, channels, side, side), value, dtype=torch.float64)


def test_fog_follows_the_beer_lambert_law():
    pictures = torch.rand(2, 3, 40, 30, dtype=torch.float64)
    seen = under("fog", pictures, density=1.2)
    up = (40 - torch.arange(40, dtype=torch.float64) - 0.5) / 40  # of the height, from the bottom
    share = (up / 0.6).clamp(max=1)
    left = (-1.2 * (0.35 + 0.65 * share**2 * (3 - 2 * share))).exp().view(1, 1, -1, 1)
    torch.testing.assert_close(seen, pictures * left + 0.85 * (1 - left), atol=1e-9, rtol=0)
    assert float(left[0, 0, 0]) == pytest.approx(math.exp(-1.2))


def test_two_fogs_add_up():
    pictures = torch.rand(2, 1, 32, 32, dtype=torch.float64)
    both = under("fog", under("fog", pictures, density=0.4), density=0.9)
    assert torch.allclose(both, under("fog", pictures, density=1.3), atol=1e-9)


def test_fog_hides_the_distance_first():
    seen = under("fog", torch.rand(4, 1, 64, 64, dtype=torch.float64), density=1.5, patchiness=0.3, scale=0.5)
    contrast = seen.std((0, 1, 3))
    assert float(contrast[:16].mean()) < 0.6 * float(contrast[-16:].mean())


def test_banks_of_fog_grow_with_scale():
    def roughness(scale):
        seen = under("fog", flat(0.0, n=16), density=1.0, patchiness=0.6, scale=scale)
        return float((seen[..., 1:] - seen[..., :-1]).abs().mean())

    assert roughness(1.0) < 0.5 * roughness(0.2)
    assert roughness(0.2) > 0.002


def test_coarsely_drawn_fog_covers_as_much_as_finely_drawn_fog():
    theta = {"density": 1.5, "patchiness": 0.6, "scale": 0.4}
    fine, coarse = (under("fog", flat(0.0, n=16, side=side), **theta) for side in (100, 200))
    pooled = F.avg_pool2d(coarse, 2)
    assert float((fine - pooled).abs().mean()) < 0.02


def test_frost_grows_from_the_edges():
    seen = under("frost", flat(0.2, n=16), amount=0.35)
    iced = (seen - 0.2).mean((0, 1))
    edge = torch.cat([iced[:12].flatten(), iced[-12:].flatten(), iced[:, :12].flatten(), iced[:, -12:].flatten()])
    assert float(edge.mean()) > 3 * float(iced[32:64, 32:64].mean())


def test_frost_only_grows():
    less, more = (under("frost", flat(0.2), amount=amount) for amount in (0.3, 0.6))
    assert bool((more >= less - 1e-9).all())
    assert float((more - less).mean()) > 0.05


def test_ice_is_bluish_and_the_sun_is_warm():
    iced = under("frost", flat(0.2, channels=3), amount=0.6).mean((0, 2, 3))
    assert iced[0] < iced[1] < iced[2]
    sunny = under("glare", flat(0.2, channels=3), strength=0.5).mean((0, 2, 3))
    assert sunny[0] > sunny[1] > sunny[2]


@pytest.mark.parametrize("name", ["frost", "glare", "fog"])
def test_pictures_without_colour_get_grey_light(name):
    ends = {each.name: each.high for each in BY_NAME[name].theta}
    four, one = under(name, flat(0.2, channels=4), **ends), under(name, flat(0.2), **ends)
    torch.testing.assert_close(four, one.expand(four.shape))
    assert float((one - 0.2).mean()) > 0.05


@pytest.mark.parametrize(("x", "y"), [(0.0, -0.3), (0.25, 0.1), (-0.4, -0.4)])
def test_the_sun_is_at_the_requested_position(x, y):
    seen = under("glare", flat(0.1, n=1, side=100), strength=0.5, x=x, y=y, size=0.05)[0, 0]
    row, column = divmod(int(seen.argmax()), 100)
    assert (column + 0.5) / 100 - 0.5 == pytest.approx(x, abs=0.02)
    assert (row + 0.5) / 100 - 0.5 == pytest.approx(y, abs=0.02)


def test_glare_has_eight_rays():
    seen = under("glare", flat(0.1, n=1), strength=0.5, x=0.0, y=0.0, size=0.05)
    torch.testing.assert_close(torch.rot90(seen, 1, (2, 3)), seen, atol=1e-9, rtol=0)
    at = torch.arange(360, dtype=torch.float64) * (math.pi / 180)
    ring = (47.5 + 25 * torch.stack([at.sin(), at.cos()])).round().long()
    around = seen[0, 0, ring[0], ring[1]]
    strength = torch.fft.rfft(around - around.mean()).abs()
    assert int(strength[1:13].argmax()) + 1 == 8


def test_glare_lightens_everything_and_most_of_all_near_the_sun():
    pictures = torch.rand(2, 1, 64, 64, dtype=torch.float64) * 0.9
    seen = under("glare", pictures, strength=0.5, y=-0.5, size=0.08)
    assert bool((seen >= pictures).all())
    lit = ((seen - pictures) / (1 - pictures)).mean((0, 1, 3))
    assert float(lit[:8].mean()) > 2 * float(lit[-8:].mean()) > 0.05


def test_a_shadow_removes_a_share_of_the_light():
    pictures = torch.rand(3, 3, 64, 64, dtype=torch.float64) * 0.8 + 0.1
    left = under("shadow", pictures, strength=0.6, width=0.4) / pictures
    torch.testing.assert_close(left, left[:, :1].expand(left.shape))
    assert float(left.min()) == pytest.approx(0.4)
    assert float(left.max()) == pytest.approx(1.0)


def test_a_shadow_has_the_requested_width():
    for width in (0.3, 0.6):
        dark = 1 - under("shadow", flat(1.0, n=64), strength=0.5, width=width)
        assert float(dark.mean() / 0.5) == pytest.approx(width, rel=0.1)


def test_a_shadow_is_at_the_requested_position():
    at = (torch.arange(96, dtype=torch.float64) + 0.5) / 96 - 0.5
    for offset in (-0.2, 0.2):
        dark = 1 - under("shadow", flat(1.0, n=64), strength=0.5, width=0.3, offset=offset)
        assert float((dark.sum((0, 1, 2)) * at).sum() / dark.sum()) == pytest.approx(offset, abs=0.03)


def test_a_soft_edge_is_wider():
    hard, soft = (under("shadow", flat(1.0), strength=0.5, softness=softness) for softness in (0.02, 0.15))
    partly = [float(((each > 0.51) & (each < 0.99)).double().mean()) for each in (hard, soft)]
    assert partly[1] > 4 * partly[0] > 0


def test_a_stop_halves_the_light():
    pictures = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    seen = under("low_light", pictures, stops=1.0)
    torch.testing.assert_close(seen**2.2, pictures**2.2 / 2, atol=1e-9, rtol=1e-6)


def test_photon_noise_grows_with_the_light():
    for value in (0.3, 0.6):
        seen = under("low_light", flat(value, n=8, channels=3), noise=0.05)
        assert float(seen.mean()) == pytest.approx(value, abs=1e-3)
        assert float(seen.var()) == pytest.approx(0.05**2 * (0.5 * value + 0.1), rel=0.03)


def test_colours_fade_to_their_luminance():
    pictures = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    seen = under("low_light", pictures, fade=1.0)
    grey = 0.299 * pictures[:, 0] + 0.587 * pictures[:, 1] + 0.114 * pictures[:, 2]
    torch.testing.assert_close(seen, grey[:, None].expand(seen.shape), atol=1e-9, rtol=0)
