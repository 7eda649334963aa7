"""Blur, as a camera out of focus, shaken or zoomed makes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from themis.compute.rng import Rng
from themis.perturb.context import Context
from themis.perturb.perturbation import Perturbation, Theta, columns
from themis.perturb.picture import convolve, places, side

MOST_SIGMA, MOST_LENGTH, MOST_RADIUS = 0.04, 0.1, 0.04
"""Ends of what a blur can be, in shares of the shorter side: a kernel is as large as the strongest needs."""
TAIL = 3.5
"""Standard deviations of a Gaussian that its kernel reaches: beyond lies a two-thousandth."""
SMALL_REACH = 6
"""Of a kernel, in pixels: smaller ones gain nothing."""
SIDE_OF_A_COPY = 32
"""Zoom blur takes one copy for so many pixels of the shorter side: about 2 pixels apart at the strongest by default."""

Numbers = TypeVar("Numbers", float, Tensor)


def gaussian_blur(pictures: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """A soft picture: each point spreads as a Gaussian, as of a lens that is dirty or poor."""
    unit = side(pictures)

    def blurred(pictures: Tensor, theta: Tensor, reach: int) -> Tensor:
        kernel, *slopes = _sloped(lambda at: _heat((at * unit) ** 2, reach), theta)
        across = convolve(pictures, kernel[:, None])
        result = convolve(across, kernel[:, :, None])
        for slope in slopes:
            down = convolve(convolve(pictures.detach(), slope[:, None]), kernel[:, :, None])
            result = _hung(result, theta, [down + convolve(across.detach(), slope[:, :, None])])
        return result

    return _by_reach(pictures, theta, TAIL * unit * theta[:, 0], TAIL * unit * MOST_SIGMA, blurred)


def motion_blur(pictures: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """A shaken picture: each point is drawn out to a line, as when the camera moves while it exposes."""
    unit = side(pictures)

    def kernel(at: Tensor, reach: int) -> Tensor:
        length, angle = columns(at, pictures[:, 0])
        x, y = _offsets(reach, at)
        cosine, sine = torch.cos(torch.deg2rad(angle)), torch.sin(torch.deg2rad(angle))
        along, off = x * cosine - y * sine, x * sine + y * cosine
        beyond = (along.abs() - _half(length * unit)).clamp_min(0)
        weight = (1 - beyond**2 - off**2).clamp_min(0) ** 2  # by the distance to the line: none from a pixel on
        return weight / weight.sum((1, 2), keepdim=True)

    needed, most = _half(theta[:, 0] * unit), _half(MOST_LENGTH * unit)
    return _by_reach(pictures, theta, needed, most, partial(_spread, kernel))


def defocus_blur(pictures: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """A picture out of focus: each point becomes an even disc, as of an open aperture."""
    unit = side(pictures)

    def kernel(at: Tensor, reach: int) -> Tensor:
        (radius,) = columns(at, pictures[:, 0])
        x, y = _offsets(reach, at)
        inside = (radius * unit + 1 - (x**2 + y**2).sqrt()).clamp(0, 1)
        weight = inside * inside * (3 - 2 * inside)
        return weight / weight.sum((1, 2), keepdim=True)

    return _by_reach(pictures, theta, theta[:, 0] * unit, MOST_RADIUS * unit, partial(_spread, kernel))


def zoom_blur(pictures: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """A picture zoomed while it is taken: each point is drawn out away from the centre.

    Averages of the picture and a larger copy, again and again with the square of the zoom, hold `2**doublings` copies.
    """
    (amount,) = columns(theta, pictures)
    doublings = max(math.ceil(math.log2(side(pictures) / SIDE_OF_A_COPY)), 2)
    step = torch.log1p(amount) / (2**doublings - 1)
    (height, width), (x, y) = pictures.shape[2:], places(pictures)
    across, down = x * (2 * side(pictures) / width), y * (2 * side(pictures) / height)
    grid = torch.stack([across.expand(1, 1, height, width), down.expand(1, 1, height, width)], -1)[:, 0]
    for k in range(doublings):
        read = (grid * torch.exp(-step * 2**k)).to(pictures.dtype)
        pictures = torch.lerp(pictures, F.grid_sample(pictures, read, "bilinear", "border", align_corners=False), 0.5)
    return pictures


def _half(length: Numbers) -> Numbers:
    """Half of a line without its soft ends, so that with them it is as long as said; a pixel's is no line at all."""
    return length * length / (2 * length + 2)


def _heat(variance: Tensor, reach: int) -> Tensor:
    """The Gaussian of a pixel grid, `[tests, 2 * reach + 1]`: what the heat equation makes of one pixel.

    Unlike a Gaussian read off at the pixels, it is never negative, sums to one and has that variance (`[tests, 1]`, in
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


def _sloped(kernel: Callable[[Tensor], Tensor], theta: Tensor) -> list[Tensor]:
    """`kernel(theta)`, and where it is asked for its slope in each theta."""
    if not (theta.requires_grad and torch.is_grad_enabled()):
        return [kernel(theta)]
    at = theta.detach().requires_grad_()
    weight = kernel(at)
    pull = torch.ones_like(weight, requires_grad=True)
    (pulled,) = torch.autograd.grad(weight, at, pull, create_graph=True)
    slopes = [torch.autograd.grad(each.sum(), pull, retain_graph=True)[0] for each in pulled.unbind(1)]
    return [weight.detach(), *slopes]


def _by_reach(
    pictures: Tensor, theta: Tensor, needed: Tensor, most: float, blur: Callable[[Tensor, Tensor, int], Tensor]
) -> Tensor:
    """`blur(pictures, theta, reach)`, with kernels that reach as far as needed, in pixels, and at most that far.

    On a CPU each test gets the smallest kernel of a few sizes that is enough for it, by its own theta and no other's.
    """
    sizes = [max(1, math.ceil(most))]
    while sizes[0] > SMALL_REACH:
        sizes.insert(0, math.ceil(sizes[0] / 1.6))
    if pictures.is_cuda or len(sizes) == 1:  # a GPU would have to be waited for
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


def _spread(kernel: Callable[[Tensor, int], Tensor], pictures: Tensor, theta: Tensor, reach: int) -> Tensor:
    """The pictures convolved with `kernel(theta, reach)`, differentiable in theta.

    A kernel has few theta and many weights. So each theta's slope is itself a convolution, with the kernel's slope: far
    cheaper than the slope in every weight.
    """
    weight, *slopes = _sloped(lambda at: kernel(at, reach), theta)
    return _hung(convolve(pictures, weight), theta, [convolve(pictures.detach(), each) for each in slopes])


def _hung(result: Tensor, theta: Tensor, slopes: list[Tensor]) -> Tensor:
    """The same values, with these slopes in theta: each hangs on a zero that has the slope one."""
    if slopes:
        for zero, slope in zip(columns(theta - theta.detach(), result), slopes, strict=True):
            result = torch.addcmul(result, zero.to(result.dtype), slope)
    return result


_camera = partial(Perturbation, is_random=False, inputs="picture", family="camera")

BLUR = (
    _camera(
        "gaussian_blur",
        (Theta("sigma", 0.0, 0.02, unit="share of the shorter side", limits=(0, MOST_SIGMA)),),
        gaussian_blur,
    ),
    _camera(
        "motion_blur",
        (
            Theta("length", 0.0, 0.08, unit="share of the shorter side", limits=(0, MOST_LENGTH)),
            Theta("angle", -90.0, 90.0, unit="degrees from level, anticlockwise", limits=(-360, 360)),
        ),
        motion_blur,
    ),
    _camera(
        "defocus_blur",
        (Theta("radius", 0.0, 0.025, unit="share of the shorter side", limits=(0, MOST_RADIUS)),),
        defocus_blur,
    ),
    _camera(
        "zoom_blur",
        (Theta("amount", 0.0, 0.15, unit="share by which the picture grows", limits=(0, 0.5)),),
        zoom_blur,
    ),
)
