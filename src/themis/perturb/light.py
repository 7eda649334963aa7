"""Light and colour: changes by exposure, lens and processing."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

from themis.compute.rng import Rng
from themis.perturb.context import Context
from themis.perturb.perturbation import Perturbation, Theta, columns
from themis.perturb.picture import places, side

DISPLAY_GAMMA = 2.2
"""The exponent that approximates the sRGB curve: a value is `light ** (1 / 2.2)`."""
DARKEST = 1e-8
"""The value that replaces black in a power, so that its slope stays finite."""

LUMA = (0.299, 0.587, 0.114)
IN_PHASE = (0.595716, -0.274453, -0.321263)
QUADRATURE = (0.211456, -0.522591, 0.311135)
"""The rows of YIQ, the colour space of television: luma and two chroma components."""
CHROMA_TO_RGB = np.linalg.inv(np.array([LUMA, IN_PHASE, QUADRATURE]))[:, 1:]


def brightness(pictures: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """All values shifted up or down."""
    (shift,) = columns(theta, pictures)
    return pictures + shift


def contrast(pictures: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Values spread away from the picture's mean, or pulled towards it."""
    (change,) = columns(theta, pictures)
    mean = pictures.mean(3).flatten(1).mean(1).view(-1, 1, 1, 1)  # in two steps, which round the same in any batch
    return torch.addcmul(-change * mean, pictures, 1 + change)


def saturation(pictures: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Colours made stronger, or paler down to grey."""
    (change,) = columns(theta, pictures)
    return torch.addcmul(-change * _mixed(pictures, LUMA), pictures, 1 + change)


def hue(pictures: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """All colours rotated around the colour wheel, from red through yellow to green; lightness stays the same.

    It rotates the chroma plane of YIQ, which unlike the hue of HSV is smooth at grey.
    """
    (angle,) = columns(torch.deg2rad(theta), pictures)
    first, second = _mixed(pictures, IN_PHASE), _mixed(pictures, QUADRATURE)
    sine, less = torch.sin(angle), torch.cos(angle) - 1
    back = [pictures.new_tensor(column).view(1, 3, 1, 1) for column in CHROMA_TO_RGB.T]
    rotated = torch.addcmul(pictures, less * first + sine * second, back[0])
    return torch.addcmul(rotated, less * second - sine * first, back[1])


def gamma(pictures: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Midtones made darker or brighter by a power of every value; black and white stay the same."""
    (stops,) = columns(theta, pictures)
    return torch.exp(torch.log(pictures.clamp_min(DARKEST)) * _two_to_the(stops))


def exposure(pictures: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """More or less light on the sensor, in stops: each one doubles it, and what gets too bright is clipped.

    Linear light is multiplied. With the sRGB curve approximated by the power 2.2, this multiplies the values as well.
    """
    (stops,) = columns(theta, pictures)
    return pictures * _two_to_the(stops / DISPLAY_GAMMA)


def vignette(pictures: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Corners darker than the middle, as with a lens that shades them."""
    strength, radius = columns(theta, pictures)
    x, y = places(pictures)
    corner = math.hypot(*pictures.shape[2:]) / 2 / side(pictures)
    out = (((x**2 + y**2).sqrt() / corner - radius) / (1 - radius)).clamp(0, 1)
    return pictures * (1 - strength * out * out * (3 - 2 * out))


def _two_to_the(power: Tensor) -> Tensor:
    return torch.exp(power * math.log(2))  # the rounding of exp2 and pow depends on the position in the batch


def _mixed(pictures: Tensor, weights: tuple[float, float, float]) -> Tensor:
    """The weighted sum of the channels, `[tests, 1, height, width]`."""
    red, green, blue = pictures.unbind(1)
    return (red * weights[0] + green * weights[1] + blue * weights[2])[:, None]


_camera = partial(Perturbation, is_random=False, inputs="picture", family="camera", moves=False)

LIGHT = (
    _camera(
        "brightness",
        (Theta("shift", -0.25, 0.25, unit="share of the input range", limits=(-1, 1)),),
        brightness,
    ),
    _camera(
        "contrast",
        (Theta("change", -0.6, 0.6, unit="share of the contrast", limits=(-1, 10)),),
        contrast,
    ),
    _camera(
        "saturation",
        (Theta("change", -1.0, 1.0, unit="share of the colour", limits=(-1, 10)),),
        saturation,
        channels=3,
    ),
    _camera(
        "hue",
        (Theta("angle", -30.0, 30.0, unit="degrees", limits=(-360, 360)),),
        hue,
        channels=3,
    ),
    _camera(
        "gamma",
        (Theta("exponent", -1.0, 1.0, unit="log2 of the power", limits=(-4, 4)),),
        gamma,
    ),
    _camera(
        "exposure",
        (Theta("stops", -1.5, 1.5, unit="EV: doublings of the light", limits=(-8, 8)),),
        exposure,
    ),
    _camera(
        "vignette",
        (
            Theta("strength", 0.0, 0.8, unit="share of the light lost in the corners", limits=(0, 1)),
            Theta("radius", 0.15, 0.6, 0.6, unit="share of the half diagonal that stays bright", limits=(0, 0.95)),
        ),
        vignette,
    ),
)
