"""Blur of a camera that is out of focus, shaken or zoomed."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from themis.compute.rng import Rng
from themis.perturb.context import Context
from themis.perturb.perturbation import Perturbation, Theta, columns
from themis.perturb.picture import convolve, places, side

USUAL_SIGMA, USUAL_LENGTH, USUAL_RADIUS = 0.04, 0.1, 0.04
"""Blurs in shares of the shorter side up to which the sizes of kernels are the same whatever the range of theta is."""
KERNEL_DEVIATIONS = 3.5
"""Standard deviations of a Gaussian that its kernel covers: 0.05% lie beyond."""
SMALL_REACH = 6
"""Radius of a kernel in pixels below which a smaller kernel is not faster."""
SIZE_STEP = 1.6
"""The reach of a kernel relative to that of the next smaller one."""
PIXELS_PER_COPY = 32
"""Pixels of the shorter side per copy of zoom blur: by default, copies are at most about 2 pixels apart."""

Length = TypeVar("Length", float, Tensor)


def gaussian_blur(pictures: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """A soft picture: each point spreads like a Gaussian, as with a dirty or poor lens."""
    unit = side(pictures)

    def blurred(pictures: Tensor, theta: Tensor, reach: int) -> Tensor:
        kernel, *slopes = _kernel_and_slopes(lambda at: _heat_kernel((at * unit) ** 2, reach), theta)
        across = convolve(pictures, kernel[:, None])
        result = convolve(across, kernel[:, :, None])
        for slope in slopes:
            down = convolve(convolve(pictures.detach(), slope[:, None]), kernel[:, :, None])
            result = _with_slopes(result, theta, [down + convolve(across.detach(), slope[:, :, None])])
        return result

    return _by_reach(pictures, theta, context, USUAL_SIGMA, lambda sigma: KERNEL_DEVIATIONS * unit * sigma, blurred)


def motion_blur(pictures: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """A shaken picture: each point is drawn out into a line, as when the camera moves during the exposure."""
    unit = side(pictures)

    def kernel(at: Tensor, reach: int) -> Tensor:
        length, angle = columns(at, pictures[:, 0])
        x, y = _offsets(reach, at)
        cosine, sine = torch.cos(torch.deg2rad(angle)), torch.sin(torch.deg2rad(angle))
        along, off = x * cosine - y * sine, x * sine + y * cosine
        beyond = (along.abs() - _half_length(length * unit)).clamp_min(0)
        weight = (1 - beyond**2 - off**2).clamp_min(0) ** 2  # falls to zero at one pixel from the line
        return weight / weight.sum((1, 2), keepdim=True)

    blurred = partial(_convolved, kernel)
    return _by_reach(pictures, theta, context, USUAL_LENGTH, lambda length: _half_length(length * unit), blurred)


def defocus_blur(pictures: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """A picture out of focus: each point becomes a uniform disc, as with an open aperture."""
    unit = side(pictures)

    def kernel(at: Tensor, reach: int) -> Tensor:
        (radius,) = columns(at, pictures[:, 0])
        x, y = _offsets(reach, at)
        inside = (radius * unit + 1 - (x**2 + y**2).sqrt()).clamp(0, 1)
        weight = inside * inside * (3 - 2 * inside)
        return weight / weight.sum((1, 2), keepdim=True)

    blurred = partial(_convolved, kernel)
    return _by_reach(pictures, theta, context, USUAL_RADIUS, lambda radius: radius * unit, blurred)


def zoom_blur(pictures: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """A picture zoomed while it is taken: each point is drawn out away from the centre.

    The picture is averaged with an enlarged copy repeatedly, each time with the square of the zoom, which makes
    `2**doublings` copies.
    """
    (amount,) = columns(theta, pictures)
    doublings = max(math.ceil(math.log2(side(pictures) / PIXELS_PER_COPY)), 2)
    step = torch.log1p(amount) / (2**doublings - 1)
    (height, width), (x, y) = pictures.shape[2:], places(pictures)
    across, down = x * (2 * side(pictures) / width), y * (2 * side(pictures) / height)
    grid = torch.stack([across.expand(1, 1, height, width), down.expand(1, 1, height, width)], -1)[:, 0]
    for k in range(doublings):
        read = (grid * torch.exp(-step * 2**k)).to(pictures.dtype)
        pictures = torch.lerp(pictures, F.grid_sample(pictures, read, "bilinear", "border", align_corners=False), 0.5)
    return pictures


def _half_length(length: Length) -> Length:
    """Half the length of a line without its soft ends, so that with them it has this length; close to 0 for a pixel."""
    return length * length / (2 * length + 2)


def _heat_kernel(variance: Tensor, reach: int) -> Tensor:
    """The Gaussian of a pixel grid, `[tests, 2 * reach + 1]`: the solution of the heat equation for one pixel.

    Unlike a Gaussian sampled at the pixels, it is never negative, sums to one and has this variance (`[tests, 1]`, in
    pixels squared) however narrow it is.
    """
    size = 2 * reach + 1
    offset = torch.arange(-reach, reach + 1, dtype=variance.dtype, device=variance.device)
    frequency = torch.arange(1, reach + 1, dtype=variance.dtype, device=variance.device) * (2 * math.pi / size)
    lost = torch.expm1(variance * (torch.cos(frequency) - 1))
    return (lost[:, None, :] * torch.cos(offset[:, None] * frequency)).sum(2) * (2 / size) + (offset == 0)


def _offsets(reach: int, like: Tensor) -> tuple[Tensor, Tensor]:
    offset = torch.arange(-reach, reach + 1, dtype=like.dtype, device=like.device)
    return offset.view(1, 1, -1), offset.view(1, -1, 1)


def _kernel_and_slopes(kernel: Callable[[Tensor], Tensor], theta: Tensor) -> list[Tensor]:
    """`kernel(theta)` and, if gradients are needed, its slope in each theta."""
    if not (theta.requires_grad and torch.is_grad_enabled()):
        return [kernel(theta)]
    at = theta.detach().requires_grad_()
    weight = kernel(at)
    pull = torch.ones_like(weight, requires_grad=True)
    (pulled,) = torch.autograd.grad(weight, at, pull, create_graph=True)
    slopes = [torch.autograd.grad(column.sum(), pull, retain_graph=True)[0] for column in pulled.unbind(1)]
    return [weight.detach(), *slopes]


def _by_reach(
    pictures: Tensor,
    theta: Tensor,
    context: Context,
    usual: float,
    reach_of: Callable[[Any], Any],
    blur: Callable[[Tensor, Tensor, int], Tensor],
) -> Tensor:
    """`blur(pictures, theta, reach)` with kernels whose reach, in pixels, is as large as needed.

    `reach_of` maps the first theta to what it needs. On a CPU each test gets the smallest of a few kernel sizes that is
    sufficient, which depends only on its own theta.
    """
    needed = reach_of(theta[:, 0])
    sizes = [max(1, math.ceil(reach_of(usual)))]
    while sizes[0] > SMALL_REACH:
        sizes.insert(0, math.ceil(sizes[0] / SIZE_STEP))
    while context.highest and sizes[-1] < reach_of(context.highest[0]):
        sizes.append(math.ceil(sizes[-1] * SIZE_STEP))
    if pictures.is_cuda or len(sizes) == 1:  # selecting sizes would wait for the GPU
        return blur(pictures, theta, sizes[-1])
    size = torch.bucketize(needed.detach(), needed.new_tensor(sizes)).clamp_(max=len(sizes) - 1)
    rows = [(size == k).nonzero()[:, 0] for k in range(len(sizes))]
    groups = [(at, reach) for at, reach in zip(rows, sizes, strict=True) if len(at)]
    if len(groups) == 1:
        return blur(pictures, theta, groups[0][1])
    result = torch.empty_like(pictures, memory_format=torch.contiguous_format)
    for at, reach in groups:
        part = blur(pictures[at], theta[at], reach)
        result = result.index_copy(0, at, part) if part.requires_grad else result.index_copy_(0, at, part)
    return result


def _convolved(kernel: Callable[[Tensor, int], Tensor], pictures: Tensor, theta: Tensor, reach: int) -> Tensor:
    """The pictures convolved with `kernel(theta, reach)`, differentiable in theta.

    A kernel has few theta and many weights. So the slope in each theta is computed as a convolution with the slope of
    the kernel, which is far cheaper than the slope in every weight.
    """
    weight, *slopes = _kernel_and_slopes(lambda at: kernel(at, reach), theta)
    return _with_slopes(convolve(pictures, weight), theta, [convolve(pictures.detach(), slope) for slope in slopes])


def _with_slopes(result: Tensor, theta: Tensor, slopes: list[Tensor]) -> Tensor:
    """The same values with these slopes in theta: each slope multiplies a zero whose own slope is one."""
    if slopes:
        for zero, slope in zip(columns(theta - theta.detach(), result), slopes, strict=True):
            result = torch.addcmul(result, zero.to(result.dtype), slope)
    return result


_camera = partial(Perturbation, is_random=False, inputs="picture", family="camera", moves=False)

BLUR = (
    _camera(
        "gaussian_blur",
        (Theta("sigma", 0.0, 0.02, unit="share of the shorter side", limits=(0, 1), small=(1.25, 0.25)),),
        gaussian_blur,
    ),
    _camera(
        "motion_blur",
        (
            Theta("length", 0.0, 0.08, unit="share of the shorter side", limits=(0, 1), small=(4.0, 0.25)),
            Theta("angle", -90.0, 90.0, unit="degrees from level, anticlockwise", limits=(-360, 360)),
        ),
        motion_blur,
    ),
    _camera(
        "defocus_blur",
        (Theta("radius", 0.0, 0.025, unit="share of the shorter side", limits=(0, 1), small=(2.0, 0.25)),),
        defocus_blur,
    ),
    _camera(
        "zoom_blur",
        (Theta("amount", 0.0, 0.15, unit="share by which the picture grows", limits=(0, 1)),),
        zoom_blur,
    ),
)
