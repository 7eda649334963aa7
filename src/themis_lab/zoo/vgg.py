"""VGG-19 of Simonyan and Zisserman; parameters are named as in torchvision, so that its files load."""

from __future__ import annotations

from torch import Tensor, nn

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
