"""Surprise adequacy and its coverage: by likelihood (LSA, LSC), distance (DSA, DSC) and Mahalanobis distance (MDSA)."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Unpack

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from themis.errors import DataError, UsageError, warn
from themis.options import check_count
from themis_lab.criteria.covering import Covering
from themis_lab.criteria.options import CriterionOptions
from themis_lab.criteria.readings import Activations, Batch, Readings

Groups = list[tuple[int, slice]]
"""For inputs sorted by class: the index of each class in the list of classes, and the rows of its inputs."""

NUMBERS_AT_ONCE = 2**22
"""Numbers held in memory at a time."""
MAX_COVARIANCE_NUMBERS = 2**30
"""Numbers that the covariances of all classes may take (8 GiB); ten classes of 4,096 neurons take 1.3 GiB."""
MIN_OWN_SHARE = 1e-10
"""A covariance counts as singular if the other neurons leave less than this share of a neuron's variance."""
LSA_BANDWIDTH = 0.2
"""The fixed bandwidth of LSA's variant `neural-coverage`."""
EPSILON = torch.finfo(torch.float64).eps


class Surprise(Covering):
    """Distinct buckets of surprise that tests hit, over all `buckets`, which divide `(lower, upper]` into equal parts.

    The buckets are those of the paper (Kim et al., ICSE 2019). A surprise outside them hits none. The program of SADL
    starts them at the smallest surprise of the tests and puts everything above `upper` into the last one, which depends
    on all tests at once. A test's surprise is infinite if no training input was predicted as its class, and NaN if an
    activation is not finite.
    """

    needs = frozenset({"predicted"})
    reads_one_layer = True
    lower: float | None = 0.0

    def __init__(self, upper: float | None, buckets: int, **options: Unpack[CriterionOptions]) -> None:
        super().__init__(**options)
        least = self.lower or 0.0
        if upper is not None and not least < upper < math.inf:
            raise UsageError(f"{self.name}: upper must be a number over {least:g}, got {upper!r}")
        check_count(f"{self.name}: buckets", buckets)
        self.upper, self.buckets = upper, buckets

    def surprise(self, activations: Activations | Batch | Readings, *, predicted: Tensor | None = None) -> Tensor:
        """The surprise of each input, float64 `[inputs]`; needs `fit` and changes nothing."""
        if not self.learnt:
            raise UsageError(f"{self.name} must be fitted on training data before it is queried: call fit(batches)")
        if not isinstance(activations, Batch | Readings):
            activations = Batch(activations, predicted=predicted)
        return self._surprises(self.accept(activations))

    def n_items(self) -> int:
        return self.buckets

    def items(self, readings: Readings) -> Tensor:
        surprise = self._surprises(readings)
        upper = self.learnt["upper"] if self.upper is None else self.upper
        lower = self.learnt.get("lower", 0.0) if self.lower is None else self.lower
        bucket = ((surprise - lower) * (self.buckets / (upper - lower))).ceil() - 1
        is_inside = (surprise > lower) & (surprise <= upper)
        # Rounding may carry a value next to either end beyond it.
        return torch.where(is_inside, bucket.clamp(0, self.buckets - 1), -1).long()[:, None]

    @abstractmethod
    def _condense(self, traces: Traces) -> dict[str, Tensor]:
        """What is kept of the training traces."""

    @abstractmethod
    def _surprise_of(self, values: Tensor, place: Tensor, groups: Groups) -> Tensor:
        """The surprise of finite traces `[inputs, neurons]`, sorted by the `place` of their predicted classes."""

    def _n_compared(self) -> int:
        return 1

    def _learn(self, readings: Readings) -> None:
        n = len(self.learnt) // 2
        self.learnt[f"values/{n}"] = readings.values.clone()
        self.learnt[f"classes/{n}"] = readings.classes(self.name).to(readings.values.device, torch.int64, copy=True)

    def _finish_fit(self) -> None:
        batches, self.learnt = list(self.learnt.values()), {}
        traces = Traces.of(torch.cat(batches[::2]), torch.cat(batches[1::2]))
        self.learnt = {"classes": traces.classes} | self._condense(traces)

    def _surprises(self, readings: Readings) -> Tensor:
        values, classes = readings.values.double(), self.learnt["classes"]
        predicted = readings.classes(self.name).to(values.device, torch.int64).contiguous()
        place = torch.searchsorted(classes, predicted).clamp(max=len(classes) - 1)
        is_finite = values.isfinite().all(1)
        place = torch.where(is_finite & (classes[place] == predicted), place, -1)
        default = torch.where(is_finite, torch.inf, torch.nan).double()
        size = max(1, NUMBERS_AT_ONCE // self._n_compared())
        parts = zip(*(torch.split(column, size) for column in (values, place, default)), strict=True)
        return torch.cat([self._surprises_by_class(*part) for part in parts])

    def _surprises_by_class(self, values: Tensor, place: Tensor, default: Tensor) -> Tensor:
        """The surprise of inputs in any order; `default` where the place is -1."""
        place, order = place.sort(stable=True)
        groups, start = [], 0
        for at, n in torch.stack(torch.unique_consecutive(place, return_counts=True)).T.tolist():
            if at < 0:
                place, order = place[n:], order[n:]
            else:
                groups.append((at, slice(start, start + n)))
                start += n
        return default.scatter(0, order, self._surprise_of(values[order], place, groups)) if groups else default


class LSA(Surprise):
    """Surprise: minus the log density of a test's trace among the training traces of its predicted class.

    The density is a Gaussian kernel estimate with Scott's bandwidth. `sadl` drops the neurons whose variance is below
    `min_variance` over the training traces or within a class; `dnn-tip` takes the `max_features` neurons with the
    largest variance in each class; `neural-coverage` has kernels of the fixed bandwidth 0.2 in every direction (its
    code takes the true class, here it is the predicted one). A class with too few traces for a covariance borrows from
    the others, with a warning (`Traces.whiteners`).

    Narrow densities exceed 1, so a surprise may be negative, as it is on DAVE-2. The buckets of the sources start at 0
    and drop those tests. `training-range`, the default, is `sadl` with buckets that start at the smallest surprise of a
    training input if that is negative, so it equals `sadl` if it is not. `lower` sets the start for any variant.
    """

    name = "lsa"
    variants: ClassVar = {
        "training-range": "as sadl, but negative surprise is not dropped",
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
        lower: float | None = None,
        **options: Unpack[CriterionOptions],
    ) -> None:
        if lower is not None and not math.isfinite(lower):
            raise UsageError(f"lsa: lower must be a number, got {lower!r}")
        if not 0 <= min_variance < math.inf:
            raise UsageError(f"lsa: min_variance must be a number, 0 or more, got {min_variance!r}")
        check_count("lsa: max_features", max_features)
        self.lower = lower
        super().__init__(upper, buckets, **options)
        self.min_variance, self.max_features = min_variance, max_features

    def _condense(self, traces: Traces) -> dict[str, Tensor]:
        columns = self._columns(traces)
        d = columns.shape[1]
        scott = traces.counts.double() ** (-1 / (d + 4))
        learnt = {"columns": columns, "means": traces.means.gather(1, columns)}
        if self.variant == "neural-coverage":
            log_det = torch.full_like(scott, d * math.log(LSA_BANDWIDTH))
        else:
            whiteners = traces.whiteners(self.name, columns, correction=1) / scott[:, None, None]
            learnt["whiteners"] = whiteners
            log_det = -whiteners.diagonal(dim1=1, dim2=2).log().sum(1)
        learnt["log_norms"] = traces.counts.double().log() + log_det + d / 2 * math.log(2 * math.pi)
        whitened = self._whitened(learnt, traces.values, traces.place, traces.groups)
        parts = torch.split(whitened.square().sum(1), traces.sizes)
        norms = pad_sequence(list(parts), batch_first=True, padding_value=math.inf)
        learnt |= {"traces": whitened, "norms": norms, "counts": traces.counts}
        if self.lower is None and self.variant == "training-range":
            # Slightly less: a bucket includes its upper end, but not its lower one.
            smallest = self._smallest(learnt, traces.groups)
            learnt["lower"] = (smallest - 1e-9 * (1 + smallest.abs())).clamp(max=0.0)
        return learnt

    def _smallest(self, learnt: dict[str, Tensor], groups: Groups) -> Tensor:
        parts = []
        for at, rows in groups:
            own, norms = learnt["traces"][rows], learnt["norms"][at, : rows.stop - rows.start]
            for some, squares in zip(
                *(torch.split(column, max(1, NUMBERS_AT_ONCE // len(own))) for column in (own, norms)), strict=True
            ):
                distances = (norms + squares[:, None] - 2 * some @ own.T).clamp_(min=0)
                parts.append(learnt["log_norms"][at] - distances.mul_(-0.5).logsumexp(1).amax())
        return torch.stack(parts).amin()

    def _columns(self, traces: Traces) -> Tensor:
        """The neurons that are compared for each class, `[classes, n]`."""
        if self.variant == "dnn-tip":
            pooled = traces.deviations.square().mean(0)
            variances = torch.where((traces.counts > 1)[:, None], traces.variances, pooled)
            widest = variances.argsort(dim=1, descending=True, stable=True)[:, : self.max_features]
            return widest.sort(1).values
        in_classes = self.variant in ("training-range", "sadl")
        kept = traces.varying_neurons(self.name, self.min_variance, in_classes=in_classes)
        return kept.repeat(len(traces.classes), 1)

    def _whitened(self, learnt: dict[str, Tensor], values: Tensor, place: Tensor, groups: Groups) -> Tensor:
        """Traces `[inputs, neurons]` in the coordinates in which the kernels of their classes are standard normal."""
        centred = values.gather(1, learnt["columns"][place]) - learnt["means"][place]
        if "whiteners" not in learnt:
            return centred / LSA_BANDWIDTH
        return torch.cat([centred[rows] @ learnt["whiteners"][at].T for at, rows in groups])

    def _n_compared(self) -> int:
        return self.learnt["norms"].shape[1]

    def _surprise_of(self, values: Tensor, place: Tensor, groups: Groups) -> Tensor:
        whitened, norms = self._whitened(self.learnt, values, place, groups), self.learnt["norms"][place]
        traces = torch.split(self.learnt["traces"], self.learnt["counts"].tolist())
        products = torch.zeros_like(norms)
        for at, rows in groups:
            products[rows, : len(traces[at])] = whitened[rows] @ traces[at].T
        squares = norms.add_(whitened.square().sum(1, keepdim=True)).sub_(products, alpha=2).clamp_(min=0)
        return self.learnt["log_norms"][place] - squares.mul_(-0.5).logsumexp(1)


class DSA(Surprise):
    """Surprise: the distance of a test's trace from the nearest training trace of its predicted class, divided by the
    distance of that trace from the nearest one of another class.

    `neural-coverage` measures the second distance from the test itself, and gives 1e-6 if it is 0 (its code takes the
    true class, here it is the predicted one). A test equal to a training input has surprise 0. `max_traces` keeps
    that many traces per class, evenly spaced in the order of the training data; by default all. Second distances are
    computed when a test needs them, so that fitting is free and each test is compared with every trace.
    """

    name = "dsa"
    variants: ClassVar = {
        "sadl": "github.com/coinse/sadl, sa.py: fetch_dsa; dnn-tip: DSA",
        "neural-coverage": "github.com/Yuanyuan-Yuan/NeuraL-Coverage, coverage.py: DSC",
    }

    def __init__(
        self,
        upper: float = 2.0,
        buckets: int = 1000,
        max_traces: int | None = None,
        **options: Unpack[CriterionOptions],
    ) -> None:
        if max_traces is not None:
            check_count("dsa: max_traces", max_traces)
        super().__init__(upper, buckets, **options)
        self.max_traces = max_traces

    def _condense(self, traces: Traces) -> dict[str, Tensor]:
        if len(traces.classes) < 2:
            raise DataError(
                f"dsa compares classes, but all training inputs are predicted as class {int(traces.classes[0])}: fit "
                "on inputs of at least two classes"
            )
        if self.max_traces is not None:
            parts = [evenly_spaced(part, self.max_traces) for part in torch.split(traces.values, traces.sizes)]
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

    def _n_compared(self) -> int:
        return len(self.learnt["traces"])

    def _surprise_of(self, values: Tensor, place: Tensor, groups: Groups) -> Tensor:
        is_own = self.learnt["places"] == place[:, None]
        first, nearest = self._nearest(values, is_own)
        if self.variant == "neural-coverage":
            second, _ = self._nearest(values, ~is_own)
            return torch.where(second > 0, first / second, 1e-6)
        second, _ = self._nearest(self.learnt["traces"][nearest], ~is_own)
        return torch.where(first > 0, first / second, first)

    def _nearest(self, values: Tensor, is_candidate: Tensor) -> tuple[Tensor, Tensor]:
        """For each of `values`: the distance to the nearest candidate trace, and its index; the first of equal ones.

        A matrix product gives squared distances less a term that is the same for all traces of a test. It loses digits
        where traces are close to each other, so all traces that its rounding could make the nearest are measured by
        differences.
        """
        traces = self.learnt["traces"]
        centred = values - self.learnt["centre"]
        rough = torch.addmm(self.learnt["squares"], centred, traces.T, alpha=-2).masked_fill_(~is_candidate, torch.inf)
        length = torch.linalg.vector_norm(centred, dim=1, keepdim=True)
        # The rounding error of a sum of products (Higham, 3.1), twice and a bit more.
        error = (traces.shape[1] + 8) * EPSILON * (self.learnt["farthest"] + 2 * length * self.learnt["longest"])
        is_far = rough > rough.amin(1, keepdim=True) + 2 * error  # false where something overflows
        test, trace = (is_candidate & ~is_far).nonzero(as_tuple=True)
        size = max(1, NUMBERS_AT_ONCE // traces.shape[1])
        pairs = zip(torch.split(test, size), torch.split(trace, size), strict=True)
        distances = torch.cat([torch.linalg.vector_norm(values[i] - traces[j], dim=1) for i, j in pairs])
        smallest = torch.full_like(values[:, 0], torch.inf).scatter_reduce(0, test, distances, "amin")
        last = torch.full((len(values),), len(traces) - 1, device=values.device)
        nearest = torch.where(distances == smallest[test], trace, len(traces) - 1)
        return smallest, last.scatter_reduce(0, test, nearest, "amin")


class MDSA(Surprise):
    """Surprise: the Mahalanobis distance of a test's trace from the mean training trace of its predicted class.

    It uses each class's population covariance, as both sources do; `dnn-tip` gives the squared distance. Neurons whose
    variance is below `min_variance` over the training traces or within a class are dropped, as for LSA, and a class
    with too few traces borrows from the others, with a warning (`Traces.whiteners`). upper: by default twice the
    largest surprise of a training input, because no source names a bound, and the scale depends on the number of
    neurons.
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
        **options: Unpack[CriterionOptions],
    ) -> None:
        if not 0 <= min_variance < math.inf:
            raise UsageError(f"mdsa: min_variance must be a number, 0 or more, got {min_variance!r}")
        super().__init__(upper, buckets, **options)
        self.min_variance = min_variance

    def _condense(self, traces: Traces) -> dict[str, Tensor]:
        columns = traces.varying_neurons(self.name, self.min_variance)
        whiteners = traces.whiteners(self.name, columns.expand(len(traces.classes), -1), correction=0)
        learnt = {"columns": columns, "means": traces.means[:, columns], "whiteners": whiteners}
        farthest = self._distance(learnt, traces.values, traces.place, traces.groups).amax()
        # Slightly more than twice: the farthest training input would lie on the edge of two buckets, and rounding
        # would choose one.
        return learnt | {"upper": (2 + 1e-9) * farthest}

    def _surprise_of(self, values: Tensor, place: Tensor, groups: Groups) -> Tensor:
        return self._distance(self.learnt, values, place, groups)

    def _distance(self, learnt: dict[str, Tensor], values: Tensor, place: Tensor, groups: Groups) -> Tensor:
        centred = values[:, learnt["columns"]] - learnt["means"][place]
        whitened = torch.cat([centred[rows] @ learnt["whiteners"][at].T for at, rows in groups])
        squares = whitened.square().sum(1)
        return squares if self.variant == "dnn-tip" else squares.sqrt()


@dataclass(frozen=True)
class Traces:
    """Training traces `values [inputs, neurons]`, float64, sorted by class; `counts` is the number of each class."""

    values: Tensor
    classes: Tensor
    counts: Tensor

    @staticmethod
    def of(values: Tensor, predicted: Tensor) -> Traces:
        """Traces sorted by class; within a class in their original order."""
        sorted_classes, order = predicted.sort(stable=True)
        classes, counts = torch.unique_consecutive(sorted_classes, return_counts=True)
        return Traces(values[order].double(), classes, counts)

    @cached_property
    def sizes(self) -> list[int]:
        """`counts` as plain numbers."""
        return self.counts.tolist()

    @cached_property
    def place(self) -> Tensor:
        """The index of each trace's class, `[inputs]`."""
        return torch.arange(len(self.counts), device=self.counts.device).repeat_interleave(self.counts)

    @cached_property
    def groups(self) -> Groups:
        """The traces of each class."""
        ends = self.counts.cumsum(0).tolist()
        return [(at, slice(end - n, end)) for at, (end, n) in enumerate(zip(ends, self.sizes, strict=True))]

    @cached_property
    def means(self) -> Tensor:
        """The mean of each class, `[classes, neurons]`."""
        return torch.stack([traces.mean(0) for traces in torch.split(self.values, self.sizes)])

    @cached_property
    def deviations(self) -> Tensor:
        """The deviation of each trace from the mean of its class."""
        return self.values - self.means.repeat_interleave(self.counts, 0)

    @cached_property
    def variances(self) -> Tensor:
        """The population variances of each class, `[classes, neurons]`."""
        return torch.stack([part.square().mean(0) for part in torch.split(self.deviations, self.sizes)])

    def varying_neurons(self, criterion: str, min_variance: float, *, in_classes: bool = True) -> Tensor:
        """The neurons with a variance of at least `min_variance` over all traces and, if asked, within every class.

        A class with no more traces than neurons is ignored: a neuron may well be constant in it by chance.
        """
        is_varying = self.values.var(0, correction=0) >= min_variance
        if in_classes:
            is_varying &= (self.variances[self.counts > self.values.shape[1]] >= min_variance).all(0)
        neurons = is_varying.nonzero()[:, 0]
        if len(neurons) == 0:
            raise DataError(
                f"{criterion} must have a neuron whose variance over training inputs is {min_variance:g} or more, but "
                "the layer has none: lower min_variance, name another layer or fit on more inputs"
            )
        return neurons

    def whiteners(self, criterion: str, columns: Tensor, correction: int) -> Tensor:
        """The inverse Cholesky factor of each class's covariance of its `columns [classes, d]`.

        The inverse, `[classes, d, d]`, so that a test costs one matrix product: a triangular system is solved one
        neuron after another. It is as accurate here, since no factor is singular within rounding.

        The covariance of a class with `n` traces that are too few or too uniform for one of `d` neurons is mixed with
        the pooled covariance within all classes: its weight is `(n - 1) / (n - 1 + d)`, which is 0 for a single trace.
        If the pooled covariance is singular too, a tenth of its mean variance on the diagonal replaces a tenth of it.
        """
        n_classes, d = columns.shape
        if n_classes * d * d > MAX_COVARIANCE_NUMBERS:
            raise UsageError(
                f"{criterion} keeps one covariance per class and takes at most {MAX_COVARIANCE_NUMBERS:,} numbers, but "
                f"{n_classes} classes of {d} neurons need more: name a narrower layer, or use neurons='channel'"
            )
        whiteners, mixed, pooled = [], [], None
        for at, deviations in enumerate(torch.split(self.deviations, self.sizes)):
            neurons, n = columns[at], len(deviations)
            deviations = deviations[:, neurons]
            covariance = deviations.T @ deviations / max(n - correction, 1)
            factor = cholesky(covariance) if n > d else None
            if factor is None:
                pooled = self._pooled(criterion) if pooled is None else pooled
                mixed.append(at)
                weight = (n - 1) / (n - 1 + d)
                covariance = weight * covariance + (1 - weight) * pooled[neurons][:, neurons]
                factor = torch.linalg.cholesky(covariance)
            identity = torch.eye(d, dtype=factor.dtype, device=factor.device)
            whiteners.append(torch.linalg.solve_triangular(factor, identity, upper=False))
        if mixed:
            classes = ", ".join(str(number) for number in self.classes[mixed[:10]].tolist())
            more = f" and {len(mixed) - 10} more" if len(mixed) > 10 else ""
            warn(
                f"{criterion}: training inputs predicted as class {classes}{more} are too few or too alike for a "
                f"covariance of {d} neurons: it is mixed with the pooled one of all classes"
            )
        return torch.stack(whiteners)

    def _pooled(self, criterion: str) -> Tensor:
        """The covariance within classes, of all neurons, made positive definite."""
        n_free = len(self.values) - len(self.classes)
        covariance = self.deviations.T @ self.deviations / max(n_free, 1)
        scale = covariance.diagonal().mean()
        if not float(scale) > 0:
            raise DataError(
                f"{criterion} must have two training inputs of one predicted class that differ, got none: fit on more "
                "inputs"
            )
        if cholesky(covariance) is None:
            covariance *= 0.9
            covariance.diagonal().add_(0.1 * scale)
        return covariance


def cholesky(covariance: Tensor) -> Tensor | None:
    """The lower Cholesky factor, or None if the matrix is singular within rounding."""
    factor, info = torch.linalg.cholesky_ex(covariance)
    independent = factor.diagonal().square() / covariance.diagonal()
    return factor if bool((info == 0) & (independent > MIN_OWN_SHARE).all()) else None


def evenly_spaced(values: Tensor, max_rows: int) -> Tensor:
    """At most `max_rows` rows, evenly spaced."""
    n = len(values)
    return values if n <= max_rows else values[torch.arange(max_rows, device=values.device) * n // max_rows]
