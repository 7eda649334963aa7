"""Common corruptions as published by Hendrycks and Dietterich (2019), unless another perturbation is the same.

They reproduce peculiarities of the published pictures, such as lines of whole pixels, for the suite `corruptions`.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from themis.compute.rng import Rng
from themis.perturb.context import Context
from themis.perturb.noise import soft_hits
from themis.perturb.perturbation import Perturbation, Theta, collector, columns
from themis.perturb.picture import constant, convolve, field, sample_rotated, side, warp_lines
from themis.perturb.weather import as_grey

MAX_HOPS = 12
"""Most scattered pixels through which a pixel's source is followed; fewer than one in 10,000 would need more."""
LINE_DEVIATIONS = 3.0
"""Standard deviations after which a fading line ends."""
FROSTS = (
    ((0.30, 0.58, 0.65), 0.057, 0.035),
    ((0.78, 0.79, 0.83), 0.057, 0.05),
    ((0.78, 0.79, 0.83), 0.057, 0.05),
    ((0.56, 0.62, 0.67), 0.067, 0.078),
    ((0.40, 0.45, 0.49), 0.115, 0.096),
)
"""The mean colour of five kinds of frost, and the standard deviations of its clouds and of its crystals."""

CORRUPTIONS: list[Perturbation] = []
_corruption = collector(CORRUPTIONS, inputs="picture", is_smooth=False, family="corruption", moves=False)


@_corruption(Theta("share", 0.0, 0.1, unit="share of the values", limits=(0, 1)), is_smooth=True, flickers=True)
def channel_impulse(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Some values turn to their lowest or highest with equal chance, each channel of a pixel on its own."""
    (share,) = columns(theta, inputs)
    chance = rng.uniform(*inputs.shape[1:]).mul_(2).sub_(1)
    return torch.lerp(inputs, (chance > 0).to(inputs.dtype), soft_hits(chance.abs(), share).to(inputs.dtype))


@_corruption(
    Theta("reach", 0.0, 0.02, unit="share of the shorter side", limits=(0, 0.5), small=(1.0, 0.05)),
    Theta("passes", 1.0, 3.0, 1.0, unit="times that pixels are scattered, rounded", limits=(1, 10)),
)
def glass(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Frosted glass: each pixel shows a random one nearby.

    Pixels are replaced one by one from the lower right corner on, so that one may show what another has shown before.
    """
    reach, passes = columns(theta, inputs[:, 0])
    height, width = inputs.shape[2:]
    pixels = reach * side(inputs)
    span = pixels.clamp_min(1)
    row = torch.arange(height, device=inputs.device).view(1, -1, 1)
    column = torch.arange(width, device=inputs.device)
    at = (row * width + column).expand(len(inputs), -1, -1)
    is_inside = (row > span) & (row <= height - span) & (column > span) & (column <= width - span)
    source = at.flatten(1)
    for k in range(math.ceil(context.highest[1] - 0.5)):
        down, across, chance = rng.uniform(3, height, width).to(reach.dtype).unbind(1)
        is_moved = is_inside & (chance < pixels) & (k + 0.5 < passes)
        step = ((2 * down - 1) * span).floor() * width + ((2 * across - 1) * span).floor()
        shown = torch.where(is_moved, at + step.long(), at).flatten(1)
        last = at.flatten(1)
        for _ in range(MAX_HOPS):
            following = shown.gather(1, last)
            last = torch.where(following > last, following, last)
        source = source.gather(1, shown.gather(1, last))
    return inputs.flatten(2).gather(2, source[:, None].expand(-1, inputs.shape[1], -1)).view_as(inputs)


@_corruption(
    Theta("sigma", 0.0, 0.08, unit="share of the shorter side", limits=(0, 0.5)),
    Theta("angle", -45.0, 45.0, unit="degrees from level, clockwise", limits=(-360, 360)),
    is_random=False,
)
def fading_motion(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """A shaken picture: each point is drawn out into a line of whole pixels that fades like half a Gaussian."""
    sigma, angle = columns(theta, inputs[:, 0])
    return _drawn_out(inputs, sigma, angle, context.highest[0])


def _drawn_out(inputs: Tensor, sigma: Tensor, angle: Tensor, highest: float) -> Tensor:
    """Draw each point out into a fading line; `highest` is the largest sigma."""
    unit = side(inputs)
    n = min(math.ceil(LINE_DEVIATIONS * highest * unit) + 1, unit)
    step = torch.arange(n, dtype=sigma.dtype, device=sigma.device).view(1, -1, 1)
    weight = (-0.5 * (step / (sigma * unit).clamp_min(1e-3)).square()).exp()
    turn = torch.deg2rad(angle)
    offset = torch.arange(1 - n, n, dtype=sigma.dtype, device=sigma.device)
    down, across = ((step * part - 0.5).ceil() == offset for part in (turn.sin(), turn.cos()))
    kernel = ((weight * down)[:, :, :, None] * across[:, :, None]).sum(1)
    return convolve(inputs, kernel / weight.sum(1, keepdim=True))


@_corruption(
    Theta("radius", 0.0, 0.03, unit="share of the shorter side", limits=(0, 0.5), small=(1.5, 0.1)),
    Theta("softness", 0.05, 0.5, 0.05, unit="standard deviation of a blur of 3 by 3 pixels", limits=(0.01, 10)),
    is_random=False,
)
def disc_blur(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """A picture out of focus: each point becomes a disc of whole pixels, whose edge is softened."""
    radius, softness = columns(theta, inputs[:, 0])
    reach = math.ceil(context.highest[0] * side(inputs)) + 1
    offset = torch.arange(-reach, reach + 1, dtype=radius.dtype, device=radius.device)
    kernel = (offset.square() + offset.view(1, -1, 1).square() <= (radius * side(inputs)).square()).to(radius.dtype)
    beside = (-0.5 / softness.square()).exp()
    for axis in (1, 2):
        kernel = kernel + beside * (kernel.roll(1, axis) + kernel.roll(-1, axis))
    return convolve(inputs, kernel / kernel.sum((1, 2), keepdim=True))


@_corruption(
    Theta("amount", 0.0, 0.15, unit="share by which the picture grows", limits=(0, 1)),
    Theta("copies", 7.0, 16.0, 7.0, unit="copies, rounded", limits=(2, 100)),
    is_random=False,
)
def zoom_copies(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """A picture zoomed while it is taken: the average of enlarged copies, each cut from a whole number of pixels."""
    amount, copies = columns(theta, inputs)
    copies, total = copies.round(), inputs
    for k in range(round(context.highest[1])):
        copy = _enlarged(inputs, 1 + amount * k / (copies - 1))
        total = total + torch.where(k < copies, copy, 0)
    return total / (1 + copies)


def _enlarged(pictures: Tensor, factor: Tensor) -> Tensor:
    """The middle of pictures, cut from a whole number of pixels and enlarged."""
    places = []
    for length in pictures.shape[2:]:
        kept = (length / factor).ceil()
        whole = (kept * factor).round()
        first = ((length - kept) / 2).floor()
        at = torch.arange(length, dtype=factor.dtype, device=factor.device) + ((whole - length) / 2).floor()
        places.append((first + at * ((kept - 1) / (whole - 1).clamp_min(1)) - (length - 1) / 2) / side(pictures))
    y, x = places[0].transpose(2, 3), places[1]
    return warp_lines(pictures, (x, 0 * x), (0 * y, y))


@_corruption(
    Theta("size", 0.25, 1.0, 1.0, unit="share of the picture's own resolution", limits=(0.01, 1)), is_random=False
)
def coarse_pixels(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """A picture scaled down and up again: blocks of whole pixels, each filled with its mean colour."""
    (size,) = columns(theta, inputs)
    for axis in (2, 3):
        length = inputs.shape[axis]
        n = (length * size + 1e-4).floor().clamp_min(1)
        at = torch.arange(length, dtype=n.dtype, device=n.device).view(-1, *(1,) * (3 - axis))
        block = ((at + 0.5) * n / length).floor()
        first, end = ((b * length / n - 0.5).ceil().long() for b in (block, block + 1))
        sums = F.pad(inputs, (1, 0) if axis == 3 else (0, 0, 1, 0)).cumsum(axis)
        shape = [-1 if k == 0 else inputs.shape[k] for k in range(4)]
        inputs = (sums.gather(axis, end.expand(shape)) - sums.gather(axis, first.expand(shape))) / (end - first)
    return inputs


@_corruption(Theta("shift", 0.0, 0.5, unit="share of the input range", limits=(0, 1)), is_smooth=True, is_random=False)
def hsv_brightness(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """The brightest channel of each pixel raised and the others in proportion: hue and saturation stay the same."""
    (shift,) = columns(theta, inputs)
    value = inputs.amax(1, keepdim=True)
    raised = (value + shift).clamp_max(1)
    return torch.where(value > 0, inputs * (raised / value.clamp_min(1e-6)), raised)


@_corruption(
    Theta("change", -0.95, 0.0, 0.0, unit="share of the contrast", limits=(-1, 10)), is_smooth=True, is_random=False
)
def channel_contrast(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Values pulled towards the mean of their channel, or spread away from it."""
    (change,) = columns(theta, inputs)
    mean = inputs.mean(3, keepdim=True).mean(2, keepdim=True)  # in two steps, so that rounding ignores the batch
    return torch.addcmul(-change * mean, inputs, 1 + change)


@_corruption(
    Theta(
        "thickness", 0.0, 1.5, unit="brightness of the fog relative to the picture's brightest value", limits=(0, 20)
    ),
    Theta("decay", 1.4, 3.0, 3.0, unit="how much smoother the fog is than the next smaller cloud", limits=(1, 10)),
    is_smooth=True,
)
def plasma_fog(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Fog of plasma clouds, mixed with the picture so that nothing gets brighter than its brightest value."""
    thickness, decay = columns(theta, inputs)
    brightest = inputs.amax((1, 2, 3), keepdim=True)
    clouds = _plasma(inputs, rng, decay)
    return (inputs + thickness * clouds) * (brightest / (brightest + thickness).clamp_min(1e-6))


def _plasma(pictures: Tensor, rng: Rng, decay: Tensor) -> Tensor:
    """A random height map in 0..1 by the diamond-square algorithm on a torus."""
    height, width = pictures.shape[2:]
    clouds, sigma = pictures.new_zeros(len(pictures), 1, 1, 1), torch.ones_like(decay)
    while clouds.shape[2] < max(height, width):
        n = clouds.shape[2]
        noise = (rng.uniform(3, n, n).to(pictures.dtype) * 2 - 1) * sigma
        right, below = clouds.roll(-1, 3), clouds.roll(-1, 2)
        middle = (clouds + right + below + below.roll(-1, 3)) / 4 + noise[:, :1]
        top = (clouds + right + middle + middle.roll(1, 2)) / 4 + noise[:, 1:2]
        left = (clouds + below + middle + middle.roll(1, 3)) / 4 + noise[:, 2:]
        rows = torch.stack([torch.stack([clouds, top], 4).flatten(3), torch.stack([left, middle], 4).flatten(3)], 3)
        clouds, sigma = rows.flatten(2, 3), sigma / decay.square()
    lowest, highest = clouds.amin((2, 3), keepdim=True), clouds.amax((2, 3), keepdim=True)
    return ((clouds - lowest) / (highest - lowest).clamp_min(1e-6))[:, :, :height, :width]


@_corruption(
    Theta("mean", 0.0, 0.55, unit="mean of the noise that flakes are the peaks of", limits=(0, 1)),
    Theta("deviation", 0.2, 0.3, 0.2, unit="standard deviation of that noise", limits=(0.01, 1)),
    Theta("size", 0.004, 0.02, 0.004, unit="share of the shorter side", limits=(0.001, 1), small=(2.0, 0.07)),
    Theta("threshold", 0.5, 1.2, 1.2, unit="least noise of a flake", limits=(0, 3)),
    Theta("sigma", 0.02, 0.05, 0.02, unit="length of a flake's fall, share of the shorter side", limits=(0, 0.5)),
    Theta("angle", -45.0, 45.0, unit="degrees from the vertical", limits=(-180, 180)),
    Theta("whiteness", 0.0, 0.4, unit="share of the picture that whitens", limits=(0, 1)),
    flickers=True,
)
def snowfall(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Snow that falls in streaks, upwards as well as downwards, in a picture that whitens."""
    mean, deviation, size, threshold, sigma, angle, whiteness = columns(theta, inputs)
    height, width = inputs.shape[2:]
    lattice = rng.normal(1, height, width).to(inputs.dtype)
    noise = mean + deviation * _enlarged(lattice, (size * side(inputs)).clamp_min(1))
    flakes = torch.where(noise < threshold, 0, noise).clamp(0, 1)
    flakes = _drawn_out(flakes, sigma[:, 0], angle[:, 0] + 90, context.highest[4])
    white = torch.maximum(inputs, as_grey(inputs) * 1.5 + 0.5)
    return torch.lerp(inputs, white, whiteness) + flakes + flakes.flip(2, 3)


@_corruption(
    Theta("ice", 0.0, 0.75, unit="brightness of the ice", limits=(0, 1)),
    Theta("loss", 0.0, 0.4, unit="share of the picture's light that is lost", limits=(0, 1)),
    Theta("grain", 0.005, 0.03, 0.005, unit="size of a crystal, share of the shorter side", limits=(0.001, 1)),
)
def hoarfrost(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Crystals of ice all over the lens, in one of a few colours, those of the published photographs of frost."""
    ice, loss, grain = columns(theta, inputs)
    height, width = inputs.shape[2:]
    kind = (rng.uniform(1) * len(FROSTS)).long()[:, 0]
    mean = constant(tuple(frost[0] for frost in FROSTS), inputs)[kind].view(-1, 3, 1, 1)
    clouds, crystals = constant(tuple(frost[1:] for frost in FROSTS), inputs)[kind].view(-1, 2, 1, 1, 1).unbind(1)
    lattice = rng.normal(1, height, width).to(inputs.dtype)
    fine, *stripes = (
        sample_rotated(sheet, inputs, 0 * ice, grain * width, grain * height)
        for sheet in (lattice, _stripes(lattice, 2), _stripes(lattice, 3))
    )
    for stripe in stripes:  # restores the contrast between lattice points, which interpolation reduces
        fine = fine / ((1 + stripe.square()) / 2).sqrt()
    texture = (field(inputs, rng, torch.full_like(ice, 0.7)) - 0.5) * (6 * clouds) + fine * crystals
    frost = (mean if inputs.shape[1] == 3 else as_grey(mean)) + texture
    return inputs * (1 - loss) + ice * frost.clamp(0, 1)


def _stripes(lattice: Tensor, dim: int) -> Tensor:
    """Alternating plus and minus one along a dimension."""
    shape = [-1 if k == dim else 1 for k in range(4)]
    signs = 1 - 2 * (torch.arange(lattice.shape[dim], device=lattice.device) % 2)
    return signs.to(lattice).view(shape).expand_as(lattice)
