"""A model and the reference that it should agree with, such as the same model before deployment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from themis.errors import ModelError, UsageError
from themis.oracle import Disagreement
from themis.target.activations import OUTPUT, Layer, OnActivation
from themis.target.blackbox import as_target
from themis.target.target import AnyTarget, TargetOptions


@dataclass(frozen=True)
class Against:
    """A target that runs a model and its reference on the same inputs; a fault is a test on which they disagree.

    The neurons are those of the model. Outputs are the scores of the model, followed by those of its reference.

    Args:
        model: The model under test: a `Target`, a `BlackBox`, an `nn.Module` or an estimator.
        reference: The reference, in the same forms. An `nn.Module` or an estimator gets the bounds and preprocessing of
            the model.
    """

    model: Any
    reference: Any

    def __post_init__(self) -> None:
        model = as_target(self.model)
        reference = self.reference
        if not isinstance(reference, AnyTarget) or isinstance(reference, nn.Module):
            reference = like(as_target(reference), model)
        if reference.bounds != model.bounds:
            raise UsageError(
                f"the reference must take the inputs of the model, with bounds {model.bounds}, got "
                f"{reference.bounds}: pass a themis.Target whose preprocess scales them"
            )
        classes, others = (getattr(each, "classes", None) for each in (model, reference))
        if classes is not None and others is not None and classes != others:
            raise ModelError(
                f"the reference must have the classes of the model, {', '.join(classes[:10])}, got "
                f"{', '.join(others[:10])}: pass a model of the same classes in the same order"
            )
        object.__setattr__(self, "model", model)
        object.__setattr__(self, "reference", reference)

    def each(self, change: Callable[[AnyTarget], AnyTarget]) -> Against:
        """This pair with both targets changed."""
        return Against(change(self.model), change(self.reference))

    @property
    def bounds(self) -> tuple[float, float]:
        return self.model.bounds  # type: ignore[no-any-return]

    @property
    def oracle(self) -> Disagreement:
        return Disagreement()

    @property
    def device(self) -> torch.device:
        return self.model.device  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype with fewer bits, for choosing tolerances; each model casts its inputs itself."""
        return min(self.model.dtype, self.reference.dtype, key=lambda each: each.itemsize)  # type: ignore[no-any-return]

    @property
    def has_gradient(self) -> bool:
        return bool(self.model.has_gradient and self.reference.has_gradient)

    @property
    def autocast(self) -> str | None:
        """The autocast type of either model, for choosing tolerances."""
        return getattr(self.model, "autocast", None) or getattr(self.reference, "autocast", None)

    def __getattr__(self, name: str) -> Any:
        """Take all other attributes of a target from the model."""
        if name.startswith("_") or name in ("model", "reference", "tracer"):
            raise AttributeError(name)
        return getattr(self.model, name)

    def fingerprint(self) -> str:
        """The fingerprint of the model; that of the reference is recorded separately."""
        return str(self.model.fingerprint())

    def find_layers(self, example: Tensor) -> tuple[Layer, ...]:
        """The layers of the model; refuses a reference whose outputs cannot be compared with the model's."""
        layers: tuple[Layer, ...] = self.model.find_layers(example)
        with torch.no_grad():
            self.forward(example[None].expand(2, *example.shape).contiguous())
        return layers

    def forward(
        self, inputs: Tensor, on_activation: OnActivation | None = None, layers: dict[str, Layer] | None = None
    ) -> Tensor:
        """The scores of both models; `on_activation` gets the activations of the model, its own output included."""
        own = self.model.forward(inputs, on_activation, layers)
        if on_activation is not None and OUTPUT in (layers or ()):
            on_activation(OUTPUT, own)
        other = self.reference.forward(inputs.to(self.reference.device)).to(own.device)
        if own.ndim != 2 or own.shape[1] < 2:
            raise ModelError(
                f"a model that is tested against a reference must return scores [inputs, classes] with 2 classes or "
                f"more, got {list(own.shape)}: other tasks are not supported"
            )
        if other.shape != own.shape:
            raise ModelError(
                f"the reference must have the classes of the model, {own.shape[1]} scores per input, got shape "
                f"{list(other.shape)} for {len(own)} inputs: pass a model of the same classes in the same order"
            )
        return torch.cat([own.float(), other.float()], 1)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open both models."""
        with self.model.opened(), self.reference.opened():
            yield


def like(reference: AnyTarget, model: AnyTarget) -> AnyTarget:
    """The reference with the bounds, the preprocessing and the label order of the model."""
    if not isinstance(reference, TargetOptions) or not isinstance(model, TargetOptions):
        return reference
    return replace(reference, bounds=model.bounds, preprocess=model.preprocess, label_order=model.label_order)
