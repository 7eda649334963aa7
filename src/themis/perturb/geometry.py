"""Geometry: where things are in the picture. Beyond its edges the picture is mirrored; no content is invented.

Each perturbation has a function that says where the content of a place comes from (a `Source`): the picture is sampled
there, and labels are moved by it.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from themis.compute.rng import Rng
from themis.oracle.motion import Size, Source
from themis.perturb.context import Context
from themis.perturb.perturbation import Perturbation, Theta, columns
from themis.perturb.picture import field, places, side, warp, warp_lines

DISTANCE = 1.5
"""Distance of the viewer from a tilted picture, in longer sides."""
FIELD_SIDE = 56
"""Approximate number of points across an elastic field; between them it is linear."""


def rotate(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """The picture rotated about its centre."""
    (angle,) = columns(torch.deg2rad(theta), inputs)
    x, y = places(inputs)
    cos, sin = angle.cos(), angle.sin()
    return warp_lines(inputs, (x * cos, x * sin), (-y * sin, y * cos))


def rotate_source(x: Tensor, y: Tensor, theta: Tensor, rng: Rng, size: Size) -> tuple[Tensor, Tensor]:
    """Where the content of a rotated picture comes from."""
    (angle,) = columns(torch.deg2rad(theta), x)
    cos, sin = angle.cos(), angle.sin()
    return x * cos - y * sin, x * sin + y * cos


def shift(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """The picture moved sideways, up or down."""
    right, down = columns(theta, inputs)
    x, y = places(inputs)
    return warp_lines(inputs, (x - right, 0 * x), (0 * y, y - down))


def shift_source(x: Tensor, y: Tensor, theta: Tensor, rng: Rng, size: Size) -> tuple[Tensor, Tensor]:
    """Where the content of a shifted picture comes from."""
    right, down = columns(theta, x)
    return x - right, y - down


def scale(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Everything nearer or farther: the picture enlarged or reduced about its centre."""
    return _warp_linearly(inputs, theta, rng, scale_source)


def scale_source(x: Tensor, y: Tensor, theta: Tensor, rng: Rng, size: Size) -> tuple[Tensor, Tensor]:
    """Where the content of an enlarged or reduced picture comes from."""
    (factor,) = columns(theta, x)
    return x / factor, y / factor


def shear(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """The picture sheared: vertical lines lean to the right, or horizontal lines rise to the right."""
    return _warp_linearly(inputs, theta, rng, shear_source)


def shear_source(x: Tensor, y: Tensor, theta: Tensor, rng: Rng, size: Size) -> tuple[Tensor, Tensor]:
    """Where the content of a sheared picture comes from."""
    lean, slope = columns(torch.deg2rad(theta).tan(), x)
    return x + lean * y, slope * x + y


def perspective(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """The picture as a tilted board, seen from in front."""
    return warp(inputs, *perspective_source(*places(inputs), theta, rng, _size(inputs)))


def perspective_source(x: Tensor, y: Tensor, theta: Tensor, rng: Rng, size: Size) -> tuple[Tensor, Tensor]:
    """Where the content of a tilted picture comes from."""
    back, aside = columns(torch.deg2rad(theta), x)
    distance = DISTANCE * max(size) / min(size)
    # Where the ray through (x, y) meets the board, rotated about its horizontal and then about its vertical axis:
    depth = back.cos() * aside.cos() - back.cos() * aside.sin() * (x / distance) + back.sin() * (y / distance)
    across = x * back.cos() - y * back.sin() * aside.sin()
    return across / depth, y * aside.cos() / depth


def elastic(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """The picture on a rubber sheet that is stretched smoothly and at random."""
    pull = F.interpolate(_pull(inputs, theta, rng), inputs.shape[2:], mode="bilinear", align_corners=False)
    x, y = places(inputs)
    return warp(inputs, x + pull[:, :1], y + pull[:, 1:])


def elastic_source(x: Tensor, y: Tensor, theta: Tensor, rng: Rng, size: Size) -> tuple[Tensor, Tensor]:
    """Where the content of a stretched picture comes from."""
    height, width = size
    pictures = x.new_zeros(()).expand(len(theta), 1, height, width)
    shape = (len(theta), *(x + y).shape[1:])
    x, y = x.expand(shape), y.expand(shape)
    grid = torch.stack([x * (2 * min(size) / width), y * (2 * min(size) / height)], -1).view(len(theta), 1, -1, 2)
    pull = F.grid_sample(_pull(pictures, theta, rng), grid, "bilinear", "border", align_corners=False)
    return x + pull[:, 0].view(x.shape), y + pull[:, 1].view(y.shape)


def _pull(pictures: Tensor, theta: Tensor, rng: Rng) -> Tensor:
    """How far the rubber sheet is pulled to the right and down, `[tests, 2, rows, columns]`, at some of the pixels."""
    amount, size = columns(theta, pictures)
    step = max(1, side(pictures) // FIELD_SIDE)
    coarse = pictures[:, :1, ::step, ::step]
    return (torch.cat([field(coarse, rng, size, octaves=2) for _ in range(2)], 1) * 2 - 1) * amount


def _warp_linearly(inputs: Tensor, theta: Tensor, rng: Rng, source: Source) -> Tensor:
    """The pictures sampled at a source that is linear in x and y."""
    x, y = places(inputs)
    size = _size(inputs)
    return warp_lines(inputs, source(x, 0 * x, theta, rng, size), source(0 * y, y, theta, rng, size))


def _size(pictures: Tensor) -> Size:
    height, width = pictures.shape[2:]
    return height, width


_geometry = partial(Perturbation, is_random=False, inputs="picture", family="geometry")

GEOMETRY = (
    _geometry(
        "rotate",
        (Theta("angle", -30.0, 30.0, unit="degrees, anticlockwise", limits=(-360, 360)),),
        rotate,
        moves=rotate_source,
    ),
    _geometry(
        "shift",
        (
            Theta("x", -0.2, 0.2, unit="share of the shorter side, to the right", limits=(-10, 10)),
            Theta("y", -0.2, 0.2, unit="share of the shorter side, down", limits=(-10, 10)),
        ),
        shift,
        moves=shift_source,
    ),
    _geometry(
        "scale",
        (Theta("factor", 0.6, 1.6, 1.0, unit="times as large", limits=(0.05, 20)),),
        scale,
        moves=scale_source,
    ),
    _geometry(
        "shear",
        (
            Theta("lean", -20.0, 20.0, unit="degrees to the right", limits=(-80, 80)),
            Theta("slope", -20.0, 20.0, unit="degrees up to the right", limits=(-80, 80)),
        ),
        shear,
        moves=shear_source,
    ),
    _geometry(
        "perspective",
        (
            Theta("back", -25.0, 25.0, unit="degrees, the upper edge away", limits=(-45, 45)),
            Theta("aside", -25.0, 25.0, unit="degrees, the right edge away", limits=(-45, 45)),
        ),
        perspective,
        moves=perspective_source,
    ),
    _geometry(
        "elastic",
        (
            Theta("amount", 0.0, 0.04, unit="share of the shorter side", limits=(0, 1)),
            Theta("scale", 0.1, 0.4, 0.4, unit="size of what is pulled, share of the shorter side", limits=(0.02, 10)),
        ),
        elastic,
        moves=elastic_source,
        is_random=True,
    ),
)
