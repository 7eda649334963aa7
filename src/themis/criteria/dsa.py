"""Distance-based surprise adequacy and its coverage (DSA, DSC)."""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
from torch import Tensor

from themis.criteria.criterion import Common
from themis.criteria.surprise import CHUNK, Surprise, Traces
from themis.errors import DataError, UsageError


class DSA(Surprise):
    """Surprise: how far a test's trace is from the nearest training trace of its predicted class, over how far that
    one is from the nearest of another class.

    `neural-coverage` measures the second distance from the test itself, and gives 1e-6 where it is 0 (its code takes
    the true class, here it is the predicted one). A test equal to a training input has surprise 0. `max_traces` keeps
    that many traces a class, evenly spaced in the order they came; by default all. Second distances are computed when
    a test asks for them, so that fitting costs nothing and a test one look at every trace.
    """

    name = "dsa"
    variants: ClassVar = {
        "sadl": "github.com/coinse/sadl, sa.py: fetch_dsa; dnn-tip: DSA",
        "neural-coverage": "github.com/Yuanyuan-Yuan/NeuraL-Coverage, coverage.py: DSC",
    }

    def __init__(
        self, upper: float = 2.0, buckets: int = 1000, max_traces: int | None = None, **common: Unpack[Common]
    ) -> None:
        is_count = isinstance(max_traces, int) and not isinstance(max_traces, bool) and max_traces >= 1
        if not (max_traces is None or is_count):
            raise UsageError(f"dsa: max_traces must be a whole number, 1 or more, or None for all, got {max_traces!r}")
        super().__init__(upper, buckets, **common)
        self.max_traces = max_traces

    def _condense(self, traces: Traces) -> dict[str, Tensor]:
        if len(traces.classes) < 2:
            raise DataError(
                f"dsa compares classes, all training inputs are predicted as class {int(traces.classes[0])}: fit on "
                "inputs of two classes at least"
            )
        if self.max_traces is not None:
            parts = [spaced(each, self.max_traces) for each in torch.split(traces.values, traces.sizes)]
            traces = Traces(torch.cat(parts), traces.classes, traces.counts.clamp(max=self.max_traces))
        ends = traces.counts.cumsum(0)
        return {"traces": traces.values, "ends": ends}

    def _of_class(self, place: int, own: slice, values: Tensor) -> Tensor:
        traces, found = self.learnt["traces"], []
        for part in torch.split(values, max(1, CHUNK // len(traces))):
            first, nearest = to_nearest(part, traces[own])
            origin = part if self.variant == "neural-coverage" else traces[own][nearest]
            others = [each for each in (traces[: own.start], traces[own.stop :]) if len(each)]
            second = torch.stack([to_nearest(origin, each)[0] for each in others]).amin(0)
            if self.variant == "neural-coverage":
                found.append(torch.where(second > 0, first / second, 1e-6))
            else:
                found.append(torch.where(first > 0, first / second, first))
        return torch.cat(found)


def to_nearest(values: Tensor, traces: Tensor) -> tuple[Tensor, Tensor]:
    """Of each of `values`: the distance to the nearest trace, and which; the first of equally near ones.

    By direct differences: a matrix product is faster and loses all digits where traces are near to one another.
    """
    distance, nearest = torch.cdist(values, traces, compute_mode="donot_use_mm_for_euclid_dist").min(1)
    return distance, nearest


def spaced(values: Tensor, at_most: int) -> Tensor:
    """At most so many rows, evenly spaced."""
    n = len(values)
    return values if n <= at_most else values[torch.arange(at_most, device=values.device) * n // at_most]
