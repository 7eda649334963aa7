"""The Sampler: a few neurons that represent all of them, evenly spaced in order of variance."""

from __future__ import annotations

import torch
from torch import Tensor

MANY = 16_384
"""Neurons from which on sorting all of them takes longer than sorting those in question."""
FEWER_BITS = 40
"""Bits of a float64 that do not tell its bucket: of the fraction, 12 bits do, so that buckets are narrow."""
MOST_BUCKETS = 1 << 17
"""Buckets below the one of the largest number, which cover a factor of 2**32; the first takes all smaller numbers. A
neuron that every test moved by the same amount has a variance of 0, and would be millions of empty buckets away."""


def sample_neurons(variance: Tensor, k: int) -> Tensor:
    """Indices of k neurons: in ascending, stable order of variance those at `ceil(j*N/k) - 1`, j = 1..k.

    All neurons if N <= k. At a given number of tests, convergence is monotone in the variance, so the coverage of the
    sample is within 1/k of that of all neurons.
    """
    n = len(variance)
    if n <= k:
        return _order(variance)
    j = torch.arange(1, k + 1, device=variance.device)
    places = -(-j * n // k) - 1
    if variance.device.type != "cpu" or n < MANY:
        return _order(variance)[places]
    return _at_places(variance, places)


def _order(variance: Tensor) -> Tensor:
    """The indices of a stable sort of numbers that are not negative.

    On a CPU by 16 bits at a time, the last ones first: NumPy counts such short numbers instead of comparing them, which
    takes less than half the time for some thousand of them.
    """
    if not variance.is_cpu:
        return torch.argsort(variance, stable=True)
    digits = (variance.numpy() + 0.0).astype("<f8").view("<u2").reshape(-1, 4).T  # + 0.0: see below
    order = digits[0].argsort(kind="stable")
    for digit in digits[1:]:
        order = order[digit[order].argsort(kind="stable")]
    return torch.from_numpy(order)


def _at_places(variance: Tensor, places: Tensor) -> Tensor:
    """The indices that a stable sort has at `places`, without sorting all neurons.

    The first bits of a number that is not negative are in its order. Numbers with the same first bits are in a bucket,
    as are the smallest ones together, and only those buckets are sorted that hold one of the places.
    """
    bucket = (variance + 0.0).view(torch.int64) >> FEWER_BITS  # + 0.0, because -0.0 would be negative
    bucket.sub_(bucket.max() - MOST_BUCKETS).clamp_(min=0)
    counts = torch.bincount(bucket)
    ends = counts.cumsum(0)
    wanted = torch.searchsorted(ends, places, right=True)  # the bucket of each place
    is_wanted = torch.zeros(len(counts), dtype=torch.bool)
    is_wanted[wanted] = True
    few = is_wanted[bucket].nonzero().squeeze(1)
    n_skipped = torch.where(is_wanted, 0, counts).cumsum(0)[wanted]  # neurons before the place that are not sorted
    return few[_order(variance[few])][places - n_skipped]
