"""Geometry: where things are in the picture. Beyond its edges the picture is mirrored; no content is invented."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from themis.compute.rng import Rng
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


def shift(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """The picture moved sideways, up or down."""
    right, down = columns(theta, inputs)
    x, y = places(inputs)
    return warp_lines(inputs, (x - right, 0 * x), (0 * y, y - down))


def scale(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Everything nearer or farther: the picture enlarged or reduced about its centre."""
    (factor,) = columns(theta, inputs)
    x, y = places(inputs)
    return warp_lines(inputs, (x / factor, 0 * x), (0 * y, y / factor))


def shear(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """The picture sheared: vertical lines lean to the right, or horizontal lines rise to the right."""
    lean, slope = columns(torch.deg2rad(theta).tan(), inputs)
    x, y = places(inputs)
    return warp_lines(inputs, (x, slope * x), (lean * y, y))


def perspective(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """The picture as a tilted board, seen from in front."""
    back, aside = columns(torch.deg2rad(theta), inputs)
    x, y = places(inputs)
    distance = DISTANCE * max(inputs.shape[2:]) / side(inputs)
    # Where the ray through (x, y) meets the board, rotated about its horizontal and then about its vertical axis:
    depth = back.cos() * aside.cos() - back.cos() * aside.sin() * (x / distance) + back.sin() * (y / distance)
    across = x * back.cos() - y * back.sin() * aside.sin()
    return warp(inputs, across / depth, y * aside.cos() / depth)


def elastic(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """The picture on a rubber sheet that is stretched smoothly and at random."""
    amount, size = columns(theta, inputs)
    step = max(1, side(inputs) // FIELD_SIDE)
    coarse = inputs[:, :1, ::step, ::step]
    pull = torch.cat([field(coarse, rng, size, octaves=2) for _ in range(2)], 1) * 2 - 1
    pull = F.interpolate(pull * amount, inputs.shape[2:], mode="bilinear", align_corners=False)
    x, y = places(inputs)
    return warp(inputs, x + pull[:, :1], y + pull[:, 1:])


_geometry = partial(Perturbation, is_random=False, inputs="picture", family="geometry")

GEOMETRY = (
    _geometry(
        "rotate",
        (Theta("angle", -30.0, 30.0, unit="degrees, counter-clockwise", limits=(-360, 360)),),
        rotate,
    ),
    _geometry(
        "shift",
        (
            Theta("x", -0.2, 0.2, unit="share of the shorter side, to the right", limits=(-10, 10)),
            Theta("y", -0.2, 0.2, unit="share of the shorter side, down", limits=(-10, 10)),
        ),
        shift,
    ),
    _geometry(
        "scale",
        (Theta("factor", 0.6, 1.6, 1.0, unit="times as large", limits=(0.05, 20)),),
        scale,
    ),
    _geometry(
        "shear",
        (
            Theta("lean", -20.0, 20.0, unit="degrees to the right", limits=(-80, 80)),
            Theta("slope", -20.0, 20.0, unit="degrees up to the right", limits=(-80, 80)),
        ),
        shear,
    ),
    _geometry(
        "perspective",
        (
            Theta("back", -25.0, 25.0, unit="degrees, the upper edge away", limits=(-45, 45)),
            Theta("aside", -25.0, 25.0, unit="degrees, the right edge away", limits=(-45, 45)),
        ),
        perspective,
    ),
    _geometry(
        "elastic",
        (
            Theta("amount", 0.0, 0.04, unit="share of the shorter side", limits=(0, 1)),
            Theta("scale", 0.1, 0.4, 0.4, unit="size of what is pulled, share of the shorter side", limits=(0.02, 10)),
        ),
        elastic,
        is_random=True,
    ),
)
