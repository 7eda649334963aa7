"""Any function as a target: ONNX, another framework, a remote service."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.errors import ModelError, UsageError
from themis.oracle import Oracle
from themis.target.activations import OUTPUT, Granularity, Layer, OnActivation, TracedActivation, choose_layers
from themis.target.fingerprint import hash_text
from themis.target.target import check_options, explain_errors

Array = NDArray[Any]


@dataclass(frozen=True)
class BlackBox:
    """A function under test, from NumPy arrays to NumPy arrays.

    It has no gradient: policies that need one use finite differences.

    Args:
        predict: Maps `inputs [inputs, ...]` (float32) to scores with one row per input, or to a pair of such scores and
            a dict of activations by layer, each with one row per input.
        bounds: As for `Target`.
        activations: A separate function that returns such a dict. Without activations, the output is the only layer.
        preprocess: As for `Target`.
        layers: As for `Target`.
        neurons: As for `Target`.
        oracle: As for `Target`.
        version: Identifies the model, for instance by the hash of its file; a run can only be resumed with the same
            version. By default it is the name of the function, which says nothing about its weights.
    """

    predict: Callable[[Array], Any]
    _: KW_ONLY
    bounds: tuple[float, float] = (0.0, 1.0)
    activations: Callable[[Array], Mapping[str, Array]] | None = None
    preprocess: Callable[[Tensor], Tensor] | None = None
    layers: str | Sequence[str] = "auto"
    neurons: Granularity = "element"
    oracle: str | Oracle = "auto"
    version: str = ""

    def __post_init__(self) -> None:
        for name, function in (("predict", self.predict), ("activations", self.activations)):
            if function is not None and not callable(function):
                raise UsageError(f"BlackBox: {name} must be a function of an array, got {type(function).__name__}")
        object.__setattr__(self, "bounds", check_options(self.bounds, self.neurons, self.oracle))

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def has_gradient(self) -> bool:
        """False: a function of arrays cannot be differentiated."""
        return False

    def fingerprint(self) -> str:
        """Return the SHA-256 of `version`, or of the function's name."""
        kind = self.predict if hasattr(self.predict, "__qualname__") else type(self.predict)
        return hash_text(self.version or f"{kind.__module__}:{kind.__qualname__}")

    def find_layers(self, example: Tensor) -> tuple[Layer, ...]:
        """Return the layers whose neurons are tested; `example` is one raw input `[...]`."""
        two, three = (self._trace(example[None].expand(n, *example.shape)) for n in (2, 3))
        layers = self.layers if isinstance(self.layers, str) else tuple(self.layers)
        return choose_layers(two, three, layers, self.neurons)

    def forward(
        self, inputs: Tensor, on_activation: OnActivation | None = None, layers: dict[str, Layer] | None = None
    ) -> Tensor:
        """Return the scores on raw `inputs`; `on_activation` gets the activation of each of `layers`."""
        outputs, activations = self._call(inputs, needs_activations=on_activation is not None)
        if on_activation is not None:
            for name in activations:
                if name in (layers or ()):
                    on_activation(name, as_tensor(activations[name], f"layer {name!r}"))
        return outputs

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Do nothing: a function has no mode to set."""
        yield

    def _trace(self, inputs: Tensor) -> list[TracedActivation]:
        outputs, activations = self._call(inputs.contiguous(), needs_activations=True)
        shapes = {name: tuple(np.shape(activation)) for name, activation in activations.items()}
        if OUTPUT in shapes:
            raise UsageError(f"a layer must not be named {OUTPUT!r}, which is the name of the output: rename it")
        shapes[OUTPUT] = tuple(outputs.shape)
        return [
            TracedActivation(name, shape, (k, 0, 0), is_activation=True)
            for k, (name, shape) in enumerate(shapes.items())
        ]

    def _call(self, inputs: Tensor, needs_activations: bool) -> tuple[Tensor, Mapping[str, Array]]:
        with explain_errors(inputs, self.bounds, self.device), torch.no_grad():
            own = inputs.detach().clone()  # the function may overwrite what it gets
            prepared = own if self.preprocess is None else self.preprocess(own)
            array = prepared.detach().cpu().float().numpy()
            kept = array.copy() if needs_activations and self.activations is not None else array
            result = self.predict(array)
            activations: Mapping[str, Array] = {}
            if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
                result, activations = result
            if needs_activations and self.activations is not None:
                activations = {**activations, **self.activations(kept)}
        outputs = as_tensor(result, "the output")
        if outputs.ndim == 0 or len(outputs) != len(inputs):
            raise ModelError(
                f"the model must return one output per input, got shape {list(outputs.shape)} for {len(inputs)} "
                "inputs: return an array with one row per input"
            )
        return outputs, activations


def as_tensor(value: Any, name: str) -> Tensor:
    """Return an array as a tensor of floating-point numbers; `name` identifies it in an error."""
    if not isinstance(value, Tensor):
        try:
            array = np.asarray(value)
            value = torch.from_numpy(array if array.flags.writeable else array.copy())
        except Exception as error:
            raise ModelError(
                f"{name} of the model must be an array of numbers, got {type(value).__name__}: return a NumPy array "
                "with one row per input"
            ) from error
    tensor: Tensor = value.detach().cpu()
    return tensor if tensor.is_floating_point() else tensor.float()
