"""The ResNets of He et al. for 32x32 pictures, with parameter-free (option A) shortcuts."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut; the activation is functional, as in the published code."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(n_out)
        self.n_added = n_out - n_in

    def forward(self, inputs: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(inputs)))
        x = self.bn2(self.conv2(x))
        if self.n_added:
            half = self.n_added // 2
            inputs = F.pad(inputs[:, :, ::2, ::2], (0, 0, 0, 0, half, self.n_added - half))
        return F.relu(x + inputs)


class CifarResNet(nn.Module):
    """Three stages of `depth` blocks with 16, 32 and 64 channels."""

    def __init__(self, depth: int, n_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = self._stage(16, 16, depth, stride=1)
        self.layer2 = self._stage(16, 32, depth, stride=2)
        self.layer3 = self._stage(32, 64, depth, stride=2)
        self.linear = nn.Linear(64, n_classes)

    @staticmethod
    def _stage(n_in: int, n_out: int, depth: int, stride: int) -> nn.Sequential:
        blocks = [Block(n_in if k == 0 else n_out, n_out, stride if k == 0 else 1) for k in range(depth)]
        return nn.Sequential(*blocks)

    def forward(self, inputs: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(inputs)))
        x = self.layer3(self.layer2(self.layer1(x)))
        scores: Tensor = self.linear(x.mean((2, 3)))
        return scores


def resnet56() -> CifarResNet:
    """ResNet-56: 9 blocks a stage; 532,490 element neurons on 32x32 pictures."""
    return CifarResNet(9)
