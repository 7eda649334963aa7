"""Layer-wise relevance propagation (LRP) with captum, at any layer that Themis can name."""

from __future__ import annotations

import warnings
from copy import deepcopy
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from themis.errors import MissingExtraError
from themis.target.activations import ACTIVATION_NAMES, ActivationTracer
from themis.target.target import Target

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
    """LRP of one layer of a target, on a copy of its model: captum leaves rules and activations in the modules.

    It uses the epsilon rule everywhere; activation functions pass relevance on. captum sees only modules without
    children: what is computed outside of them after the layer must be harmless, so a residual sum, for instance, is
    rejected.
    """

    def __init__(self, target: Target, layer: str) -> None:
        try:
            import captum.attr  # noqa: F401
        except ImportError:
            raise MissingExtraError("relevance by LRP needs captum: pip install 'themis-dl[lrp]'") from None
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
    """A target's model that returns the scores and catches the relevance that the backward pass brings to a layer."""

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
