"""Neuron path coverage: how like the paths are on which a model decides (NPC)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Unpack

import torch
from torch import Tensor

from themis.criteria.covering import Covering
from themis.criteria.criterion import Common
from themis.criteria.readings import Batch, Readings
from themis.errors import DataError, MissingExtraError, ModelError, UsageError
from themis.target.activations import OUTPUT, Layer

if TYPE_CHECKING:
    from themis.target.target import AnyTarget

BLOCK = 2**26
"""Neurons compared at once."""


class NPC(Covering):
    """Degrees of likeness between tests' decision paths and those of their class: structure-based (SNPC).

    It reads relevances in the place of activations: of each input, how much each neuron contributed to the class that
    the model answered. `contributions(target, inputs)` gives them as a batch for `fit` and `update`; LRP's
    relevances by layer serve too.

    An input's path is, in each layer, the fewest neurons that hold the share `alpha` of the positive relevance. The
    paths of a class's training inputs (rightly classified ones, where labels are given) form `paths` clusters by
    k-means; a cluster's abstract path has the neurons that are on at least the share `beta` of its paths. A test
    covers, for each abstract path of its predicted class, one of `buckets` equal parts of 0..1: the one that the
    Jaccard similarity of both paths lies in. Covered parts / parts of all abstract paths.

    `path` compares whole paths, `layer` the part in each layer. The published code puts similarity 0 in a part of its
    own that the total does not count, and takes one neuron beyond each share; here 0 belongs to the first part, and
    paths are what the paper says. Two empty sets are alike. A class with fewer distinct paths than `paths` has fewer
    abstract ones; a class without training inputs has none.

    max_paths: the most training inputs of a class that are clustered; the first ones are taken.
    """

    name = "npc"
    guides = False
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
        **common: Unpack[Common],
    ) -> None:
        for name, share in (("alpha", alpha), ("beta", beta)):
            if not 0 < share <= 1:
                raise UsageError(f"npc: {name} must be above 0 and at most 1, got {share}")
        for name, number in (("paths", paths), ("buckets", buckets), ("max_paths", max_paths)):
            if number < 1:
                raise UsageError(f"npc: {name} must be at least 1, got {number}")
        super().__init__(**common)
        self.alpha, self.beta, self.paths, self.buckets, self.max_paths = alpha, beta, paths, buckets, max_paths

    def prepare(self, target: AnyTarget, inputs: Tensor, labels: Tensor | None) -> None:
        raise UsageError(
            "npc reads what neurons contribute, and would be shown activations here: fit and update it in a loop of "
            "your own, with contributions(target, inputs)"
        )

    def n_items(self) -> int:
        return len(self.learnt["paths"]) * self._parts() * self.buckets if "paths" in self.learnt else 0

    def _learn(self, readings: Readings) -> None:
        classes = readings.classes(self.name)
        if readings.labels is not None:
            right = classes == readings.labels.to(classes.device)
            readings, classes = readings[right], classes[right]
        if len(readings) == 0:
            return
        counts = self.learnt.get("counts", torch.zeros(0, dtype=torch.int64, device=classes.device))
        n = max(len(counts), int(classes.max()) + 1)
        counts = torch.cat([counts, counts.new_zeros(n - len(counts))])
        mine = torch.nn.functional.one_hot(classes, n)
        rank = (counts + mine.cumsum(0)).gather(1, classes[:, None])[:, 0]
        keep = rank <= self.max_paths
        number = len(self.learnt)
        self.learnt["counts"] = counts + mine.sum(0)
        self.learnt[f"kept/{number}"] = self.path(readings)[keep]
        self.learnt[f"kept of/{number}"] = classes[keep]

    def _conclude(self) -> None:
        if not self.learnt:
            raise DataError("npc: fit must see a rightly classified training input, got none: check the labels")
        kept = torch.cat([each for name, each in self.learnt.items() if name.startswith("kept/")])
        classes = torch.cat([each for name, each in self.learnt.items() if name.startswith("kept of/")])
        n_classes = len(self.learnt["counts"])
        table = torch.full((n_classes, self.paths), -1, dtype=torch.int64, device=kept.device)
        abstract: list[Tensor] = []
        for each in torch.unique(classes).tolist():
            own = kept[classes == each]
            cluster = clusters(own, self.paths)
            found = [own[cluster == k] for k in range(int(cluster.max()) + 1)]
            table[each, : len(found)] = torch.arange(len(abstract), len(abstract) + len(found), device=kept.device)
            # A hair less than the share, so that 3 of 5 are 0.6 of them.
            abstract += [some.sum(0) >= self.beta * len(some) - 1e-9 for some in found]
        self.learnt = {"paths": torch.stack(abstract), "table": table}

    def path(self, readings: Readings) -> Tensor:
        """The path of each input: which neurons are critical, bool `[inputs, neurons]`."""
        return torch.cat([critical(each, self.alpha) for each in readings.layers().values()], 1)

    def items(self, readings: Readings) -> Tensor:
        step = max(BLOCK // max(self.paths * readings.layout.n_neurons, 1), 1)
        parts = [self._items(readings[at : at + step]) for at in range(0, len(readings), step)]
        return torch.cat(parts)

    def _items(self, readings: Readings) -> Tensor:
        table, classes = self.learnt["table"], readings.classes(self.name)
        is_seen = (classes >= 0) & (classes < len(table))
        rows = torch.where(is_seen[:, None], table[torch.where(is_seen, classes, 0)], -1)
        mine, theirs = self.path(readings)[:, None], self.learnt["paths"][rows.clamp(min=0)]
        n_both, n_any = mine & theirs, mine | theirs
        slices = list(readings.layout.slices().values()) if self.variant == "layer" else [slice(None)]
        found = []
        for part, at in enumerate(slices):
            both, any_ = n_both[..., at].sum(2), n_any[..., at].sum(2)
            bucket = torch.where(any_ > 0, (both * self.buckets + any_ - 1) // any_.clamp(min=1), self.buckets)
            item = (rows * len(slices) + part) * self.buckets + (bucket - 1).clamp(min=0)
            is_known = readings.values[:, at].isfinite().all(1, keepdim=True)
            found.append(torch.where((rows >= 0) & is_known, item, -1))
        return torch.cat(found, 1)

    def _parts(self) -> int:
        return 1 if self.layout is None or self.variant == "path" else len(self.layout.names)


def critical(relevance: Tensor, alpha: float) -> Tensor:
    """The fewest neurons of each row that hold the share `alpha` of its positive sum; of equals the first."""
    positive = relevance.double().clamp(min=0)
    value, order = positive.sort(dim=1, descending=True, stable=True)
    total = value.cumsum(1)
    before = torch.nn.functional.pad(total[:, :-1], (1, 0))
    is_needed = (value > 0) & (before < alpha * total[:, -1:])
    return torch.zeros_like(is_needed).scatter_(1, order, is_needed)


def clusters(paths: Tensor, most: int) -> Tensor:
    """The cluster of each path, by k-means with at most as many clusters as there are different paths."""
    n = min(most, len(torch.unique(paths, dim=0)))
    if n == 1:
        return torch.zeros(len(paths), dtype=torch.int64, device=paths.device)
    try:
        from sklearn.cluster import KMeans
    except ImportError as error:
        raise MissingExtraError("npc needs scikit-learn: pip install 'themis-dl[lrp]'") from error
    fitted = KMeans(n, n_init=10, random_state=0).fit(paths.cpu().float().numpy())
    return torch.as_tensor(fitted.labels_, dtype=torch.int64, device=paths.device)


def contributions(
    target: AnyTarget, inputs: Tensor, labels: Tensor | None = None, layers: tuple[Layer, ...] | None = None
) -> Batch:
    """What each neuron contributed to each input's winning score: gradient x activation, by hidden layer.

    One forward and one backward pass. Where activations are piecewise linear and there are no biases, this is what
    LRP gives. `layers` are those of `target.find_layers` by default.
    """
    if not target.has_gradient:
        raise UsageError("contributions are gradients, and this target has none: give relevances of your own to npc")
    layers = target.find_layers(inputs[0]) if layers is None else layers
    wanted = {layer.name: layer for layer in layers if layer.name != OUTPUT}
    found = {name: inputs.new_zeros(len(inputs), *layer.shape) for name, layer in wanted.items()}

    def on_activation(name: str, activation: Tensor) -> None:
        value = activation.detach().clone()  # the model may write over it

        def keep(gradient: Tensor) -> None:
            found[name] = (value * gradient).reshape(found[name].shape)

        if activation.requires_grad:
            activation.register_hook(keep)  # type: ignore[no-untyped-call]

    with target.opened(), torch.enable_grad():
        leaf = inputs.detach().clone().requires_grad_()
        scores = target.forward(leaf, on_activation, wanted)
        if scores.ndim != 2:
            raise UsageError(f"contributions need one score a class, got outputs {list(scores.shape)}")
        winning = scores.max(1)
        try:
            torch.autograd.grad(winning.values.sum(), leaf)
        except RuntimeError as error:
            raise ModelError(
                f"contributions need a model that can be differentiated, this one cannot: {error}"
            ) from error
    return Batch(found, predicted=winning.indices, labels=labels)
