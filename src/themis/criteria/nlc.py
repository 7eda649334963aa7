"""Neural coverage (NLC): how widely the layers' outputs spread, and how much they vary together."""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
from torch import Tensor
from torch.nn.functional import pad

from themis.criteria.criterion import Common, Criterion, Laws
from themis.criteria.readings import Readings
from themis.criteria.runs import Run, runs
from themis.errors import UsageError

WIDEST = 4096
"""Neurons a layer may have: its covariance takes 128 MiB then."""
CHUNK = 2**18
"""Entries of covariances held at a time, about as many as a cache holds."""
GPU = 256
"""On a GPU so many times more: there each step has a price of its own."""
STEPS = 16
"""Tests whose products are summed one after the other; whatever is summed before them is a matrix product."""
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
        count, sums = self.state["count"].clamp(min=1), [self.state[m2_of(run)] for run in runs(self.layout)]
        return float(torch.stack([self._part(l1(m2[None]), count, m2.shape[-1]) for m2 in sums]).sum())

    def _part(self, total: Tensor, count: Tensor, width: int) -> Tensor:
        """Of the sum of all entries of layers' sums of products, over `count` tests: their part of the score."""
        return total / (count if self.variant == "neural-coverage-code" else count * width**2)

    def _begin(self, readings: Readings) -> dict[str, Tensor]:
        device = readings.values.device
        mean = torch.zeros(readings.layout.n_neurons, dtype=torch.float64, device=device)
        state = {"count": torch.zeros((), dtype=torch.int64, device=device), "mean": mean}
        for run in runs(readings.layout):
            if run.width > WIDEST:
                raise UsageError(
                    f"nlc keeps neurons x neurons covariances and takes layers of {WIDEST:,} neurons at most, "
                    f"{run.names[0]!r} has {run.width:,}: take neurons='channel', or name narrower ones by layers=[...]"
                )
            state[m2_of(run)] = mean.new_zeros(len(run), run.width, run.width)
        return state

    def _take(self, readings: Readings) -> Tensor:
        # Tests that are left out are masked: to pick the others would wait for the GPU, here nothing does.
        is_in, count = (readings.values.abs() < LARGEST).all(1), self.state["count"]
        values = readings.values.where(is_in[:, None], 0.0).double()
        one = is_in.double()
        after = count + one.cumsum(0)
        before = after - one
        first = values.index_select(0, is_in.to(torch.uint8).argmax()[None])[0]
        mean = torch.where(count == 0, first, self.state["mean"])
        shifts = (values - mean).where(is_in[:, None], 0.0)  # what all tests share cancels exactly
        sums = shifts.cumsum(0)
        means = torch.cat([torch.zeros_like(sums[:1]), sums[:-1]]) / before.clamp(min=1)[:, None]
        deviations = (shifts - means) * (one * before / (before + 1)).sqrt()[:, None]
        counts = torch.cat([before[:1], after]).clamp(min=1)
        scores = torch.stack([self._fold(run, run.of(deviations), counts) for run in runs(readings.layout)]).sum(0)
        self.state |= {"count": count + is_in.sum(), "mean": mean + sums[-1] / counts[-1]}
        return is_in & (scores[1:] > scores[:-1] * (1 + ROUNDING))

    def _fold(self, run: Run, deviations: Tensor, counts: Tensor) -> Tensor:
        """Take tests into the sums of some layers; their part of the score before the first and after each of them.

        The sums of products grow by `(value - mean before) (value - mean before)^T n / (n + 1)` a test (Welford), so
        all of a batch are one cumulative sum of rank-one matrices, and none cancels. It is taken in blocks of tests
        side by side: what each begins with is a sum over the blocks before it.
        """
        m2 = self.state[m2_of(run)]
        totals = [l1(m2[None])]
        for part in torch.split(deviations, max(1, (CHUNK * GPU if m2.is_cuda else CHUNK) // m2.numel())):
            steps = min(STEPS, len(part))
            blocks = pad(part, (0, 0, 0, 0, 0, -len(part) % steps)).view(-1, steps, *part.shape[1:])
            whole = blocks[:-1].transpose(1, 2)
            products = blocks[..., :, None] * blocks[..., None, :]
            products[:, 0] += torch.cat([m2[None], whole.mT @ whole]).cumsum(0)
            products = products.cumsum_(1).flatten(0, 1)
            totals.append(l1(products)[: len(part)])
            m2 = products[-1].clone()
        self.state[m2_of(run)] = m2
        return self._part(torch.cat(totals), counts, run.width)

    def _merge(self, other: dict[str, Tensor]) -> dict[str, Tensor]:
        ours, theirs = self.state["count"], other["count"]
        count = ours + theirs
        share = theirs.double() / count.clamp(min=1)
        delta = (other["mean"] - self.state["mean"])[None]
        state = {"count": count, "mean": self.state["mean"] + delta[0] * share}
        for run in runs(self.layout) if self.layout else []:
            part, key = run.of(delta)[0], m2_of(run)
            state[key] = self.state[key] + other[key] + part[:, :, None] * part[:, None] * (ours * share)
        return state


def m2_of(run: Run) -> str:
    """Where the state has the sums of products of some layers `[layers, neurons, neurons]`."""
    return f"m2/{run.names[0]}"


def l1(sums: Tensor) -> Tensor:
    """The sum of absolute entries `[tests]` of `[tests, layers, neurons, neurons]`."""
    found: Tensor = torch.linalg.vector_norm(sums.flatten(1), 1, dim=1)
    return found
