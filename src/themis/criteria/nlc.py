"""Neural coverage (NLC): how widely the layers' outputs spread, and how much they vary together."""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
from torch import Tensor

from themis.criteria.criterion import Common, Criterion, Laws
from themis.criteria.readings import Readings
from themis.errors import UsageError

WIDEST = 4096
"""Neurons a layer may have: its covariance takes 128 MiB then."""
CHUNK = 2**22
"""Entries of covariances held at a time."""
LARGEST = 1e100
"""A test with a larger activation counts for nothing: its products overflow."""
ROUNDING = 1e-12
"""A rise by a smaller share is rounding."""


class NLC(Criterion):
    """The mean absolute covariance (population) of a layer's neurons over all tests, summed over layers.

    It has no upper limit, and a test near the mean lowers it. A test with an activation that is not finite is left out.
    Of one test it is 0. The published program takes in the training data first: update with them to do the same.

    `neural-coverage-code` sums the absolute covariances of a layer: the published code divides by the first dimension
    of a tensor `[1, neurons, neurons]`, so by 1. Neither variant leaves out layers whose norm a batch does not raise,
    as that code does: it would depend on the order of tests, and never start when they come singly.
    """

    name = "nlc"
    laws = Laws(bounded=False, monotone=False, order_free=True, mergeable=True)
    learns = False
    variants: ClassVar = {
        "neural-coverage": "github.com/Yuanyuan-Yuan/NeuraL-Coverage, coverage.py: NLC, as its norm is named",
        "neural-coverage-code": "the same and tool.py: Estimator, by what they compute",
    }

    def __init__(self, **common: Unpack[Common]) -> None:
        super().__init__(**common)

    def score(self) -> float:
        if not self.state or self.layout is None:
            return 0.0
        count = self.state["count"].clamp(min=1)
        norms = [self._norm(self.state[f"m2/{name}"][None], count) for name in self.layout.names]
        return float(torch.stack(norms).sum())

    def _norm(self, m2: Tensor, count: Tensor) -> Tensor:
        """Of sums of products `[tests, neurons, neurons]` over `count` tests: the layer's part of the score."""
        divisor = count if self.variant == "neural-coverage-code" else count * m2.shape[1] ** 2
        return m2.abs().sum((1, 2)) / divisor

    def _begin(self, readings: Readings) -> dict[str, Tensor]:
        device = readings.values.device
        state = {"count": torch.zeros((), dtype=torch.int64, device=device)}
        for name, width in zip(readings.layout.names, readings.layout.widths, strict=True):
            if width > WIDEST:
                raise UsageError(
                    f"nlc keeps neurons x neurons covariances and takes layers of {WIDEST:,} neurons at most, {name!r} "
                    f"has {width:,}: take neurons='channel', or name narrower ones by layers=[...]"
                )
            state[f"mean/{name}"] = torch.zeros(width, dtype=torch.float64, device=device)
            state[f"m2/{name}"] = torch.zeros(width, width, dtype=torch.float64, device=device)
        return state

    def _take(self, readings: Readings) -> Tensor:
        rows = (readings.values.abs() < LARGEST).all(1).nonzero()[:, 0]
        raised = torch.zeros(len(readings), dtype=torch.bool, device=readings.values.device)
        if len(rows) == 0:
            return raised
        taken = readings.values[rows].double()
        scores = torch.zeros(len(rows) + 1, dtype=torch.float64, device=taken.device)  # before the first, after each
        for name, at in readings.layout.slices().items():
            scores += self._fold(name, taken[:, at])
        self.state["count"] += len(rows)
        raised[rows] = scores[1:] > scores[:-1] * (1 + ROUNDING)
        return raised

    def _fold(self, name: str, values: Tensor) -> Tensor:
        """Take tests into one layer's sums; its part of the score before the first and after each of them.

        The sums of products grow by `(value - mean before) (value - mean before)^T n / (n + 1)` a test (Welford), so
        all of a batch are one cumulative sum of rank-one matrices, and none cancels.
        """
        count, m2 = self.state["count"], self.state[f"m2/{name}"]
        mean = torch.where(count == 0, values[0], self.state[f"mean/{name}"])
        before = count + torch.arange(len(values), dtype=torch.float64, device=values.device)
        shifts = values - mean  # what all tests share cancels exactly: a constant neuron has no variance
        sums = shifts.cumsum(0)
        means = torch.cat([torch.zeros_like(sums[:1]), sums[:-1]]) / before.clamp(min=1)[:, None]
        deviations = (shifts - means) * (before / (before + 1)).sqrt()[:, None]
        found = [self._norm(m2[None], count.clamp(min=1)[None])]
        size = max(1, CHUNK // values.shape[1] ** 2)
        for part, after in zip(torch.split(deviations, size), torch.split(before + 1, size), strict=True):
            products = part[:, :, None] * part[:, None, :]
            products[0] += m2
            products = products.cumsum(0)
            found.append(self._norm(products, after))
            m2 = products[-1].clone()
        self.state[f"mean/{name}"] = mean + sums[-1] / (before[-1] + 1)
        self.state[f"m2/{name}"] = m2
        return torch.cat(found)

    def _merge(self, other: dict[str, Tensor]) -> dict[str, Tensor]:
        ours, theirs = self.state["count"], other["count"]
        state = {"count": ours + theirs}
        share = theirs.double() / state["count"].clamp(min=1)
        for name in (key.removeprefix("m2/") for key in self.state if key.startswith("m2/")):
            mean, m2 = self.state[f"mean/{name}"], self.state[f"m2/{name}"]
            delta = other[f"mean/{name}"] - mean
            state[f"mean/{name}"] = mean + delta * share
            state[f"m2/{name}"] = m2 + other[f"m2/{name}"] + torch.outer(delta, delta) * (ours * share)
        return state
