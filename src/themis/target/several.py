"""How a module is called with several inputs per example."""

from __future__ import annotations

import inspect

from torch import Tensor, nn

from themis.data.several import Key, OtherInputs
from themis.errors import ModelError
from themis.target.activations import Arguments


class Beside:
    """The other inputs of the examples that a module is given next; none unless the data has several inputs."""

    def __init__(self) -> None:
        self.others: OtherInputs | None = None

    def arguments(self, perturbed: Tensor, module: nn.Module) -> Arguments:
        """The arguments of a module: the perturbed inputs and the others, in the order of the data.

        They are keyword arguments if the data names them and the module knows the names, or positional ones if it takes
        as many; otherwise the module gets one dict or tuple.
        """
        others = self.others
        assert others is not None
        n, inputs = len(perturbed), {}
        for key in others.keys:
            inputs[key] = perturbed if key == others.perturbed else _rows(others.tensors[key], n, key)
        parameters = inspect.signature(module.forward).parameters.values()
        if all(isinstance(key, str) for key in others.keys):
            names = {parameter.name for parameter in parameters}
            takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
            if takes_any or names.issuperset(map(str, inputs)):
                return Arguments((), {str(key): value for key, value in inputs.items()})
            return Arguments((inputs,), {})
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        takes_any = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
        values = tuple(inputs.values())
        return Arguments(values if takes_any or len(positional) >= len(values) else (values,), {})


def _rows(tensor: Tensor, n: int, key: Key) -> Tensor:
    if len(tensor) == 1:
        return tensor.expand(n, *tensor.shape[1:])
    if len(tensor) != n:
        raise ModelError(
            f"the input {key!r} must have a row for each of {n} perturbed inputs, got {len(tensor)}: several inputs "
            "per example are supported by run, check, resume and replay only"
        )
    return tensor
