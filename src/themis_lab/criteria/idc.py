"""Importance-driven coverage (DeepImportance)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any, ClassVar, Self, Unpack

import numpy as np
import torch
from torch import Tensor

from themis.errors import DataError, UsageError, needs_extra, warn
from themis.options import check_count
from themis.target.target import AnyTarget
from themis_lab.criteria.covering import Covering, first_hits, mark_tests
from themis_lab.criteria.options import CriterionOptions
from themis_lab.criteria.readings import ONLY_LAYER, Activations, Batch, Readings
from themis_lab.criteria.relevances import Relevance, relevance

MAX_TUPLES = 2**62
"""Tuples that an int64 can number."""


class IDC(Covering):
    """Combinations of clusters of a layer's `m` most relevant neurons that some test shows, over all combinations.

    The training activations of each of these neurons are clustered by k-means into 2 to `max_clusters` clusters; the
    number with the best silhouette is chosen, the smallest of equal ones, and a constant neuron has one cluster. A
    test shows the tuple of its nearest centroids, the lower of two equally near ones. The score is small by nature: 12
    neurons have up to 16.8 million tuples; `score_reachable` divides by the most that this number of tests could show.

    m: the number of neurons, the first of equally relevant ones; if the layer has fewer, all are used, with a warning.
    relevance: of each neuron of the layer; by default `prepare` computes it. max_traces, silhouette_sample: how many
    training activations of a neuron k-means and the silhouette use; of more, evenly spaced quantiles are taken.

    The published code cannot be followed exactly: it reads test activations from the layer before the clustered one,
    and sorts the relevances incorrectly (the table that it sorts stays zero, and the centroids are in a different order
    than the neurons). It also leaves zeros out of the clustering and rounds centroids to two decimals.
    """

    name = "idc"
    reads_one_layer = True
    variants: ClassVar = {
        "corrected": "Gerasimou et al., ICSE 2020, section 3; github.com/DeepImportance/deepimportance_code_release, "
        "coverages/idc.py, without its defects"
    }

    def __init__(
        self,
        m: int = 12,
        relevance: Tensor | Relevance | None = None,
        max_clusters: int = 4,
        silhouette_sample: int = 1000,
        random_seed: int = 0,
        max_traces: int = 10_000,
        **options: Unpack[CriterionOptions],
    ) -> None:
        for option, value, smallest in (
            ("m", m, 1),
            ("max_clusters", max_clusters, 2),
            ("silhouette_sample", silhouette_sample, 3),
            ("max_traces", max_traces, 3),
        ):
            check_count(f"idc: {option}", value, smallest)
        super().__init__(**options)
        self.m, self.max_clusters, self.silhouette_sample = m, max_clusters, silhouette_sample
        self.random_seed, self.max_traces = random_seed, max_traces
        self._relevance, self._has_own_relevance = relevance, relevance is not None
        self._neurons: Tensor | None = None
        self._traces: list[Tensor] = []

    @property
    def relevance(self) -> Tensor | Relevance | None:
        """The relevance of the layer's neurons: as passed, or as computed by `prepare`."""
        return self._relevance

    def prepare(self, target: AnyTarget, inputs: Tensor, labels: Tensor | None) -> None:
        """Compute the relevance of the layer's neurons on training inputs, unless it was passed."""
        if not self._has_own_relevance:
            layer = None if self.requested_layers is None else self.requested_layers[0]
            self._relevance = relevance(target, inputs, labels, layer, neurons=self.neurons)

    def fit(self, batches: Iterable[Activations | Batch | Readings]) -> Self:
        self._neurons, self._traces = None, []
        return super().fit(batches)

    def _learn(self, readings: Readings) -> None:
        if self._neurons is None:
            self._neurons = self._most_relevant(readings)
        self._traces.append(readings.values[:, self._neurons])

    def _finish_fit(self) -> None:
        assert self._neurons is not None
        traces, self._traces = torch.cat(self._traces), []
        columns = np.sort(traces.double().cpu().numpy(), 0).T
        clusters = [self._cluster(_thin(column, self.max_traces)) for column in columns]
        if (n_tuples := math.prod(map(len, clusters))) > MAX_TUPLES:
            raise UsageError(
                f"idc: there may be at most 2^62 tuples, {len(clusters)} neurons have {n_tuples:.1e}: pass a smaller m"
            )
        centroids = np.full((len(clusters), max(map(len, clusters))), np.inf)
        for row, values in zip(centroids, clusters, strict=True):
            row[: len(values)] = values
        self.learnt = {
            "neurons": self._neurons,
            "centroids": torch.from_numpy(centroids).to(traces.device),
            "n_clusters": torch.tensor([len(values) for values in clusters], device=traces.device),
        }

    def _most_relevant(self, readings: Readings) -> Tensor:
        """The neurons that are read; checks that the relevance belongs to this layer."""
        (layer,), width = readings.layout.names, readings.layout.n_neurons
        if self._relevance is None:
            raise UsageError(
                "idc must know the relevance of its neurons before fit: call prepare(target, inputs, labels), or pass "
                "relevance=..."
            )
        values = self._relevance
        if isinstance(values, Relevance):
            if layer not in (ONLY_LAYER, values.layer):
                raise UsageError(f"idc: relevance must be of the layer that is read, {layer!r}, got {values.layer!r}")
            values = values.values
        if values.shape != (width,) or not bool(values.isfinite().all()):
            raise DataError(
                f"idc: relevance must be one finite number per neuron, got {list(values.shape)} for {width} neurons of "
                f"{layer!r}: compute it for this layer with neurons={self.neurons!r}"
            )
        if self.m > width:
            warn(f"idc: layer {layer!r} has {width} neurons, fewer than m={self.m}: all are used")
        return values.to(readings.values.device).argsort(descending=True, stable=True)[: self.m]

    def _cluster(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The centroids of a neuron's sorted training activations, ascending."""
        with needs_extra("lrp", "idc needs scikit-learn"):
            from sklearn.cluster import KMeans
            from sklearn.metrics import silhouette_score
        centroids, best = values[:1], -math.inf
        sample = _thin(np.arange(len(values)), self.silhouette_sample)
        for k in range(2, min(self.max_clusters, len(np.unique(values))) + 1):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # values that are too close to distinguish form fewer clusters
                means = KMeans(k, n_init=10, random_state=self.random_seed).fit(values[:, None])
            labels = means.labels_[sample]
            is_defined = 1 < len(np.unique(labels)) < len(sample)
            score = silhouette_score(values[sample, None], labels) if is_defined else -1.0
            if score > best:
                centroids, best = np.unique(means.cluster_centers_), score
        return centroids

    # Tests

    def n_items(self) -> int:
        return math.prod(self.learnt["n_clusters"].tolist()) if self.learnt else 0

    def n_covered(self) -> int:
        return len(self.state["keys"]) if self.state else 0

    def score_reachable(self) -> float:
        """Distinct tuples, over the most that this number of tests could show."""
        return self.n_covered() / max(min(self.n_items(), self.tests), 1)

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = {"score_reachable": self.score_reachable()}
        if isinstance(self._relevance, Relevance):
            report |= {"relevance": self._relevance.method, "conservation_error": self._relevance.conservation_error}
        return report

    def items(self, readings: Readings) -> Tensor:
        """The tuple of each test as one number, `[tests, 1]`."""
        learnt = {name: tensor.to(readings.values.device) for name, tensor in self.learnt.items()}
        neurons, centroids, n_clusters = learnt["neurons"], learnt["centroids"], learnt["n_clusters"]
        values = readings.values[:, neurons].double()
        nearest = (values[:, :, None] - centroids).abs().argmin(2)  # the first of equal ones
        place = n_clusters.cumprod(0) // n_clusters
        return torch.where(values.isfinite().all(1), (nearest * place).sum(1), -1)[:, None]

    def _initial_state(self, readings: Readings) -> dict[str, Tensor]:
        return {"keys": torch.zeros(0, dtype=torch.int64, device=readings.values.device)}

    def _update(self, readings: Readings) -> Tensor:
        # Keys of the tuples that were seen, not one bit per tuple: there may be far more than fit in memory.
        items, keys = self.items(readings), self.state["keys"]
        fresh, first = first_hits(items, (items >= 0) & ~torch.isin(items, keys))
        if len(fresh):
            self.state["keys"] = torch.cat([keys, fresh]).sort().values
        return mark_tests(first, len(readings))

    def _merge_state(self, other: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"keys": torch.unique(torch.cat([self.state["keys"], other["keys"]]))}


def _thin(values: np.ndarray[Any, Any], n: int) -> np.ndarray[Any, Any]:
    """At most `n` sorted values, evenly spaced, including both ends."""
    return values if len(values) <= n else values[np.linspace(0, len(values) - 1, n).round().astype(np.int64)]
