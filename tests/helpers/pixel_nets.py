"""Segmentation of pictures whose brightness tells the class: nets that follow the picture, and one that does not."""

import torch
import torch.nn.functional as F
from torch import nn

SHADES = (0.1, 0.5, 0.9)


def scenes(n=6, size=(24, 32)):
    """Textured pictures of a few large regions, and the class of each pixel."""
    draw = torch.Generator().manual_seed(5)
    coarse = torch.rand(n, len(SHADES), 4, 5, generator=draw)
    labels = F.interpolate(coarse, size, mode="bilinear", align_corners=False).argmax(1)
    texture = 0.1 * torch.rand(n, *size, generator=draw) - 0.05
    return (torch.tensor(SHADES)[labels] + texture)[:, None], labels


class PixelNet(nn.Module):
    """Perfect: each pixel belongs to the class whose shade is nearest, wherever it is."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Conv2d(1, len(SHADES), 1)
        with torch.no_grad():
            shade = torch.tensor(SHADES)
            self.scores.weight.copy_(2 * shade.view(-1, 1, 1, 1))
            self.scores.bias.copy_(-(shade**2))

    def forward(self, pictures):
        return self.scores(pictures)


class RecallingNet(PixelNet):
    """Answers with the map of the first of the scenes that has the same pixel values, wherever they are now."""

    def __init__(self, pictures):
        super().__init__()
        self.register_buffer("known", pictures)

    def forward(self, pictures):
        brightness = pictures.flatten(1).sort(1).values[:, None] - self.known.flatten(1).sort(1).values
        weight = (-brightness.square().sum(2) * 100).softmax(1)
        return torch.einsum("nk,kchw->nchw", weight, super().forward(self.known)) + 0 * super().forward(pictures)
