"""Light and colour, compared with the formulas that define them."""

import colorsys
import math

import numpy as np
import pytest
import torch

from themis.perturb import Context, perturb
from themis.perturb.camera import CAMERA
from themis.perturb.picture import LUMA

BY_NAME = {each.name: each for each in CAMERA}


def lit(name, pictures, *values):
    theta = torch.tensor([values], dtype=pictures.dtype).expand(len(pictures), -1)
    return perturb(BY_NAME[name], pictures, theta, torch.arange(len(pictures)), Context())


def pictures(channels=3, low=0.0, high=1.0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    return low + (high - low) * torch.rand(4, channels, 12, 10, generator=draw, dtype=dtype)


def luma(colours):
    return (colours * torch.tensor(LUMA, dtype=colours.dtype).view(1, 3, 1, 1)).sum(1, keepdim=True)


def of_colour(*rgb):
    return torch.tensor(rgb, dtype=torch.float64).view(1, 3, 1, 1)


def test_brightness_shifts_and_clips():
    x = pictures()
    torch.testing.assert_close(lit("brightness", x, -0.2), (x - 0.2).clamp(0, 1))
    torch.testing.assert_close(lit("brightness", x, 0.2), (x + 0.2).clamp(0, 1))


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("change", [-0.6, 0.3])
def test_contrast_scales_about_each_pictures_mean(channels, change):
    x = pictures(channels, 0.3, 0.7) + torch.tensor([-0.1, 0.0, 0.05, 0.1]).view(4, 1, 1, 1)
    made = lit("contrast", x, change)
    torch.testing.assert_close(made.mean((1, 2, 3)), x.mean((1, 2, 3)))
    torch.testing.assert_close(made.std((1, 2, 3)), x.std((1, 2, 3)) * (1 + change))
    flat = lit("contrast", x, -1.0)
    assert flat.flatten(1).std(1).max() < 1e-12


def test_no_saturation_gives_the_luma_and_more_preserves_it():
    x = pictures(3, 0.35, 0.65)
    torch.testing.assert_close(lit("saturation", x, -1.0), luma(x).expand_as(x))
    stronger = lit("saturation", x, 0.8)
    torch.testing.assert_close(luma(stronger), luma(x))
    torch.testing.assert_close(stronger - luma(stronger), 1.8 * (x - luma(x)))


@pytest.mark.parametrize("name", ["saturation", "hue"])
def test_grey_has_no_colour_to_change(name):
    grey = pictures(1).expand(-1, 3, -1, -1).contiguous()
    torch.testing.assert_close(lit(name, grey, 1.0 if name == "saturation" else 60.0), grey, atol=2e-6, rtol=0)


@pytest.mark.parametrize("angle", [-50.0, 20.0, 60.0])
def test_hue_rotates_the_chroma_plane(angle):
    x = pictures(3, 0.4, 0.6)
    made = lit("hue", x, angle)
    for before, after in zip(x[0].flatten(1).T, made[0].flatten(1).T, strict=True):
        (y, *chroma), (y_after, *turned) = colorsys.rgb_to_yiq(*before.tolist()), colorsys.rgb_to_yiq(*after.tolist())
        assert math.isclose(y, y_after, abs_tol=2e-3)
        expected = complex(*chroma) * np.exp(-1j * math.radians(angle))
        assert abs(expected - complex(*turned)) < 2e-3


def test_hue_goes_from_red_through_yellow_to_green_and_full_circle():
    red, green, blue = lit("hue", of_colour(0.7, 0.3, 0.3), 40.0).flatten().tolist()
    assert green > 0.35 > 0.3 > blue
    red, green, blue = lit("hue", of_colour(0.7, 0.3, 0.3), 120.0).flatten().tolist()
    assert green > max(red, blue)
    x = pictures(3, 0.3, 0.7)
    torch.testing.assert_close(lit("hue", x, 360.0), x, atol=1e-9, rtol=0)


@pytest.mark.parametrize("stops", [-1.0, -0.3, 0.5, 1.0])
def test_gamma_is_a_power_that_preserves_black_and_white(stops):
    x = pictures(2)
    torch.testing.assert_close(lit("gamma", x, stops), x ** (2.0**stops))
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64).view(1, 1, 1, 2)
    torch.testing.assert_close(lit("gamma", ends, stops), ends, atol=2e-4, rtol=0)


@pytest.mark.parametrize("stops", [-1.0, 0.5, 1.0])
def test_exposure_is_close_to_more_light_on_the_srgb_curve(stops):
    values = np.linspace(0.1, 0.7, 13)
    light = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4) * 2**stops
    expected = np.where(light <= 0.0031308, light * 12.92, 1.055 * light ** (1 / 2.4) - 0.055)
    made = lit("exposure", torch.tensor(values).view(1, 1, 1, -1), stops).flatten().numpy()
    np.testing.assert_allclose(made, expected.clip(0, 1), atol=0.025)


def test_exposure_adds_up_in_stops():
    x = pictures(3, 0.0, 0.4)
    torch.testing.assert_close(lit("exposure", lit("exposure", x, 0.7), -0.7), x)
    torch.testing.assert_close(lit("exposure", x, 1.1), lit("exposure", x, 2.2) / math.sqrt(2))


def test_a_vignette_darkens_the_corners_by_its_strength_and_not_the_middle():
    white = torch.ones(1, 1, 200, 300, dtype=torch.float64)
    made = lit("vignette", white, 0.6, 0.4)[0, 0]
    assert abs(made[0, 0] - 0.4) < 0.01
    assert bool((made[80:120, 120:180] == 1).all())
    torch.testing.assert_close(made, made.flip(0))
    torch.testing.assert_close(made, made.flip(1))
    row = made[100, 150:]
    assert bool((row.diff() <= 0).all()), "never brighter outwards"


def test_a_smaller_bright_middle_is_darker_everywhere_outside():
    white = torch.ones(1, 1, 60, 60, dtype=torch.float64)
    assert bool((lit("vignette", white, 0.6, 0.2) <= lit("vignette", white, 0.6, 0.5)).all())


@pytest.mark.parametrize("name", list(BY_NAME))
@pytest.mark.parametrize("shape", [(3, 23, 19), (3, 3, 5), (3, 120, 130)])
def test_a_picture_changes_the_same_at_any_position_in_a_batch(name, shape):
    x = torch.rand(5, *shape, generator=torch.Generator().manual_seed(1))
    theta = torch.tensor([[each.low + 0.7 * (each.high - each.low) for each in BY_NAME[name].theta]]).repeat(5, 1)
    whole = perturb(BY_NAME[name], x, theta, torch.arange(5), Context())
    for k in range(5):
        assert torch.equal(
            perturb(BY_NAME[name], x[k : k + 1], theta[:1], torch.tensor([k]), Context()), whole[k : k + 1]
        )
