"""Distances between tests and their seeds, by which tests are dropped and slight disturbances detected."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from themis.errors import UsageError

WINDOW = 7
"""Side of the SSIM windows in pixels."""
VALUES_AT_ONCE = 1 << 18
"""Values for which SSIM is computed at a time on a CPU; it takes thirty times their memory."""


def distances(inputs: Tensor, disturbed: Tensor, bounds: tuple[float, float]) -> dict[str, Tensor]:
    """Distances of tests from their seeds, `[tests]`, by column of a fault."""
    change = (disturbed - inputs).flatten(1)
    return {
        "distance": change.square().sum(1).sqrt(),  # Euclidean
        "linf": change.abs().amax(1),
        "ssim": ssim(inputs, disturbed, bounds),
    }


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
    """Means over all 7x7 windows; on a CPU, adding 7 shifted rows and then 7 shifted columns is faster."""
    if not pictures.is_cpu:
        return torch.nn.functional.avg_pool2d(pictures, WINDOW, 1)
    height, width = pictures.shape[-2] - 6, pictures.shape[-1] - 6
    rows = pictures[..., :height, :].clone()
    for k in range(1, 7):
        rows += pictures[..., k : k + height, :]
    windows = rows[..., :width].clone()
    for k in range(1, 7):
        windows += rows[..., k : k + width]
    return windows / 49


SLIGHT_CHANGE = 0.02
"""Disturbances that change inputs by less than this share of their contrast are slight."""


def change_of_contrast(inputs: Tensor, disturbed: Tensor) -> float:
    """The root mean square of the change, relative to the standard deviation of the inputs; per feature for tables.

    It is infinite if all inputs are the same.
    """
    inputs, change = inputs.double(), (disturbed - inputs).double()
    if inputs.ndim == 2:
        contrast = inputs.std(0, correction=0)
        inputs, change, contrast = inputs[:, contrast > 0], change[:, contrast > 0], contrast[contrast > 0]
    else:
        contrast = inputs.std(correction=0)
    return float((change / contrast).square().mean().sqrt()) if contrast.sum() > 0 else math.inf


def check_similarity(least: Mapping[str, float], shape: tuple[int, ...]) -> None:
    """Refuse limits of similarity that the measures do not have for inputs of `shape` (of one input)."""
    for name in least:
        side = _MEASURES[name][1]
        if len(shape) not in (3, 4) or min(shape[-2:]) < side:
            raise UsageError(
                f"min_{name} needs pictures [channels, height, width], or clips of them, of at least {side} pixels per "
                f"side, got inputs {list(shape)}: leave it out"
            )


def is_similar(inputs: Tensor, disturbed: Tensor, bounds: tuple[float, float], least: Mapping[str, float]) -> Tensor:
    """Which tests are as similar to their seeds as the limits require."""
    similar = torch.ones(len(inputs), dtype=torch.bool, device=inputs.device)
    for name, limit in least.items():
        similar &= _MEASURES[name][0](inputs, disturbed, bounds) >= limit
    return similar


def similar_first(
    inputs: Tensor, disturbed: Tensor, n: int, bounds: tuple[float, float], least: Mapping[str, float]
) -> tuple[Tensor, int]:
    """An order with tests similar to their seed first, and how many of the first `n` tests are similar."""
    with torch.no_grad():
        similar = is_similar(inputs[:n], disturbed.detach()[:n], bounds, least)
    order = torch.arange(len(inputs), device=inputs.device)
    order[:n] = torch.cat([similar.nonzero(), (~similar).nonzero()]).squeeze(1)
    return order, int(similar.sum())


_NOISE = 2 / 255**2
"""The variance of visual noise, for pictures in 0..1."""


def vif(inputs: Tensor, disturbed: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Visual information fidelity `[tests]`: the share of the information of a picture or clip that is left.

    Sheikh and Bovik 2006, in the pixel domain, at four scales, on the mean over the channels; 1 is the same picture.
    """
    frames = ((x - bounds[0]).float().mean(-3).flatten(0, -3) / (bounds[1] - bounds[0]) for x in (inputs, disturbed))
    clean, other = (x[:, None] for x in frames)
    left = total = torch.zeros(len(clean), device=clean.device)
    for scale, radius in enumerate((8, 4, 2, 1)):
        if scale:
            clean, other = (_filtered(x, radius)[..., ::2, ::2] for x in (clean, other))
        products = torch.cat([clean, other, clean * clean, other * other, clean * other], 1)
        a, b, aa, bb, ab = _filtered(products, radius).unbind(1)
        var_a, var_b, covariance = (aa - a * a).clamp(min=0), (bb - b * b).clamp(min=0), ab - a * b
        gain = (covariance / (var_a + 1e-10)).clamp(min=0)
        added = (var_b - gain * covariance).clamp(min=0)
        left = left + torch.log1p(gain**2 * var_a / (added + _NOISE)).flatten(1).sum(1)
        total = total + torch.log1p(var_a / _NOISE).flatten(1).sum(1)
    left, total = (x.view(len(inputs), -1).sum(1) for x in (left, total))
    return torch.where(total > 0, left / total, 1.0)


def _filtered(pictures: Tensor, radius: int) -> Tensor:
    """Pictures `[tests, channels, height, width]` under a Gaussian filter, without their margin."""
    kernel = torch.exp(-12.5 * (torch.arange(-radius, radius + 1, device=pictures.device) / (2 * radius + 1)) ** 2)
    rows = (kernel / kernel.sum()).expand(pictures.shape[1], 1, 1, -1)
    return conv2d(conv2d(pictures, rows, groups=len(rows)), rows.mT, groups=len(rows))


_MEASURES = {"ssim": (ssim, WINDOW), "vif": (vif, 41)}
"""The measures of similarity, and the smallest side in pixels that they need."""
