"""Groups of faults by content, that is, of faults whose clean inputs look alike to the tested model.

The features of a seed are the activations of the last layer before the output, averaged over places. They are reduced
to principal components and divided into clusters, of which there are as many as are best apart.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.errors import UsageError, needs_extra
from themis.measure.calculator import Calculator
from themis.measure.clean import place_others
from themis.progress import advance, step
from themis.runs.analysis.bench import open_bench
from themis.runs.analysis.groups import Group, describe_members, order_by_size
from themis.runs.faults import Faults
from themis.runs.replay import AnyRun, as_run
from themis.target.activations import OUTPUT, Layer
from themis.text import percent

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
CLUSTERED_COMPONENTS = 20
CLUSTERED_SEEDS = 2000
"""Seeds that clusters are formed from; every other one joins the nearest."""
MIN_SILHOUETTE = 0.1
"""Least silhouette of clusters: in 20 dimensions, a single cloud of points has one of 0.05."""
N_CLASSES = 3
"""Classes of seeds that a group's description names."""


def group_by_content(run: AnyRun, most: int = 20) -> list[Group]:
    """Run the model on the seeds with a fault, and group those that look alike, the largest group first."""
    if most < 1:
        raise UsageError(f"most must be 1 or more groups, got {most}: leave it out for 20")
    run = as_run(run)
    if not len(run.faults):
        return []
    seed_id, row = np.unique(run.faults.columns["seed_id"], return_inverse=True)
    with open_bench(run, seed_id) as bench:
        features = seed_features(bench.calculator, bench.rows(seed_id))
    groups = order_by_size(find_clusters(features, most)[row])
    n = int(groups.max()) + 1
    return [_describe(run.faults, groups == k, max(1, most // n)) for k in range(n)]


def seed_features(calculator: Calculator, rows: Ints) -> Floats:
    """The features of some seeds, `[seeds, features]`; the target must be open."""
    hidden = [layer.name for layer in calculator.layers if layer.name != OUTPUT]
    if not hidden:
        raise UsageError("groups by content need a model with a hidden layer, but this one has none: group by change")
    is_last = getattr(calculator.target, "channels", "first") == "last"
    parts: list[Floats] = []

    def on_activation(layer: Layer, activation: Tensor) -> None:
        if layer.name == hidden[-1]:
            places = tuple(range(1, activation.ndim - 1)) if is_last else tuple(range(2, activation.ndim))
            parts.append(activation.float().mean(places).cpu().numpy() if places else activation.float().cpu().numpy())

    with step("running the clean inputs"), torch.no_grad():
        for first in range(0, len(rows), calculator.chunk):
            some = torch.from_numpy(rows[first : first + calculator.chunk]).to(calculator.device)
            place_others(calculator.target, calculator.seeds, some)
            calculator.run_model(calculator.inputs[some], on_activation)
            advance(first, len(rows), "inputs")
    return np.concatenate(parts)


def find_clusters(features: Floats, most: int) -> Ints:
    """The cluster number of each row; there is one cluster if none are clearly separate."""
    with needs_extra("content", "groups by content need scikit-learn"):
        from sklearn.cluster import KMeans
        from sklearn.decomposition import PCA
        from sklearn.metrics import silhouette_score
    n = len(features)
    single: Ints = np.zeros(n, np.int64)
    if min(n - 1, most) < 2 or not np.ptp(features, 0).any():
        return single
    at = np.linspace(0, n - 1, min(n, CLUSTERED_SEEDS)).round().astype(np.int64)
    reduced = PCA(min(CLUSTERED_COMPONENTS, *features[at].shape), random_state=0).fit(features[at])
    points = reduced.transform(features)
    found: list[tuple[float, Ints]] = []
    for k in range(2, min(most, len(at) - 1) + 1):
        clusters = KMeans(k, n_init=4, random_state=0).fit(points[at])
        if len(np.unique(clusters.labels_)) == k:
            found.append((silhouette_score(points[at], clusters.labels_), clusters.predict(points).astype(np.int64)))
    apart, best = max(found, key=lambda pair: pair[0], default=(0.0, single))
    return best if apart >= MIN_SILHOUETTE else single


def _describe(faults: Faults, is_member: NDArray[np.bool_], n_shown: int) -> Group:
    """The group with the classes of its seeds in front."""
    group, columns = describe_members(faults, is_member, n_shown), faults.columns
    number = np.where(columns["label"] >= 0, columns["label"], columns["clean_answer"])[is_member]
    seeds = dict(zip(columns["seed_id"][is_member].tolist(), number.tolist(), strict=True))
    counts, names = Counter(k for k in seeds.values() if k >= 0), faults.classes
    shares = [
        f"{names[k] if names and k < len(names) else k} {percent(n / len(seeds), 0)}"
        for k, n in counts.most_common(N_CLASSES)
    ]
    return replace(group, text=f"seeds of class {', '.join(shares)}: {group.text}") if shares else group
