"""The sensor: block means, shares of pixels, stripes, edges of a patch, rows in time."""

import math

import pytest
import torch
import torch.nn.functional as F

from themis.compute.rng import Rng
from themis.perturb import PERTURBATIONS
from themis.perturb.context import Context
from themis.perturb.perturbation import perturb


def disturbed(name, pictures, *theta):
    values = torch.tensor([theta], dtype=pictures.dtype).repeat(len(pictures), 1)
    return perturb(PERTURBATIONS[name], pictures, values, torch.arange(len(pictures)) * 10**10, Context())


def smooth(n=1, size=64, channels=3):
    draw = torch.Generator().manual_seed(3)
    coarse = 0.1 + 0.8 * torch.rand(n, channels, 8, 8, generator=draw)
    return F.interpolate(coarse, (size, size), mode="bicubic", align_corners=False).clamp(0, 1)


@pytest.mark.parametrize("block", [4, 8, 16])
def test_pixelate_fills_blocks_with_about_their_means(block):
    pictures = smooth()
    blocks = F.interpolate(F.avg_pool2d(pictures, block), scale_factor=block)
    made = disturbed("pixelate", pictures, block / 64)
    assert (made - blocks).abs().mean() < 0.3 * (pictures - blocks).abs().mean()
    inside = made.view(1, 3, 64 // block, block, 64 // block, block)[:, :, :, 1:-1, :, 1:-1]
    assert (inside.amax((3, 5)) - inside.amin((3, 5))).max() < 0.05, "one colour each"


def test_pixelate_preserves_uniform_areas_and_blocks_below_a_pixel_do_almost_nothing():
    even = torch.full((1, 3, 33, 47), 0.4)
    torch.testing.assert_close(disturbed("pixelate", even, 0.2), even, atol=1e-5, rtol=0)
    pictures = smooth()
    torch.testing.assert_close(disturbed("pixelate", pictures, 0.2 / 64), pictures, atol=2e-3, rtol=0)


def test_the_share_of_dead_pixels_is_as_requested_and_they_stay_dead():
    pictures = torch.full((4, 3, 100, 100), 2.0)  # outside the range of dead pixels
    apply = PERTURBATIONS["dead_pixels"].apply

    def dead(share):
        return apply(pictures, torch.full((4, 1), share), Rng(torch.arange(4)), Context()) != 2

    few, many = dead(0.02), dead(0.04)
    assert many.float().mean() == pytest.approx(0.04 * 1.125, rel=0.1), "with those that are so in part"
    assert bool((few <= many).all())
    assert torch.equal(many[:, 0], many[:, 2]), "all channels of a pixel"


def test_dead_pixels_have_all_levels_of_brightness():
    made = disturbed("dead_pixels", torch.full((4, 1, 100, 100), 0.5), 0.05)
    values = made[made != 0.5]
    assert values.min() < 0.05
    assert values.max() > 0.95
    assert values.mean() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(("angle", "along", "across"), [(0.0, 2, 3), (90.0, 3, 2), (-90.0, 3, 2)])
def test_stripes_are_uniform_along_and_differ_across(angle, along, across):
    grey = torch.full((1, 3, 60, 60), 0.5)
    made = disturbed("stripes", grey, 0.2, 0.1, angle) - grey
    assert made.diff(dim=along).abs().max() < 1e-4
    assert made.diff(dim=across).abs().max() > 0.02
    assert made.abs().max() <= 0.2
    assert torch.equal(made[:, 0], made[:, 1])


def test_a_stripe_has_the_requested_width():
    grey = torch.full((8, 1, 100, 100), 0.5)
    row = disturbed("stripes", grey, 0.2, 0.1, 0.0)[:, 0, 0]
    assert (row.diff().abs() < 1e-6).float().mean() > 0.6, "even inside"
    middles = row.view(8, 10, 10)[:, :, 4:6]
    assert (middles[:, :, 0] - middles[:, :, 1]).abs().max() < 1e-6
    assert (middles[:, :, 0].std(1) > 0.02).all()


def test_a_patch_hides_its_square_and_nothing_else():
    pictures = smooth(size=100)
    made = disturbed("occlusion", pictures, 0.1, -0.2, 0.3, 1.0)
    hidden = made[:, :, 18:42, 48:72]  # its centre is at 60, 30
    assert (hidden.amax((2, 3)) - hidden.amin((2, 3))).max() < 1e-6, "one colour"
    changed = (made != pictures).any(1)[0]
    assert changed.any(0).nonzero().aminmax() == (torch.tensor(43), torch.tensor(76))
    assert changed.any(1).nonzero().aminmax() == (torch.tensor(13), torch.tensor(46))


def test_the_effect_of_a_patch_is_its_area_times_its_opacity():
    black = torch.zeros(1, 1, 100, 100, dtype=torch.float64)
    whole, half = (disturbed("occlusion", black, 0.03, 0.07, 0.2, opacity) for opacity in (1.0, 0.5))
    torch.testing.assert_close(whole.sum() / whole.max(), torch.tensor(400.0).double(), rtol=1e-3, atol=0)
    torch.testing.assert_close(half, whole / 2)
    assert not disturbed("occlusion", black, 0.0, 0.0, 0.0, 1.0).any(), "of no size, it is not there"


def test_a_rolling_shutter_moves_rows_in_proportion_to_their_time():
    at = torch.arange(80, dtype=torch.float64)
    pole = (-((at - 39.5) ** 2) / 18).exp().expand(1, 1, 80, 80)

    def leans(*theta):
        made = disturbed("rolling_shear", pole, *theta)[0, 0]
        return ((made * at).sum(1) / made.sum(1) - 39.5) / 80

    time = (at - 39.5) / 80
    torch.testing.assert_close(leans(0.2, 0.0, 1.0), 0.2 * time, atol=1e-3, rtol=0)
    waved = 0.02 * torch.sin(2 * math.pi * 3 * time)
    torch.testing.assert_close(leans(0.0, 0.02, 3.0), waved, atol=1e-3, rtol=0)
