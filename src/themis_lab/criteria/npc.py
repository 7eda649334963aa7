"""Neuron path coverage (NPC): the similarity of the paths on which a model decides."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Unpack

import torch
from torch import Tensor

from themis.errors import DataError, ModelError, UsageError, needs_extra
from themis.options import check_count
from themis.target.activations import OUTPUT, Layer
from themis_lab.criteria.covering import Covering
from themis_lab.criteria.options import CriterionOptions
from themis_lab.criteria.readings import Batch, Readings

if TYPE_CHECKING:
    from themis.target.target import AnyTarget

COMPARED_NEURONS = 2**26
"""Neurons compared at once."""


class NPC(Covering):
    """Degrees of similarity between the decision paths of tests and those of their class: structure-based (SNPC).

    It reads relevances instead of activations: how much each neuron contributed to the class that the model answered
    for each input. `contributions(target, inputs)` gives them as a batch for `fit` and `update`; relevances by layer
    from LRP can be used as well.

    An input's path is, in each layer, the smallest set of neurons that hold the share `alpha` of the positive
    relevance. The paths of a class's training inputs (the correctly classified ones, if there are labels) form `paths`
    clusters by k-means; the abstract path of a cluster has the neurons that lie on at least the share `beta` of its
    paths. For each abstract path of its predicted class, a test covers one of `buckets` equal parts of 0..1: the one
    that contains the Jaccard similarity of the two paths. The score is the covered parts over the parts of all abstract
    paths.

    `path` compares whole paths, `layer` the part in each layer. The published code puts similarity 0 in a part of its
    own that the total does not count, and takes one neuron more than needed for each share; here 0 belongs to the first
    part, and paths are defined as in the paper. Two empty sets are equal. A class with fewer distinct paths than
    `paths` has fewer abstract ones; a class without training inputs has none.

    max_paths: how many training inputs of a class are clustered at most; the first ones are taken.
    """

    name = "npc"
    can_guide = False
    needs = frozenset({"predicted"})
    variants: ClassVar = {
        "path": "Xie et al., NPC, TOSEM 2022: SNPC; github.com/ltl7155/NPC, SNPC/neuron_coverage.py: Intra_NPC",
        "layer": "the same file: Layer_Intra_NPC",
    }

    def __init__(
        self,
        alpha: float = 0.8,
        beta: float = 0.8,
        paths: int = 4,
        buckets: int = 100,
        max_paths: int = 1000,
        **options: Unpack[CriterionOptions],
    ) -> None:
        for name, share in (("alpha", alpha), ("beta", beta)):
            if not 0 < share <= 1:
                raise UsageError(f"npc: {name} must be above 0 and at most 1, got {share}")
        for name, number in (("paths", paths), ("buckets", buckets), ("max_paths", max_paths)):
            check_count(f"npc: {name}", number)
        super().__init__(**options)
        self.alpha, self.beta, self.paths, self.buckets, self.max_paths = alpha, beta, paths, buckets, max_paths

    def prepare(self, target: AnyTarget, inputs: Tensor, labels: Tensor | None) -> None:
        raise UsageError(
            "npc reads the contributions of neurons, but would get activations here: fit and update it in a loop of "
            "your own, with contributions(target, inputs)"
        )

    def n_items(self) -> int:
        return len(self.learnt["paths"]) * self._n_parts() * self.buckets if "paths" in self.learnt else 0

    def _learn(self, readings: Readings) -> None:
        classes = readings.classes(self.name)
        if readings.labels is not None:
            is_correct = classes == readings.labels.to(classes.device)
            readings, classes = readings[is_correct], classes[is_correct]
        if len(readings) == 0:
            return
        counts = self.learnt.get("counts", torch.zeros(0, dtype=torch.int64, device=classes.device))
        n = max(len(counts), int(classes.max()) + 1)
        counts = torch.cat([counts, counts.new_zeros(n - len(counts))])
        is_of_class = torch.nn.functional.one_hot(classes, n)
        rank = (counts + is_of_class.cumsum(0)).gather(1, classes[:, None])[:, 0]
        is_kept = rank <= self.max_paths
        number = len(self.learnt)
        self.learnt["counts"] = counts + is_of_class.sum(0)
        self.learnt[f"kept/{number}"] = self.path(readings)[is_kept]
        self.learnt[f"kept of/{number}"] = classes[is_kept]

    def _finish_fit(self) -> None:
        if not self.learnt:
            raise DataError("npc: fit must see a correctly classified training input, got none: check the labels")
        kept = torch.cat([paths for name, paths in self.learnt.items() if name.startswith("kept/")])
        classes = torch.cat([part for name, part in self.learnt.items() if name.startswith("kept of/")])
        n_classes = len(self.learnt["counts"])
        table = torch.full((n_classes, self.paths), -1, dtype=torch.int64, device=kept.device)
        abstract: list[Tensor] = []
        for number in torch.unique(classes).tolist():
            own = kept[classes == number]
            cluster = clusters(own, self.paths)
            groups = [own[cluster == k] for k in range(int(cluster.max()) + 1)]
            table[number, : len(groups)] = torch.arange(len(abstract), len(abstract) + len(groups), device=kept.device)
            # Slightly less than the share, so that 3 of 5 paths reach 0.6.
            abstract += [group.sum(0) >= self.beta * len(group) - 1e-9 for group in groups]
        self.learnt = {"paths": torch.stack(abstract), "table": table}

    def path(self, readings: Readings) -> Tensor:
        """The path of each input: which neurons are critical, bool `[inputs, neurons]`."""
        return torch.cat([critical(layer, self.alpha) for layer in readings.layers().values()], 1)

    def items(self, readings: Readings) -> Tensor:
        step = max(COMPARED_NEURONS // max(self.paths * readings.layout.n_neurons, 1), 1)
        parts = [self._items(readings[at : at + step]) for at in range(0, len(readings), step)]
        return torch.cat(parts)

    def _items(self, readings: Readings) -> Tensor:
        table, classes = self.learnt["table"], readings.classes(self.name)
        is_seen = (classes >= 0) & (classes < len(table))
        rows = torch.where(is_seen[:, None], table[torch.where(is_seen, classes, 0)], -1)
        path, abstract = self.path(readings)[:, None], self.learnt["paths"][rows.clamp(min=0)]
        in_both, in_any = path & abstract, path | abstract
        slices = list(readings.layout.slices().values()) if self.variant == "layer" else [slice(None)]
        items = []
        for part, columns in enumerate(slices):
            n_both, n_any = in_both[..., columns].sum(2), in_any[..., columns].sum(2)
            bucket = torch.where(n_any > 0, (n_both * self.buckets + n_any - 1) // n_any.clamp(min=1), self.buckets)
            item = (rows * len(slices) + part) * self.buckets + (bucket - 1).clamp(min=0)
            is_finite = readings.values[:, columns].isfinite().all(1, keepdim=True)
            items.append(torch.where((rows >= 0) & is_finite, item, -1))
        return torch.cat(items, 1)

    def _n_parts(self) -> int:
        return 1 if self.layout is None or self.variant == "path" else len(self.layout.names)


def critical(relevance: Tensor, alpha: float) -> Tensor:
    """The smallest set of neurons of each row that hold the share `alpha` of its positive sum; ties go to the first."""
    positive = relevance.double().clamp(min=0)
    value, order = positive.sort(dim=1, descending=True, stable=True)
    total = value.cumsum(1)
    before = torch.nn.functional.pad(total[:, :-1], (1, 0))
    is_needed = (value > 0) & (before < alpha * total[:, -1:])
    return torch.zeros_like(is_needed).scatter_(1, order, is_needed)


def clusters(paths: Tensor, max_clusters: int) -> Tensor:
    """The cluster of each path, by k-means with at most as many clusters as there are distinct paths."""
    n = min(max_clusters, len(torch.unique(paths, dim=0)))
    if n == 1:
        return torch.zeros(len(paths), dtype=torch.int64, device=paths.device)
    with needs_extra("lrp", "npc needs scikit-learn"):
        from sklearn.cluster import KMeans
    fitted = KMeans(n, n_init=10, random_state=0).fit(paths.cpu().float().numpy())
    return torch.as_tensor(fitted.labels_, dtype=torch.int64, device=paths.device)


def contributions(
    target: AnyTarget, inputs: Tensor, labels: Tensor | None = None, layers: tuple[Layer, ...] | None = None
) -> Batch:
    """The contribution of each neuron to each input's winning score: gradient x activation, by hidden layer.

    It takes one forward and one backward pass. In piecewise linear nets without biases it equals LRP. `layers` are by
    default those of `target.find_layers`.
    """
    if not target.has_gradient:
        raise UsageError("contributions need gradients, and this target has none: pass relevances of your own to npc")
    layers = target.find_layers(inputs[0]) if layers is None else layers
    hidden = {layer.name: layer for layer in layers if layer.name != OUTPUT}
    by_layer = {name: inputs.new_zeros(len(inputs), *layer.shape) for name, layer in hidden.items()}

    def on_activation(name: str, activation: Tensor) -> None:
        value = activation.detach().clone()  # the model may overwrite it

        def keep(gradient: Tensor) -> None:
            by_layer[name] = (value * gradient).reshape(by_layer[name].shape)

        if activation.requires_grad:
            activation.register_hook(keep)  # type: ignore[no-untyped-call]

    with target.opened(), torch.enable_grad():
        leaf = inputs.detach().clone().requires_grad_()
        scores = target.forward(leaf, on_activation, hidden)
        if scores.ndim != 2:
            raise UsageError(f"contributions need one score per class, got outputs {list(scores.shape)}")
        winning = scores.max(1)
        try:
            torch.autograd.grad(winning.values.sum(), leaf)
        except RuntimeError as error:
            raise ModelError(
                f"contributions need a model that can be differentiated, but this one cannot: {error}"
            ) from error
    return Batch(by_layer, predicted=winning.indices, labels=labels)
