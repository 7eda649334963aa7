"""Building blocks of picture perturbations: coordinates, warps, convolutions and smooth random fields.

Pictures are `[tests, channels, height, width]` in 0..1. Lengths are shares of the shorter side, so that a disturbance
looks the same at any resolution. Every function treats tests independently and is differentiable in the arguments that
depend on theta.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from themis.compute.rng import Rng

LATTICE = 16
"""Side of the lattice of random numbers of one octave of a field; beyond it the field is mirrored."""


def side(pictures: Tensor) -> int:
    """The shorter side in pixels: the unit of lengths."""
    return min(pictures.shape[2:])


def places(pictures: Tensor) -> tuple[Tensor, Tensor]:
    """The positions of pixel centres relative to the picture's centre, in shares of the shorter side.

    x `[1, 1, 1, width]` grows to the right, y `[1, 1, height, 1]` downwards.
    """
    height, width = pictures.shape[2:]
    unit = side(pictures)
    x = (torch.arange(width, dtype=pictures.dtype, device=pictures.device) - (width - 1) / 2) / unit
    y = (torch.arange(height, dtype=pictures.dtype, device=pictures.device) - (height - 1) / 2) / unit
    return x.view(1, 1, 1, -1), y.view(1, 1, -1, 1)


def warp(pictures: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The pictures sampled at the positions `x` and `y` (`[tests, 1, height, width]`, in the units of `places`).

    Values between pixels are interpolated linearly; beyond the edges the picture is mirrored.
    """
    height, width = pictures.shape[2:]
    unit = side(pictures)
    shape = (len(pictures), height, width)
    across, down = (x * (2 * unit / width))[:, 0], (y * (2 * unit / height))[:, 0]
    grid = torch.stack([across.expand(shape), down.expand(shape)], -1)
    return F.grid_sample(pictures, grid.to(pictures.dtype), "bilinear", "reflection", align_corners=False)


def convolve(pictures: Tensor, kernel: Tensor) -> Tensor:
    """Each picture convolved with its own kernel `[tests, rows, columns]` of odd size; edges are repeated."""
    n, channels, height, width = pictures.shape
    if n * channels == 1:  # a single channel would be rounded differently
        return convolve(pictures.expand(1, 2, height, width), kernel)[:, :1]
    rows, across = kernel.shape[1:]
    padded = F.pad(pictures, (across // 2, across // 2, rows // 2, rows // 2), mode="replicate")
    weight = kernel.to(pictures.dtype).repeat_interleave(channels, 0)[:, None]
    convolved = F.conv2d(padded.reshape(1, n * channels, *padded.shape[2:]), weight, groups=n * channels)
    return convolved.view(n, channels, height, width)


def field(pictures: Tensor, rng: Rng, scale: Tensor, octaves: int = 4, roughness: float = 0.5) -> Tensor:
    """Smooth random numbers in 0..1 that look like clouds, `[tests, 1, height, width]`.

    scale: size of the largest features, a share of the shorter side, `[tests, 1, 1, 1]`. Each octave halves their size
    and multiplies their amplitude by `roughness`.
    """
    x, y = places(pictures)
    shape = (len(pictures), *pictures.shape[2:])
    total = torch.zeros((), dtype=pictures.dtype, device=pictures.device)
    amplitudes = [roughness**k for k in range(octaves)]
    for k, amplitude in enumerate(amplitudes):
        lattice = rng.uniform(1, LATTICE, LATTICE).to(pictures.dtype)
        across, down = (_smoothed(axis * 2**k / scale)[:, 0].expand(shape) for axis in (x, y))
        grid = torch.stack([across, down], -1)
        total = total + amplitude / sum(amplitudes) * F.grid_sample(
            lattice, grid * (2 / LATTICE), "bilinear", "reflection", align_corners=False
        )
    return total


def _smoothed(u: Tensor) -> Tensor:
    """Positions between lattice points, pulled towards them so that linear interpolation becomes smooth."""
    whole = (u - 0.5).floor() + 0.5
    part = u - whole
    return whole + part * part * (3 - 2 * part)


def warp_lines(pictures: Tensor, columns: tuple[Tensor, Tensor], rows: tuple[Tensor, Tensor]) -> Tensor:
    """Like `warp`, for positions that are the sum of a part per column and a part per row, which is faster.

    columns: x and y `[tests, 1, 1, width]`. rows: x and y `[tests, 1, height, 1]`.
    """
    height, width = pictures.shape[2:]
    unit = side(pictures)

    def part(x: Tensor, y: Tensor, *shape: int) -> Tensor:
        scaled = (x * (2 * unit / width))[:, 0], (y * (2 * unit / height))[:, 0]
        return torch.stack([axis.expand(len(pictures), *shape) for axis in scaled], -1)

    grid = part(*columns, 1, width) + part(*rows, height, 1)
    return F.grid_sample(pictures, grid.to(pictures.dtype), "bilinear", "reflection", align_corners=False)


def halved(pictures: Tensor) -> Tensor:
    """Pictures at half the resolution: the means of four pixels; if a side is odd, its last pixels are repeated."""
    height, width = pictures.shape[2:]
    if height % 2 or width % 2:
        pictures = F.pad(pictures, (0, width % 2, 0, height % 2), mode="replicate")
    pairs = pictures[:, :, ::2] + pictures[:, :, 1::2]
    return (pairs[..., ::2] + pairs[..., 1::2]) / 4


def doubled(pictures: Tensor, like: Tensor) -> Tensor:
    """Pictures at twice the resolution, by linear interpolation, cropped to the size of `like`, their original."""
    n, channels, height, width = pictures.shape
    single = pictures.reshape(n * channels, 1, height, width)  # single channels are many times faster to enlarge
    enlarged = F.interpolate(single, scale_factor=2, mode="bilinear", align_corners=False)
    return enlarged.view(n, channels, 2 * height, 2 * width)[:, :, : like.shape[2], : like.shape[3]]


def eased(x: Tensor) -> Tensor:
    """A smooth step: 0 below 0 and 1 above 1."""
    x = x.clamp(0, 1)
    return x * x * (3 - 2 * x)


def sample_rotated(
    sheet: Tensor, pictures: Tensor, angle: Tensor, width: Tensor | float, height: Tensor | float
) -> Tensor:
    """A sheet `[tests, 1, rows, columns]`, centred and rotated by an angle in radians, sampled at the pictures' pixels.

    width, height: the size of the sheet, in shares of the pictures' shorter side; beyond it the sheet is mirrored.
    """
    x, y = places(pictures)
    cos, sin = angle.cos(), angle.sin()
    across, down = 2 / width, 2 / height
    columns = torch.stack([(x * cos * across)[:, 0], (x * -sin * down)[:, 0]], -1)
    rows = torch.stack([(y * sin * across)[:, 0], (y * cos * down)[:, 0]], -1)
    return F.grid_sample(sheet, (columns + rows).to(sheet.dtype), "bilinear", "reflection", align_corners=False)
