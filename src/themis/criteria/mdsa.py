"""Mahalanobis-distance surprise adequacy and its coverage (MDSA, MDSC)."""

from __future__ import annotations

import math
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from themis.criteria.criterion import Common
from themis.criteria.surprise import Groups, Surprise, Traces
from themis.errors import UsageError


class MDSA(Surprise):
    """Surprise: the Mahalanobis distance of a test's trace from the mean training trace of its predicted class.

    By each class's population covariance, as both sources do; `dnn-tip` gives the squared distance. Neurons whose
    variance is under `min_variance` over the training traces or within a class are dropped, as for LSA, and a class
    with too few traces borrows from the others, with a warning (`Traces.whiteners`). upper: by default twice the
    largest surprise of a training input: no source names a bound, and the scale depends on the number of neurons.
    """

    name = "mdsa"
    variants: ClassVar = {
        "neural-coverage": "github.com/Yuanyuan-Yuan/NeuraL-Coverage, coverage.py: MDSC",
        "dnn-tip": "github.com/testingautomated-usi/dnn-tip, dnn_tip/surprise.py: MDSA, MultiModalSA.build_by_class",
    }

    def __init__(
        self,
        upper: float | None = None,
        buckets: int = 1000,
        min_variance: float = 1e-5,
        **common: Unpack[Common],
    ) -> None:
        if not 0 <= min_variance < math.inf:
            raise UsageError(f"mdsa: min_variance must be a number, 0 or more, got {min_variance!r}")
        super().__init__(upper, buckets, **common)
        self.min_variance = min_variance

    def _condense(self, traces: Traces) -> dict[str, Tensor]:
        columns = traces.wide_enough(self.name, self.min_variance)
        whiteners = traces.whiteners(self.name, columns.expand(len(traces.classes), -1), correction=0)
        learnt = {"columns": columns, "means": traces.means[:, columns], "whiteners": whiteners}
        farthest = self._distance(learnt, traces.values, traces.place, traces.groups).amax()
        # A hair more: the farthest training input would lie on the edge of two buckets, and rounding choose one.
        return learnt | {"upper": (2 + 1e-9) * farthest}

    def _of(self, values: Tensor, place: Tensor, groups: Groups) -> Tensor:
        return self._distance(self.learnt, values, place, groups)

    def _distance(self, learnt: dict[str, Tensor], values: Tensor, place: Tensor, groups: Groups) -> Tensor:
        centred = values[:, learnt["columns"]] - learnt["means"][place]
        whitened = torch.cat([centred[rows] @ learnt["whiteners"][at].T for at, rows in groups])
        squares = whitened.square().sum(1)
        return squares if self.variant == "dnn-tip" else squares.sqrt()
