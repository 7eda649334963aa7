"""Neural coverage (NLC): how widely the outputs of layers spread, and how much they vary together."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from themis.criteria import Laws
from themis.errors import UsageError
from themis_lab.criteria.criterion import Criterion
from themis_lab.criteria.readings import Readings
from themis_lab.criteria.spans import LayerSpan, layer_spans

MAX_WIDTH = 4096
"""Neurons per layer at most; the covariance then takes 128 MiB."""
ENTRIES_AT_ONCE = 2**18
"""Entries of covariances held at a time, about as many as fit in a cache."""
GPU_FACTOR = 256
"""On a GPU, this many times more: there each operation has a fixed cost."""
STEPS_AT_ONCE = 16
"""Tests whose products are summed one by one; the sums over earlier blocks are matrix products."""
LARGEST_ACTIVATION = 1e100
"""Tests with a larger activation are left out: their products overflow."""
ROUNDING_SHARE = 1e-12
"""An increase by a smaller share is rounding."""


class NLC(Criterion):
    """The mean absolute covariance (population) of a layer's neurons over all tests, summed over layers.

    It has no upper limit, and a test near the mean lowers it. A test with a non-finite activation is left out. For a
    single test it is 0. The published program takes in the training data first: call update with them to do the same.

    The published program differs in two ways that are left out here. Its score starts at 1, so that of a first batch is
    1 more. And a layer takes in a batch only if that raises its own norm, which would depend on the order and the
    batches of tests, and never start if they come one by one.
    """

    name = "nlc"
    laws = Laws(bounded=False, monotone=False, order_free=True, mergeable=True)
    learns = False
    variants: ClassVar = {
        "neural-coverage": "github.com/Yuanyuan-Yuan/NeuraL-Coverage, coverage.py: NLC, without its order of batches"
    }

    def score(self) -> float:
        if not self.state or self.layout is None:
            return 0.0
        count, sums = self.state["count"].clamp(min=1), [self.state[m2_key(span)] for span in layer_spans(self.layout)]
        return float(torch.stack([self._scaled(l1(m2[None]), count, m2.shape[-1]) for m2 in sums]).sum())

    @staticmethod
    def _scaled(total: Tensor, count: Tensor, width: int) -> Tensor:
        """The contribution to the score of layers whose absolute sums of products over `count` tests add to `total`."""
        return total / (count * width**2)

    def _initial_state(self, readings: Readings) -> dict[str, Tensor]:
        device = readings.values.device
        mean = torch.zeros(readings.layout.n_neurons, dtype=torch.float64, device=device)
        state = {"count": torch.zeros((), dtype=torch.int64, device=device), "mean": mean}
        for span in layer_spans(readings.layout):
            if span.width > MAX_WIDTH:
                raise UsageError(
                    f"nlc keeps neurons x neurons covariances and takes layers of at most {MAX_WIDTH:,} neurons, but "
                    f"{span.names[0]!r} has {span.width:,}: use neurons='channel', or name narrower ones with "
                    "layers=[...]"
                )
            state[m2_key(span)] = mean.new_zeros(len(span), span.width, span.width)
        return state

    def _update(self, readings: Readings) -> Tensor:
        # Tests that are left out are masked: selecting the others would wait for the GPU, which nothing else here does.
        is_in, count = (readings.values.abs() < LARGEST_ACTIVATION).all(1), self.state["count"]
        values = readings.values.where(is_in[:, None], 0.0).double()
        one = is_in.double()
        after = count + one.cumsum(0)
        before = after - one
        first = values.index_select(0, is_in.to(torch.uint8).argmax()[None])[0]
        mean = torch.where(count == 0, first, self.state["mean"])
        shifts = (values - mean).where(is_in[:, None], 0.0)  # a common offset cancels exactly
        sums = shifts.cumsum(0)
        means = torch.cat([torch.zeros_like(sums[:1]), sums[:-1]]) / before.clamp(min=1)[:, None]
        deviations = (shifts - means) * (one * before / (before + 1)).sqrt()[:, None]
        counts = torch.cat([before[:1], after]).clamp(min=1)
        scores = torch.stack(
            [self._fold(span, span.of(deviations), counts) for span in layer_spans(readings.layout)]
        ).sum(0)
        self.state |= {"count": count + is_in.sum(), "mean": mean + sums[-1] / counts[-1]}
        return is_in & (scores[1:] > scores[:-1] * (1 + ROUNDING_SHARE))

    def _fold(self, span: LayerSpan, deviations: Tensor, counts: Tensor) -> Tensor:
        """Take tests into the sums of some layers; returns their part of the score before and after each test.

        Each test adds `(value - mean before) (value - mean before)^T n / (n + 1)` to the sums of products (Welford), so
        a batch is one cumulative sum of rank-one matrices without cancellation. It is computed in blocks of tests side
        by side: each block starts from the sum over the blocks before it.
        """
        m2 = self.state[m2_key(span)]
        totals = [l1(m2[None])]
        for part in torch.split(
            deviations, max(1, (ENTRIES_AT_ONCE * GPU_FACTOR if m2.is_cuda else ENTRIES_AT_ONCE) // m2.numel())
        ):
            steps = min(STEPS_AT_ONCE, len(part))
            blocks = pad(part, (0, 0, 0, 0, 0, -len(part) % steps)).view(-1, steps, *part.shape[1:])
            earlier = blocks[:-1].transpose(1, 2)
            products = blocks[..., :, None] * blocks[..., None, :]
            products[:, 0] += torch.cat([m2[None], earlier.mT @ earlier]).cumsum(0)
            products = products.cumsum_(1).flatten(0, 1)
            totals.append(l1(products)[: len(part)])
            m2 = products[-1].clone()
        self.state[m2_key(span)] = m2
        return self._scaled(torch.cat(totals), counts, span.width)

    def _merge_state(self, other: dict[str, Tensor]) -> dict[str, Tensor]:
        ours, theirs = self.state["count"], other["count"]
        count = ours + theirs
        share = theirs.double() / count.clamp(min=1)
        delta = (other["mean"] - self.state["mean"])[None]
        state = {"count": count, "mean": self.state["mean"] + delta[0] * share}
        for span in layer_spans(self.layout) if self.layout else []:
            part, key = span.of(delta)[0], m2_key(span)
            state[key] = self.state[key] + other[key] + part[:, :, None] * part[:, None] * (ours * share)
        return state


def m2_key(span: LayerSpan) -> str:
    """The key in the state of the sums of products of some layers, `[layers, neurons, neurons]`."""
    return f"m2/{span.names[0]}"


def l1(sums: Tensor) -> Tensor:
    """The sum of absolute entries `[tests]` of `[tests, layers, neurons, neurons]`."""
    totals: Tensor = torch.linalg.vector_norm(sums.flatten(1), 1, dim=1)
    return totals
