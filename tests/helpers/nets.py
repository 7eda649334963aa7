"""Small nets whose layers and activations are known."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


class Hand(nn.Module):
    """relu([a, -a, a + b]) then a sum: activations worked out by hand."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 3, bias=False)
        self.relu = nn.ReLU()
        self.last = nn.Linear(3, 2, bias=False)
        with torch.no_grad():
            self.first.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 1.0]]))
            self.last.weight.copy_(torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]))

    def forward(self, x):
        return self.last(self.relu(self.first(x)))


class Functional(nn.Module):
    """Functional activations of several spellings, one of them in place."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        x = F.relu(self.a(x))
        x = torch.tanh(self.b(x))
        x = self.c(x).sigmoid()
        return F.gelu(self.d(x)) @ torch.ones(4, 3)


class InPlace(nn.Module):
    """An activation that a later in-place operation overwrites."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.a(x))
        y += 100.0
        return self.b(y - 100.0)


class Reused(nn.Module):
    """One module called three times."""

    def __init__(self):
        super().__init__()
        self.a, self.act = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x):
        for _ in range(3):
            x = self.act(self.a(x))
        return x[:, :3] * 1.0


class Branching(nn.Module):
    """Nested branches that meet again, and an activation module of the user's own."""

    class Swish(nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(x)

    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.ReLU()))
        self.right = nn.Sequential(nn.Linear(4, 5), Branching.Swish())
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.left(x) + self.right(x))


class Wrapped(nn.Module):
    """The same scores in another wrapping."""

    def __init__(self, wrap):
        super().__init__()
        self.net, self.wrap = Branching(), wrap

    def forward(self, x):
        return self.wrap(self.net(x))


WRAPPINGS = {
    "tensor": lambda scores: scores,
    "tuple": lambda scores: (scores, "extra"),
    "list": lambda scores: [None, scores],
    "dict": lambda scores: {"loss": 0.0, "logits": scores},
    "object": lambda scores: SimpleNamespace(logits=scores, hidden=None),
}


class Conv(nn.Module):
    """Convolution, batch norm, dropout and a counter: everything that training mode would change."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.drop = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.5)
        self.fc = nn.Linear(4 * 8 * 8, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return self.fc(self.drop(F.relu(self.bn(self.conv(x)))).flatten(1))
