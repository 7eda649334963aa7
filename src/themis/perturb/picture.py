"""Building blocks of picture perturbations: coordinates, warps, convolutions and smooth random fields.

Pictures are `[tests, channels, height, width]` in 0..1. Lengths are shares of the shorter side, so that a disturbance
looks the same at any resolution. Every function treats tests independently and is differentiable in the arguments that
depend on theta.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from themis.compute.rng import Rng

LUMA = (0.299, 0.587, 0.114)
"""The weights of red, green and blue in the brightness of a colour."""
LATTICE_SIDE = 16
"""Side of the lattice of random numbers for one octave of a field, beyond which the field is mirrored."""


def side(pictures: Tensor) -> int:
    """The shorter side in pixels, which is the unit of lengths."""
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


def constant(numbers: tuple[Any, ...], like: Tensor) -> Tensor:
    """A cached tensor of numbers; a chunk that is captured as a CUDA graph cannot copy them from the host."""
    return _constant(numbers, like.dtype, like.device)


@lru_cache(maxsize=64)
def _constant(numbers: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=dtype, device=device)


def weighted_sum(pictures: Tensor, weights: Sequence[float]) -> Tensor:
    """The weighted sum of the channels, `[tests, 1, height, width]`."""
    total = pictures[:, :1] * weights[0]
    for k in range(1, len(weights)):
        total = total + pictures[:, k : k + 1] * weights[k]
    return total


def warp(pictures: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The pictures sampled at the positions `x` and `y` (`[tests, 1, height, width]`, in the units of `places`).

    Values between pixels are interpolated linearly; beyond the edges the picture is mirrored.
    """
    return _sampled(pictures, _grid(x, y, *_size(pictures)))


def warp_lines(pictures: Tensor, columns: tuple[Tensor, Tensor], rows: tuple[Tensor, Tensor]) -> Tensor:
    """Like `warp`, but faster, for positions that are the sum of a part per column and a part per row.

    columns: x and y `[tests, 1, 1, width]`. rows: x and y `[tests, 1, height, 1]`.
    """
    return _sampled(pictures, _grid(*columns, *_size(pictures)) + _grid(*rows, *_size(pictures)))


def _size(pictures: Tensor) -> tuple[float, float]:
    """Width and height, in shares of the shorter side."""
    return pictures.shape[3] / side(pictures), pictures.shape[2] / side(pictures)


def _grid(x: Tensor, y: Tensor, width: Tensor | float, height: Tensor | float) -> Tensor:
    """Convert positions `[tests, 1, rows, columns]` on a sheet of this size to the form of `grid_sample`."""
    across, down = (x * (2 / width))[:, 0], (y * (2 / height))[:, 0]
    shape = tuple(map(max, across.shape, down.shape))
    return torch.stack([across.expand(shape), down.expand(shape)], -1)


def _sampled(sheet: Tensor, grid: Tensor) -> Tensor:
    return F.grid_sample(sheet, grid.to(sheet.dtype), "bilinear", "reflection", align_corners=False)


def convolve(pictures: Tensor, kernel: Tensor) -> Tensor:
    """Convolve each picture with its own kernel `[tests, rows, columns]` of odd size; edges are repeated."""
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

    scale: size of the largest features, as a share of the shorter side, `[tests, 1, 1, 1]`. Each octave halves the size
    of features and multiplies their amplitude by `roughness`.
    """
    x, y = places(pictures)
    total = torch.zeros((), dtype=pictures.dtype, device=pictures.device)
    amplitudes = [roughness**k for k in range(octaves)]
    for k, amplitude in enumerate(amplitudes):
        lattice = rng.uniform(1, LATTICE_SIDE, LATTICE_SIDE).to(pictures.dtype)
        grid = _grid(_smoothed(x * 2**k / scale), _smoothed(y * 2**k / scale), LATTICE_SIDE, LATTICE_SIDE)
        total = total + amplitude / sum(amplitudes) * _sampled(lattice, grid)
    return total


def _smoothed(u: Tensor) -> Tensor:
    """Positions pulled towards lattice points, which makes linear interpolation between these smooth."""
    whole = (u - 0.5).floor() + 0.5
    return whole + eased(u - whole)


def halved(pictures: Tensor) -> Tensor:
    """Pictures at half the resolution, as means of four pixels; the last pixels of an odd side are repeated."""
    height, width = pictures.shape[2:]
    if height % 2 or width % 2:
        pictures = F.pad(pictures, (0, width % 2, 0, height % 2), mode="replicate")
    pairs = pictures[:, :, ::2] + pictures[:, :, 1::2]
    return (pairs[..., ::2] + pairs[..., 1::2]) / 4


def doubled(pictures: Tensor, like: Tensor) -> Tensor:
    """Pictures at twice the resolution, by linear interpolation, cropped to the size of `like`."""
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
    """Sample a sheet `[tests, 1, rows, columns]`, centred and rotated by an angle in radians, at the pictures' pixels.

    width, height: the size of the sheet, in shares of the pictures' shorter side; beyond it, the sheet is mirrored.
    """
    x, y = places(pictures)
    cos, sin = angle.cos(), angle.sin()
    return _sampled(sheet, _grid(x * cos, x * -sin, width, height) + _grid(y * sin, y * cos, width, height))
