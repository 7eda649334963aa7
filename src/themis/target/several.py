"""How a model is called with several inputs per example."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn

from themis.data.items import Key, OtherInputs
from themis.errors import ModelError
from themis.target.activations import Arguments
from themis.target.compiled import script_parameters


class SideInputs:
    """The other inputs of the examples that a model is given next; none unless the data has several inputs."""

    def __init__(self) -> None:
        self.others: OtherInputs | None = None

    def rows(self, n: int) -> dict[Key, Tensor]:
        """The other inputs of `n` examples, by name or position; none if the data has one input."""
        tensors = {} if self.others is None else self.others.tensors
        return {key: _rows(tensor, n, key) for key, tensor in tensors.items()}

    def arguments(self, perturbed: Any, others: dict[Key, Any], model: Callable[..., Any]) -> Arguments:
        """The arguments of a model: the perturbed inputs and the others, in the order of the data.

        They are keyword arguments if the data names them and the model knows the names, or positional ones if it takes
        as many; otherwise the model gets one dict or tuple.
        """
        assert self.others is not None
        inputs = {key: perturbed if key == self.others.perturbed else others[key] for key in self.others.keys}
        parameters = _parameters(model)
        if all(isinstance(key, str) for key in inputs):
            names = {parameter.name for parameter in parameters}
            takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
            if takes_any or names.issuperset(map(str, inputs)):
                return Arguments((), {str(key): value for key, value in inputs.items()})
            return Arguments((inputs,), {})
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        takes_any = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
        values = tuple(inputs.values())
        return Arguments(values if takes_any or len(positional) >= len(values) else (values,), {})


def _parameters(model: Callable[..., Any]) -> Sequence[Parameter]:
    """The parameters of a function or a module; one if they cannot be known."""
    if isinstance(model, torch.jit.ScriptModule):
        return [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in script_parameters(model)]
    function = model.forward if isinstance(model, nn.Module) else model
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a function of C
        return [Parameter("inputs", Parameter.POSITIONAL_ONLY)]


def _rows(tensor: Tensor, n: int, key: Key) -> Tensor:
    if len(tensor) == 1:
        return tensor.expand(n, *tensor.shape[1:])
    if len(tensor) != n:
        raise ModelError(
            f"the input {key!r} must have a row for each of {n} perturbed inputs, got {len(tensor)}: several inputs "
            "per example are not supported here"
        )
    return tensor
