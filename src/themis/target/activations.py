"""Tracing the activations of each layer while the model computes them, and the neurons of layers.

A `TorchFunctionMode` sees every activation function, including functional calls (`F.relu`) that module hooks miss, and
each call of a module that is called several times. Hooks are only used to know in which module a call happens, and are
removed after every pass.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from themis.errors import ModelError, UsageError, nearest
from themis.target.kernels_cuda import channel_means
from themis.target.output import SCORE_ENTRIES, tensors_in

OUTPUT = "output"
"""The name of the layer with the model's output."""

Granularity = Literal["element", "channel"]
OnActivation = Callable[[str, Tensor], None]
"""Called with the name of a layer and its activation."""

_ACTIVATION_NAMES = """
    relu relu6 leaky_relu prelu rrelu elu selu celu gelu silu mish hardswish hardsigmoid hardtanh sigmoid tanh
    softplus softsign logsigmoid tanhshrink softshrink hardshrink threshold glu
"""
ACTIVATION_NAMES = tuple(_ACTIVATION_NAMES.split())
ACTIVATIONS = frozenset(
    function
    for namespace in (F, torch, Tensor)
    for name in ACTIVATION_NAMES
    for variant in (name, f"{name}_")
    if (function := getattr(namespace, variant, None)) is not None
)
"""Functions whose results are neurons. Softmax is not included, because it only rescales scores."""
_KINDS_WITHOUT_ACTIVATIONS = "batchnorm conv dropout flatten instancenorm linear normalization padding pooling"
MODULES_WITHOUT_ACTIVATIONS = {f"torch.nn.modules.{kind}" for kind in _KINDS_WITHOUT_ACTIVATIONS.split()}
"""Modules in which torch defines layers that call no activation function."""


@dataclass(frozen=True)
class Layer:
    """A layer whose `n_neurons` neurons start at `start` in the flat order of all neurons."""

    name: str
    shape: tuple[int, ...]
    start: int
    n_neurons: int
    channel_axis: int | None
    """The dimension of `shape` with the channels if a neuron is the mean of a channel; None if it is an element."""

    @property
    def stop(self) -> int:
        return self.start + self.n_neurons


@dataclass(frozen=True)
class TracedActivation:
    """A traced tensor: its name and shape, and whether an activation function computed it.

    `storage` identifies the value: entries with equal `storage` are the same tensor under two names.
    """

    name: str
    shape: tuple[int, ...]
    storage: tuple[int, int, int]
    is_activation: bool


@dataclass(frozen=True)
class Arguments:
    """The arguments of a module that takes several inputs."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call_module(module: nn.Module, inputs: Any) -> Any:
    """Return `module(inputs)`, also for several `Arguments`."""
    return module(*inputs.args, **inputs.kwargs) if isinstance(inputs, Arguments) else module(inputs)


class Tracer(Protocol):
    """Runs a module and reports its activations: `ActivationTracer`, or one for compiled models in `compiled.py`."""

    module: nn.Module
    activation_results: set[str]
    """Names of the tensors in the last pass that an activation function computed."""

    def trace(self, inputs: Tensor, on_activation: OnActivation) -> Any:
        """Return `module(inputs)`; `on_activation` gets every tensor that can be a layer."""

    def forward(self, inputs: Tensor, on_activation: OnActivation, names: Collection[str]) -> Any:
        """Return `module(inputs)`; `on_activation` gets the activations with these names."""

    def run(self, inputs: Tensor) -> Any:
        """Return `module(inputs)`, equal to the last bit to the result of the other two methods."""


class ActivationTracer(TorchFunctionMode):
    """Traces the activations of one module in any number of forward passes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.submodules = list(module.modules())[1:]
        self.paths = {id(submodule): path for path, submodule in module.named_modules()}
        # A leaf without parameters that calls an activation function *is* an activation (nn.ReLU, a user's Swish):
        # its neurons are the values it returns, not its intermediate results.
        self.pure = {id(m) for m in module.modules() if m is not module and not [*m.children(), *m.parameters()]}
        # Torch's own activation modules return the function's result, which can be reported at the call.
        self.plain = {id(m) for m in module.modules() if type(m).__module__ == nn.ReLU.__module__} & self.pure
        # No activation function is called in these, so that hooks are needed only to see their results.
        self.silent = {id(m) for m in self.submodules if _calls_no_activation(m)}
        self._begin(_ignore, None)

    def _begin(self, on_activation: OnActivation, names: Collection[str] | None) -> None:
        self.on_activation, self.names = on_activation, names
        self.stack = [id(self.module)]  # the whole model needs no hooks, because every call is inside it
        self.activated: set[int] = set()
        self.calls: dict[str, int] = {}
        self.activation_results: set[str] = set()

    def trace(self, inputs: Tensor, on_activation: OnActivation) -> Any:
        """Return `module(inputs)`; `on_activation` gets every activation and the result of every module."""
        return self._run(inputs, on_activation, None)

    def forward(self, inputs: Tensor, on_activation: OnActivation, names: Collection[str]) -> Any:
        """Return `module(inputs)`; `on_activation` gets the named activations as they are computed.

        Use a reported tensor at once, or copy it, because the model may overwrite it with an in-place operation.
        """
        return self._run(inputs, on_activation, names)

    def run(self, inputs: Tensor) -> Any:
        return call_module(self.module, inputs)

    def _run(self, inputs: Tensor, on_activation: OnActivation, names: Collection[str] | None) -> Any:
        self._begin(on_activation, names)
        wanted, handles = None if names is None else {name.partition("#")[0] for name in names}, []
        try:
            for module in self.submodules:
                if wanted is not None and id(module) in self.silent and self.paths[id(module)] not in wanted:
                    continue
                handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
                handles.append(module.register_forward_hook(self._leave))
            with self:
                return call_module(self.module, inputs)
        finally:
            for handle in handles:
                handle.remove()
            self.on_activation = _ignore  # the callback may hold gigabytes of activations

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        if func in ACTIVATIONS and isinstance(result, Tensor):
            caller = self.stack[-1]
            if caller in self.plain:
                self.activated.add(len(self.stack))
                self._report(self.paths[caller], result, is_activation=True)
            elif caller in self.pure:
                self.activated.add(len(self.stack))
            else:
                name = f"{self.paths[caller]}.{func.__name__.rstrip('_')}()".lstrip(".")
                self._report(name, result, is_activation=True)
        return result

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.stack.append(id(module))

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        depth = len(self.stack)
        self.stack.pop()
        is_activation = depth in self.activated
        self.activated.discard(depth)
        if is_activation and id(module) in self.plain:
            return
        entries: dict[str | int, Tensor] = {0: result} if isinstance(result, Tensor) else tensors_in(result)
        if entries:
            entry = next((name for name in SCORE_ENTRIES if name in entries), next(iter(entries)))
            self._report(self.paths[id(module)], entries[entry], is_activation)

    def _report(self, name: str, result: Tensor, is_activation: bool) -> None:
        call = self.calls[name] = self.calls.get(name, 0) + 1
        if call > 1:
            name = f"{name}#{call}"
        if self.names is None or name in self.names:
            if is_activation:
                self.activation_results.add(name)
            self.on_activation(name, result)


def _calls_no_activation(module: nn.Module) -> bool:
    """Whether a module is a layer of torch's own without activation function, parametrisation, hooks or new forward."""
    has_own_code = [*module.children(), *module._forward_hooks, *module._forward_pre_hooks] or "forward" in vars(module)
    return type(module).__module__ in MODULES_WITHOUT_ACTIVATIONS and not has_own_code


def trace_activations(tracer: Tracer, inputs: Tensor, output: Callable[[Any], Tensor]) -> list[TracedActivation]:
    """Return every tensor that can be a layer, in the order of the forward pass, with the output last."""
    tensors: list[tuple[str, Tensor, int]] = []
    with torch.no_grad():
        result = tracer.trace(inputs, lambda name, activation: tensors.append((name, activation, activation._version)))
    scores = output(result)
    tensors.append((OUTPUT, scores, scores._version))
    # All tensors are kept alive, so equal addresses mean the same tensor, and another version means another value.
    return [
        TracedActivation(
            name, tuple(tensor.shape), (tensor.data_ptr(), tensor.numel(), version), name in tracer.activation_results
        )
        for name, tensor, version in tensors
    ]


def keep_fixed_layers(tracer: Tracer, others: Any, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Return the layers of a detector with one row and the same neurons for every picture, without the detections.

    Layers after the proposals of a two-stage detector have one row per proposal. The detections are sorted by score, so
    that positions have no meaning. `others` are two different pictures.
    """
    two = {traced.name: traced.shape for traced in trace_activations(tracer, others, lambda result: torch.zeros(2, 1))}
    fixed = [layer for layer in layers if layer.name != OUTPUT and two.get(layer.name) == (2, *layer.shape)]
    return _consecutive(fixed) or layers


def choose_layers(
    two: list[TracedActivation],
    three: list[TracedActivation],
    layers: str | Sequence[str],
    neurons: Granularity,
    *,
    has_conv1d: bool = False,
    has_channels_last: bool = False,
) -> tuple[Layer, ...]:
    """Return the layers among the tensors traced with two and with three inputs, which reveal the batch dimension.

    With `auto`, they are the output and the results of activation functions, otherwise those that match the globs.
    """
    if [traced.name for traced in two] != [traced.name for traced in three]:
        raise ModelError(
            "the model must compute the same layers for every batch, got different ones for 2 and 3 inputs: "
            "name layers that are always computed with layers=[...]"
        )
    has_batch = {
        a.name: a.shape[1:] == b.shape[1:] and a.shape[:1] > (0,) and 3 * a.shape[0] == 2 * b.shape[0]
        for a, b in zip(two, three, strict=True)
    }
    if layers == "auto":
        chosen = [
            traced for traced in three if (traced.is_activation or traced.name == OUTPUT) and has_batch[traced.name]
        ]
        # A net that ends in an activation function has one last layer, not two.
        if len(chosen) > 1 and chosen[-1].storage == chosen[-2].storage:
            chosen.pop(-2)
    else:
        chosen = _match(three, [layers] if isinstance(layers, str) else layers, has_batch)
    found = []
    for traced in chosen:
        per_input = traced.shape[0] // 3  # more than one if a model folds windows into the batch
        shape = (per_input, *traced.shape[1:]) if per_input > 1 or len(traced.shape) == 1 else traced.shape[1:]
        # Images are [channel, ...]. With two dimensions, Conv1d has [channel, time] and a transformer [token, channel].
        first = 1 if len(shape) == 2 and not has_conv1d else 0
        axis = None if neurons == "element" else len(shape) - 1 if has_channels_last else first
        found.append(Layer(traced.name, shape, 0, math.prod(shape) if axis is None else shape[axis], axis))
    return _consecutive(found)


def _consecutive(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Number the neurons of the layers consecutively."""
    starts = accumulate((layer.n_neurons for layer in layers), initial=0)
    return tuple(replace(layer, start=start) for layer, start in zip(layers, starts, strict=False))


def _match(
    activations: list[TracedActivation], patterns: Sequence[str], has_batch: dict[str, bool]
) -> list[TracedActivation]:
    names = [traced.name for traced in activations]
    for pattern in patterns:
        matches = [name for name in names if fnmatchcase(name, pattern)]
        if not matches:
            raise UsageError(f"layers must match names, but {pattern!r} matches none: {nearest(pattern, names)}")
        if without := [name for name in matches if not has_batch[name]]:
            raise UsageError(f"layers: the first dimension must be the batch, that of {without[0]!r} is not: omit it")
    chosen: dict[tuple[int, int, int], TracedActivation] = {}
    for traced in activations:
        if any(fnmatchcase(traced.name, pattern) for pattern in patterns):
            chosen.setdefault(traced.storage, traced)  # one tensor with two names is one layer
    return list(chosen.values())


def flatten(activation: Tensor, layer: Layer, n_inputs: int) -> Tensor:
    """Return an activation as `[inputs, neurons]`: its elements, or the mean of each channel; at least float32."""
    if activation.numel() != n_inputs * math.prod(layer.shape):
        raise ModelError(
            f"layer {layer.name!r} must keep its shape {layer.shape}, got {tuple(activation.shape[1:])}: "
            "give inputs of one size, or leave the layer out with layers=[...]"
        )
    if activation.dtype not in (torch.float32, torch.float64):
        activation = activation.float()
    if layer.channel_axis is None:
        return activation.reshape(n_inputs, -1)
    activation = activation.reshape(n_inputs, *layer.shape)
    if len(layer.shape) == 1:
        return activation
    if layer.channel_axis == 0:
        return channel_means(activation)
    return activation.mean([1 + k for k in range(len(layer.shape)) if k != layer.channel_axis])


def _ignore(name: str, activation: Tensor) -> None:
    pass
