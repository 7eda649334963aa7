"""Likelihood-based surprise adequacy and its coverage (LSA, LSC)."""

from __future__ import annotations

import math
from typing import ClassVar, Unpack

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from themis.criteria.criterion import Common
from themis.criteria.surprise import Groups, Surprise, Traces
from themis.errors import UsageError

BANDWIDTH = 0.2
"""The fixed bandwidth of the variant `neural-coverage`."""


class LSA(Surprise):
    """Surprise: minus the log density of a test's trace among the training traces of its predicted class.

    The density is a Gaussian kernel estimate with Scott's bandwidth. `sadl` drops the neurons whose variance is under
    `min_variance` over the training traces or within a class; `dnn-tip` takes each class's `max_features` neurons of
    widest variance; `neural-coverage` has kernels of the fixed bandwidth 0.2 in every direction (its code takes the
    true class, here it is the predicted one). A class with too few traces for a covariance borrows from the others,
    with a warning (`Traces.whiteners`). Narrow densities exceed 1, so a surprise may be negative: give `lower` then.
    """

    name = "lsa"
    variants: ClassVar = {
        "sadl": "github.com/coinse/sadl, sa.py: _get_kdes, fetch_lsa",
        "dnn-tip": "github.com/testingautomated-usi/dnn-tip, dnn_tip/surprise.py: LSA, MultiModalSA.build_by_class",
        "neural-coverage": "github.com/Yuanyuan-Yuan/NeuraL-Coverage, coverage.py: LSC",
    }

    def __init__(
        self,
        upper: float = 2000.0,
        buckets: int = 1000,
        min_variance: float = 1e-5,
        max_features: int = 300,
        lower: float = 0.0,
        **common: Unpack[Common],
    ) -> None:
        if not math.isfinite(lower):
            raise UsageError(f"lsa: lower must be a number, got {lower!r}")
        if not 0 <= min_variance < math.inf:
            raise UsageError(f"lsa: min_variance must be a number, 0 or more, got {min_variance!r}")
        if isinstance(max_features, bool) or not isinstance(max_features, int) or max_features < 1:
            raise UsageError(f"lsa: max_features must be a whole number, 1 or more, got {max_features!r}")
        self.lower = lower
        super().__init__(upper, buckets, **common)
        self.min_variance, self.max_features = min_variance, max_features

    def _condense(self, traces: Traces) -> dict[str, Tensor]:
        columns = self._columns(traces)
        d = columns.shape[1]
        scott = traces.counts.double() ** (-1 / (d + 4))
        learnt = {"columns": columns, "means": traces.means.gather(1, columns)}
        if self.variant == "neural-coverage":
            log_det = torch.full_like(scott, d * math.log(BANDWIDTH))
        else:
            whiteners = traces.whiteners(self.name, columns, correction=1) / scott[:, None, None]
            learnt["whiteners"] = whiteners
            log_det = -whiteners.diagonal(dim1=1, dim2=2).log().sum(1)
        learnt["log_norms"] = traces.counts.double().log() + log_det + d / 2 * math.log(2 * math.pi)
        whitened = self._whitened(learnt, traces.values, traces.place, traces.groups)
        parts = torch.split(whitened.square().sum(1), traces.sizes)
        norms = pad_sequence(list(parts), batch_first=True, padding_value=math.inf)
        return learnt | {"traces": whitened, "norms": norms, "counts": traces.counts}

    def _columns(self, traces: Traces) -> Tensor:
        """The neurons that count for each class, `[classes, some]`."""
        if self.variant == "dnn-tip":
            pooled = traces.deviations.square().mean(0)
            variances = torch.where((traces.counts > 1)[:, None], traces.variances, pooled)
            widest = variances.argsort(dim=1, descending=True, stable=True)[:, : self.max_features]
            return widest.sort(1).values
        in_classes = self.variant == "sadl"
        kept = traces.wide_enough(self.name, self.min_variance, in_classes=in_classes)
        return kept.repeat(len(traces.classes), 1)

    def _whitened(self, learnt: dict[str, Tensor], values: Tensor, place: Tensor, groups: Groups) -> Tensor:
        """Traces `[inputs, neurons]` in the coordinates in which their classes' kernels are standard normal."""
        centred = values.gather(1, learnt["columns"][place]) - learnt["means"][place]
        if "whiteners" not in learnt:
            return centred / BANDWIDTH
        return torch.cat([centred[rows] @ learnt["whiteners"][at].T for at, rows in groups])

    def _compared(self) -> int:
        return self.learnt["norms"].shape[1]

    def _of(self, values: Tensor, place: Tensor, groups: Groups) -> Tensor:
        whitened, norms = self._whitened(self.learnt, values, place, groups), self.learnt["norms"][place]
        traces = torch.split(self.learnt["traces"], self.learnt["counts"].tolist())
        products = torch.zeros_like(norms)
        for at, rows in groups:
            products[rows, : len(traces[at])] = whitened[rows] @ traces[at].T
        squares = norms.add_(whitened.square().sum(1, keepdim=True)).sub_(products, alpha=2).clamp_(min=0)
        return self.learnt["log_norms"][place] - squares.mul_(-0.5).logsumexp(1)
