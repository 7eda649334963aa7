"""Distance-based surprise adequacy and its coverage (DSA, DSC)."""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
from torch import Tensor

from themis.criteria.criterion import Common
from themis.criteria.surprise import CHUNK, Groups, Surprise, Traces
from themis.errors import DataError, UsageError

EPSILON = torch.finfo(torch.float64).eps


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
        centre = traces.values.mean(0)
        squares = (traces.values - centre).square().sum(1)
        return {
            "traces": traces.values,
            "places": traces.place,
            "centre": centre,
            "squares": squares,
            "farthest": squares.amax(),
            "longest": torch.linalg.vector_norm(traces.values, dim=1).amax(),
        }

    def _compared(self) -> int:
        return len(self.learnt["traces"])

    def _of(self, values: Tensor, place: Tensor, groups: Groups) -> Tensor:
        is_own = self.learnt["places"] == place[:, None]
        first, nearest = self._nearest(values, is_own)
        if self.variant == "neural-coverage":
            second, _ = self._nearest(values, ~is_own)
            return torch.where(second > 0, first / second, 1e-6)
        second, _ = self._nearest(self.learnt["traces"][nearest], ~is_own)
        return torch.where(first > 0, first / second, first)

    def _nearest(self, values: Tensor, is_asked: Tensor) -> tuple[Tensor, Tensor]:
        """Of each of `values`: the distance to the nearest trace that is asked for, and which; the first of equals.

        A matrix product gives squared distances less what is the same for all traces of a test. It loses digits where
        traces are near to one another, so all that its rounding could make the nearest are measured by differences.
        """
        traces = self.learnt["traces"]
        centred = values - self.learnt["centre"]
        rough = torch.addmm(self.learnt["squares"], centred, traces.T, alpha=-2).masked_fill_(~is_asked, torch.inf)
        length = torch.linalg.vector_norm(centred, dim=1, keepdim=True)
        # The bound of a sum of products as it is rounded (Higham, 3.1), twice and a bit over.
        error = (traces.shape[1] + 8) * EPSILON * (self.learnt["farthest"] + 2 * length * self.learnt["longest"])
        is_far = rough > rough.amin(1, keepdim=True) + 2 * error  # not where something overflows
        test, trace = (is_asked & ~is_far).nonzero(as_tuple=True)
        size = max(1, CHUNK // traces.shape[1])
        pairs = zip(torch.split(test, size), torch.split(trace, size), strict=True)
        found = torch.cat([torch.linalg.vector_norm(values[i] - traces[j], dim=1) for i, j in pairs])
        distance = torch.full_like(values[:, 0], torch.inf).scatter_reduce(0, test, found, "amin")
        last = torch.full((len(values),), len(traces) - 1, device=values.device)
        nearest = torch.where(found == distance[test], trace, len(traces) - 1)
        return distance, last.scatter_reduce(0, test, nearest, "amin")


def spaced(values: Tensor, at_most: int) -> Tensor:
    """At most so many rows, evenly spaced."""
    n = len(values)
    return values if n <= at_most else values[torch.arange(at_most, device=values.device) * n // at_most]
