"""A model whose faults can be worked out, and data for it."""

import torch
from torch import nn


class Mean(nn.Module):
    """Says 1 where an input's mean is over a limit, a parameter."""

    def __init__(self, over=0.5):
        super().__init__()
        self.relu, self.over = nn.ReLU(), nn.Parameter(torch.tensor(over))

    def forward(self, x):
        over = self.relu(x).flatten(1).mean(1) - self.over
        return torch.stack([-over, over], 1)


def seeds(n=100, of=0):
    """Inputs with means from 0.3 to 0.4, and as many again that no shift breaks; all are answered 0."""
    means = torch.cat([torch.linspace(0.3, 0.4, n // 2), torch.full((n - n // 2,), 0.1)])
    noise = torch.rand(n, 1, 8, 8, generator=torch.Generator().manual_seed(of))
    return means.view(-1, 1, 1, 1) + 0.02 * noise, torch.zeros(n, dtype=torch.long)
