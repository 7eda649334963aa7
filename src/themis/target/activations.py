"""Activations by layer, seen as the model computes them; and which neurons they make.

A `TorchFunctionMode` sees every activation function, also a functional one (`F.relu`) that module hooks miss, and
each call of a module that is called several times. Hooks only say in which module a call happens; they are removed
after every pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from themis.errors import ModelError, UsageError, nearest

OUTPUT = "output"
"""Name of the layer that holds the model's output."""

Granularity = Literal["element", "channel"]
OnActivation = Callable[[str, Tensor], None]

_NAMES = """
    relu relu6 leaky_relu prelu rrelu elu selu celu gelu silu mish hardswish hardsigmoid hardtanh sigmoid tanh
    softplus softsign logsigmoid tanhshrink softshrink hardshrink threshold glu
"""
ACTIVATION_NAMES = tuple(_NAMES.split())
ACTIVATIONS = frozenset(
    found
    for space in (F, torch, Tensor)
    for name in ACTIVATION_NAMES
    for variant in (name, f"{name}_")
    if (found := getattr(space, variant, None)) is not None
)
"""Functions whose results are neurons. Softmax is left out: it only rescales scores."""


@dataclass(frozen=True)
class Layer:
    """One place in the forward pass: `n_neurons` neurons from `start` on in the flat order of all neurons."""

    name: str
    shape: tuple[int, ...]
    start: int
    n_neurons: int
    channel_axis: int | None
    """Which dimension of `shape` holds the neurons when a neuron is a channel's mean; None when it is an element."""

    @property
    def stop(self) -> int:
        return self.start + self.n_neurons


@dataclass(frozen=True)
class TracedActivation:
    """What one traced call showed: the activation's shape, and whether an activation function made it."""

    name: str
    shape: tuple[int, ...]
    storage: tuple[int, int, int]
    is_activation: bool


class Tracer(Protocol):
    """Runs a module and shows its activations: `ActivationTracer`, and in `programs.py` those of compiled models."""

    module: nn.Module
    made_by_activation: set[str]
    """Names of those activations, seen in the last pass, that an activation function made."""

    def trace(self, inputs: Tensor, on_activation: OnActivation) -> Any:
        """`module(inputs)`, with everything that can be a layer shown to `on_activation`."""

    def forward(self, inputs: Tensor, on_activation: OnActivation, wanted: Container[str]) -> Any:
        """`module(inputs)`, with each wanted activation shown to `on_activation`."""

    def run(self, inputs: Tensor) -> Any:
        """`module(inputs)`, the same to the bit."""


class ActivationTracer(TorchFunctionMode):
    """Sees the activations of one module; made once, used for any number of forward passes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.paths = {id(each): path for path, each in module.named_modules()}
        # A leaf without parameters that calls an activation function *is* an activation (nn.ReLU, a user's Swish):
        # what it returns is the neuron, not what it computes on the way.
        self.pure = {id(m) for m in module.modules() if m is not module and not _has(m.children(), m.parameters())}
        # Those of torch return what the function returns: they are seen at the call, without waiting for the end.
        self.plain = {id(m) for m in module.modules() if type(m).__module__ == nn.ReLU.__module__} & self.pure
        self.callers = set(self.paths)  # modules that call activation functions; all, until a pass has shown which
        self._begin(_ignore, None)

    def _begin(self, on_activation: OnActivation, wanted: Container[str] | None) -> None:
        self.on_activation, self.wanted = on_activation, wanted
        self.stack: list[int] = []
        self.activated: set[int] = set()
        self.calls: dict[str, int] = {}
        self.made_by_activation: set[str] = set()
        self.called: set[int] = set()

    def trace(self, inputs: Tensor, on_activation: OnActivation) -> Any:
        """`module(inputs)`, with every activation and every module's result shown to `on_activation`."""
        self.callers = set(self.paths)
        result = self._run(inputs, on_activation, None, list(self.module.modules()))
        self.callers = self.called
        return result

    def forward(self, inputs: Tensor, on_activation: OnActivation, wanted: Container[str]) -> Any:
        """`module(inputs)`, with each wanted activation shown to `on_activation` as it is computed.

        A visited tensor may be overwritten later by an in-place operation of the model: use it at once, or copy it.
        """
        hooked = [
            module
            for path, module in self.module.named_modules()
            if not path or id(module) in self.callers or path in wanted
        ]
        return self._run(inputs, on_activation, wanted, hooked)

    def run(self, inputs: Tensor) -> Any:
        return self.module(inputs)

    def _run(
        self, inputs: Tensor, on_activation: OnActivation, wanted: Container[str] | None, hooked: list[nn.Module]
    ) -> Any:
        self._begin(on_activation, wanted)
        handles = []
        try:
            for module in hooked:
                handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
                handles.append(module.register_forward_hook(self._leave))
            with self:
                return self.module(inputs)
        finally:
            for handle in handles:
                handle.remove()
            self.on_activation = _ignore  # a on_activation may hold gigabytes of activations

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        if func in ACTIVATIONS and self.stack and isinstance(result, Tensor):
            inside = self.stack[-1]
            self.called.add(inside)
            if inside in self.plain:
                self.activated.add(len(self.stack))
                self._see(self.paths[inside], result, is_activation=True)
            elif inside in self.pure:
                self.activated.add(len(self.stack))
            else:
                name = f"{self.paths[inside]}.{func.__name__.rstrip('_')}()".lstrip(".")
                self._see(name, result, is_activation=True)
        return result

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.stack.append(id(module))

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        depth = len(self.stack)
        self.stack.pop()
        is_activation = depth in self.activated
        self.activated.discard(depth)
        path = self.paths[id(module)]
        if not path or (is_activation and id(module) in self.plain):
            return
        tensor = first_tensor(result)
        if tensor is not None:
            self._see(path, tensor, is_activation)

    def _see(self, name: str, result: Tensor, is_activation: bool) -> None:
        call = self.calls[name] = self.calls.get(name, 0) + 1
        if call > 1:
            name = f"{name}#{call}"
        if self.wanted is None or name in self.wanted:
            if is_activation:
                self.made_by_activation.add(name)
            self.on_activation(name, result)


def trace_activations(tracer: Tracer, inputs: Tensor, output: Callable[[Any], Tensor]) -> list[TracedActivation]:
    """Everything that can be a layer, in the order of the forward pass; the output last."""
    found: list[tuple[str, Tensor, int]] = []
    with torch.no_grad():
        result = tracer.trace(inputs, lambda name, activation: found.append((name, activation, activation._version)))
    scores = output(result)
    found.append((OUTPUT, scores, scores._version))
    # `found` keeps every tensor alive, so equal addresses are one tensor; another version is another value.
    made = tracer.made_by_activation
    return [
        TracedActivation(name, tuple(t.shape), (t.data_ptr(), t.numel(), version), name in made)
        for name, t, version in found
    ]


def find_layers(
    tracer: Tracer,
    example: Callable[[int], Tensor],
    *,
    layers: str | tuple[str, ...] = "auto",
    neurons: Granularity = "element",
    output: Callable[[Any], Tensor],
) -> tuple[Layer, ...]:
    """The layers of a module: what follows each activation plus the output (`auto`), or names matching the globs.

    `example(n)` gives a model-ready batch of n inputs; two sizes tell the batch dimension from the others.
    """
    two, three = trace_activations(tracer, example(2), output), trace_activations(tracer, example(3), output)
    has_conv1d = any(
        isinstance(m, nn.Conv1d) or getattr(m, "original_name", "") == "Conv1d" for m in tracer.module.modules()
    )
    return choose_layers(two, three, layers, neurons, has_conv1d=has_conv1d)


def choose_layers(
    two: list[TracedActivation],
    three: list[TracedActivation],
    layers: str | tuple[str, ...],
    neurons: Granularity,
    *,
    has_conv1d: bool = False,
) -> tuple[Layer, ...]:
    """The layers among what was seen with two inputs and with three."""
    if [s.name for s in two] != [s.name for s in three]:
        raise ModelError(
            "the model must compute the same layers for every batch, got different ones for 2 and 3 inputs: "
            "name layers that are always computed with layers=[...]"
        )
    splits = {a.name: _has_batch_dimension(a.shape, b.shape) for a, b in zip(two, three, strict=True)}
    if layers == "auto":
        chosen = [s for s in three if (s.is_activation or s.name == OUTPUT) and splits[s.name]]
        # A net that ends in an activation has one last layer, not two.
        if len(chosen) > 1 and chosen[-1].storage == chosen[-2].storage:
            chosen.pop(-2)
    else:
        patterns = (layers,) if isinstance(layers, str) else tuple(layers)
        chosen = _match(three, patterns, splits)
    return _number(chosen, neurons, has_conv1d)


def _match(found: list[TracedActivation], patterns: tuple[str, ...], splits: dict[str, bool]) -> list[TracedActivation]:
    names = [s.name for s in found]
    for pattern in patterns:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise UsageError(
                f"layers: each pattern must match a layer, {pattern!r} matches none: {nearest(pattern, names)}"
            )
        for name in matched:
            if not splits[name]:
                raise UsageError(
                    f"layers: the first dimension of a layer must be the batch, {name!r} has another: leave it out"
                )
    chosen: dict[tuple[int, int, int], TracedActivation] = {}
    for traced in found:
        if any(fnmatchcase(traced.name, pattern) for pattern in patterns):
            chosen.setdefault(traced.storage, traced)  # one tensor seen under two names is one layer
    return list(chosen.values())


def _number(chosen: list[TracedActivation], neurons: Granularity, has_conv1d: bool) -> tuple[Layer, ...]:
    result, start = [], 0
    for traced in chosen:
        per_input = traced.shape[0] // 3  # more than one where a model folds windows into the batch
        shape = (per_input, *traced.shape[1:]) if per_input > 1 or len(traced.shape) == 1 else traced.shape[1:]
        axis = None if neurons == "element" else _channel_axis(len(shape), has_conv1d)
        n_neurons = math.prod(shape) if axis is None else shape[axis]
        result.append(Layer(traced.name, shape, start, n_neurons, axis))
        start += n_neurons
    return tuple(result)


def flatten(activation: Tensor, layer: Layer, n_inputs: int) -> Tensor:
    """An activation as `[inputs, neurons]`: its elements, or each channel's mean; float32 at least."""
    if activation.numel() != n_inputs * math.prod(layer.shape):
        raise ModelError(
            f"layer {layer.name!r} must keep its shape {layer.shape}, got {tuple(activation.shape[1:])}: "
            "give inputs of one size"
        )
    if activation.dtype not in (torch.float32, torch.float64):
        activation = activation.float()
    if layer.channel_axis is None:
        return activation.reshape(n_inputs, -1)
    spatial = [1 + k for k in range(len(layer.shape)) if k != layer.channel_axis]
    activation = activation.reshape(n_inputs, *layer.shape)
    return activation.mean(spatial) if spatial else activation


def first_tensor(result: Any) -> Tensor | None:
    """The tensor a module returned: itself, `.logits`, or the first one in a tuple or dict."""
    if isinstance(result, Tensor):
        return result
    logits = getattr(result, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    if isinstance(result, dict):
        for key in ("logits", "out"):
            if isinstance(result.get(key), Tensor):
                return result[key]  # type: ignore[no-any-return]
        result = tuple(result.values())
    if isinstance(result, list | tuple):
        return next((each for each in result if isinstance(each, Tensor)), None)
    return None


def _channel_axis(n_dims: int, has_conv1d: bool) -> int:
    # Pictures are [channel, ...]; of two dimensions, Conv1d has [channel, time] and a transformer [token, channel].
    return 1 if n_dims == 2 and not has_conv1d else 0


def _has_batch_dimension(of_two: tuple[int, ...], of_three: tuple[int, ...]) -> bool:
    if not of_two or not of_three or of_two[1:] != of_three[1:]:
        return False
    return of_two[0] % 2 == 0 and of_three[0] % 3 == 0 and of_two[0] // 2 == of_three[0] // 3 > 0


def _ignore(name: str, activation: Tensor) -> None:
    pass


def _has(*iterables: Any) -> bool:
    return any(next(iter(each), None) is not None for each in iterables)
