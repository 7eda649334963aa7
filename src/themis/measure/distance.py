"""How far a test is from its seed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def l2(inputs: Tensor, disturbed: Tensor) -> Tensor:
    """Euclidean distance `[tests]`."""
    return (disturbed - inputs).flatten(1).square().sum(1).sqrt()


def ssim(inputs: Tensor, disturbed: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Structural similarity `[tests]` of pictures `[tests, channels, height, width]`: 1 is the same picture.

    Wang et al. 2004 with a uniform 7x7 window and the unbiased (co)variance; NaN for what is no such picture.
    """
    if inputs.ndim != 4 or min(inputs.shape[2:]) < 7:
        return torch.full((len(inputs),), torch.nan, device=inputs.device)
    a, b = inputs.double(), disturbed.double()
    n = 49
    mean_a, mean_b = F.avg_pool2d(a, 7, 1), F.avg_pool2d(b, 7, 1)
    var_a = (F.avg_pool2d(a * a, 7, 1) - mean_a**2) * n / (n - 1)
    var_b = (F.avg_pool2d(b * b, 7, 1) - mean_b**2) * n / (n - 1)
    covariance = (F.avg_pool2d(a * b, 7, 1) - mean_a * mean_b) * n / (n - 1)
    span = bounds[1] - bounds[0]
    c1, c2 = (0.01 * span) ** 2, (0.03 * span) ** 2
    luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    structure = (2 * covariance + c2) / (var_a + var_b + c2)
    return (luminance * structure).flatten(1).mean(1).float()
