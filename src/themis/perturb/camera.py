"""Cameras: light and colour, blur, JPEG compression, and the sensor with what is in front of it."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from themis.compute.rng import Rng
from themis.perturb.context import Context
from themis.perturb.perturbation import Perturbation, Theta, collector, columns
from themis.perturb.picture import (
    LUMA,
    constant,
    convolve,
    doubled,
    eased,
    halved,
    places,
    side,
    warp_lines,
    weighted_sum,
)

CAMERA: list[Perturbation] = []
_camera = collector(CAMERA, is_random=False, inputs="picture", family="camera", moves=False)

USUAL_SIGMA, USUAL_LENGTH, USUAL_RADIUS = 0.04, 0.1, 0.04
"""Blurs, in shares of the shorter side, up to which kernel sizes do not depend on the range of theta."""
KERNEL_DEVIATIONS = 3.5
"""Standard deviations of a Gaussian that its kernel covers; 0.05% lie beyond."""
SMALL_REACH = 6
"""Radius of a kernel, in pixels, below which smaller kernels are not faster."""
SIZE_STEP = 1.6
"""Ratio of the radii of successive kernel sizes."""
PIXELS_PER_COPY = 32
"""Pixels of the shorter side per copy in a zoom blur; by default, copies are at most about 2 pixels apart."""

Length = TypeVar("Length", float, Tensor)


@_camera(Theta("sigma", 0.0, 0.02, unit="share of the shorter side", limits=(0, 1), small=(1.25, 0.25)))
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


@_camera(
    Theta("length", 0.0, 0.08, unit="share of the shorter side", limits=(0, 1), small=(4.0, 0.25)),
    Theta("angle", -90.0, 90.0, unit="degrees from level, anticlockwise", limits=(-360, 360)),
)
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


@_camera(Theta("radius", 0.0, 0.025, unit="share of the shorter side", limits=(0, 1), small=(2.0, 0.25)))
def defocus_blur(pictures: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """A picture out of focus: each point becomes a uniform disc, as with an open aperture."""
    unit = side(pictures)

    def kernel(at: Tensor, reach: int) -> Tensor:
        (radius,) = columns(at, pictures[:, 0])
        x, y = _offsets(reach, at)
        weight = eased(radius * unit + 1 - (x**2 + y**2).sqrt())
        return weight / weight.sum((1, 2), keepdim=True)

    blurred = partial(_convolved, kernel)
    return _by_reach(pictures, theta, context, USUAL_RADIUS, lambda radius: radius * unit, blurred)


@_camera(Theta("amount", 0.0, 0.15, unit="share by which the picture grows", limits=(0, 1)))
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
    """Half the length of a line without its soft ends, which make up the rest of the length."""
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
    """`kernel(theta)` and, if gradients are needed, its derivative in each theta."""
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
    """Call `blur(pictures, theta, reach)` with sufficiently large kernels; `reach` is their radius in pixels.

    `reach_of` maps the first theta to the radius it needs. On a CPU, each test gets the smallest sufficient kernel of a
    few sizes, which depends only on its own theta.
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

    The derivative in each theta is computed as a convolution with the derivative of the kernel. A kernel has few theta
    and many weights, so this is far cheaper than the derivative in every weight.
    """
    weight, *slopes = _kernel_and_slopes(lambda at: kernel(at, reach), theta)
    return _with_slopes(convolve(pictures, weight), theta, [convolve(pictures.detach(), slope) for slope in slopes])


def _with_slopes(result: Tensor, theta: Tensor, slopes: list[Tensor]) -> Tensor:
    """Give a result these derivatives in theta, by adding each of them times a zero whose own derivative is one."""
    if slopes:
        for zero, slope in zip(columns(theta - theta.detach(), result), slopes, strict=True):
            result = torch.addcmul(result, zero.to(result.dtype), slope)
    return result


DISPLAY_GAMMA = 2.2
"""The exponent that approximates the sRGB curve: a value is `light ** (1 / 2.2)`."""
MIN_LIGHT = 1e-8
"""The value that replaces black in a power, so that the derivative stays finite."""

IN_PHASE = (0.595716, -0.274453, -0.321263)
QUADRATURE = (0.211456, -0.522591, 0.311135)
"""The chroma components of YIQ, the colour space of television."""
CHROMA_TO_RGB = np.linalg.inv(np.array([LUMA, IN_PHASE, QUADRATURE]))[:, 1:]


@_camera(Theta("shift", -0.25, 0.25, unit="share of the input range", limits=(-1, 1)))
def brightness(pictures: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """All values shifted up or down."""
    (shift,) = columns(theta, pictures)
    return pictures + shift


@_camera(Theta("change", -0.6, 0.6, unit="share of the contrast", limits=(-1, 10)))
def contrast(pictures: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Values spread away from the picture's mean, or pulled towards it."""
    (change,) = columns(theta, pictures)
    mean = pictures.mean(3).flatten(1).mean(1).view(-1, 1, 1, 1)  # in two steps, so that rounding ignores the batch
    return torch.addcmul(-change * mean, pictures, 1 + change)


@_camera(Theta("change", -1.0, 1.0, unit="share of the colour", limits=(-1, 10)), channels=3)
def saturation(pictures: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Colours made stronger, or paler down to grey."""
    (change,) = columns(theta, pictures)
    return torch.addcmul(-change * weighted_sum(pictures, LUMA), pictures, 1 + change)


@_camera(Theta("angle", -30.0, 30.0, unit="degrees", limits=(-360, 360)), channels=3)
def hue(pictures: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """All colours rotated around the colour wheel, from red through yellow to green; lightness stays the same.

    It rotates the chroma plane of YIQ, which unlike the hue of HSV is smooth at grey.
    """
    (angle,) = columns(torch.deg2rad(theta), pictures)
    first, second = weighted_sum(pictures, IN_PHASE), weighted_sum(pictures, QUADRATURE)
    sine, less = torch.sin(angle), torch.cos(angle) - 1
    back = [constant(tuple(column), pictures).view(1, 3, 1, 1) for column in CHROMA_TO_RGB.T]
    rotated = torch.addcmul(pictures, less * first + sine * second, back[0])
    return torch.addcmul(rotated, less * second - sine * first, back[1])


@_camera(Theta("exponent", -1.0, 1.0, unit="log2 of the power", limits=(-4, 4)))
def gamma(pictures: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Midtones made darker or brighter by a power of every value; black and white stay the same."""
    (stops,) = columns(theta, pictures)
    return torch.exp(torch.log(pictures.clamp_min(MIN_LIGHT)) * _two_to_the(stops))


@_camera(Theta("stops", -1.5, 1.5, unit="EV: doublings of the light", limits=(-8, 8)))
def exposure(pictures: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """More or less light on the sensor, in stops: each one doubles it, and what gets too bright is clipped.

    Linear light is multiplied. With the sRGB curve approximated by the power 2.2, this multiplies the values as well.
    """
    (stops,) = columns(theta, pictures)
    return pictures * _two_to_the(stops / DISPLAY_GAMMA)


@_camera(
    Theta("strength", 0.0, 0.8, unit="share of the light lost in the corners", limits=(0, 1)),
    Theta("radius", 0.15, 0.6, 0.6, unit="share of the half diagonal that stays bright", limits=(0, 0.95)),
)
def vignette(pictures: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Corners darker than the middle, as with a lens that shades them."""
    strength, radius = columns(theta, pictures)
    x, y = places(pictures)
    corner = math.hypot(*pictures.shape[2:]) / 2 / side(pictures)
    return pictures * (1 - strength * eased(((x**2 + y**2).sqrt() / corner - radius) / (1 - radius)))


def _two_to_the(power: Tensor) -> Tensor:
    return torch.exp(power * math.log(2))  # exp2 and pow round differently by position in the batch


# JPEG: colour is subsampled to half the resolution (4:2:0), as encoders do by default. Rounding is a steep slope
# instead of a step, and neither the quantization tables nor the pixels are rounded.

# Quantization steps at quality 50 for luma and chroma, row by row: ISO/IEC 10918-1, tables K.1 and K.2.
LUMA_STEPS = """
16 11 10 16 24 40 51 61    12 12 14 19 26 58 60 55    14 13 16 24 40 57 69 56    14 17 22 29 51 87 80 62
18 22 37 56 68 109 103 77  24 35 55 64 81 104 113 92  49 64 78 87 103 121 120 101  72 92 95 98 112 100 103 99
"""
CHROMA_STEPS = """
17 18 24 47 99 99 99 99  18 21 26 66 99 99 99 99  24 26 56 99 99 99 99 99  47 66 99 99 99 99 99 99
99 99 99 99 99 99 99 99  99 99 99 99 99 99 99 99  99 99 99 99 99 99 99 99  99 99 99 99 99 99 99 99
"""
COSINE_FACTORS = tuple(math.sqrt((1 + (k > 0)) / 8) for k in range(8))
"""Factors that normalise the cosines of `_dct`."""
JPEG_OFFSET = 128 / 255
"""The value that JPEG subtracts before the cosine transform."""


@_camera(
    Theta("quality", 10.0, 100.0, 100.0, unit="quality of the encoder, 1 to 100", limits=(1, 100)), has_identity=False
)
def jpeg(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """The picture stored as a JPEG file and read again: blocks of 8 by 8 pixels lose fine detail.

    Three channels are red, green and blue; with any other number, each channel is stored as luma.
    """
    (quality,) = columns(theta.to(inputs.dtype), inputs)
    coarseness = torch.where(quality < 50, 50 / quality, 2 - quality / 50)
    if inputs.shape[1] != 3:
        return _quantized(inputs - JPEG_OFFSET, LUMA_STEPS, coarseness) + JPEG_OFFSET
    luma = _quantized(weighted_sum(inputs, LUMA) - JPEG_OFFSET, LUMA_STEPS, coarseness) + JPEG_OFFSET
    return _chroma_part(inputs, coarseness) + luma


def _chroma_part(inputs: Tensor, coarseness: Tensor) -> Tensor:
    """The stored chroma's contribution to red, green and blue, to be added to the luma."""
    half = halved(inputs)
    luma = weighted_sum(half, LUMA)[:, 0]
    chroma = torch.stack([(half[:, 2] - luma) / 1.772, (half[:, 0] - luma) / 1.402], 1)
    to_blue, to_red = _quantized(chroma, CHROMA_STEPS, coarseness).unbind(1)
    added = torch.stack([1.402 * to_red, -0.344136 * to_blue - 0.714136 * to_red, 1.772 * to_blue], 1)
    return doubled(added, inputs)


def _quantized(planes: Tensor, table: str, coarseness: Tensor) -> Tensor:
    """Quantize the coefficients of each block of 8 by 8 pixels in planes `[tests, planes, height, width]`."""
    n, n_planes, height, width = planes.shape
    padded = planes
    if height % 8 or width % 8:
        padded = F.pad(planes, (0, -width % 8, 0, -height % 8), mode="replicate")
    down, across = padded.shape[2] // 8, padded.shape[3] // 8
    # The position in the block comes first, across and down, so that each step works on whole tensors.
    pixels = padded.view(n, n_planes, down, 8, across, 8).permute(5, 3, 0, 1, 2, 4).contiguous()
    waves = torch.stack(_dct(torch.stack(_dct(pixels.unbind(0))).unbind(1)), 1)
    steps = _quantization_steps(table, coarseness)
    level = constant(COSINE_FACTORS, planes)
    level = (level[:, None] * level).view(8, 8, 1, 1, 1, 1)
    waves = _rounded(waves * (level / steps)) * (level * steps)
    pixels = torch.stack(_inverse_dct(torch.stack(_inverse_dct(waves.unbind(1)), 1).unbind(0)))
    return pixels.permute(2, 3, 4, 1, 5, 0).reshape(padded.shape)[:, :, :height, :width]


def _quantization_steps(table: str, coarseness: Tensor) -> Tensor:
    """The quantization step of each coefficient: `[8 across, 8 down, tests, 1, 1, 1]`."""
    steps = constant(tuple(map(float, table.split())), coarseness).view(8, 8).T[:, :, None]
    return ((steps * coarseness.view(-1)).clamp(1, 255) / 255).view(8, 8, -1, 1, 1, 1)


# The recursive cosine transform (Lee 1984) uses only sums and products of whole tensors. Unlike that of a matrix
# product, its rounding does not depend on the number of pictures.


def _dct(points: Sequence[Tensor]) -> list[Tensor]:
    """The sums of `point[j] cos((2j + 1) k pi / 2n)` over `j` for each `k`, of a signal with one tensor per point."""
    n = len(points)
    if n == 1:
        return list(points)
    pairs = list(zip(points[: n // 2], reversed(points[n // 2 :]), strict=True))
    even = _dct([a + b for a, b in pairs])
    odd = _dct([(a - b) * _half_secant(j, n) for j, (a, b) in enumerate(pairs)])
    odd = [a + b for a, b in pairwise(odd)] + odd[-1:]
    return [wave for pair in zip(even, odd, strict=True) for wave in pair]


def _inverse_dct(waves: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of `_dct`: the sums of `wave[k] cos((2j + 1) k pi / 2n)` over `k` for each point `j`."""
    n = len(waves)
    if n == 1:
        return list(waves)
    even = _inverse_dct(waves[::2])
    odd = _inverse_dct([waves[1], *(a + b for a, b in pairwise(waves[1::2]))])
    odd = [point * _half_secant(j, n) for j, point in enumerate(odd)]
    pairs = list(zip(even, odd, strict=True))
    return [a + b for a, b in pairs] + [a - b for a, b in reversed(pairs)]


def _half_secant(j: int, n: int) -> float:
    return 0.5 / math.cos((2 * j + 1) * math.pi / (2 * n))


def _rounded(x: Tensor) -> Tensor:
    """A smooth approximation of the nearest whole number, to which the 65th power of the distance is added."""
    whole = x.detach().round()
    part = x - whole
    power = part
    for _ in range(6):
        power = power * power
    return torch.add(whole, power * part, alpha=2.0**64)


SOFT_SHARE = 0.25
"""Share of the dead pixels that are only partly dead, which makes the result smooth in theta."""
STRIPES = 128
"""Number of stripes that are drawn; beyond these they are mirrored."""
STRIPE_EDGE = 0.25
"""Share of a stripe's width over which it blends into the next."""
PATCH_EDGE = 0.04
"""Width of the soft edge of a patch, a share of the shorter side."""


@_camera(Theta("block", 0.0, 0.05, unit="share of the shorter side", limits=(0, 1), small=(3.0, 0.25)))
def pixelate(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Coarse pixels: square blocks, each filled with its mean colour."""
    (block,) = columns(theta, inputs)
    unit = side(inputs)
    size = (1 + (block * unit).square().square()).sqrt().sqrt()  # in pixels, at least one
    x, y = (size / unit * _stepped(axis * unit / size, 1 / size) for axis in places(inputs))
    return warp_lines(_averaged(inputs, size), (x, 0 * x), (0 * y, y))


def _averaged(pictures: Tensor, size: Tensor) -> Tensor:
    """Pictures averaged over about `size` pixels, mixed from repeatedly halved copies."""
    last = max(pictures.shape[2:]).bit_length() - 1
    level = (size / math.sqrt(3)).log2().clamp(0, last)  # an enlarged halved copy is as soft as a block sqrt(3) wider
    halves = [pictures]
    for _ in range(last):
        halves.append(halved(halves[-1]))
    mixed = _hat(level - last) * halves[last]
    for k in reversed(range(last)):
        mixed = torch.addcmul(doubled(mixed, halves[k]), _hat(level - k).to(pictures.dtype), halves[k])
    return mixed


def _hat(x: Tensor) -> Tensor:
    return (1 - x.abs()).clamp(min=0)


def _stepped(x: Tensor, edge: Tensor | float) -> Tensor:
    """The middle between the whole numbers around `x`, with a slope of width `edge` at each whole number."""
    whole = x.detach().round()
    part = ((x - whole) / edge).clamp(-0.5, 0.5)
    return whole + part * (1.5 - 2 * part * part)


@_camera(Theta("share", 0.0, 0.05, unit="share of the pixels", limits=(0, 1)), is_random=True)
def dead_pixels(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Single pixels that are stuck at a random brightness."""
    (share,) = columns(theta, inputs)
    draw = rng.uniform(1, *inputs.shape[2:]).to(inputs.dtype)
    steepness = 1 / (SOFT_SHARE * share.clamp(min=1e-9))
    is_dead = (0.5 + 1 / SOFT_SHARE - draw * steepness).clamp(0, 1)
    return torch.lerp(inputs, (draw * 4096).frac(), is_dead.to(inputs.dtype))


@_camera(
    Theta("strength", 0.0, 0.2, unit="share of the input range", limits=(0, 2)),
    Theta("width", 0.01, 0.05, 0.01, unit="share of the shorter side", limits=(0.001, 1)),
    Theta("angle", -90.0, 90.0, unit="degrees from upright", limits=(-360, 360)),
    is_random=True,
)
def stripes(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Straight stripes, each darker or brighter at random, as from rows or columns of a sensor with uneven gain."""
    strength, width, angle = columns(theta, inputs)
    angle = torch.deg2rad(angle)
    x, y = places(inputs)
    along = _stepped((x * angle.cos() + y * angle.sin()) / width, STRIPE_EDGE) * (2 / STRIPES)
    levels = rng.uniform(1, 1, STRIPES).to(inputs.dtype) * 2 - 1
    grid = torch.stack([along[:, 0], torch.zeros_like(along[:, 0])], -1).to(inputs.dtype)
    return inputs + strength * F.grid_sample(levels, grid, "bilinear", "reflection", align_corners=False)


@_camera(
    Theta("x", -0.4, 0.4, unit="share of the shorter side, to the right of the centre", limits=(-10, 10)),
    Theta("y", -0.4, 0.4, unit="share of the shorter side, below the centre", limits=(-10, 10)),
    Theta("size", 0.0, 0.4, unit="share of the shorter side", limits=(0, 10)),
    Theta("opacity", 0.5, 1.0, 0.5, unit="share of the patch in the mixture", limits=(0, 1)),
    is_random=True,
)
def occlusion(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """A square patch of one random colour that hides a part of the picture."""
    right, down, size, opacity = columns(theta.to(inputs.dtype), inputs)
    x, y = places(inputs)
    colour = rng.uniform(inputs.shape[1], 1, 1).to(inputs.dtype)
    edge = max(PATCH_EDGE, 1 / side(inputs))
    return torch.lerp(inputs, colour, opacity * _covered(x - right, size, edge) * _covered(y - down, size, edge))


def _covered(x: Tensor, size: Tensor, edge: float) -> Tensor:
    """The share of a window of width `edge` around `x` that lies in an interval of width `size` around zero."""
    start, end = (-size / 2).maximum(x - edge / 2), (size / 2).minimum(x + edge / 2)
    return (end - start).clamp(min=0) / edge
