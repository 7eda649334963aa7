"""Test a model of clips: a small 3-D convolutional net that tells where a square moves, while the camera shakes."""

import torch
from torch import nn

import themis

DIRECTIONS = ["left", "right", "up", "down"]


def clips(n: int, frames: int = 6, side: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    """Clips `[n, frames, 1, side, side]` of a bright square that moves by a pixel per frame, on a dim background."""
    labels = torch.arange(n) % 4
    step = torch.tensor([[-1, 0], [1, 0], [0, -1], [0, 1]])[labels]
    start = torch.randint(8, side - 12, (n, 2))
    shown = 0.2 * torch.rand(n, 1, 1, side, side).expand(n, frames, 1, side, side).clone()
    for k in range(frames):
        for i, (x, y) in enumerate((start + k * step).tolist()):
            shown[i, k, 0, y : y + 5, x : x + 5] = 0.9
    return shown, labels


class Net(nn.Module):
    """Sees how each frame differs from the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv3d(1, 8, (3, 5, 5), stride=(1, 2, 2)), nn.Conv3d(8, 16, 3)
        self.last = nn.Linear(16, len(DIRECTIONS))

    def forward(self, clips: torch.Tensor) -> torch.Tensor:
        changes = (clips[:, 1:] - clips[:, :-1]).transpose(1, 2)  # PyTorch's 3-D layers take the channels first
        return self.last(torch.relu(self.conv2(torch.relu(self.conv1(changes)))).mean((2, 3, 4)))


torch.manual_seed(0)
inputs, labels = clips(200)
net = Net()
optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
for _ in range(60):
    optimiser.zero_grad()
    nn.functional.cross_entropy(net(inputs), labels).backward()
    optimiser.step()

# Clips are [inputs, frames, channels, height, width]. A perturbation of pictures disturbs all frames alike;
# over_time(...) has a value of each theta for the first frame and one for the last.
target = themis.Target(net)
test = clips(60)
for perturbation in ("shift", "over_time(shift(x=-0.1:0.1, y=-0.1:0.1))", "over_time(brightness) + rain"):
    run = themis.run(target, test, perturbation, classes=DIRECTIONS, max_tests=300)
    print(f"{perturbation}: {run.stop}")
    print(f"  {run.rounds[-1].distinct_faults} distinct faults, fault rate {run.fault_rate.value:.1%}")
