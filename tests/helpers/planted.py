"""Small nets that read real digits, with planted causes of faults: where, under which theta, and to which answer.

The perturbation turns and lights a little and adds noise, and writes its theta into a row of marks below the picture.
The nets read the marks for nothing but their planted causes, so the cause of a fault is known from its theta.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from themis import Perturbation, Theta
from themis_integrations.data.digits import read_digits

SIZE = 14
THETA = (Theta("angle", -8, 8), Theta("light", -0.08, 0.08), Theta("sigma", 0, 0.4))
LOW, HIGH = (np.array([getattr(each, end) for each in THETA], dtype=np.float32) for end in ("low", "high"))


@dataclass(frozen=True)
class Cause:
    """Under theta's `dimension` in `low..high` of its range, `layer` goes wrong before its activation.

    Towards the mean of the class `answer`; or, where that is None, it is multiplied by `gain`. neurons: only the first
    so many, or channels, do.
    """

    dimension: int
    low: float
    high: float
    layer: int
    answer: int | None = None
    gain: float = 4.0
    neurons: int | None = None


class Net(nn.Module):
    """Stages, each followed by ReLU but the last; `causes` act on what a stage gives."""

    def __init__(self, *stages):
        super().__init__()
        self.stages, self.relu = nn.ModuleList(stages), nn.ModuleList(nn.ReLU() for _ in stages[1:])
        self.causes, self.means = (), {}

    def forward(self, x):
        marks, h = x[:, 0, SIZE], x[:, :, :SIZE] - 0.5
        for k, stage in enumerate(self.stages):
            h = stage(h)
            for cause in self.causes:
                if cause.layer == k:
                    h = torch.where(_at(cause, marks).view(-1, *(1,) * (h.ndim - 1)), self._wrong(cause, h), h)
            h = self.relu[k](h) if k < len(self.relu) else h
        return h

    def _wrong(self, cause, h):
        wrong = cause.gain * h
        if cause.answer is not None:
            wrong = 0.2 * h + 1.2 * self.means[cause.layer, cause.answer]
        return torch.cat([wrong[:, : cause.neurons], h[:, cause.neurons :]], 1) if cause.neurons else wrong

    def plant(self, causes, inputs, labels):
        """Give the net its causes."""
        with torch.no_grad():
            for cause in causes:
                if cause.answer is None:
                    continue
                h = inputs[labels == cause.answer][:, :, :SIZE] - 0.5
                for k, stage in enumerate(self.stages[: cause.layer + 1]):
                    h = stage(h if k == 0 else F.relu(h))
                self.means[cause.layer, cause.answer] = h.mean(0, keepdim=True)
        self.causes = causes
        return self


class Skip(nn.Module):
    """A block whose input goes past it too."""

    def __init__(self, width):
        super().__init__()
        self.first, self.relu, self.last = nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)

    def forward(self, x):
        return x + self.last(self.relu(self.first(x)))


def _at(cause, marks):
    return (marks[:, cause.dimension] >= cause.low) & (marks[:, cause.dimension] <= cause.high)


def _linear(*widths):
    return [nn.Linear(a, b) for a, b in pairwise(widths)]


def _mlp(*widths):
    first, *rest = _linear(SIZE * SIZE, *widths, 10)
    return Net(nn.Sequential(nn.Flatten(), first), *rest)


def _strided():
    return Net(
        nn.Conv2d(1, 8, 3, stride=2),
        nn.Conv2d(8, 12, 3),
        nn.Sequential(nn.Flatten(), nn.Linear(12 * 16, 48)),
        nn.Linear(48, 10),
    )


def _conv():
    return Net(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(6, 12, 3)),
        nn.Conv2d(12, 12, 3),
        nn.Sequential(nn.Flatten(), nn.Linear(12 * 9, 32)),
        nn.Linear(32, 10),
    )


NETS = {
    "mlp": lambda: _mlp(64, 48, 32),
    "deep": lambda: _mlp(48, 48, 40, 40, 32, 32),
    "conv": _conv,
    "strided": _strided,
    "skip": lambda: Net(nn.Sequential(nn.Flatten(), nn.Linear(SIZE * SIZE, 48)), Skip(48), Skip(48), nn.Linear(48, 10)),
}


@lru_cache
def digits():
    """All digits at half size, with a row of marks that say: nothing was changed."""
    data = read_digits()
    inputs = F.avg_pool2d(data.inputs.float(), 2)
    identity = (torch.zeros(3) - torch.from_numpy(LOW)) / torch.from_numpy(HIGH - LOW)
    marks = torch.zeros(len(inputs), 1, 1, SIZE)
    marks[..., :3] = identity
    return torch.cat([inputs, marks], 2), data.labels


def _disturb(inputs, theta, rng, context):
    """Turned, lit and noisy; theta written below."""
    angle = theta[:, 0] * torch.pi / 180
    zero = torch.zeros_like(angle)
    turn = torch.stack([angle.cos(), -angle.sin(), zero, angle.sin(), angle.cos(), zero], 1).view(-1, 2, 3)
    picture = inputs[:, :, :SIZE]
    grid = F.affine_grid(turn, list(picture.shape), align_corners=False)
    picture = F.grid_sample(picture, grid, align_corners=False)
    noise = rng.normal(*picture.shape[1:])
    picture = picture + theta[:, 1, None, None, None] + theta[:, 2, None, None, None] * noise
    low, high = (torch.from_numpy(each).to(theta) for each in (LOW, HIGH))
    marks = torch.zeros_like(inputs[:, :, SIZE:])
    marks[..., :3] = ((theta - low) / (high - low))[:, None, None]
    return torch.cat([picture, marks], 2)


MARKED = Perturbation("marked", THETA, _disturb)


@lru_cache
def _weights(name, random_seed):
    torch.manual_seed(random_seed)
    net, (inputs, labels) = NETS[name](), digits()
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    draw = torch.Generator().manual_seed(random_seed)
    for _ in range(400):
        rows = torch.randint(len(inputs), (100,), generator=draw)
        noisy = inputs[rows] + 0.1 * torch.randn(inputs[rows].shape, generator=draw)
        optimizer.zero_grad()
        F.cross_entropy(net(noisy), labels[rows]).backward()
        optimizer.step()
    return net.state_dict()


def planted(name, causes, random_seed=0):
    """A trained net with planted causes."""
    net = NETS[name]()
    net.load_state_dict(_weights(name, random_seed))
    return net.eval().plant(causes, *digits())


def layer_name(name, layer):
    """What the layer of a cause is called."""
    return "output" if layer == len(NETS[name]().stages) - 1 else f"relu.{layer}"


def cause_of(causes, theta):
    """Number of each fault's cause, the last that acted; -1 where none did."""
    share = (theta - LOW) / (HIGH - LOW)
    found = np.full(len(theta), -1)
    for k, cause in enumerate(causes):
        found[(share[:, cause.dimension] >= cause.low) & (share[:, cause.dimension] <= cause.high)] = k
    return found
