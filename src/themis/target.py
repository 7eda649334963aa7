"""The target: a model, how to feed it, and which of its neurons are tested. The model leaves as it came."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, get_args

import torch
from torch import Tensor, nn

from themis.errors import DataError, ModelError, ThemisError, UsageError
from themis.oracle import Oracle, choose_oracle
from themis.probe import Granularity, Layer, Visit, Watch, find_layers, first_tensor


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
    oracle: `wrong`, `changed`, or `auto`: `wrong` where there are labels, else `changed`.
    output: picks the scores out of what the model returns; by default the tensor, its `.logits`, or the first one.
    """

    module: nn.Module
    bounds: tuple[float, float] = (0.0, 1.0)
    preprocess: Callable[[Tensor], Tensor] | None = None
    layers: str | Sequence[str] = "auto"
    neurons: Granularity = "element"
    oracle: str | Oracle = "auto"
    output: Callable[[Any], Tensor] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.module, nn.Module):
            raise UsageError(f"Target needs an nn.Module, got {type(self.module).__name__}: pass the model itself")
        try:
            low, high = (float(each) for each in self.bounds)
        except (TypeError, ValueError):
            raise UsageError(f"bounds must be two numbers, got {self.bounds!r}: write bounds=(0, 1)") from None
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise UsageError(f"bounds must be finite and ascending, got {self.bounds}: write bounds=(0, 1)")
        if self.neurons not in get_args(Granularity):
            raise UsageError(f"neurons must be 'element' or 'channel', got {self.neurons!r}")
        choose_oracle(self.oracle, has_labels=False)  # refuses an unknown name
        object.__setattr__(self, "bounds", (low, high))
        object.__setattr__(self, "module", getattr(self.module, "_orig_mod", self.module))  # torch.compile's wrapper

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return next((t.device for t in _tensors(self.module)), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The model's floating-point type; inputs are cast to it after the preprocessing."""
        return next((t.dtype for t in _tensors(self.module) if t.is_floating_point()), torch.float32)

    @cached_property
    def _watch(self) -> Watch:
        return Watch(self.module)

    def find_layers(self, example: Tensor) -> tuple[Layer, ...]:
        """The layers whose neurons are tested; `example` is one raw input `[...]`."""

        def batch(n: int) -> Tensor:
            return self._prepare(example[None].expand(n, *example.shape).contiguous())

        layers = self.layers if isinstance(self.layers, str) else tuple(self.layers)
        with self._explained(example[None]):
            return find_layers(self._watch, batch, layers=layers, neurons=self.neurons, output=self._scores)

    def forward(self, inputs: Tensor, visit: Visit | None = None, wanted: dict[str, Layer] | None = None) -> Tensor:
        """The model's scores on raw `inputs`; with `visit`, each wanted layer's activation is shown to it."""
        with self._explained(inputs):
            prepared = self._prepare(inputs)
            result = self.module(prepared) if visit is None else self._watch.forward(prepared, visit, wanted or ())
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
        self.module.eval()
        try:
            yield
        finally:
            for each, training, parameters, buffers in held:
                each.training = training
                each._parameters.update(parameters)  # a forward may have put new tensors in their place
                each._buffers.update(buffers)
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

    @contextmanager
    def _explained(self, inputs: Tensor) -> Iterator[None]:
        try:
            yield
        except ThemisError:
            raise
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise ModelError(
                f"out of memory on {self.device} with {len(inputs)} inputs at once: pass a smaller clean_memory_gib, "
                f"use neurons='channel', or a smaller model ({(str(error).splitlines() or ['no more is known'])[0]})"
            ) from error
        except Exception as error:
            raise ModelError(
                f"the model raised {type(error).__name__} on inputs {list(inputs.shape)} in {self.bounds}: {error}; "
                "check that it takes this shape, and the preprocess given to Target"
            ) from error


def _version(tensor: Tensor) -> int | None:
    """How often a tensor was written to; tensors made in inference mode do not count, nor can they be written to."""
    return None if tensor.is_inference() else tensor._version


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
