"""Mutants of trained models: operators that change weights, neurons or layers, and the mutants that tests kill.

The operators are those that DeepMutation (Ma et al., ISSRE 2018) defines on models. They need no training, so a mutant
is made in no time; those on neurons and layers change the graph that torch.fx traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor, fx, nn

from themis.data.seeds import read_seeds
from themis.errors import ModelError, UsageError, first_line, nearest
from themis.options import check_count
from themis.target.activations import ACTIVATION_NAMES, ACTIVATIONS
from themis.target.alignment import align_seeds, align_target
from themis.target.blackbox import as_target
from themis.target.target import AnyTarget, Target

MUTATED_SHARE = 0.01
"""Share of the weights or neurons that an operator changes, as in DeepMutation."""
FUZZ_SPREAD = 1.0
"""Standard deviation of the noise that GF adds, relative to that of a layer's weights."""
WEIGHTED_MODULES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers that have neurons: units of the first, channels of the others."""
NORMALISATIONS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Layers that may stand between the weights of a neuron and its activation function."""
LayerT = TypeVar("LayerT")
_FLAT_NAMES = {name.replace("_", "") for name in ACTIVATION_NAMES}
ACTIVATION_MODULES = tuple(
    kind for name, kind in vars(nn).items() if isinstance(kind, type) and name.lower() in _FLAT_NAMES
)


def mutate(model: nn.Module, operator: str, *, ratio: float = MUTATED_SHARE, random_seed: int = 0) -> nn.Module:
    """A mutated copy of a model, by one of `MUTATIONS`; the model itself is not changed.

    ratio: the share of all weights or neurons that are changed, at least one of them; operators on layers change one
    layer. The same random seed makes the same mutant.
    """
    name = choose_mutation(operator)
    if not 0 < ratio <= 1:
        raise UsageError(f"ratio must lie in (0, 1], got {ratio!r}")
    rng = Generator().manual_seed(random_seed)
    with torch.no_grad():
        return MUTATIONS[name](deepcopy(model), ratio, rng)


def choose_mutation(operator: str) -> str:
    """The name of an operator in `MUTATIONS`, in whatever case it is written."""
    name = {known.lower(): known for known in MUTATIONS}.get(str(operator).lower())
    if name is None:
        raise UsageError(f"operator must be a known name, got {operator!r}: {nearest(str(operator), MUTATIONS)}")
    return name


def _fuzz_weights(model: nn.Module, ratio: float, rng: Generator) -> nn.Module:
    """Gaussian fuzzing: add noise to some weights."""
    layers = _weighted(model)
    for layer, picked in _pick(layers, [layer.weight.numel() for layer in layers], ratio, rng):
        weights = layer.weight.view(-1)
        noise = torch.randn(len(picked), generator=rng).to(weights)
        weights[picked.to(weights.device)] += FUZZ_SPREAD * weights.std(correction=0) * noise
    return model


def _shuffle_weights(model: nn.Module, ratio: float, rng: Generator) -> nn.Module:
    """Weight shuffling: shuffle the weights by which some neurons are connected to the previous layer."""
    layers = _weighted(model)
    for layer, picked in _pick(layers, [len(layer.weight) for layer in layers], ratio, rng):
        for weights in (layer.weight[neuron] for neuron in picked.tolist()):
            order = torch.randperm(weights.numel(), generator=rng).to(weights.device)
            weights.copy_(weights.flatten()[order].view_as(weights))
    return model


def _block_neurons(model: nn.Module, ratio: float, rng: Generator) -> nn.Module:
    """Neuron effect block: some neurons pass nothing on to the following layers."""
    traced, layers = _activated_layers(model)
    for layer, picked in _pick(layers, [layer.n_neurons for layer in layers], ratio, rng):
        _insert_after(traced, layer.end, ScaledNeurons(layer.factors(picked, 0.0), layer.axis))
    return _compiled(traced)


def _invert_neurons(model: nn.Module, ratio: float, rng: Generator) -> nn.Module:
    """Neuron activation inverse: the activation functions of some neurons get their input with the opposite sign."""
    traced, layers = _activated_layers(model)
    for layer, picked in _pick(layers, [layer.n_neurons for layer in layers], ratio, rng):
        _insert_after(traced, layer.before_activation, ScaledNeurons(layer.factors(picked, -1.0), layer.axis))
    return _compiled(traced)


def _switch_neurons(model: nn.Module, ratio: float, rng: Generator) -> nn.Module:
    """Neuron switch: some neurons exchange their effects with another neuron of the same layer."""
    traced, layers = _activated_layers(model)
    layers = [layer for layer in layers if layer.n_neurons > 1]
    if not layers:
        raise UsageError("NS needs a layer of at least two neurons, but the model has none: choose another operator")
    for layer, picked in _pick(layers, [layer.n_neurons for layer in layers], ratio, rng):
        order = torch.arange(layer.n_neurons)
        for neuron in picked.tolist():
            other = (neuron + 1 + int(torch.randint(len(order) - 1, (), generator=rng))) % len(order)
            order[[neuron, other]] = order[[other, neuron]]
        _insert_after(traced, layer.end, SwitchedNeurons(order.to(layer.module.weight.device), layer.axis))
    return _compiled(traced)


def _deactivate_layer(model: nn.Module, ratio: float, rng: Generator) -> nn.Module:
    """Layer deactivation: a layer is left out, with the normalisation and the activation function that follow it."""
    traced, layer = _pick_layer(model, "LD", rng)
    layer.end.replace_all_uses_with(layer.node.all_input_nodes[0])
    for node in reversed(layer.nodes):
        traced.graph.erase_node(node)
    return _compiled(traced)


def _add_layer(model: nn.Module, ratio: float, rng: Generator) -> nn.Module:
    """Layer addition: a layer is applied twice, with the normalisation and the activation function that follow it."""
    traced, layer = _pick_layer(model, "LAm", rng)
    users = list(layer.end.users)
    copies, before = {layer.node.all_input_nodes[0]: layer.end}, layer.end
    for node in layer.nodes:
        with traced.graph.inserting_after(before):
            before = copies[node] = traced.graph.node_copy(node, lambda argument: copies.get(argument, argument))
    for user in users:
        user.replace_input_with(layer.end, before)
    return _compiled(traced)


def _remove_activation(model: nn.Module, ratio: float, rng: Generator) -> nn.Module:
    """Activation function removal: one layer loses its activation function."""
    traced = _trace(model)
    found = [node for node in traced.graph.nodes if _is_activation(node, traced)]
    if not found:
        raise UsageError("AFRm needs an activation function, but the model has none: choose another operator")
    node = found[int(torch.randint(len(found), (), generator=rng))]
    node.replace_all_uses_with(node.all_input_nodes[0])
    traced.graph.erase_node(node)
    return _compiled(traced)


Mutation = Callable[[nn.Module, float, Generator], nn.Module]
MUTATIONS: dict[str, Mutation] = {
    "GF": _fuzz_weights,
    "WS": _shuffle_weights,
    "NEB": _block_neurons,
    "NAI": _invert_neurons,
    "NS": _switch_neurons,
    "LD": _deactivate_layer,
    "LAm": _add_layer,
    "AFRm": _remove_activation,
}
"""The operators by DeepMutation's names. Each changes and returns the copy that it is given."""


class ScaledNeurons(nn.Module):
    """Multiplies the values of each neuron of a layer by a factor."""

    factors: Tensor

    def __init__(self, factors: Tensor, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.register_buffer("factors", factors)

    def forward(self, values: Tensor) -> Tensor:
        shape = [1] * values.ndim
        shape[self.axis] = -1
        return values * self.factors.view(shape)


class SwitchedNeurons(nn.Module):
    """Permutes the neurons of a layer."""

    order: Tensor

    def __init__(self, order: Tensor, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.register_buffer("order", order)

    def forward(self, values: Tensor) -> Tensor:
        return values.index_select(self.axis, self.order)


@dataclass(frozen=True)
class _TracedLayer:
    """A layer with weights in a traced model, and what directly follows it."""

    module: Any
    node: fx.Node
    normalisation: fx.Node | None
    activation: fx.Node | None

    @property
    def n_neurons(self) -> int:
        return len(self.module.weight)

    def factors(self, neurons: Tensor, factor: float) -> Tensor:
        """A factor for each neuron: `factor` for some of them, 1 for the others."""
        factors = torch.ones(self.n_neurons)
        factors[neurons] = factor
        return factors.to(self.module.weight)

    @property
    def nodes(self) -> list[fx.Node]:
        return [node for node in (self.node, self.normalisation, self.activation) if node is not None]

    @property
    def end(self) -> fx.Node:
        return self.nodes[-1]

    @property
    def before_activation(self) -> fx.Node:
        return self.normalisation or self.node

    @property
    def axis(self) -> int:
        """The dimension of the values along which neurons are numbered."""
        return -1 if isinstance(self.module, nn.Linear) else 1


def _weighted(model: nn.Module) -> list[Any]:
    layers = [module for module in model.modules() if isinstance(module, WEIGHTED_MODULES)]
    if not layers:
        raise UsageError(
            f"mutation needs linear or convolutional layers, but {type(model).__name__} has none: mutate the PyTorch "
            "model that it was made from"
        )
    return layers


def _pick(layers: Sequence[LayerT], sizes: list[int], ratio: float, rng: Generator) -> list[tuple[LayerT, Tensor]]:
    """A share of all weights or neurons, at least one: the layers that have some, and their numbers in the layer.

    sizes: how many weights or neurons each layer has.
    """
    n = sum(sizes)
    picked = torch.randperm(n, generator=rng)[: max(1, round(ratio * n))].sort().values
    parts, start = [], 0
    for layer, size in zip(layers, sizes, strict=True):
        inside = picked[(picked >= start) & (picked < start + size)] - start
        if len(inside):
            parts.append((layer, inside))
        start += size
    return parts


def _trace(model: nn.Module) -> fx.GraphModule:
    try:
        return fx.symbolic_trace(model)
    except Exception as error:  # whatever the model's own code raises
        raise ModelError(
            f"mutating neurons and layers needs a model that torch.fx can trace, but {type(model).__name__} cannot be "
            f"traced ({first_line(error)}): choose GF or WS, which change weights only"
        ) from error


def _compiled(traced: fx.GraphModule) -> fx.GraphModule:
    traced.graph.lint()
    traced.delete_all_unused_submodules()
    traced.recompile()
    return traced


def _traced_layers(model: nn.Module) -> tuple[fx.GraphModule, list[_TracedLayer]]:
    """The traced model and its layers; a layer that is called several times counts as often."""
    _weighted(model)
    traced, layers = _trace(model), []
    for node in traced.graph.nodes:
        if _module(node, traced) is None or not isinstance(_module(node, traced), WEIGHTED_MODULES):
            continue
        following = _only_user(node)
        normalisation = following if isinstance(_module(following, traced), NORMALISATIONS) else None
        following = _only_user(normalisation) if normalisation is not None else following
        activation = following if following is not None and _is_activation(following, traced) else None
        layers.append(_TracedLayer(_module(node, traced), node, normalisation, activation))
    return traced, layers


def _activated_layers(model: nn.Module) -> tuple[fx.GraphModule, list[_TracedLayer]]:
    """The traced model and the layers that an activation function follows: those whose neurons are mutated."""
    traced, layers = _traced_layers(model)
    layers = [layer for layer in layers if layer.activation is not None]
    if not layers:
        raise UsageError(
            "mutating neurons needs a layer that an activation function follows, but the model has none: choose GF or "
            "WS, which change weights only"
        )
    return traced, layers


def _pick_layer(model: nn.Module, operator: str, rng: Generator) -> tuple[fx.GraphModule, _TracedLayer]:
    """The traced model and one of the layers that can be left out or applied twice."""
    traced, layers = _traced_layers(model)
    found = [layer for layer in layers if _keeps_shape(layer.module)]
    if not found:
        raise UsageError(
            f"{operator} needs a layer whose input and output have the same shape, but none of {len(layers)} has: "
            "choose another operator"
        )
    return traced, found[int(torch.randint(len(found), (), generator=rng))]


def _keeps_shape(module: Any) -> bool:
    if isinstance(module, nn.Linear):
        return module.in_features == module.out_features
    if module.in_channels != module.out_channels or any(step != 1 for step in module.stride):
        return False
    if isinstance(module.padding, str):
        return module.padding == "same"
    sides = zip(module.padding, module.dilation, module.kernel_size, strict=True)
    return all(2 * padding == dilation * (size - 1) for padding, dilation, size in sides)


def _module(node: fx.Node | None, traced: fx.GraphModule) -> nn.Module | None:
    return traced.get_submodule(str(node.target)) if node is not None and node.op == "call_module" else None


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_activation(node: fx.Node, traced: fx.GraphModule) -> bool:
    if node.op == "call_module":
        return isinstance(_module(node, traced), ACTIVATION_MODULES)
    if node.op == "call_method":
        return str(node.target).rstrip("_") in ACTIVATION_NAMES
    return node.op == "call_function" and node.target in ACTIVATIONS


def _insert_after(traced: fx.GraphModule, node: fx.Node, module: nn.Module) -> None:
    """Apply a module to the value of a node, before anything else uses it."""
    name = f"mutated_{node.name}"
    traced.add_submodule(name, module)
    with traced.graph.inserting_after(node):
        mutated = traced.graph.call_module(name, (node,))
    node.replace_all_uses_with(mutated, delete_user_cb=lambda user: user is not mutated)


KEPT_ACCURACY = 0.9
"""A mutant with less than this share of the model's accuracy is trivial: nearly every test kills it; DeepMutation's."""
SCORED_AT_ONCE = 256


@dataclass(frozen=True)
class Mutant:
    """A mutated copy of a target, how it was made, and its accuracy on the data that it was filtered by."""

    operator: str
    random_seed: int
    target: Target
    accuracy: float


@dataclass(frozen=True)
class MutantSet:
    """The mutants that were kept, and why others were not."""

    kept: tuple[Mutant, ...]
    accuracy: float
    """Of the model itself."""
    trivial: dict[str, int]
    """Mutants by operator that have lost more than a tenth of the accuracy."""
    equivalent: dict[str, int]
    """Mutants by operator whose scores equal those of the model, or of a mutant kept before, on all data."""
    refused: dict[str, str]
    """Operators that the model does not allow, with the reason."""


def make_mutants(
    target: Any,
    data: Any,
    *,
    operators: Iterable[str] = tuple(MUTATIONS),
    per_operator: int = 5,
    ratio: float = MUTATED_SHARE,
    random_seed: int = 0,
) -> MutantSet:
    """Mutate a classifier several times by each operator, and keep the mutants that are neither trivial nor equivalent.

    A mutant is kept if it has at least 90% of the model's accuracy on the data, as in DeepMutation, and if its scores
    differ from those of the model and of the other mutants. target: a `Target` or a model. data: labelled inputs, as
    for `themis.run`, preferably test data.
    """
    check_count("per_operator", per_operator)
    if not 0 < ratio <= 1:
        raise UsageError(f"ratio must lie in (0, 1], got {ratio!r}")
    target = as_target(target)
    if not isinstance(target, Target):
        raise UsageError(f"only a PyTorch model can be mutated, got a {type(target).__name__}")
    seeds = align_seeds(target, read_seeds(data))
    target = align_target(target, seeds)
    if seeds.labels is None:
        raise UsageError("mutants are kept by their accuracy, which needs labels: pass data as (inputs, labels)")
    assert isinstance(target, Target)  # aligning changes its options only
    inputs, labels = seeds.take(torch.arange(len(seeds))), seeds.labels
    scores = run_scores(target, inputs)
    if scores.ndim != 2 or scores.shape[1] < 2:
        raise UsageError(
            f"mutants are kept by their accuracy, which needs one score per class, got {list(scores.shape)}"
        )
    accuracy = _accuracy(scores, labels)
    kept: list[Mutant] = []
    trivial: dict[str, int] = {}
    equivalent: dict[str, int] = {}
    refused: dict[str, str] = {}
    for operator in map(choose_mutation, operators):
        known = [scores]
        for number in range(random_seed, random_seed + per_operator):
            try:
                module = mutate(target.module, operator, ratio=ratio, random_seed=number)
            except (ModelError, UsageError) as error:
                refused[operator] = str(error)
                break
            mutant = replace(target, module=module)
            mutated = run_scores(mutant, inputs)
            if any(torch.equal(mutated, other) for other in known):
                equivalent[operator] = equivalent.get(operator, 0) + 1
            elif _accuracy(mutated, labels) < KEPT_ACCURACY * accuracy:
                trivial[operator] = trivial.get(operator, 0) + 1
            else:
                known.append(mutated)
                kept.append(Mutant(operator, number, mutant, _accuracy(mutated, labels)))
    return MutantSet(tuple(kept), accuracy, trivial, equivalent, refused)


def find_killed(target: AnyTarget, mutants: Sequence[AnyTarget], inputs: Tensor, labels: Tensor) -> Tensor:
    """Which classes each mutant is killed for, bool `[mutants, classes]`; its mean is DeepMutation's mutation score.

    A test kills a mutant for a class if it has this label, the target answers it correctly, and the mutant does not.
    """
    scores = run_scores(target, inputs)
    labels = labels.to(scores.device).long()
    is_correct = scores.argmax(1) == labels
    killed = torch.zeros(len(mutants), scores.shape[1], dtype=torch.bool)
    for number, mutant in enumerate(mutants):
        is_killing = is_correct & (run_scores(mutant, inputs).argmax(1) != labels)
        killed[number, labels[is_killing].cpu()] = True
    return killed


def run_scores(target: AnyTarget, inputs: Tensor) -> Tensor:
    """The scores of a target on inputs, `[inputs, classes]`."""
    with target.opened(), torch.no_grad():
        return torch.cat([target.forward(batch.to(target.device)) for batch in torch.split(inputs, SCORED_AT_ONCE)])


def _accuracy(scores: Tensor, labels: Tensor) -> float:
    return float((scores.argmax(1) == labels.to(scores.device)).float().mean())
