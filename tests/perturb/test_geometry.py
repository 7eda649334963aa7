"""Geometry: exact rotations and shifts, and each map checked point by point."""

import math

import pytest
import torch
import torch.nn.functional as F

from themis.perturb.context import Context
from themis.perturb.geometry import GEOMETRY
from themis.perturb.perturbation import perturb

BY_NAME = {each.name: each for each in GEOMETRY}


def disturbed(name, pictures, *theta):
    values = torch.tensor([theta], dtype=pictures.dtype).repeat(len(pictures), 1)
    return perturb(BY_NAME[name], pictures, values, torch.arange(len(pictures)), Context())


def noise(*shape):
    return torch.rand(2, 3, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def dot(x, y, size=81, width=0.03):
    """A soft dot at a position, in shares of the side from the centre."""
    at = (torch.arange(size, dtype=torch.float64) - (size - 1) / 2) / size
    return (-((at[None] - x) ** 2 + (at[:, None] - y) ** 2) / (2 * width**2)).exp()[None, None]


def centre(picture):
    """The position of the dot, x and y."""
    size = picture.shape[-1]
    at = (torch.arange(size, dtype=torch.float64) - (size - 1) / 2) / size
    weight = picture[0, 0] / picture.sum()
    return float((weight * at[None]).sum()), float((weight * at[:, None]).sum())


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_a_quarter_turn_is_exact_and_counter_clockwise(turns):
    pictures = noise(12, 12)
    torch.testing.assert_close(disturbed("rotate", pictures, 90.0 * turns), pictures.rot90(turns, (2, 3)))


def test_rotating_there_and_back_gives_the_picture():
    picture = dot(0.1, -0.15, width=0.08)
    back = disturbed("rotate", disturbed("rotate", picture, 20.0), -20.0)
    torch.testing.assert_close(back, picture, atol=0.02, rtol=0)


def test_a_shift_by_whole_pixels_moves_them_and_mirrors_the_edge():
    pictures = noise(10, 20)
    moved = disturbed("shift", pictures, 0.3, -0.2)  # three to the right, two up
    torch.testing.assert_close(moved[:, :, :-2, 3:], pictures[:, :, 2:, :-3])
    torch.testing.assert_close(moved[:, :, :-2, :3], pictures[:, :, 2:, :3].flip(3))
    torch.testing.assert_close(moved[:, :, -2:, 3:], pictures[:, :, -2:, :-3].flip(2))


def test_half_a_pixel_is_the_mean_of_two():
    pictures = noise(10, 10)
    moved = disturbed("shift", pictures, 0.05, 0.0)
    torch.testing.assert_close(moved[..., 1:], (pictures[..., 1:] + pictures[..., :-1]) / 2)


def test_scale_by_two_is_a_bilinear_enlargement_of_the_middle():
    pictures = noise(16, 16)
    large = F.interpolate(pictures, scale_factor=2, mode="bilinear", align_corners=False)
    torch.testing.assert_close(disturbed("scale", pictures, 2.0), large[:, :, 8:24, 8:24])


def test_scale_keeps_wide_pictures_in_proportion():
    picture = torch.zeros(1, 1, 40, 80, dtype=torch.float64)
    picture[:, :, 10:30, 30:50] = 1
    small = disturbed("scale", picture, 0.5)[0, 0] > 0.5
    assert small[10:30, 40].sum() == 10
    assert small[20, 20:60].sum() == 10


@pytest.mark.parametrize(("lean", "slope"), [(15.0, 0.0), (0.0, 15.0), (-10.0, 0.0)])
def test_shear_moves_a_dot_in_proportion_to_its_height_or_side(lean, slope):
    x, y = 0.12, -0.2
    at_x, at_y = centre(disturbed("shear", dot(x, y), lean, slope))
    assert at_x == pytest.approx(x - math.tan(math.radians(lean)) * y, abs=2e-3), "what is above leans to the right"
    assert at_y == pytest.approx(y - math.tan(math.radians(slope)) * x, abs=2e-3), "what is right of it rises"


@pytest.mark.parametrize(("back", "aside"), [(30.0, 0.0), (0.0, 30.0), (25.0, -20.0), (-35.0, 35.0)])
def test_perspective_sees_a_tilted_board_as_a_pinhole_does(back, aside):
    x, y, distance = 0.1, -0.14, 1.5
    a, b = math.radians(back), math.radians(aside)
    about_level = torch.tensor([[1, 0, 0], [0, math.cos(a), math.sin(a)], [0, -math.sin(a), math.cos(a)]])
    about_upright = torch.tensor([[math.cos(b), 0, -math.sin(b)], [0, 1, 0], [math.sin(b), 0, math.cos(b)]])
    across, down, behind = (about_upright @ about_level @ torch.tensor([x, y, 0.0])).tolist()
    seen = [distance * each / (distance + behind) for each in (across, down)]
    assert centre(disturbed("perspective", dot(x, y, 161, 0.02), back, aside)) == pytest.approx(seen, abs=2e-3)


def test_a_board_tilted_back_has_its_upper_edge_away():
    picture = torch.zeros(1, 1, 81, 81, dtype=torch.float64)
    picture[..., 20:61] = 1
    rows = disturbed("perspective", picture, 30.0, 0.0)[0, 0].sum(1)
    assert rows[0] < rows[40] < rows[-1]


def test_elastic_is_smooth_bounded_by_its_amount_and_grows_with_it():
    at = (torch.arange(64, dtype=torch.float64) - 31.5) / 64
    ramp = (0.5 + at / 2).expand(1, 1, 64, 64)  # its value is the position that was sampled
    small, large = (disturbed("elastic", ramp, amount, 0.3) - ramp for amount in (0.02, 0.04))
    inside = (..., slice(8, -8), slice(8, -8))
    assert (2 * small[inside]).abs().max() <= 0.02
    torch.testing.assert_close(large[inside], 2 * small[inside], atol=1e-6, rtol=0)
    assert small[inside].diff(dim=3).abs().max() < 0.25 * small[inside].abs().max(), "neighbours move alike"
    assert small[inside].std() > 0.001


def test_elastic_changes_large_and_small_pictures_alike():
    picture = dot(0.0, 0.0, 64, 0.1)
    twice = dot(0.0, 0.0, 128, 0.1)
    pulled, pulled_twice = disturbed("elastic", picture, 0.04, 0.2), disturbed("elastic", twice, 0.04, 0.2)
    torch.testing.assert_close(F.avg_pool2d(pulled_twice, 2), pulled, atol=0.03, rtol=0)
    assert (pulled - picture).abs().max() > 0.05
