"""A small network that segments the embedded digits: every pixel with ink has the class of its digit."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from searching.packs import ModelWithData
from themis.data.seeds import Seeds
from themis.target.target import Target
from themis_integrations.data.digits import read_digits
from themis_lab.cli.demo import split

NAME = "segmenter-digits"
INK = 0.3
"""The least brightness of a pixel that belongs to the digit."""
N_STEPS, BATCH_SIZE = 600, 64


def train_segmenter(device: str) -> ModelWithData:
    """The network, trained on four fifths of the digits, and the other fifth as test seeds; takes a minute on a CPU."""
    train, test = (_with_maps(seeds) for seeds in split(read_digits()))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = _network()
        optimiser = torch.optim.Adam(net.parameters(), 3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, N_STEPS)
        assert train.labels is not None
        for _ in range(N_STEPS):
            rows = torch.randint(len(train), (BATCH_SIZE,))
            loss = F.cross_entropy(net(train.take(rows)), train.labels[rows])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
    net.eval().to(device)
    return ModelWithData(Target(net, bounds=(0, 1), oracle="segmentation"), test, train)


def _with_maps(seeds: Seeds) -> Seeds:
    """Seeds whose labels are maps: 0 without ink, 1 to 10 for the digits."""
    assert seeds.labels is not None
    has_ink = seeds.take(torch.arange(len(seeds)))[:, 0] > INK
    return seeds.with_labels(torch.where(has_ink, seeds.labels[:, None, None] + 1, 0))


def _network() -> nn.Sequential:
    def block(n_in: int, n_out: int) -> list[nn.Module]:
        return [nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU()]

    down = [*block(1, 16), nn.MaxPool2d(2), *block(16, 32), nn.MaxPool2d(2), *block(32, 64), *block(64, 64)]
    up = [nn.Upsample(scale_factor=2), *block(64, 32), nn.Upsample(scale_factor=2), *block(32, 16)]
    return nn.Sequential(*down, *up, nn.Conv2d(16, 11, 1))
