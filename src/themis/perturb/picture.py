"""What picture perturbations are drawn with: coordinates, blends, warps, blurs and smooth random fields.

Pictures are `[tests, channels, height, width]` in 0..1. Lengths are shares of the shorter side, so that a disturbance
looks the same at any resolution. All of it works on each test by itself and is differentiable in what comes from theta.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from themis.rng import Rng

LATTICE = 16
"""Side of the lattice of random numbers that one octave of a field is made of; beyond it the field is mirrored."""


def side(pictures: Tensor) -> int:
    """The shorter side in pixels: the unit of lengths."""
    return min(pictures.shape[2:])


def places(pictures: Tensor) -> tuple[Tensor, Tensor]:
    """Where pixel centres lie: x `[1, 1, 1, width]` and y `[1, 1, height, 1]`, from the picture's centre, x to the right
    and y down, in shares of the shorter side."""
    height, width = pictures.shape[2:]
    unit = side(pictures)
    x = (torch.arange(width, dtype=pictures.dtype, device=pictures.device) - (width - 1) / 2) / unit
    y = (torch.arange(height, dtype=pictures.dtype, device=pictures.device) - (height - 1) / 2) / unit
    return x.view(1, 1, 1, -1), y.view(1, 1, -1, 1)


def blend(pictures: Tensor, layer: Tensor | float, alpha: Tensor) -> Tensor:
    """`layer` over the pictures; alpha 0 leaves them as they are, to the bit, and 1 hides them."""
    return pictures + alpha * (layer - pictures)


def warp(pictures: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The pictures read off at the places `x` and `y` (as `places`, `[tests, 1, height, width]`), between pixels
    linearly; beyond the edge they are mirrored."""
    height, width = pictures.shape[2:]
    unit = side(pictures)
    shape = (len(pictures), height, width)
    grid = torch.stack([(x * (2 * unit / width))[:, 0].expand(shape), (y * (2 * unit / height))[:, 0].expand(shape)], -1)
    return F.grid_sample(pictures, grid.to(pictures.dtype), "bilinear", "reflection", align_corners=False)


def convolve(pictures: Tensor, kernel: Tensor) -> Tensor:
    """Each picture's channels convolved with its own kernel `[tests, rows, columns]`, odd in size; edges are repeated."""
    n, channels, height, width = pictures.shape
    rows, across = kernel.shape[1:]
    padded = F.pad(pictures, (across // 2, across // 2, rows // 2, rows // 2), mode="replicate")
    weight = kernel.to(pictures.dtype).repeat_interleave(channels, 0)[:, None]
    return F.conv2d(padded.reshape(1, n * channels, *padded.shape[2:]), weight, groups=n * channels).view(
        n, channels, height, width
    )


def field(pictures: Tensor, rng: Rng, scale: Tensor, octaves: int = 4, roughness: float = 0.5) -> Tensor:
    """Smooth random numbers in 0..1, `[tests, 1, height, width]`, as clouds are.

    scale: size of the largest lumps, a share of the shorter side, `[tests, 1, 1, 1]`. Each octave halves the lumps and
    multiplies their height by `roughness`.
    """
    x, y = places(pictures)
    total = torch.zeros((), dtype=pictures.dtype, device=pictures.device)
    heights = [roughness**k for k in range(octaves)]
    for k, height in enumerate(heights):
        lattice = rng.uniform(1, LATTICE, LATTICE).to(pictures.dtype)
        grid = torch.stack(torch.broadcast_tensors(*(_smoothed(each * 2**k / scale) for each in (x, y))), -1)[:, 0]
        total = total + height / sum(heights) * F.grid_sample(
            lattice, grid * (2 / LATTICE), "bilinear", "reflection", align_corners=False
        )
    return total


def _smoothed(u: Tensor) -> Tensor:
    """Places among lattice points, drawn towards them so that linear steps between them become smooth ones."""
    whole = (u - 0.5).floor() + 0.5
    part = u - whole
    return whole + part * part * (3 - 2 * part)
