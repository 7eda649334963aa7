"""Geometry: perturbations that move the content of a picture, which is mirrored beyond its edges.

Each perturbation is a `Source`, a function that returns where the content at a place comes from. The picture is sampled
there, and labels are moved accordingly.
"""

import math
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from themis.compute.rng import Rng
from themis.oracle.motion import Size, Source
from themis.perturb.context import Context
from themis.perturb.perturbation import Apply, Perturbation, Theta, columns
from themis.perturb.picture import field, places, side, warp, warp_lines

VIEWING_DISTANCE = 1.5
"""Distance of the viewer from a tilted picture, in units of its longer side."""
FIELD_POINTS = 56
"""Approximate number of points across an elastic field, which is linear in between."""
CORNER_DISTANCE = 1 / 3
"""Distance of the three points of `jitter` from the centre along each axis, as a share of the shorter side."""
GEOMETRY: list[Perturbation] = []


def _geometry(
    *theta: Theta, by_lines: bool = False, apply: Apply | None = None, **options: Any
) -> Callable[[Source], Source]:
    """A decorator that adds a source as a perturbation.

    by_lines: whether its result is the sum of a part per column and a part per row, both zero at the centre, which can
    be sampled faster. apply: a faster way to sample pictures at this source.
    """

    def add(source: Source) -> Source:
        def sampled(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
            (x, y), (height, width) = places(inputs), inputs.shape[2:]
            if not by_lines:
                return warp(inputs, *source(x, y, theta, rng, (height, width)))
            parts = (source(*at, theta, rng, (height, width)) for at in ((x, 0 * x), (0 * y, y)))
            return warp_lines(inputs, *parts)

        common: dict[str, Any] = {"inputs": "picture", "family": "geometry", "moves": source, "is_random": False}
        function = update_wrapper(apply or sampled, source)
        GEOMETRY.append(Perturbation(source.__name__, theta, function, **(common | options)))
        return source

    return add


@_geometry(Theta("angle", -30.0, 30.0, unit="degrees, anticlockwise", limits=(-360, 360)), by_lines=True)
def rotate(x: Tensor, y: Tensor, theta: Tensor, rng: Rng, size: Size) -> tuple[Tensor, Tensor]:
    """The picture rotated about its centre."""
    (angle,) = columns(torch.deg2rad(theta), x)
    cos, sin = angle.cos(), angle.sin()
    return x * cos - y * sin, x * sin + y * cos


@_geometry(
    Theta("x", -0.2, 0.2, unit="share of the shorter side, to the right", limits=(-10, 10)),
    Theta("y", -0.2, 0.2, unit="share of the shorter side, down", limits=(-10, 10)),
)
def shift(x: Tensor, y: Tensor, theta: Tensor, rng: Rng, size: Size) -> tuple[Tensor, Tensor]:
    """The picture moved sideways, up or down."""
    right, down = columns(theta, x)
    return x - right, y - down


@_geometry(Theta("factor", 0.6, 1.6, 1.0, unit="times as large", limits=(0.05, 20)))
def scale(x: Tensor, y: Tensor, theta: Tensor, rng: Rng, size: Size) -> tuple[Tensor, Tensor]:
    """Everything nearer or farther: the picture enlarged or reduced about its centre."""
    (factor,) = columns(theta, x)
    return x / factor, y / factor


@_geometry(
    Theta("lean", -20.0, 20.0, unit="degrees to the right", limits=(-80, 80)),
    Theta("slope", -20.0, 20.0, unit="degrees up to the right", limits=(-80, 80)),
    by_lines=True,
)
def shear(x: Tensor, y: Tensor, theta: Tensor, rng: Rng, size: Size) -> tuple[Tensor, Tensor]:
    """The picture sheared: vertical lines lean to the right, or horizontal lines rise to the right."""
    lean, slope = columns(torch.deg2rad(theta).tan(), x)
    return x + lean * y, slope * x + y


@_geometry(
    Theta("back", -25.0, 25.0, unit="degrees, the upper edge away", limits=(-45, 45)),
    Theta("aside", -25.0, 25.0, unit="degrees, the right edge away", limits=(-45, 45)),
)
def perspective(x: Tensor, y: Tensor, theta: Tensor, rng: Rng, size: Size) -> tuple[Tensor, Tensor]:
    """The picture as a tilted board, seen from in front."""
    back, aside = columns(torch.deg2rad(theta), x)
    distance = VIEWING_DISTANCE * max(size) / min(size)
    # Where the ray through (x, y) meets the board, which is rotated about its horizontal and then its vertical axis.
    depth = back.cos() * aside.cos() - back.cos() * aside.sin() * (x / distance) + back.sin() * (y / distance)
    across = x * back.cos() - y * back.sin() * aside.sin()
    return across / depth, y * aside.cos() / depth


def _stretched(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """A faster way to sample the pictures at the source of `elastic`."""
    pull = F.interpolate(_pull(inputs, theta, rng), inputs.shape[2:], mode="bilinear", align_corners=False)
    x, y = places(inputs)
    return warp(inputs, x + pull[:, :1], y + pull[:, 1:])


def _pull(pictures: Tensor, theta: Tensor, rng: Rng) -> Tensor:
    """The pull of the rubber sheet to the right and down, at a grid of pixels, `[tests, 2, rows, columns]`."""
    amount, size = columns(theta, pictures)
    step = max(1, side(pictures) // FIELD_POINTS)
    coarse = pictures[:, :1, ::step, ::step]
    return (torch.cat([field(coarse, rng, size, octaves=2) for _ in range(2)], 1) * 2 - 1) * amount


@_geometry(
    Theta("amount", 0.0, 0.04, unit="share of the shorter side", limits=(0, 1)),
    Theta("scale", 0.1, 0.4, 0.4, unit="size of what is pulled, share of the shorter side", limits=(0.02, 10)),
    is_random=True,
    apply=_stretched,
)
def elastic(x: Tensor, y: Tensor, theta: Tensor, rng: Rng, size: Size) -> tuple[Tensor, Tensor]:
    """The picture on a rubber sheet that is stretched smoothly and at random."""
    height, width = size
    pictures = x.new_zeros(()).expand(len(theta), 1, height, width)
    shape = (len(theta), *(x + y).shape[1:])
    x, y = x.expand(shape), y.expand(shape)
    grid = torch.stack([x * (2 * min(size) / width), y * (2 * min(size) / height)], -1).view(len(theta), 1, -1, 2)
    pull = F.grid_sample(_pull(pictures, theta, rng), grid, "bilinear", "border", align_corners=False)
    return x + pull[:, 0].view(x.shape), y + pull[:, 1].view(y.shape)


@_geometry(
    Theta("skew", -0.25, 0.25, unit="sideways from top to bottom, share of the shorter side", limits=(-10, 10)),
    Theta("wobble", 0.0, 0.02, unit="share of the shorter side", limits=(0, 1)),
    Theta("waves", 1.0, 5.0, 1.0, unit="waves from top to bottom", limits=(0, 100)),
    by_lines=True,
    family="camera",
)
def rolling_shear(x: Tensor, y: Tensor, theta: Tensor, rng: Rng, size: Size) -> tuple[Tensor, Tensor]:
    """A rolling shutter in a moving camera: each row is read after the one above, so vertical lines lean and wave."""
    skew, wobble, waves = columns(theta, x)
    time = y * (min(size) / size[0])
    return x - (skew * time + wobble * (2 * math.pi * waves * time).sin()), y


@_geometry(
    Theta("amount", 0.0, 0.08, unit="share of the shorter side", limits=(0, 1)),
    is_random=True,
    family="corruption",
)
def jitter(x: Tensor, y: Tensor, theta: Tensor, rng: Rng, size: Size) -> tuple[Tensor, Tensor]:
    """The picture stretched, sheared and moved as a whole: three of its points move at random."""
    moved = (rng.uniform(6).to(x.dtype) * 2 - 1) * theta
    d = CORNER_DISTANCE  # the points are at (d, d), (d, -d) and (-d, -d)
    x1, y1, x2, y2, x3, y3 = columns(moved / (2 * d), x)
    return x - (x2 - x3) * x - (x1 - x2) * y - (x1 + x3) * d, y - (y2 - y3) * x - (y1 - y2) * y - (y1 + y3) * d
