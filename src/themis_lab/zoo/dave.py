"""DAVE-2 as DeepXplore builds it (its `Dave_orig`): a steering angle from a 100x100 picture of the road."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
