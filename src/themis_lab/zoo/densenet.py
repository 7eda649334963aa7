"""DenseNet-121 of Huang et al. for 32x32 pictures; parameters are named as in torchvision."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROWTH = 32
"""Channels that each dense layer adds."""


class DenseLayer(nn.Module):
    """A 1x1 and a 3x3 convolution, each after a normalisation; the output is appended to the input channels."""

    def __init__(self, n_in: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(n_in)
        self.conv1 = nn.Conv2d(n_in, 4 * GROWTH, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * GROWTH)
        self.conv2 = nn.Conv2d(4 * GROWTH, GROWTH, 3, padding=1, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.conv1(F.relu(self.norm1(inputs)))
        x = self.conv2(F.relu(self.norm2(x)))
        return torch.cat([inputs, x], 1)


class Transition(nn.Module):
    """Halves the number of channels and the size."""

    def __init__(self, n_in: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(n_in)
        self.conv = nn.Conv2d(n_in, n_in // 2, 1, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return F.avg_pool2d(self.conv(F.relu(self.norm(inputs))), 2)


class CifarDenseNet(nn.Module):
    """Dense blocks of `depths` layers after a 3x3 convolution that keeps the size."""

    def __init__(self, depths: tuple[int, ...], n_classes: int = 10) -> None:
        super().__init__()
        n = 2 * GROWTH
        parts: OrderedDict[str, nn.Module] = OrderedDict(conv0=nn.Conv2d(3, n, 3, padding=1, bias=False))
        parts["norm0"], parts["relu0"] = nn.BatchNorm2d(n), nn.ReLU()
        for k, depth in enumerate(depths, start=1):
            layers = {f"denselayer{j + 1}": DenseLayer(n + j * GROWTH) for j in range(depth)}
            parts[f"denseblock{k}"] = nn.Sequential(OrderedDict(layers))
            n += depth * GROWTH
            if k < len(depths):
                parts[f"transition{k}"] = Transition(n)
                n //= 2
        parts["norm5"] = nn.BatchNorm2d(n)
        self.features = nn.Sequential(parts)
        self.classifier = nn.Linear(n, n_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.classifier(F.relu(self.features(inputs)).mean((2, 3)))
        return scores


def densenet121() -> CifarDenseNet:
    """DenseNet-121: blocks of 6, 12, 24 and 16 layers; 4,919,306 element neurons on 32x32 pictures."""
    return CifarDenseNet((6, 12, 24, 16))
