"""The common corruptions against other implementations: loops over pixels, SciPy and Pillow."""

import math

import numpy as np
import pytest
import torch
from matplotlib.colors import hsv_to_rgb, rgb_to_hsv
from PIL import Image
from scipy.ndimage import zoom

from themis.compute.rng import Rng
from themis.perturb import disturb

SIDE = 32


def picture(seed=0):
    """A picture of bytes `[32, 32, 3]`."""
    return np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3)).astype(np.uint8)


def disturbed(spec, pixels, **theta):
    inputs = torch.from_numpy(pixels.astype(np.float32) / 255).permute(2, 0, 1)[None]
    return disturb(spec, inputs, theta)[0].permute(1, 2, 0).numpy() * 255


@pytest.mark.parametrize("size", [0.95, 0.9, 0.85, 0.75, 0.65, 0.3])
def test_coarse_pixels_are_those_of_pillow(size):
    small = Image.fromarray(picture()).resize((int(SIDE * size),) * 2, Image.Resampling.BOX)
    expected = np.asarray(small.resize((SIDE, SIDE), Image.Resampling.BOX), dtype=float)
    assert np.abs(disturbed("coarse_pixels", picture(), size=size) - expected).max() <= 1.01, "Pillow rounds twice"


@pytest.mark.parametrize("shift", [0.05, 0.3, 0.5])
def test_hsv_brightness_raises_the_value(shift):
    pixels = picture()
    pixels[0] = 0  # black turns grey
    hsv = rgb_to_hsv(pixels / 255.0)
    hsv[..., 2] = np.clip(hsv[..., 2] + shift, 0, 1)
    np.testing.assert_allclose(disturbed("hsv_brightness", pixels, shift=shift), hsv_to_rgb(hsv) * 255, atol=1e-3)


def test_channel_contrast_keeps_the_mean_of_each_channel():
    pixels = picture()
    means = pixels.mean((0, 1), keepdims=True)
    expected = means + 0.05 * (pixels - means)
    np.testing.assert_allclose(disturbed("channel_contrast", pixels, change=-0.95), expected, atol=1e-3)


@pytest.mark.parametrize(("amount", "copies"), [(0.06, 7), (0.11, 12), (0.25, 26)])
def test_zoom_copies_are_those_of_scipy(amount, copies):
    pixels, total = picture() / 255.0, picture() / 255.0
    for factor in 1 + np.linspace(0, amount, copies):
        n = math.ceil(SIDE / factor)
        first = (SIDE - n) // 2
        enlarged = zoom(pixels[first : first + n, first : first + n], (factor, factor, 1), order=1)
        trim = (len(enlarged) - SIDE) // 2
        total = total + enlarged[trim : trim + SIDE, trim : trim + SIDE]
    found = disturbed("zoom_copies(amount=0:0.3,copies=7:26)", picture(), amount=amount, copies=copies)
    np.testing.assert_allclose(found, total / (copies + 1) * 255, atol=0.05)


@pytest.mark.parametrize(("radius", "softness"), [(0.3, 0.4), (1, 0.2), (1.5, 0.1), (4, 0.5)])
def test_a_point_becomes_a_soft_disc(radius, softness):
    point = np.zeros((SIDE, SIDE, 3), np.uint8)
    point[16, 16] = 255
    found = disturbed(
        "disc_blur(radius=0:0.2,softness=0.05:1)", point, radius=(radius + 0.01) / SIDE, softness=softness
    )
    down, across = np.mgrid[:SIDE, :SIDE] - 16
    disc = (down**2 + across**2 <= radius**2).astype(float)
    beside = math.exp(-0.5 / softness**2)
    for axis in (0, 1):
        disc = disc + beside * (np.roll(disc, 1, axis) + np.roll(disc, -1, axis))
    np.testing.assert_allclose(found[..., 0], disc / disc.sum() * 255, atol=1e-3)


@pytest.mark.parametrize("angle", [-40.0, 0.0, 13.0, 45.0])
def test_a_point_becomes_a_fading_line_of_pixels(angle):
    point, sigma = np.zeros((SIDE, SIDE, 3), np.uint8), 2.0
    point[16, 16] = 255
    expected = np.zeros((SIDE, SIDE))
    steps = np.arange(7)  # three standard deviations
    weights = np.exp(-0.5 * (steps / sigma) ** 2)
    for step, weight in zip(steps, weights / weights.sum(), strict=True):
        down, across = (math.ceil(step * part(math.radians(angle)) - 0.5) for part in (math.sin, math.cos))
        expected[16 - down, 16 - across] += 255 * weight
    found = disturbed("fading_motion(sigma=0:0.0625)", point, sigma=sigma / SIDE, angle=angle)
    np.testing.assert_allclose(found[..., 0], expected, atol=1e-3)


@pytest.mark.parametrize(("reach", "passes"), [(1, 1), (1, 2), (3, 1), (4, 2)])
def test_glass_replaces_pixel_by_pixel(reach, passes):
    pixels, rng = picture(), Rng(torch.zeros(1, dtype=torch.long))
    expected = pixels.astype(float)
    for _ in range(passes):
        down, across, _ = rng.uniform(3, SIDE, SIDE)[0].numpy()
        for row in range(SIDE - reach, reach, -1):
            for column in range(SIDE - reach, reach, -1):
                steps = (math.floor((2 * draw[row, column] - 1) * reach) for draw in (down, across))
                expected[row, column] = expected[row + next(steps), column + next(steps)]
    found = disturbed("glass(reach=0:0.2)", pixels, reach=reach / SIDE, passes=float(passes))
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_values_of_a_channel_turn_black_or_white_on_their_own():
    found = disturbed("channel_impulse", np.full((SIDE, SIDE, 3), 128, np.uint8), share=0.1)
    black, white = found < 1, found > 254
    assert 0.06 < (black | white).mean() < 0.14
    assert 0.3 < black.sum() / (black | white).sum() < 0.7
    assert ((black | white).sum(2) == 1).sum() > 10 * ((black | white).sum(2) == 3).sum()


def test_fog_hides_the_picture_and_makes_nothing_brighter_than_its_brightest_value():
    pixels = picture() // 2
    found = disturbed("plasma_fog", pixels, thickness=1.5, decay=1.75)
    assert found.max() <= pixels.max() + 1e-3
    assert found.std() < 0.6 * pixels.std()


def test_snow_falls_both_ways_and_whitens():
    night = np.zeros((SIDE, SIDE, 3), np.uint8)
    how = {"mean": 0.1, "deviation": 0.2, "size": 1 / SIDE, "threshold": 0.5, "sigma": 4 / SIDE}
    found = disturbed("snowfall(sigma=0:0.2,size=0.01:0.1)", night, **how, whiteness=0.1)
    assert found.min() == pytest.approx(0.05 * 255, abs=1), "half of the share that whitens"
    assert found.max() > 60
    np.testing.assert_allclose(found, found[::-1, ::-1], atol=1e-3)


def test_jitter_is_an_affine_map():
    ramp = np.tile(np.arange(SIDE, dtype=np.uint8)[:, None, None] * 4, (1, SIDE, 3))
    found = disturbed("jitter", ramp, amount=0.08)[8:24, 8:24, 0]
    np.testing.assert_allclose(np.diff(found, axis=0).std(), 0, atol=0.01)
    np.testing.assert_allclose(np.diff(found, axis=1).std(), 0, atol=0.01)
    assert abs(np.diff(found, axis=0).mean() - 4) > 0.01 or abs(np.diff(found, axis=1).mean()) > 0.01
