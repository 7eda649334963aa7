"""The ResNets of He et al.: ResNet-56 for 32x32 pictures with parameter-free shortcuts, ResNet-50 for ImageNet."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut; ReLU is called as a function, as in the published code."""

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
    """ResNet-56: 9 blocks per stage; 532,490 element neurons on 32x32 pictures."""
    return CifarResNet(9)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, the last four times as wide, and a shortcut; the stride is in the 3x3."""

    def __init__(self, n_in: int, width: int, stride: int) -> None:
        super().__init__()
        n_out = 4 * width
        self.conv1 = nn.Conv2d(n_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, n_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(n_out)
        self.downsample = None
        if stride > 1 or n_in != n_out:
            self.downsample = nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out))

    def forward(self, inputs: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(inputs)))
        x = F.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        return F.relu(x + (inputs if self.downsample is None else self.downsample(inputs)))


class ImageNetResNet(nn.Module):
    """Four stages of bottlenecks on 224x224 pictures; parameters are named as in torchvision, so its files load."""

    def __init__(self, depths: tuple[int, int, int, int], n_classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = self._stage(64, 64, depths[0], stride=1)
        self.layer2 = self._stage(256, 128, depths[1], stride=2)
        self.layer3 = self._stage(512, 256, depths[2], stride=2)
        self.layer4 = self._stage(1024, 512, depths[3], stride=2)
        self.fc = nn.Linear(2048, n_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @staticmethod
    def _stage(n_in: int, width: int, depth: int, stride: int) -> nn.Sequential:
        blocks = [Bottleneck(n_in if k == 0 else 4 * width, width, stride if k == 0 else 1) for k in range(depth)]
        return nn.Sequential(*blocks)

    def forward(self, inputs: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(inputs))), 3, 2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        scores: Tensor = self.fc(x.mean((2, 3)))
        return scores


def resnet50() -> ImageNetResNet:
    """ResNet-50: 3, 4, 6 and 3 bottlenecks."""
    return ImageNetResNet((3, 4, 6, 3))
