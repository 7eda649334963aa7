"""Cluster coverage (CC): tests far from all kept before."""

from __future__ import annotations

import math
from typing import ClassVar, Unpack

import numpy as np
import torch
from torch import Tensor

from themis.criteria.criterion import Common, Criterion, Laws
from themis.criteria.readings import Readings
from themis.errors import UsageError

CHUNK = 2**22
"""Distances held at a time."""
TESTS = 1024
"""Tests compared with one another at a time."""


class CC(Criterion):
    """Tests kept, summed over layers: in a layer, one farther than `threshold` from all kept before is kept.

    The distance is squared Euclidean, as in TensorFuzz; NeuraL-Coverage takes 10 for CIFAR-10 and 1,000 for ImageNet,
    TensorFuzz 1 on the output layer. The first test is kept and counted (the published code keeps and does not count
    it); neighbours are found exactly, not by an approximate index. A count, not a share; it depends on the order.
    """

    name = "cc"
    laws = Laws(bounded=False, monotone=True, order_free=False, mergeable=False)
    learns = False
    variants: ClassVar = {
        "neural-coverage": "github.com/Yuanyuan-Yuan/NeuraL-Coverage, coverage.py: CC; "
        "github.com/brain-research/tensorfuzz, lib/corpus.py: Updater"
    }

    def __init__(self, threshold: float = 10.0, **common: Unpack[Common]) -> None:
        if not 0 <= threshold < math.inf:
            raise UsageError(f"cc: threshold must be a number, 0 or more, got {threshold!r}")
        super().__init__(**common)
        self.threshold = threshold

    def score(self) -> float:
        return float(sum(len(kept) for kept in self.state.values()))

    def _begin(self, readings: Readings) -> dict[str, Tensor]:
        return {f"kept/{name}": each[:0].double() for name, each in readings.layers().items()}

    def _take(self, readings: Readings) -> Tensor:
        raised = torch.zeros(len(readings), dtype=torch.bool, device=readings.values.device)
        for name, values in readings.layers().items():
            rows = values.isfinite().all(1).nonzero()[:, 0]
            for some in torch.split(rows, TESTS):
                if len(some):
                    raised[some[self._keep(f"kept/{name}", values[some].double())]] = True
        return raised

    def _keep(self, key: str, values: Tensor) -> Tensor:
        """Keep which of `values` are new, in order; their rows."""
        kept, radius = self.state[key], math.sqrt(self.threshold)
        rows = torch.arange(len(values), device=values.device)
        if len(kept):
            parts = torch.split(values, max(1, CHUNK // len(kept)))
            rows = rows[torch.cat([distances(part, kept).amin(1) for part in parts]) > radius]
        is_near = (distances(values[rows], values[rows]) <= radius).cpu().numpy()
        is_open = np.ones(len(rows), dtype=bool)
        chosen: list[int] = []
        while is_open.any():
            first = int(is_open.argmax())
            chosen.append(first)
            is_open &= ~is_near[first]
            is_open[first] = False
        rows = rows[torch.tensor(chosen, dtype=torch.int64, device=rows.device)]
        self.state[key] = torch.cat([kept, values[rows]])
        return rows


def distances(ones: Tensor, others: Tensor) -> Tensor:
    """Euclidean distances `[ones, others]`, by direct differences: equal vectors are at 0."""
    return torch.cdist(ones, others, compute_mode="donot_use_mm_for_euclid_dist")
