"""The model and the data of the stored run folder `earlier_run`."""

import torch
from torch import nn


def make_net():
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        net[2].bias -= net(torch.rand(500, 6, generator=generator)).mean(0)
    return net


def make_data():
    inputs = torch.rand(40, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return inputs, make_net()(inputs).argmax(1)


def make_picture_net():
    """A network for pictures of 1x6x6."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))


def make_pictures():
    """60 pictures, with the answers of that network as labels."""
    inputs = torch.rand(60, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return inputs, make_picture_net()(inputs).argmax(1)
