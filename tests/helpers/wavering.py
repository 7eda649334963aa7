"""What tests of the page share: a net that breaks often, pictures, and the view in a page."""

import re

import torch
from torch import nn

ENDLESS = {"tolerance": 1e-12, "plateau": None}


class Wavering(nn.Module):
    """A small net whose answer breaks often."""

    def __init__(self, n=64, n_classes=3):
        super().__init__()
        torch.manual_seed(0)
        first, last = nn.Linear(n, 16, bias=False), nn.Linear(16, n_classes, bias=False)
        self.net = nn.Sequential(nn.Flatten(), first, nn.ReLU(), last)

    def forward(self, x):
        return self.net(x - 0.5)


def pictures(n=40, shape=(1, 8, 8)):
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(0))


def embedded(page):
    return re.search(r'<script type="application/json" id="view">(.*?)</script>', page, re.DOTALL)[1]
