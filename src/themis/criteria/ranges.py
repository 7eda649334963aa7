"""The range of each neuron over training data, and its spread: batch by batch."""

from __future__ import annotations

import torch
from torch import Tensor

from themis.errors import UsageError


def widen(learnt: dict[str, Tensor], values: Tensor) -> None:
    """Take `values [inputs, neurons]` into the least and the greatest of each neuron, `low` and `high`."""
    low, high = values.amin(0), values.amax(0)
    if learnt:
        low, high = torch.minimum(low, learnt["low"]), torch.maximum(high, learnt["high"])
    learnt["low"], learnt["high"] = low, high


def spread(learnt: dict[str, Tensor], values: Tensor) -> None:
    """Take `values [inputs, neurons]` into each neuron's mean and squared deviations (Chan's merge, float64)."""
    n = torch.tensor(len(values), device=values.device)
    variance, mean = (each.double() for each in torch.var_mean(values, 0, correction=0))
    squares = variance * n
    if "mean" in learnt:
        before, gap = learnt["n"], mean - learnt["mean"]
        n = before + n
        mean = learnt["mean"] + gap * ((n - before) / n)
        squares = learnt["squares"] + squares + gap.square() * (before * (n - before) / n)
    learnt["n"], learnt["mean"], learnt["squares"] = n, mean, squares


def deviation(learnt: dict[str, Tensor]) -> Tensor:
    """The standard deviation of each neuron's training values (of n - 1; 0 of a single one)."""
    return (learnt["squares"] / (learnt["n"] - 1).clamp(min=1)).sqrt()


def check_count(who: str, k: int, most: int) -> None:
    """Refuse a `k` that counts nothing."""
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= most:
        raise UsageError(f"{who}: k must be a whole number from 1 to {most}, got {k!r}")
