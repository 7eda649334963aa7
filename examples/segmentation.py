"""Test a segmentation under geometry: label maps move with the picture, so that only answers that stay are faults."""

import torch
from torch import nn

import themis

CLASSES = ["background", "disc", "square"]


def scenes(n: int, side: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures `[n, 1, side, side]` of a bright disc and a square on a dim background, and the class of each pixel."""
    at = torch.arange(side)
    x, y = at.view(1, 1, -1), at.view(1, -1, 1)
    disc, square = torch.randint(8, side - 8, (2, n, 2, 1, 1))
    labels = torch.zeros(n, side, side, dtype=torch.long)
    labels[((x - square[:, 0]).abs() <= 5) & ((y - square[:, 1]).abs() <= 5)] = 2
    labels[(x - disc[:, 0]) ** 2 + (y - disc[:, 1]) ** 2 <= 36] = 1
    brightness = torch.tensor([0.2, 0.7, 0.8])[labels] + 0.05 * torch.randn(labels.shape)
    return brightness.clamp(0, 1)[:, None], labels


torch.manual_seed(0)
pictures, labels = scenes(80)
net = nn.Sequential(
    *(nn.Conv2d(1, 12, 5, padding=2), nn.ReLU()),
    *(nn.Conv2d(12, 12, 5, padding=4, dilation=2), nn.ReLU()),
    nn.Conv2d(12, 3, 1),
)
optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
for _ in range(50):
    optimiser.zero_grad()
    nn.functional.cross_entropy(net(pictures), labels).backward()
    optimiser.step()

# A fault is a mean IoU that falls by more than 0.1. Pixels that show nothing of the clean picture do not count.
target = themis.Target(net, oracle="segmentation:0.1")
test = scenes(30)
for perturbation in ("shift", "rotate", "rotate + brightness"):
    run = themis.run(target, test, perturbation, classes=CLASSES, max_tests=200, batch_size=50)
    print(f"{perturbation}: {run.stop}")
    print(f"  {run.rounds[-1].distinct_faults} distinct faults, fault rate {run.fault_rate.value:.1%}")
