"""How much each neuron of a layer speaks for what the model answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from themis.criteria.lrp import Lrp, UncoveredError
from themis.errors import DataError, MissingExtraError, ModelError, UsageError, nearest
from themis.target.activations import OUTPUT, Layer
from themis.target.target import AnyTarget, Target

CONSERVED = 0.05
"""LRP is taken without a second look when it loses less of the winning score, at the median input."""


@dataclass(frozen=True)
class Relevance:
    """Relevance of a layer's neurons for the winning score, summed over `n_inputs` inputs; float64 `[neurons]`.

    conservation_error: `|sum of relevances - winning score| / |winning score|`, the median over the inputs. Biases
    take relevance by design, and so does whatever goes past the layer, so it is seldom zero.
    """

    values: Tensor
    layer: str
    n_inputs: int
    method: Literal["lrp", "gradient"]
    conservation_error: float
    note: str = ""
    """Why it is not LRP, where LRP was tried."""

    def describe(self) -> str:
        """One sentence."""
        how = "LRP (epsilon rule)" if self.method == "lrp" else "gradient x activation"
        return (
            f"Relevance of {len(self.values):,} neurons of {self.layer!r} over {self.n_inputs:,} inputs by {how}"
            f"{self.note and f', since {self.note}'}; at the median input their sum differs from the winning score by "
            f"{self.conservation_error:.2%}."
        )


Attribute = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Relevance at the layer `[inputs, ...]` and winning score `[inputs]`, of raw inputs and winning classes."""


def relevance(
    target: AnyTarget,
    inputs: Tensor,
    labels: Tensor | None,
    layer: str | None = None,
    *,
    neurons: str = "channel",
    method: str = "auto",
    batch_size: int = 256,
) -> Relevance:
    """Relevance of a layer's neurons for the winning score of raw `inputs` that are classified as `labels` say.

    labels: None takes every input, as does a model with one output. layer: by default the last hidden one. neurons: a
    channel's relevance is the sum of its elements'. method: `lrp` (captum), `gradient` (gradient x activation, which is
    LRP's relevance where the net is piecewise linear without biases), or `auto`: LRP where it covers the model, is
    finite, and loses less than 5% of the score or about as little as the gradient does.

    The winning score should be a logit: a softmax at the end of the model is not taken away.
    """
    if not target.has_gradient:
        raise UsageError(
            f"relevance needs gradients, a {type(target).__name__} has none: test the model as a Target, or give IDC "
            "the relevance of its neurons yourself"
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
        raise DataError(f"labels must be one an input, got {len(labels)} for {len(inputs)} inputs")
    with target.opened():
        found = _find(target, inputs[0].to(target.device), layer, neurons)

        def run(attribute: Attribute, method: Literal["lrp", "gradient"], note: str = "") -> Relevance:
            return _sum(_winners(target, inputs, labels, batch_size), attribute, found, neurons, method, note)

        if method == "gradient":
            return run(_by_gradient(target, found), "gradient")
        try:
            by_lrp = run(_by_lrp(target, found), "lrp")
        except (UncoveredError, MissingExtraError) as error:
            if method == "lrp":
                if isinstance(error, MissingExtraError):
                    raise
                raise UsageError(f"LRP must cover the model, {error}: pass method='gradient'") from error
            return run(_by_gradient(target, found), "gradient", str(error))
        if method == "lrp" or by_lrp.conservation_error < CONSERVED:
            return by_lrp
        by_gradient = run(_by_gradient(target, found), "gradient", f"LRP loses {by_lrp.conservation_error:.2%}")
        is_worse = by_lrp.conservation_error > 1.01 * by_gradient.conservation_error  # more than rounding
        return by_gradient if is_worse else by_lrp


def _find(target: AnyTarget, example: Tensor, name: str | None, neurons: str) -> Layer:
    if isinstance(target, Target):
        wanted = target.layers if name is None or name == OUTPUT else (name,)
        target = replace(target, layers=wanted, neurons=neurons)  # type: ignore[arg-type]  # checked
    layers = {each.name: each for each in target.find_layers(example)}
    if name is None:
        return next((each for each in reversed(layers.values()) if each.name != OUTPUT), layers[OUTPUT])
    if name not in layers:
        raise UsageError(f"layer must be one of the target's, got {name!r}: {nearest(name, layers)}")
    return layers[name]


def _winners(
    target: AnyTarget, inputs: Tensor, labels: Tensor | None, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Those inputs that are classified rightly, and their classes, batch by batch."""
    for start in range(0, len(inputs), batch_size):
        batch = inputs[start : start + batch_size].to(target.device)
        with torch.no_grad():
            scores = target.forward(batch)
        if scores.ndim != 2:
            raise UsageError(
                f"relevance needs scores [inputs, classes], this model gives {list(scores.shape)}: pass output=... to "
                "Target to pick them"
            )
        winners = scores.argmax(1)
        if labels is not None and scores.shape[1] > 1:
            is_right = winners == labels[start : start + batch_size].to(winners)
            batch, winners = batch[is_right], winners[is_right]
        if len(batch):
            yield batch, winners


def _sum(
    batches: Iterator[tuple[Tensor, Tensor]],
    attribute: Attribute,
    layer: Layer,
    neurons: str,
    method: Literal["lrp", "gradient"],
    note: str,
) -> Relevance:
    """Sum what `attribute` says of each batch, and check it."""
    values, errors, n_inputs = None, [], 0
    for batch, winners in batches:
        found, scores = attribute(batch, winners)
        found, scores = _of_neurons(found.double(), layer, len(batch), neurons), scores.double()
        if not bool(found.isfinite().all()):
            if method == "lrp":
                raise UncoveredError("its relevances are not finite")
            raise ModelError(f"relevance must be finite, layer {layer.name!r} has a NaN or an infinity: choose another")
        values = found.sum(0) if values is None else values + found.sum(0)
        errors.append((found.sum(1) - scores).abs() / scores.abs().clamp(min=torch.finfo(torch.float64).tiny))
        n_inputs += len(batch)
    if values is None:
        raise DataError("relevance must see an input that the model classifies rightly, got none: check the labels")
    return Relevance(values, layer.name, n_inputs, method, float(torch.cat(errors).median()), note)


def _of_neurons(found: Tensor, layer: Layer, n_inputs: int, neurons: str) -> Tensor:
    """Relevance by neuron `[inputs, neurons]`."""
    found = found.reshape(n_inputs, *layer.shape)
    if neurons == "element":
        return found.flatten(1)
    axis = layer.channel_axis
    if axis is None:
        axis = 1 if len(layer.shape) == 2 else 0
    others = [1 + k for k in range(len(layer.shape)) if k != axis]
    return found.sum(others) if others else found


def _by_lrp(target: AnyTarget, layer: Layer) -> Attribute:
    if not isinstance(target, Target):
        raise UncoveredError("the target is not a PyTorch model")
    if layer.name == OUTPUT:
        raise UncoveredError("at the output there is nothing to propagate")
    lrp = Lrp(target, layer.name)

    def attribute(inputs: Tensor, winners: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            return lrp(target.prepare(inputs), winners)

    return attribute


def _by_gradient(target: AnyTarget, layer: Layer) -> Attribute:
    def attribute(inputs: Tensor, winners: Tensor) -> tuple[Tensor, Tensor]:
        seen: list[tuple[Tensor, GradientEdge]] = []

        def on_activation(name: str, activation: Tensor) -> None:
            if not activation.requires_grad:
                raise UsageError(f"relevance needs a layer with a gradient, {name!r} has none: name another layer")
            # At once: a later in-place operation makes the tensor another one.
            seen.append((activation.detach().clone(), get_gradient_edge(activation)))

        with torch.enable_grad():
            if inputs.is_floating_point():
                inputs = inputs.detach().requires_grad_(True) * 1.0  # not a leaf: models may write into it
            scores = target.forward(inputs, on_activation, {layer.name: layer})
            if layer.name == OUTPUT:
                on_activation(OUTPUT, scores)
            winning = scores.gather(1, winners[:, None]).squeeze(1)
            activation, edge = seen[0]
            (gradient,) = torch.autograd.grad(winning.sum(), edge, allow_unused=True)
        value = torch.zeros_like(activation) if gradient is None else gradient * activation
        return value, winning.detach()

    return attribute
