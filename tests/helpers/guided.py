"""A small net, its data and options for campaigns that a criterion guides."""

import torch
from torch import nn

QUICK = {"magnitude": 0.4, "tolerance": 1e-12, "plateau": None, "round_size": 128, "max_tests": 640}
SPECS = (
    "nc(threshold=0.7)",
    "kmnc(k=20)",
    "kmnc(k=20, neurons=element)",
    "nbc",
    "tknc(k=1)",
    "dsa",
    "scc(tolerance=1e-9)",
    "nlc",
)


class Seen(nn.Module):
    """A small net that remembers what it was given."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.conv, self.relu, self.last = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Linear(4 * 36, 5)
        self.seen = None

    def forward(self, x):
        if self.seen is not None:
            self.seen.append(x.detach().clone())
        return self.last(self.relu(self.conv(x)).flatten(1))


def labelled(net):
    """Inputs with the net's own answers."""
    inputs = torch.rand(150, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return inputs, net(inputs).argmax(1)
