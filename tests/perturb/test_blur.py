"""Blurs, compared with closed forms."""

import math

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter
from scipy.special import ive

from themis.perturb import PERTURBATIONS, Context, choose_perturbation, disturb, perturb
from themis.perturb.camera import CAMERA
from themis.perturb.perturbation import combine

BY_NAME = {each.name: each for each in CAMERA}
BLURS = [name for name in BY_NAME if name.endswith("blur")]
SIDE = 101
KERNELS = [("gaussian_blur", (0.02,)), ("motion_blur", (0.08, 30.0)), ("defocus_blur", (0.03,))]


def blurred(name, pictures, *values):
    theta = torch.tensor([values], dtype=pictures.dtype).expand(len(pictures), -1)
    return perturb(BY_NAME[name], pictures, theta, torch.arange(len(pictures)), Context())


def spot(name, *values):
    """The result for one bright pixel on black, `[SIDE, SIDE]`."""
    picture = torch.zeros(1, 1, SIDE, SIDE, dtype=torch.float64)
    picture[..., SIDE // 2, SIDE // 2] = 1
    return blurred(name, picture, *values)[0, 0].numpy()


def spread(kernel):
    """Variances across and down, and the covariance, in pixels squared."""
    at = np.arange(SIDE) - SIDE // 2
    x, y = np.meshgrid(at, at)
    return [(kernel * each).sum() for each in (x * x, y * y, x * y)]


@pytest.mark.parametrize(("name", "values"), KERNELS)
def test_no_light_is_lost_or_displaced(name, values):
    kernel = spot(name, *values)
    assert kernel.min() > -1e-12
    assert math.isclose(kernel.sum(), 1, abs_tol=1e-9)
    np.testing.assert_allclose(kernel, kernel[::-1, ::-1], atol=1e-12)
    flat = torch.full((1, 3, 20, 30), 0.7)
    torch.testing.assert_close(blurred(name, flat, *values), flat, atol=1e-6, rtol=0)


@pytest.mark.parametrize("pixels", [0.2, 0.7, 1.5, 3.0])
def test_gaussian_blur_is_the_heat_kernel(pixels):
    kernel = spot("gaussian_blur", pixels / SIDE)
    at = np.abs(np.arange(SIDE) - SIDE // 2)
    row = ive(at, pixels**2)
    np.testing.assert_allclose(kernel, np.outer(row, row), atol=1e-4)
    np.testing.assert_allclose(spread(kernel), [pixels**2, pixels**2, 0], atol=0.02)


def test_gaussian_blur_is_close_to_a_sampled_gaussian():
    pictures = torch.rand(1, 1, 60, 80, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = gaussian_filter(pictures[0, 0].numpy(), 2.0, mode="nearest", truncate=6)
    np.testing.assert_allclose(blurred("gaussian_blur", pictures, 2.0 / 60)[0, 0].numpy(), expected, atol=0.012)


def test_motion_blurs_only_along_its_angle():
    level, upright, rising = (spot("motion_blur", 0.08, angle) for angle in (0.0, 90.0, 45.0))
    middle = SIDE // 2
    assert math.isclose(level[middle].sum(), 1, abs_tol=1e-9)
    np.testing.assert_allclose(upright, level.T, atol=1e-9)
    across, down, both = spread(rising)
    assert math.isclose(across, down, rel_tol=1e-6)
    assert both < -0.9 * across, "anticlockwise: to the right is up"
    np.testing.assert_allclose(spot("motion_blur", 0.08, 20.0), spot("motion_blur", 0.08, 200.0), atol=1e-9)


@pytest.mark.parametrize("pixels", [4.0, 6.0, 9.5])
@pytest.mark.parametrize("angle", [0.0, 25.0, -60.0])
def test_motion_has_the_requested_length(pixels, angle):
    across, down, _ = spread(spot("motion_blur", pixels / SIDE, angle))
    length = math.sqrt(12 * (across + down))
    assert abs(length - pixels) < 0.9


@pytest.mark.parametrize("angle", [-70.0, 0.0, 13.0, 45.0])
def test_no_motion_means_no_blur_at_any_angle(angle):
    pictures = torch.rand(2, 3, 17, 23)
    assert torch.equal(blurred("motion_blur", pictures, 0.0, angle), pictures)


def test_defocus_is_a_uniform_disc():
    kernel = spot("defocus_blur", 0.04)
    at = np.arange(SIDE) - SIDE // 2
    far = np.hypot(at[:, None], at)
    radius = 0.04 * SIDE
    np.testing.assert_allclose(kernel[far <= radius], kernel.max(), atol=1e-12)
    assert (kernel[far >= radius + 1] == 0).all()
    np.testing.assert_allclose(kernel, kernel.T, atol=1e-12)
    assert math.isclose(kernel.max(), 1 / (math.pi * (radius + 0.5) ** 2), rel_tol=0.03)


def test_zoom_averages_larger_copies():
    at = (torch.arange(41, dtype=torch.float64) - 20) / 50
    slope = (0.5 + at.view(1, 1, 1, -1) + 0 * at.view(1, 1, -1, 1)).contiguous()
    zoomed = blurred("zoom_blur", slope, 0.3)
    shrunk = np.mean([1.3 ** (-k / 3) for k in range(4)])
    torch.testing.assert_close(zoomed, 0.5 + (slope - 0.5) * shrunk, atol=1e-6, rtol=0)


def test_zoom_blurs_the_edge_and_spares_the_centre():
    checks = ((torch.arange(65)[:, None] + torch.arange(65)) // 2 % 2).float().view(1, 1, 65, 65)
    change = (blurred("zoom_blur", checks, 0.15) - checks).abs()[0, 0]
    assert change[32, 32] < 1e-4
    assert change[:8].mean() > 3 * change[30:35, 30:35].mean()


@pytest.mark.parametrize("name", BLURS)
@pytest.mark.parametrize("shape", [(1, 28, 28), (1, 9, 7), (3, 23, 19)])
def test_a_single_picture_is_blurred_as_in_a_batch(name, shape):
    pictures = torch.rand(5, *shape, generator=torch.Generator().manual_seed(1))
    theta = torch.tensor([[each.low + 0.7 * (each.high - each.low) for each in BY_NAME[name].theta]]).repeat(5, 1)
    whole = perturb(BY_NAME[name], pictures, theta, torch.arange(5), Context())
    for k in range(5):
        alone = perturb(BY_NAME[name], pictures[k : k + 1], theta[:1], torch.tensor([k]), Context())
        assert torch.equal(alone, whole[k : k + 1])


@pytest.mark.parametrize("name", BLURS)
def test_computing_slopes_changes_no_value(name):
    pictures = torch.rand(3, 3, 30, 26, generator=torch.Generator().manual_seed(2))
    theta = torch.tensor([[each.high * 0.6 for each in BY_NAME[name].theta]]).repeat(3, 1)
    plain = perturb(BY_NAME[name], pictures, theta, torch.arange(3), Context())
    sloped = perturb(BY_NAME[name], pictures, theta.clone().requires_grad_(), torch.arange(3), Context())
    assert sloped.requires_grad
    assert torch.equal(sloped.detach(), plain)


@pytest.mark.parametrize("name", BLURS)
def test_perturbations_before_a_blur_keep_their_slope(name):
    both = combine(BY_NAME["contrast"], BY_NAME[name])
    pictures = 0.3 + 0.4 * torch.rand(1, 1, 20, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    middle = torch.tensor([[0.1, *(each.high * 0.6 for each in BY_NAME[name].theta)]], dtype=torch.float64)
    weights = torch.rand(20, 24, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def value(theta):
        return (perturb(both, pictures, theta, torch.tensor([0]), Context()) * weights).sum()

    theta = middle.clone().requires_grad_()
    (slope,) = torch.autograd.grad(value(theta), theta)
    for k in range(theta.shape[1]):
        step = torch.zeros_like(middle)
        step[0, k] = 1e-6 * max(1, middle[0, k])
        expected = (value(middle + step) - value(middle - step)) / (2 * step[0, k])
        torch.testing.assert_close(slope[0, k], expected, rtol=1e-4, atol=1e-6)


WIDE = {
    "gaussian_blur": "gaussian_blur(sigma=0:0.2)",
    "motion_blur": "motion_blur(length=0:0.5)",
    "defocus_blur": "defocus_blur(radius=0:0.2)",
}


@pytest.mark.parametrize("name", WIDE)
def test_a_wider_range_gives_the_same_result_where_both_are_defined(name):
    picture = torch.rand(3, 1, 57, 64, generator=torch.Generator().manual_seed(0))
    theta = {PERTURBATIONS[name].theta[0].name: torch.tensor([0.005, 0.01, 0.02])}
    assert torch.equal(disturb(WIDE[name], picture, theta), disturb(name, picture, theta))


@pytest.mark.parametrize(
    "perturbation",
    [
        choose_perturbation("gaussian_blur(sigma=0:0.08)"),
        choose_perturbation("gaussian_blur", 4),
        choose_perturbation("gaussian_blur + brightness", 4),
        choose_perturbation("brightness + gaussian_blur(sigma=0:0.08)"),
    ],
    ids=lambda each: each.name,
)
def test_kernels_are_large_enough_for_any_range(perturbation):
    picture = torch.zeros(1, 1, SIDE, SIDE, dtype=torch.float64)
    picture[..., SIDE // 2, SIDE // 2] = 1
    kernel = disturb(perturbation, picture, {"sigma": 0.08})[0, 0].numpy()
    np.testing.assert_allclose(spread(kernel)[:2], (0.08 * SIDE) ** 2, rtol=2e-2)


def test_kernels_are_large_enough_where_theta_is_held_or_changes_over_time():
    picture = torch.zeros(1, 1, SIDE, SIDE, dtype=torch.float64)
    picture[..., SIDE // 2, SIDE // 2] = 1
    line = disturb("motion_blur(length=0.4)", picture, {"angle": 0.0})[0, 0].numpy()
    assert (line.sum(0) > 1e-6).sum() == pytest.approx(0.4 * SIDE, abs=2)
    clip = choose_perturbation("over_time(gaussian_blur)", 4)
    frames = disturb(clip, picture[:, None].expand(1, 2, 1, SIDE, SIDE), {"sigma_first": 0.0, "sigma_last": 0.08})
    np.testing.assert_allclose(spread(frames[0, 1, 0].numpy())[:2], (0.08 * SIDE) ** 2, rtol=2e-2)
