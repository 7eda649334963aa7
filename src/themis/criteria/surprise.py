"""What the surprise criteria share: training traces by predicted class, and the buckets that tests hit."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Unpack

import torch
from torch import Tensor

from themis.criteria.covering import Covering
from themis.criteria.criterion import Common
from themis.criteria.readings import Activations, Batch, Readings
from themis.errors import DataError, UsageError

Groups = list[tuple[int, slice]]
"""Of inputs sorted by class: where each class stands in the list of classes, and its inputs."""

CHUNK = 2**22
"""Numbers held at a time."""
WIDEST = 2**30
"""Numbers that the covariances of all classes may take (8 GiB); ten classes of 4,096 neurons take 1.3 GiB."""
DEPENDENT = 1e-10
"""Share of a neuron's variance that the others leave, under which a covariance counts as singular."""


class Surprise(Covering):
    """Distinct buckets of surprise that tests hit, over all `buckets`, which are equal parts of `(lower, upper]`.

    The buckets are those of the paper (Kim et al., ICSE 2019). A surprise outside them hits none. SADL's program starts
    them at the least surprise of the tests and counts all above `upper` as the last; that depends on all tests at once.
    A test's surprise is infinite when no training input was predicted as its class, and NaN when an activation is not
    finite.
    """

    needs = frozenset({"predicted"})
    is_of_one_layer = True
    lower: float = 0.0

    def __init__(self, upper: float | None, buckets: int, **common: Unpack[Common]) -> None:
        super().__init__(**common)
        if upper is not None and not self.lower < upper < math.inf:
            raise UsageError(f"{self.name}: upper must be a number over {self.lower:g}, got {upper!r}")
        if isinstance(buckets, bool) or not isinstance(buckets, int) or buckets < 1:
            raise UsageError(f"{self.name}: buckets must be a whole number, 1 or more, got {buckets!r}")
        self.upper, self.buckets = upper, buckets

    def surprise(self, activations: Activations | Batch | Readings, *, predicted: Tensor | None = None) -> Tensor:
        """How surprising each input is, float64 `[inputs]`; needs `fit`, changes nothing."""
        if not self.learnt:
            raise UsageError(f"{self.name} must be fitted on training data before it is asked: call fit(batches)")
        if not isinstance(activations, Batch | Readings):
            activations = Batch(activations, predicted=predicted)
        return self._surprises(self._readings(activations))

    def n_items(self) -> int:
        return self.buckets

    def items(self, readings: Readings) -> Tensor:
        surprise = self._surprises(readings)
        upper = self.learnt["upper"] if self.upper is None else self.upper
        bucket = ((surprise - self.lower) * (self.buckets / (upper - self.lower))).ceil() - 1
        is_inside = (surprise > self.lower) & (surprise <= upper)
        # Rounding may carry what lies next to an end over it.
        return torch.where(is_inside, bucket.clamp(0, self.buckets - 1), -1).long()[:, None]

    @abstractmethod
    def _condense(self, traces: Traces) -> dict[str, Tensor]:
        """What is kept of the training traces."""

    @abstractmethod
    def _of(self, values: Tensor, place: Tensor, groups: Groups) -> Tensor:
        """The surprise of finite traces `[inputs, neurons]`, sorted by the `place` of their predicted classes."""

    def _compared(self) -> int:
        """How many numbers an input is compared with."""
        return 1

    def _learn(self, readings: Readings) -> None:
        n = len(self.learnt) // 2
        self.learnt[f"values/{n}"] = readings.values.clone()
        self.learnt[f"classes/{n}"] = readings.classes(self.name).to(readings.values.device, torch.int64, copy=True)

    def _conclude(self) -> None:
        given, self.learnt = list(self.learnt.values()), {}
        traces = Traces.of(torch.cat(given[::2]), torch.cat(given[1::2]))
        self.learnt = {"classes": traces.classes} | self._condense(traces)

    def _surprises(self, readings: Readings) -> Tensor:
        values, classes = readings.values.double(), self.learnt["classes"]
        predicted = readings.classes(self.name).to(values.device, torch.int64).contiguous()
        place = torch.searchsorted(classes, predicted).clamp(max=len(classes) - 1)
        is_finite = values.isfinite().all(1)
        place = torch.where(is_finite & (classes[place] == predicted), place, -1)
        found = torch.where(is_finite, torch.inf, torch.nan).double()
        size = max(1, CHUNK // self._compared())
        parts = zip(*(torch.split(each, size) for each in (values, place, found)), strict=True)
        return torch.cat([self._sorted(*part) for part in parts])

    def _sorted(self, values: Tensor, place: Tensor, found: Tensor) -> Tensor:
        """The surprise of inputs in any order; `found` where the place is -1."""
        place, order = place.sort(stable=True)
        groups, start = [], 0
        for at, n in torch.stack(torch.unique_consecutive(place, return_counts=True)).T.tolist():
            if at < 0:
                place, order = place[n:], order[n:]
            else:
                groups.append((at, slice(start, start + n)))
                start += n
        return found.scatter(0, order, self._of(values[order], place, groups)) if groups else found


@dataclass(frozen=True)
class Traces:
    """Training traces `values [inputs, neurons]`, float64, class after class; `counts` says how many each class has."""

    values: Tensor
    classes: Tensor
    counts: Tensor

    @staticmethod
    def of(values: Tensor, predicted: Tensor) -> Traces:
        """Traces in the order of their classes; within a class as they came."""
        classes, order = predicted.sort(stable=True)
        found, counts = torch.unique_consecutive(classes, return_counts=True)
        return Traces(values[order].double(), found, counts)

    @cached_property
    def sizes(self) -> list[int]:
        """`counts` as plain numbers."""
        return self.counts.tolist()

    @cached_property
    def place(self) -> Tensor:
        """The place of each trace's class, `[inputs]`."""
        return torch.arange(len(self.counts), device=self.counts.device).repeat_interleave(self.counts)

    @cached_property
    def groups(self) -> Groups:
        """The traces of each class."""
        ends = self.counts.cumsum(0).tolist()
        return [(at, slice(end - n, end)) for at, (end, n) in enumerate(zip(ends, self.sizes, strict=True))]

    @cached_property
    def means(self) -> Tensor:
        """Each class's mean `[classes, neurons]`."""
        return torch.stack([each.mean(0) for each in torch.split(self.values, self.sizes)])

    @cached_property
    def deviations(self) -> Tensor:
        """How far each trace is from its class's mean."""
        return self.values - self.means.repeat_interleave(self.counts, 0)

    @cached_property
    def variances(self) -> Tensor:
        """Each class's population variances `[classes, neurons]`."""
        return torch.stack([each.square().mean(0) for each in torch.split(self.deviations, self.sizes)])

    def wide_enough(self, who: str, min_variance: float, *, in_classes: bool = True) -> Tensor:
        """Which neurons vary by `min_variance` at least, over all traces and, if asked, within every class.

        A class with no more traces than neurons has no say: a neuron may well be constant in it by chance.
        """
        is_wide = self.values.var(0, correction=0) >= min_variance
        if in_classes:
            is_wide &= (self.variances[self.counts > self.values.shape[1]] >= min_variance).all(0)
        found = is_wide.nonzero()[:, 0]
        if len(found) == 0:
            raise DataError(
                f"{who} must have a neuron whose variance over training inputs is {min_variance:g} or more, the layer "
                "has none: lower min_variance, name another layer or fit on more inputs"
            )
        return found

    def whiteners(self, who: str, columns: Tensor, correction: int) -> Tensor:
        """The inverse Cholesky factor of each class's covariance of its `columns [classes, some]`.

        The inverse, `[classes, some, some]`, so that tests cost a product: a triangular system is solved neuron after
        neuron. It is as accurate here: no factor is singular within rounding.

        The covariance of a class with `n` traces, too few or too uniform for one of `d` neurons, is mixed with the
        pooled covariance within all classes: it weighs `(n - 1) / (n - 1 + d)`, nothing at a single trace. Where the
        pooled one is singular too, a tenth of its mean variance on the diagonal replaces a tenth of it.
        """
        n_classes, d = columns.shape
        if n_classes * d * d > WIDEST:
            raise UsageError(
                f"{who} keeps a covariance a class and takes {WIDEST:,} numbers at most, {n_classes} classes of {d} "
                "neurons need more: name a narrower layer, or take neurons='channel'"
            )
        found, mixed, pooled = [], [], None
        for at, deviations in enumerate(torch.split(self.deviations, self.sizes)):
            chosen, n = columns[at], len(deviations)
            deviations = deviations[:, chosen]
            covariance = deviations.T @ deviations / max(n - correction, 1)
            factor = cholesky(covariance) if n > d else None
            if factor is None:
                pooled = self._pooled(who) if pooled is None else pooled
                mixed.append(at)
                weight = (n - 1) / (n - 1 + d)
                covariance = weight * covariance + (1 - weight) * pooled[chosen][:, chosen]
                factor = torch.linalg.cholesky(covariance)
            one = torch.eye(d, dtype=factor.dtype, device=factor.device)
            found.append(torch.linalg.solve_triangular(factor, one, upper=False))
        if mixed:
            named = ", ".join(str(each) for each in self.classes[mixed[:10]].tolist())
            more = f" and {len(mixed) - 10} more" if len(mixed) > 10 else ""
            warnings.warn(
                f"{who}: training inputs predicted as class {named}{more} are too few or too alike for a covariance of "
                f"{d} neurons: it is mixed with the pooled one of all classes",
                RuntimeWarning,
                stacklevel=5,
            )
        return torch.stack(found)

    def _pooled(self, who: str) -> Tensor:
        """The covariance within classes, of all neurons, made positive definite."""
        free = len(self.values) - len(self.classes)
        covariance = self.deviations.T @ self.deviations / max(free, 1)
        scale = covariance.diagonal().mean()
        if not float(scale) > 0:
            raise DataError(
                f"{who} must have two training inputs of one predicted class that differ, got none: fit on more inputs"
            )
        if cholesky(covariance) is None:
            covariance *= 0.9
            covariance.diagonal().add_(0.1 * scale)
        return covariance


def cholesky(covariance: Tensor) -> Tensor | None:
    """The lower Cholesky factor, or None where the matrix is singular within rounding."""
    factor, info = torch.linalg.cholesky_ex(covariance)
    left = factor.diagonal().square() / covariance.diagonal()
    return factor if bool((info == 0) & (left > DEPENDENT).all()) else None
