"""Data augmentation for training; all inputs stay in 0..1."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Generator, Tensor


def shift_and_mirror(inputs: Tensor, labels: Tensor, rng: Generator) -> tuple[Tensor, Tensor]:
    """Shift pictures by up to 4 pixels and mirror half of them."""
    n, _, height, width = inputs.shape
    is_mirrored = torch.rand(n, generator=rng) < 0.5
    inputs = torch.where(is_mirrored.to(inputs.device).view(-1, 1, 1, 1), inputs.flip(3), inputs)
    padded = F.pad(inputs, (4, 4, 4, 4))
    down, right = torch.randint(0, 9, (2, n, 1, 1), generator=rng).to(inputs.device)
    rows = torch.arange(height, device=inputs.device).view(1, -1, 1) + down
    columns = torch.arange(width, device=inputs.device).view(1, 1, -1) + right
    picked = padded.permute(0, 2, 3, 1)[torch.arange(n, device=inputs.device).view(-1, 1, 1), rows, columns]
    return picked.permute(0, 3, 1, 2).contiguous(), labels


def mirror_and_light(inputs: Tensor, labels: Tensor, rng: Generator) -> tuple[Tensor, Tensor]:
    """Mirror half of the roads, which negates the angle, and make all of them darker or lighter."""
    is_mirrored = (torch.rand(len(inputs), generator=rng) < 0.5).to(inputs.device)
    light = torch.empty(len(inputs), 1, 1, 1).uniform_(0.6, 1.4, generator=rng).to(inputs.device)
    inputs = torch.where(is_mirrored.view(-1, 1, 1, 1), inputs.flip(3), inputs)
    return (inputs * light).clamp(0, 1), torch.where(is_mirrored, -labels, labels)
