"""Distances between a test and its seed."""

from __future__ import annotations

import torch
from torch import Tensor

WINDOW = 7
"""Side of the SSIM windows in pixels."""
VALUES_AT_ONCE = 1 << 18
"""On a CPU, SSIM is computed for about so many values at a time: it takes thirty times their memory."""


def distances(inputs: Tensor, disturbed: Tensor, bounds: tuple[float, float]) -> dict[str, Tensor]:
    """How far tests are from their seeds, by column of a fault; each `[tests]`."""
    return {
        "distance": l2(inputs, disturbed),
        "linf": linf(inputs, disturbed),
        "ssim": ssim(inputs, disturbed, bounds),
    }


def l2(inputs: Tensor, disturbed: Tensor) -> Tensor:
    """Euclidean distance `[tests]`."""
    return (disturbed - inputs).flatten(1).square().sum(1).sqrt()


def linf(inputs: Tensor, disturbed: Tensor) -> Tensor:
    """The largest change of any value `[tests]`."""
    return (disturbed - inputs).flatten(1).abs().amax(1)


def ssim(inputs: Tensor, disturbed: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Structural similarity `[tests]` of pictures `[tests, channels, height, width]`: 1 is the same picture.

    Wang et al. 2004 with a uniform 7x7 window and the unbiased (co)variance; the mean over the frames of clips; NaN for
    inputs that are neither.
    """
    if inputs.ndim == 5:
        inputs, disturbed = inputs.flatten(1, 2), disturbed.flatten(1, 2)
    if inputs.ndim != 4 or min(inputs.shape[2:]) < WINDOW or not len(inputs):
        return torch.full((len(inputs),), torch.nan, device=inputs.device)
    n_parts = -(-inputs.numel() // VALUES_AT_ONCE) if inputs.is_cpu else 1
    parts = zip(inputs.tensor_split(n_parts), disturbed.tensor_split(n_parts), strict=True)
    return torch.cat([_ssim(*part, bounds) for part in parts if len(part[0])])


def _ssim(inputs: Tensor, disturbed: Tensor, bounds: tuple[float, float]) -> Tensor:
    """SSIM of pictures of at least the window's size."""
    a, b = inputs - bounds[0], disturbed - bounds[0]  # from zero, so that float32 is precise enough
    moments = torch.stack([a, b, a * a, b * b, a * b]).flatten(0, 1)
    means = _window_means(moments).view(5, *a.shape[:2], a.shape[2] - 6, a.shape[3] - 6)
    mean_a, mean_b = means[0], means[1]
    unbiased = 49 / 48
    var_a, var_b = (means[2] - mean_a**2) * unbiased, (means[3] - mean_b**2) * unbiased
    covariance = (means[4] - mean_a * mean_b) * unbiased
    span = bounds[1] - bounds[0]
    c1, c2 = (0.01 * span) ** 2, (0.03 * span) ** 2
    luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    structure = (2 * covariance + c2) / (var_a + var_b + c2)
    similarity: Tensor = (luminance * structure).flatten(1).mean(1)
    return similarity


def _window_means(pictures: Tensor) -> Tensor:
    """Means over all 7x7 windows: a sum of 7 shifted rows, then of 7 shifted columns."""
    height, width = pictures.shape[-2] - 6, pictures.shape[-1] - 6
    rows = pictures[..., :height, :].clone()
    for k in range(1, 7):
        rows += pictures[..., k : k + height, :]
    windows = rows[..., :width].clone()
    for k in range(1, 7):
        windows += rows[..., k : k + width]
    return windows / 49
