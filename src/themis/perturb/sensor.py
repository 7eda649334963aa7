"""The sensor and what is in front of it: coarse and dead pixels, stripes, occlusion, a rolling shutter."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from themis.compute.rng import Rng
from themis.oracle.motion import Size
from themis.perturb.context import Context
from themis.perturb.perturbation import Perturbation, Theta, columns
from themis.perturb.picture import doubled, halved, places, side, warp_lines

PARTLY = 0.25
"""Share of the dead pixels that are only partly dead, which makes the result smooth in their share."""
STRIPES = 128
"""Number of stripes that are drawn; beyond them they are mirrored."""
STRIPE_EDGE = 0.25
"""Share of a stripe's width over which it blends into the next."""
PATCH_EDGE = 0.04
"""Width of the soft edge of a patch, a share of the shorter side."""


def pixelate(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Coarse pixels: square blocks, each filled with its mean colour."""
    (block,) = columns(theta, inputs)
    unit = side(inputs)
    size = (1 + (block * unit).square().square()).sqrt().sqrt()  # in pixels, at least one
    x, y = (size / unit * _stepped(axis * unit / size, 1 / size) for axis in places(inputs))
    return warp_lines(_averaged(inputs, size), (x, 0 * x), (0 * y, y))


def _averaged(pictures: Tensor, size: Tensor) -> Tensor:
    """Pictures averaged over about `size` pixels, mixed from copies that are halved repeatedly."""
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
    """The middle between the whole numbers around `x`; near a whole number, a slope of width `edge` to the next."""
    whole = x.detach().round()
    part = ((x - whole) / edge).clamp(-0.5, 0.5)
    return whole + part * (1.5 - 2 * part * part)


def dead_pixels(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Single pixels that are stuck at a random brightness."""
    (share,) = columns(theta, inputs)
    draw = rng.uniform(1, *inputs.shape[2:]).to(inputs.dtype)
    steepness = 1 / (PARTLY * share.clamp(min=1e-9))
    is_dead = (0.5 + 1 / PARTLY - draw * steepness).clamp(0, 1)
    return torch.lerp(inputs, (draw * 4096).frac(), is_dead.to(inputs.dtype))


def stripes(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Straight stripes, each darker or brighter at random, as from rows or columns of a sensor with uneven gain."""
    strength, width, angle = columns(theta, inputs)
    angle = torch.deg2rad(angle)
    x, y = places(inputs)
    along = _stepped((x * angle.cos() + y * angle.sin()) / width, STRIPE_EDGE) * (2 / STRIPES)
    levels = rng.uniform(1, 1, STRIPES).to(inputs.dtype) * 2 - 1
    grid = torch.stack([along[:, 0], torch.zeros_like(along[:, 0])], -1).to(inputs.dtype)
    return inputs + strength * F.grid_sample(levels, grid, "bilinear", "reflection", align_corners=False)


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


def rolling_shear(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """A rolling shutter in a moving camera: each row is read after the one above, so vertical lines lean and wave."""
    x, y = places(inputs)
    height, width = inputs.shape[2:]
    return warp_lines(inputs, (x, 0 * x), rolling_source(0 * y, y, theta, rng, (height, width)))


def rolling_source(x: Tensor, y: Tensor, theta: Tensor, rng: Rng, size: Size) -> tuple[Tensor, Tensor]:
    """Where the content of a picture taken with a rolling shutter comes from."""
    skew, wobble, waves = columns(theta, x)
    time = y * (min(size) / size[0])
    return x - (skew * time + wobble * (2 * math.pi * waves * time).sin()), y


_camera = partial(Perturbation, inputs="picture", family="camera", moves=False)

SENSOR = (
    _camera(
        "pixelate",
        (Theta("block", 0.0, 0.05, unit="share of the shorter side", limits=(0, 1), small=(3.0, 0.25)),),
        pixelate,
        is_random=False,
    ),
    _camera(
        "dead_pixels",
        (Theta("share", 0.0, 0.05, unit="share of the pixels", limits=(0, 1)),),
        dead_pixels,
    ),
    _camera(
        "stripes",
        (
            Theta("strength", 0.0, 0.2, unit="share of the input range", limits=(0, 2)),
            Theta("width", 0.01, 0.05, 0.01, unit="share of the shorter side", limits=(0.001, 1)),
            Theta("angle", -90.0, 90.0, unit="degrees from upright", limits=(-360, 360)),
        ),
        stripes,
    ),
    _camera(
        "occlusion",
        (
            Theta("x", -0.4, 0.4, unit="share of the shorter side, to the right of the centre", limits=(-10, 10)),
            Theta("y", -0.4, 0.4, unit="share of the shorter side, below the centre", limits=(-10, 10)),
            Theta("size", 0.0, 0.4, unit="share of the shorter side", limits=(0, 10)),
            Theta("opacity", 0.5, 1.0, 0.5, unit="share of the patch in the mixture", limits=(0, 1)),
        ),
        occlusion,
    ),
    _camera(
        "rolling_shear",
        (
            Theta("skew", -0.25, 0.25, unit="sideways from top to bottom, share of the shorter side", limits=(-10, 10)),
            Theta("wobble", 0.0, 0.02, unit="share of the shorter side", limits=(0, 1)),
            Theta("waves", 1.0, 5.0, 1.0, unit="waves from top to bottom", limits=(0, 100)),
        ),
        rolling_shear,
        moves=rolling_source,
        is_random=False,
    ),
)
