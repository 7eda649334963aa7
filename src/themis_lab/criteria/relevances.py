"""The relevance of a layer's neurons: how much each contributes to the model's answer, by LRP or by the gradient."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from themis.errors import DataError, MissingExtraError, ModelError, UsageError, nearest, needs_extra
from themis.target.activations import ACTIVATION_NAMES, OUTPUT, ActivationTracer, Layer
from themis.target.target import AnyTarget, Target

ELEMENTWISE = {name.replace("_", "") for name in ACTIVATION_NAMES} - {"glu"}
"""Modules, by lower-case name, that pass relevance on unchanged."""

_NAMES = """
    relu flatten reshape view view_as unflatten ravel permute transpose t movedim moveaxis squeeze unsqueeze contiguous
    clone to type float double expand cat concat concatenate split chunk unbind narrow getitem get select pad
    dropout dropout1d dropout2d dropout3d fn max_pool1d max_pool2d max_pool3d
"""
HARMLESS = frozenset(_NAMES.split())
"""Functions whose gradient propagates relevance as LRP would (`fn` is torch's name for max pooling)."""


class UncoveredError(Exception):
    """LRP does not support this model; the message says why."""


class Lrp:
    """LRP of one layer of a target, on a copy of its model, because captum leaves rules and activations in the modules.

    It uses the epsilon rule everywhere; activation functions pass relevance on. captum sees only modules without
    children: what is computed outside of them after the layer must be harmless, so a residual sum, for instance, is
    rejected.
    """

    def __init__(self, target: Target, layer: str) -> None:
        with needs_extra("lrp", "relevance by LRP needs captum"):
            import captum.attr  # noqa: F401
        if not isinstance(target.tracer, ActivationTracer):
            raise UncoveredError("a compiled model has no modules to put rules on")
        try:
            module = deepcopy(target.module).eval()
        except Exception as error:
            raise UncoveredError(f"the model cannot be copied ({error})") from error
        for submodule in module.modules():
            if getattr(submodule, "inplace", None) is True:
                setattr(submodule, "inplace", False)  # noqa: B010 (typed as a submodule); its input is needed again
        self._tapped = _Tapped(replace(target, module=module), layer)

    def __call__(self, prepared: Tensor, winners: Tensor) -> tuple[Tensor, Tensor]:
        """The relevance at the layer `[inputs, ...]` and the score `[inputs]` of the class `winners` of each input."""
        from captum.attr import LRP

        tapped = self._tapped
        tapped.caught = None
        _set_rules(tapped)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                LRP(tapped).attribute(prepared.detach().clone(), target=winners)
        except UncoveredError:
            raise
        except Exception as error:
            reason = (str(error).splitlines() or ["no message"])[0].split(". ")[0]
            raise UncoveredError(f"captum raised {type(error).__name__}: {reason}") from error
        if tapped.caught is None:
            raise UncoveredError("no relevance reaches the layer")
        scores = tapped.scores.gather(1, winners[:, None])
        share = tapped.caught.reshape(len(prepared), -1)  # captum starts from 1
        return (share * scores).reshape(tapped.caught.shape), scores.squeeze(1)


class _Tapped(nn.Module):
    """Wraps a target's model to return the scores and record the relevance that the backward pass brings to a layer."""

    def __init__(self, target: Target, layer: str) -> None:
        super().__init__()
        self.module = target.module
        self._target, self._names, self._outside = target, {layer}, _Outside(target.module)
        self.caught: Tensor | None = None

    def forward(self, prepared: Tensor) -> Tensor:
        self._outside.is_after = False
        with self._outside:
            scores = self._target.scores(self._target.tracer.forward(prepared, self._on_activation, self._names))
        self.scores = scores.detach()
        return scores

    def _on_activation(self, name: str, activation: Tensor) -> None:
        self._outside.is_after = True
        if activation.grad_fn is None:
            return
        at = activation.output_nr

        # Not a hook on the tensor: the next module adds its own there later, which turns the gradient into relevance.
        def catch(gradients: Any) -> None:
            self.caught = gradients[at].detach()

        activation.grad_fn.register_prehook(catch)


class _Outside(TorchFunctionMode):
    """Rejects functions that captum does not see and that are not harmless, once `is_after` the layer."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.is_after, self._depth = False, 0
        for submodule in module.modules():
            if next(submodule.children(), None) is None:
                submodule.register_forward_pre_hook(self._enter, prepend=True)
                submodule.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._depth += 1

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._depth -= 1

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_after and not self._depth and isinstance(result, Tensor) and result.requires_grad:
            name = getattr(func, "__name__", "a function").strip("_")
            if name not in HARMLESS:
                raise UncoveredError(f"the model computes {name} outside of its modules")
        return result


def _set_rules(tapped: _Tapped) -> None:
    """Set rules for the modules that captum has no rule for; captum removes all rules after each call."""
    from captum.attr._core.lrp import SUPPORTED_LAYERS_WITH_RULES, SUPPORTED_NON_LINEAR_LAYERS
    from captum.attr._utils.lrp_rules import EpsilonRule, IdentityRule

    class PassRule(IdentityRule):  # type: ignore[misc]
        """The identity, also at the output, where captum's own identity rule divides."""

        def _create_backward_hook_output(self, outputs: Tensor) -> Any:
            def keep(gradient: Tensor) -> None:
                self.relevance_output[gradient.device] = gradient.data

            return keep

    known = {*SUPPORTED_LAYERS_WITH_RULES, *SUPPORTED_NON_LINEAR_LAYERS}
    for submodule in tapped.module.modules():
        if next(submodule.children(), None) is None and type(submodule) not in known:
            submodule.rule = PassRule() if type(submodule).__name__.lower() in ELEMENTWISE else EpsilonRule()


MAX_LOST_SHARE = 0.05
"""LRP is accepted without a comparison if it loses less of the winning score than this share, at the median input."""


@dataclass(frozen=True)
class Relevance:
    """Relevance of a layer's neurons for the winning score, summed over `n_inputs` inputs; float64 `[neurons]`.

    conservation_error: `|sum of relevances - winning score| / |winning score|`, the median over the inputs. Biases
    absorb relevance by design, and so does everything that bypasses the layer, so it is rarely zero.
    """

    values: Tensor
    layer: str
    n_inputs: int
    method: Literal["lrp", "gradient"]
    conservation_error: float
    note: str = ""
    """Why it is not LRP, if LRP was tried."""

    def describe(self) -> str:
        """One sentence."""
        method = "LRP (epsilon rule)" if self.method == "lrp" else "gradient x activation"
        return (
            f"Relevance of {len(self.values):,} neurons of {self.layer!r} over {self.n_inputs:,} inputs by {method}"
            f"{self.note and f', since {self.note}'}; at the median input their sum differs from the winning score by "
            f"{self.conservation_error:.2%}."
        )


Attribute = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From raw inputs and winning classes to the relevance at the layer `[inputs, ...]` and winning scores `[inputs]`."""


def relevance(  # noqa: C901 (one branch per case)
    target: AnyTarget,
    inputs: Tensor,
    labels: Tensor | None,
    layer: str | None = None,
    *,
    neurons: str = "channel",
    method: str = "auto",
    batch_size: int = 256,
) -> Relevance:
    """The relevance of a layer's neurons for the winning score of raw `inputs` that are classified as in `labels`.

    labels: None takes every input, and so does a model with one output. layer: by default the last hidden one.
    neurons: a channel's relevance is the sum of that of its elements. method: `lrp` (captum), `gradient` (gradient x
    activation, which equals LRP in piecewise linear nets without biases), or `auto`: LRP if it covers the model, is
    finite, and loses less than 5% of the score or about as little as the gradient does.

    The winning score should be a logit: a softmax at the end of the model is not removed.
    """
    if not target.has_gradient:
        raise UsageError(
            f"relevance needs gradients, but a {type(target).__name__} has none: test the model as a Target, or pass "
            "the relevance of its neurons to IDC yourself"
        )
    if neurons not in ("channel", "element"):
        raise UsageError(f"neurons must be 'channel' or 'element', got {neurons!r}")
    if method not in ("auto", "lrp", "gradient"):
        raise UsageError(f"method must be 'auto', 'lrp' or 'gradient', got {method!r}")
    if batch_size < 1:
        raise UsageError(f"batch_size must be at least 1, got {batch_size}")
    if len(inputs) == 0:
        raise DataError("relevance must see at least one input, got none")
    if labels is not None and len(labels) != len(inputs):
        raise DataError(f"there must be one label per input, got {len(labels)} for {len(inputs)} inputs")
    with target.opened():
        chosen = _find_layer(target, inputs[0].to(target.device), layer, neurons)

        def run(attribute: Attribute, method: Literal["lrp", "gradient"], note: str = "") -> Relevance:
            batches = _correct_inputs(target, inputs, labels, batch_size)
            return _sum_batches(batches, attribute, chosen, neurons, method, note)

        if method == "gradient":
            return run(_by_gradient(target, chosen), "gradient")
        try:
            by_lrp = run(_by_lrp(target, chosen), "lrp")
        except (UncoveredError, MissingExtraError) as error:
            if method == "lrp":
                if isinstance(error, MissingExtraError):
                    raise
                raise UsageError(f"LRP must support the model, but {error}: pass method='gradient'") from error
            return run(_by_gradient(target, chosen), "gradient", str(error))
        if method == "lrp" or by_lrp.conservation_error < MAX_LOST_SHARE:
            return by_lrp
        by_gradient = run(_by_gradient(target, chosen), "gradient", f"LRP loses {by_lrp.conservation_error:.2%}")
        is_worse = by_lrp.conservation_error > 1.01 * by_gradient.conservation_error  # more than rounding
        return by_gradient if is_worse else by_lrp


def _find_layer(target: AnyTarget, example: Tensor, name: str | None, neurons: str) -> Layer:
    if isinstance(target, Target):
        names = target.layers if name is None or name == OUTPUT else (name,)
        target = replace(target, layers=names, neurons=neurons)  # type: ignore[arg-type]  # checked
    layers = {layer.name: layer for layer in target.find_layers(example)}
    if name is None:
        return next((layer for layer in reversed(layers.values()) if layer.name != OUTPUT), layers[OUTPUT])
    if name not in layers:
        raise UsageError(f"layer must be one of the target's, got {name!r}: {nearest(name, layers)}")
    return layers[name]


def _correct_inputs(
    target: AnyTarget, inputs: Tensor, labels: Tensor | None, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The inputs that are classified correctly, and their classes, batch by batch."""
    for start in range(0, len(inputs), batch_size):
        batch = inputs[start : start + batch_size].to(target.device)
        with torch.no_grad():
            scores = target.forward(batch)
        if scores.ndim != 2:
            raise UsageError(
                f"relevance needs scores [inputs, classes], but this model gives {list(scores.shape)}: pass output=... "
                "to Target to pick them"
            )
        winners = scores.argmax(1)
        if labels is not None and scores.shape[1] > 1:
            is_correct = winners == labels[start : start + batch_size].to(winners)
            batch, winners = batch[is_correct], winners[is_correct]
        if len(batch):
            yield batch, winners


def _sum_batches(
    batches: Iterator[tuple[Tensor, Tensor]],
    attribute: Attribute,
    layer: Layer,
    neurons: str,
    method: Literal["lrp", "gradient"],
    note: str,
) -> Relevance:
    """The sum of the relevances that `attribute` gives for each batch, checked."""
    values, errors, n_inputs = None, [], 0
    for batch, winners in batches:
        relevance, scores = attribute(batch, winners)
        relevance, scores = _by_neuron(relevance.double(), layer, len(batch), neurons), scores.double()
        if not bool(relevance.isfinite().all()):
            if method == "lrp":
                raise UncoveredError("its relevances are not finite")
            raise ModelError(
                f"relevance must be finite, but layer {layer.name!r} has a NaN or an infinity: choose another"
            )
        values = relevance.sum(0) if values is None else values + relevance.sum(0)
        errors.append((relevance.sum(1) - scores).abs() / scores.abs().clamp(min=torch.finfo(torch.float64).tiny))
        n_inputs += len(batch)
    if values is None:
        raise DataError("relevance must see an input that the model classifies correctly, got none: check the labels")
    return Relevance(values, layer.name, n_inputs, method, float(torch.cat(errors).median()), note)


def _by_neuron(relevance: Tensor, layer: Layer, n_inputs: int, neurons: str) -> Tensor:
    relevance = relevance.reshape(n_inputs, *layer.shape)
    if neurons == "element":
        return relevance.flatten(1)
    axis = layer.channel_axis
    if axis is None:
        axis = 1 if len(layer.shape) == 2 else 0
    other_axes = [1 + k for k in range(len(layer.shape)) if k != axis]
    return relevance.sum(other_axes) if other_axes else relevance


def _by_lrp(target: AnyTarget, layer: Layer) -> Attribute:
    if not isinstance(target, Target):
        raise UncoveredError("the target is not a PyTorch model")
    if layer.name == OUTPUT:
        raise UncoveredError("there is nothing to propagate at the output")
    lrp = Lrp(target, layer.name)

    def attribute(inputs: Tensor, winners: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            return lrp(target.prepare(inputs), winners)

    return attribute


def _by_gradient(target: AnyTarget, layer: Layer) -> Attribute:
    def attribute(inputs: Tensor, winners: Tensor) -> tuple[Tensor, Tensor]:
        traced: list[tuple[Tensor, GradientEdge]] = []

        def on_activation(name: str, activation: Tensor) -> None:
            if not activation.requires_grad:
                raise UsageError(f"relevance needs a layer with a gradient, but {name!r} has none: name another layer")
            # Immediately: a later in-place operation changes the tensor and its edge.
            traced.append((activation.detach().clone(), get_gradient_edge(activation)))

        with torch.enable_grad():
            if inputs.is_floating_point():
                inputs = inputs.detach().requires_grad_(True) * 1.0  # not a leaf: models may write to it
            scores = target.forward(inputs, on_activation, {layer.name: layer})
            if layer.name == OUTPUT:
                on_activation(OUTPUT, scores)
            winning = scores.gather(1, winners[:, None]).squeeze(1)
            activation, edge = traced[0]
            (gradient,) = torch.autograd.grad(winning.sum(), edge, allow_unused=True)
        value = torch.zeros_like(activation) if gradient is None else gradient * activation
        return value, winning.detach()

    return attribute
