"""The Sampler: a few neurons that represent all of them, evenly spaced in order of variance."""

from __future__ import annotations

import torch
from torch import Tensor


def sample_neurons(variance: Tensor, k: int) -> Tensor:
    """Indices of k neurons: in ascending, stable order of variance those at `ceil(j*N/k) - 1`, j = 1..k.

    All neurons if N <= k. At a given number of tests, convergence is monotone in the variance, so the coverage of the
    sample is within 1/k of that of all neurons.
    """
    n = len(variance)
    order = torch.argsort(variance, stable=True)
    if n <= k:
        return order
    j = torch.arange(1, k + 1, device=variance.device)
    return order[-(-j * n // k) - 1]
