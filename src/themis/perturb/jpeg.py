"""JPEG compression: what a picture loses when it is stored as a JPEG file, differentiable in the quality.

Colour is subsampled to half the resolution (4:2:0), the default of encoders. Rounding is a steep slope instead of a
step, and neither the quantization tables nor the pixels are rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from themis.compute.rng import Rng
from themis.perturb.context import Context
from themis.perturb.perturbation import Perturbation, Theta, columns
from themis.perturb.picture import doubled, halved

# Quantization steps at quality 50 for luma and chroma, row by row: ISO/IEC 10918-1, tables K.1 and K.2.
LUMA = """
16 11 10 16 24 40 51 61    12 12 14 19 26 58 60 55    14 13 16 24 40 57 69 56    14 17 22 29 51 87 80 62
18 22 37 56 68 109 103 77  24 35 55 64 81 104 113 92  49 64 78 87 103 121 120 101  72 92 95 98 112 100 103 99
"""
CHROMA = """
17 18 24 47 99 99 99 99  18 21 26 66 99 99 99 99  24 26 56 99 99 99 99 99  47 66 99 99 99 99 99 99
99 99 99 99 99 99 99 99  99 99 99 99 99 99 99 99  99 99 99 99 99 99 99 99  99 99 99 99 99 99 99 99
"""
COSINE_FACTORS = [math.sqrt((1 + (k > 0)) / 8) for k in range(8)]
"""Factors that normalise the cosines of `_dct`."""
MIDDLE = 128 / 255
"""The value that is subtracted before the transform."""


def jpeg(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """The picture stored as a JPEG file and read again: blocks of 8 by 8 pixels lose fine detail.

    Three channels are red, green and blue; with any other number, each channel is stored as luma.
    """
    (quality,) = columns(theta.to(inputs.dtype), inputs)
    coarseness = torch.where(quality < 50, 50 / quality, 2 - quality / 50)
    if inputs.shape[1] != 3:
        return _quantized(inputs - MIDDLE, LUMA, coarseness) + MIDDLE
    luma = _quantized(_luma(inputs)[:, None] - MIDDLE, LUMA, coarseness) + MIDDLE
    return _chroma_part(inputs, coarseness) + luma


def _luma(pictures: Tensor) -> Tensor:
    red, green, blue = pictures.unbind(1)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def _chroma_part(inputs: Tensor, coarseness: Tensor) -> Tensor:
    """What the stored chroma adds to the luma of red, green and blue."""
    half = halved(inputs)
    luma = _luma(half)
    chroma = torch.stack([(half[:, 2] - luma) / 1.772, (half[:, 0] - luma) / 1.402], 1)
    to_blue, to_red = _quantized(chroma, CHROMA, coarseness).unbind(1)
    added = torch.stack([1.402 * to_red, -0.344136 * to_blue - 0.714136 * to_red, 1.772 * to_blue], 1)
    return doubled(added, inputs)


def _quantized(planes: Tensor, table: str, coarseness: Tensor) -> Tensor:
    """Planes `[tests, planes, height, width]` with the coefficients of each block of 8 by 8 quantized."""
    n, n_planes, height, width = planes.shape
    padded = planes
    if height % 8 or width % 8:
        padded = F.pad(planes, (0, -width % 8, 0, -height % 8), mode="replicate")
    down, across = padded.shape[2] // 8, padded.shape[3] // 8
    # The position in the block comes first, across and down, so that each step works on whole tensors.
    pixels = padded.view(n, n_planes, down, 8, across, 8).permute(5, 3, 0, 1, 2, 4).contiguous()
    waves = torch.stack(_dct(torch.stack(_dct(pixels.unbind(0))).unbind(1)), 1)
    steps = _quantization_steps(table, coarseness)
    level = planes.new_tensor(COSINE_FACTORS)
    level = (level[:, None] * level).view(8, 8, 1, 1, 1, 1)
    waves = _rounded(waves * (level / steps)) * (level * steps)
    pixels = torch.stack(_inverse_dct(torch.stack(_inverse_dct(waves.unbind(1)), 1).unbind(0)))
    return pixels.permute(2, 3, 4, 1, 5, 0).reshape(padded.shape)[:, :, :height, :width]


def _quantization_steps(table: str, coarseness: Tensor) -> Tensor:
    """The quantization step of each coefficient: `[8 across, 8 down, tests, 1, 1, 1]`."""
    steps = coarseness.new_tensor([float(number) for number in table.split()]).view(8, 8).T[:, :, None]
    return ((steps * coarseness.view(-1)).clamp(1, 255) / 255).view(8, 8, -1, 1, 1, 1)


# The recursive cosine transform (Lee 1984) uses only sums and products of whole tensors, so that the rounding of a
# picture does not depend on the number of pictures, as it would in a matrix product.


def _dct(points: Sequence[Tensor]) -> list[Tensor]:
    """The sums of `point[j] cos((2j + 1) k pi / 2n)` for each `k`, of a signal with one tensor per point."""
    n = len(points)
    if n == 1:
        return list(points)
    pairs = list(zip(points[: n // 2], reversed(points[n // 2 :]), strict=True))
    even = _dct([a + b for a, b in pairs])
    odd = _dct([(a - b) * _half_secant(j, n) for j, (a, b) in enumerate(pairs)])
    odd = [a + b for a, b in pairwise(odd)] + odd[-1:]
    return [wave for pair in zip(even, odd, strict=True) for wave in pair]


def _inverse_dct(waves: Sequence[Tensor]) -> list[Tensor]:
    """The inverse: the sums of `wave[k] cos((2j + 1) k pi / 2n)` for each point `j`."""
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
    """Almost the nearest whole number, but smooth: the distance from it enters with the ninth power."""
    whole = x.detach().round()
    part = x - whole
    power = part
    for _ in range(3):
        power = power * power
    return torch.add(whole, power * part, alpha=256)


JPEG = (
    Perturbation(
        "jpeg",
        (Theta("quality", 10.0, 100.0, 100.0, unit="quality of the encoder, 1 to 100", limits=(1, 100)),),
        jpeg,
        is_random=False,
        inputs="picture",
        has_identity=False,
        family="camera",
        moves=False,
    ),
)
