"""Small networks that are trained here: residual ones on CIFAR-10, and one with dropout on MNIST."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from themis.data.seeds import Seeds
from themis.runs.source import Origin
from themis.target.target import Normalize, Target
from themis_lab.zoo.nets import CifarResNet
from themis_lab.zoo.table import Augment, shift_and_mirror

BATCH_SIZE = 128


@dataclass(frozen=True)
class Trained:
    """A network, the entry of the zoo whose data it learns, and how it is trained with a one-cycle schedule."""

    build: Callable[[], nn.Module]
    data: str
    epochs: int
    max_rate: float
    normalise: Normalize | None = None
    augment: Augment | None = None


def _digit_reader() -> nn.Sequential:
    first = [nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(
        *first, *second, nn.Flatten(), nn.Linear(32 * 49, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 10)
    )


CIFAR = Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
NETWORKS = {
    "resnet8-cifar10": Trained(lambda: CifarResNet(1), "resnet56-cifar10", 6, 0.3, CIFAR, shift_and_mirror),
    "resnet20-cifar10": Trained(lambda: CifarResNet(3), "resnet56-cifar10", 6, 0.3, CIFAR, shift_and_mirror),
    "cnn-mnist": Trained(_digit_reader, "lenet5-mnist", 4, 0.1),
}


def train(name: str, device: str) -> tuple[Target, Seeds, Seeds]:
    """The trained network, its test data and its training data; a residual one takes minutes on one core."""
    network = NETWORKS[name]
    origin = Origin(zoo=network.data)
    test, train = origin.read(), origin.read_train()
    assert train is not None
    assert train.labels is not None  # the zoo's data has both
    rng = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = network.build().to(device)
        optimiser = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
        n_batches = len(train) // BATCH_SIZE
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimiser, network.max_rate, total_steps=network.epochs * n_batches
        )
        for _ in range(network.epochs):
            for rows in torch.randperm(len(train), generator=rng)[: n_batches * BATCH_SIZE].view(n_batches, -1):
                inputs, labels = train.take(rows), train.labels[rows]
                if network.augment is not None:
                    inputs, labels = network.augment(inputs, labels, rng)
                if network.normalise is not None:
                    inputs = network.normalise(inputs)
                with torch.autocast(torch.device(device).type, torch.bfloat16):
                    outputs = module(inputs.to(device))
                loss = F.cross_entropy(outputs.float(), labels.to(device))
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                schedule.step()
    return Target(module.eval(), bounds=(0, 1), preprocess=network.normalise), test, train
