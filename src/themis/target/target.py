"""The target: a model, how to feed it, and which of its neurons are tested. The model leaves as it came."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor, nn

from themis.errors import DataError, ModelError, ThemisError, UsageError
from themis.oracle import Oracle, choose_oracle
from themis.target.activations import (
    ActivationTracer,
    Granularity,
    Layer,
    OnActivation,
    Tracer,
    find_layers,
    first_tensor,
)
from themis.target.compiled import Exported, Script, is_exported
from themis.target.fingerprint import hash_model


@runtime_checkable
class AnyTarget(Protocol):
    """What can be tested: a `Target` around a PyTorch model, a `BlackBox` around any function, or one of your own."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest value of a raw input."""

    @property
    def oracle(self) -> str | Oracle: ...

    @property
    def device(self) -> torch.device:
        """Where inputs must lie, and outputs and activations are given."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def has_gradient(self) -> bool:
        """Whether outputs and activations can be differentiated in the inputs."""

    def find_layers(self, example: Tensor) -> tuple[Layer, ...]:
        """The layers whose neurons are tested, found with a batch of two and one of three; `example` is one input."""

    def forward(
        self, inputs: Tensor, on_activation: OnActivation | None = None, wanted: dict[str, Layer] | None = None
    ) -> Tensor:
        """Return the scores on raw `inputs`, one row per input; `on_activation` gets each wanted layer but the output."""

    def opened(self) -> AbstractContextManager[None]:
        """A block in which it is used; afterwards it is as it was."""

    def fingerprint(self) -> str:
        """64 hex digits that change with the model."""


class Normalize:
    """`(inputs - mean) / std` by channel: part of the target, so that perturbations act on real inputs."""

    def __init__(self, mean: Sequence[float] | float, std: Sequence[float] | float) -> None:
        self.mean = torch.as_tensor(mean, dtype=torch.float32).reshape(-1)
        self.std = torch.as_tensor(std, dtype=torch.float32).reshape(-1)
        if not bool((self.std > 0).all()):
            raise UsageError(f"Normalize: std must be positive, got {std}: give the spread of each channel")

    def __call__(self, inputs: Tensor) -> Tensor:
        n_channels = inputs.shape[1]
        for name, value in (("mean", self.mean), ("std", self.std)):
            if len(value) not in (1, n_channels):
                raise DataError(
                    f"Normalize: {name} must have one value, or one a channel, got {len(value)} for inputs with "
                    f"{n_channels} channels: inputs are [batch, channel, ...]"
                )
        shape = (1, -1) + (1,) * (inputs.ndim - 2)
        return (inputs - self.mean.to(inputs).view(shape)) / self.std.to(inputs).view(shape)

    def __repr__(self) -> str:
        return f"Normalize(mean={self.mean.tolist()}, std={self.std.tolist()})"


@dataclass(frozen=True)
class Target:
    """A model under test.

    module: any `nn.Module`; it is used in evaluation mode and given back as it came.
    bounds: lowest and highest value of a raw input; every test stays inside.
    preprocess: what the model expects done to raw inputs (`Normalize`, any differentiable function).
    layers: `auto` (what follows each activation, plus the output) or globs over layer names.
    neurons: `element` (each activation is a neuron, as the paper counts) or `channel` (each channel's mean).
    oracle: what a fault is. `wrong`, `changed`, `topK`, `threshold`, `multilabel`, `regression`, `off`,
        `segmentation`, some with a number as `regression:0.1`; `Compare(function)`; or `auto`: read off the outputs and
        the labels.
    output: picks the scores out of what the model returns; by default the tensor, its `.logits`, or the first one.
    version: what else tells this model from others, beside its weights: the hash of the file it came from.
    """

    module: nn.Module
    bounds: tuple[float, float] = (0.0, 1.0)
    preprocess: Callable[[Tensor], Tensor] | None = None
    layers: str | Sequence[str] = "auto"
    neurons: Granularity = "element"
    oracle: str | Oracle = "auto"
    output: Callable[[Any], Tensor] | None = field(default=None, repr=False)
    version: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.module, nn.Module):
            kind = type(self.module).__name__
            remedy = "pass program.module()" if kind == "ExportedProgram" else "pass the model itself"
            raise UsageError(f"Target needs an nn.Module, got {kind}: {remedy}")
        object.__setattr__(self, "bounds", check_options(self.bounds, self.neurons, self.oracle))
        object.__setattr__(self, "module", getattr(self.module, "_orig_mod", self.module))  # torch.compile's wrapper

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return next((t.device for t in _tensors(self.module)), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The model's floating-point type; inputs are cast to it after the preprocessing."""
        return next((t.dtype for t in _tensors(self.module) if t.is_floating_point()), torch.float32)

    @property
    def has_gradient(self) -> bool:
        return True

    @cached_property
    def _tracer(self) -> Tracer:
        if isinstance(self.module, torch.jit.ScriptModule):
            return Script(self.module)
        return Exported(self.module) if is_exported(self.module) else ActivationTracer(self.module)

    def fingerprint(self) -> str:
        """SHA-256 of all parameters and buffers, and of `version`."""
        return hash_model(self.module, self.version)

    def find_layers(self, example: Tensor) -> tuple[Layer, ...]:
        """The layers whose neurons are tested; `example` is one raw input `[...]`."""

        def batch(n: int) -> Tensor:
            return self._prepare(example[None].expand(n, *example.shape).contiguous())

        layers = self.layers if isinstance(self.layers, str) else tuple(self.layers)
        _check_devices(self.module)
        with self._explained(example[None]):
            return find_layers(self._tracer, batch, layers=layers, neurons=self.neurons, output=self._scores)

    def forward(
        self, inputs: Tensor, on_activation: OnActivation | None = None, wanted: dict[str, Layer] | None = None
    ) -> Tensor:
        """The model's scores on raw `inputs`; with `on_activation`, each wanted layer's activation is shown to it."""
        with self._explained(inputs):
            prepared = self._prepare(inputs)
            result = (
                self._tracer.run(prepared)
                if on_activation is None
                else self._tracer.forward(prepared, on_activation, wanted or ())
            )
            scores = self._scores(result)
            if scores.ndim == 0 or len(scores) != len(inputs):
                raise ModelError(
                    f"the model must give one output an input, got shape {list(scores.shape)} for {len(inputs)} "
                    "inputs: pass output=... to Target to pick the scores"
                )
            return scores

    @contextmanager
    def opened(self) -> Iterator[None]:
        """The model in evaluation mode; afterwards flags, parameters and buffers are as they were, to the bit."""
        modules = list(self.module.modules())
        held = [(each, each.training, dict(each._parameters), dict(each._buffers)) for each in modules]
        copies = [(tensor, tensor.detach().clone(), _version(tensor)) for tensor in _tensors(self.module)]
        try:
            self.module.eval()
        except NotImplementedError:  # a torch.export program stays as it was exported
            for each in modules:
                each.training = False
        try:
            yield
        finally:
            for each, training, parameters, buffers in held:
                each.training = training
                _put_back(each, parameters, buffers)
            with torch.no_grad():
                for tensor, copy, version in copies:
                    if version is not None and tensor._version != version:
                        tensor.copy_(copy)

    def _prepare(self, inputs: Tensor) -> Tensor:
        prepared = inputs if self.preprocess is None else self.preprocess(inputs)
        return prepared.to(self.dtype)

    def _scores(self, result: Any) -> Tensor:
        scores = first_tensor(result) if self.output is None else self.output(result)
        if not isinstance(scores, Tensor):
            raise ModelError(
                "the model must return a tensor, a tuple, a dict or an object with .logits, got "
                f"{type(result).__name__}: pass output=... to Target to pick the scores"
            )
        return scores

    def _explained(self, inputs: Tensor) -> AbstractContextManager[None]:
        return explained(inputs, self.bounds, self.device, self.module)


def as_target(target: Any) -> AnyTarget:
    """Return `target` itself, or a `Target` with default options if it is a bare module."""
    if isinstance(target, nn.Module):
        return Target(target)
    if not isinstance(target, AnyTarget):
        raise UsageError(
            f"target must be a themis.Target, a themis.BlackBox or an nn.Module, got {type(target).__name__}"
        )
    return target


def check_options(bounds: Any, neurons: str, oracle: str | Oracle) -> tuple[float, float]:
    """Refuse what no target can have; gives the bounds back as two numbers."""
    try:
        low, high = (float(each) for each in bounds)
    except (TypeError, ValueError):
        raise UsageError(f"bounds must be two numbers, got {bounds!r}: write bounds=(0, 1)") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UsageError(f"bounds must be finite and ascending, got {bounds}: write bounds=(0, 1)")
    if neurons not in get_args(Granularity):
        raise UsageError(f"neurons must be 'element' or 'channel', got {neurons!r}")
    choose_oracle(oracle)  # refuses an unknown name
    return low, high


@contextmanager
def explained(
    inputs: Tensor, bounds: tuple[float, float], device: torch.device, module: nn.Module | None = None
) -> Iterator[None]:
    """Whatever a model raises on `inputs`, as a `ModelError` that says what to check."""
    try:
        yield
    except ThemisError:
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ModelError(
            f"out of memory on {device} with {len(inputs)} inputs at once: pass a smaller clean_memory_gib, "
            f"use neurons='channel', or a smaller model ({(str(error).splitlines() or ['no more is known'])[0]})"
        ) from error
    except Exception as error:
        remedy = None if module is None else _remedy(module, tuple(inputs.shape))
        raise ModelError(
            f"the model raised {type(error).__name__} on inputs {list(inputs.shape)} in {bounds}: {error}; "
            f"{remedy or 'check that it takes this shape, and the preprocess given to Target'}"
        ) from error


def permutation_that_fits(shape: Sequence[int], fits: Callable[[Sequence[int]], bool]) -> str | None:
    """Words for the permutation of the axes of inputs `[batch, ...]` that a model could take; None if there is none."""
    if fits(shape):
        return None
    axes = range(1, len(shape))
    # Moving one axis comes first: channels that stand last are the common mistake.
    moves = [(k, *(axis for axis in axes if axis != k)) for k in axes]
    moves += [(*(axis for axis in axes if axis != k), k) for k in axes]
    for move in moves:
        found = [shape[0], *(shape[axis] for axis in move)]
        if fits(found):
            return f"permute the data to {found[1:]} an input, as inputs.permute{(0, *move)}"
    return None


def _remedy(module: nn.Module, shape: tuple[int, ...]) -> str | None:
    """What to try when a module raises on inputs of a shape: another order of axes, another device."""
    devices = sorted({str(tensor.device) for tensor in _tensors(module)})
    if len(devices) > 1:
        return f"its weights lie on {' and '.join(devices)}: move them to one device with model.to({devices[0]!r})"
    for path, layer in module.named_modules():
        channels, features = getattr(layer, "in_channels", None), getattr(layer, "in_features", None)
        if not isinstance(channels or features, int):
            continue

        def fits(found: Sequence[int], channels: Any = channels, features: Any = features) -> bool:
            return len(found) > 2 and (found[1] == channels if channels else found[-1] == features)

        permute = permutation_that_fits(shape, fits)
        takes = f"{channels} channels first" if channels else f"{features} features last"
        return permute and f"its layer {path!r} takes {takes}: {permute}"
    return None


def _check_devices(module: nn.Module) -> None:
    if any(tensor.is_meta for tensor in _tensors(module)):
        raise ModelError("the model must have its weights, some are on the device 'meta' and have no values: load them")


def _put_back(module: nn.Module, parameters: dict[str, Any], buffers: dict[str, Any]) -> None:
    """A forward may have put new tensors in the place of a module's own."""
    if not isinstance(module, torch.jit.ScriptModule):
        module._parameters.update(parameters)
        module._buffers.update(buffers)
        return
    for name, tensor in {**parameters, **buffers}.items():
        if tensor is not None and getattr(module, name) is not tensor:
            setattr(module, name, tensor)


def _version(tensor: Tensor) -> int | None:
    """How often a tensor was written to; tensors made in inference mode do not count, nor can they be written to."""
    return None if tensor.is_inference() else tensor._version


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
