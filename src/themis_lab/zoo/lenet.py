"""The LeNets of DeepXplore that the paper tests: 5x5 convolutions that keep the size, ReLU, 2x2 max pooling."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


class LeNet(nn.Module):
    """Two convolutions and one or more linear layers on 28x28 digits."""

    def __init__(self, channels: tuple[int, int], hidden: tuple[int, ...], n_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels[0], 5, padding=2)
        self.conv2 = nn.Conv2d(*channels, 5, padding=2)
        widths = (channels[1] * 49, *hidden, n_classes)
        self.fcs = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, inputs: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(inputs)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        for layer in self.fcs[:-1]:
            x = F.relu(layer(x))
        scores: Tensor = self.fcs[-1](x)
        return scores


def lenet1() -> LeNet:
    """LeNet-1: 4 and 12 channels, no hidden units."""
    return LeNet((4, 12), ())


def lenet4() -> LeNet:
    """LeNet-4: 6 and 16 channels, 84 hidden units."""
    return LeNet((6, 16), (84,))


def lenet5() -> LeNet:
    """LeNet-5: 6 and 16 channels, 120 and 84 hidden units."""
    return LeNet((6, 16), (120, 84))
