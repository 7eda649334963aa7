"""The model under test: its inputs and outputs, and running it without changing it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from inspect import Parameter, Signature
from itertools import chain
from typing import Any, ClassVar, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from themis.data.items import Key, OtherInputs
from themis.errors import DataError, ModelError, ThemisError, UsageError, first_line, warn
from themis.oracle import Oracle, choose_oracle
from themis.target.activations import (
    ActivationTracer,
    Arguments,
    Granularity,
    Layer,
    OnActivation,
    Tracer,
    choose_layers,
    keep_fixed_layers,
    trace_activations,
)
from themis.target.compiled import ExportTracer, ScriptTracer, is_exported, script_parameters
from themis.target.detections import Detections, choose_output, detections_in
from themis.target.estimator import is_estimator
from themis.target.fingerprint import hash_model
from themis.target.output import Output, in_label_order, own_output, pick_scores, without_wrapper
from themis.target.traits import Channels, as_expected, choose_channels, own_statistics

AUTOCAST_TYPES = ("bfloat16", "float16")
UNBOUNDED = (-math.inf, math.inf)
"""Bounds that are not known yet; for a table, the range of its features replaces them."""


@runtime_checkable
class AnyTarget(Protocol):
    """Anything that can be tested: a `Target` around a PyTorch model, a `BlackBox` around a function, or your own."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest value of a raw input."""

    @property
    def oracle(self) -> str | Oracle: ...

    @property
    def device(self) -> torch.device:
        """Device of inputs, outputs and activations."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def has_gradient(self) -> bool:
        """Whether targets of this type can be differentiated; `is_differentiable` checks whether this one can."""

    def find_layers(self, example: Tensor) -> tuple[Layer, ...]:
        """Return the layers whose neurons are tested; `example` is one raw input `[...]`."""

    def forward(
        self, inputs: Tensor, on_activation: OnActivation | None = None, layers: dict[str, Layer] | None = None
    ) -> Tensor:
        """Return the scores on raw `inputs`, one row per input.

        `on_activation` is called once with each of `layers`, but with the output only if it differs from the scores.
        """

    def opened(self) -> AbstractContextManager[None]:
        """Prepare the target for use, and restore it when the context ends."""

    def fingerprint(self) -> str:
        """Return 64 hex digits that change with the model."""


class Normalize:
    """`(inputs - mean) / std` per channel, as part of the target, so that perturbations act on raw inputs."""

    def __init__(self, mean: Sequence[float] | float, std: Sequence[float] | float) -> None:
        self.mean = torch.as_tensor(mean, dtype=torch.float32).reshape(-1)
        self.std = torch.as_tensor(std, dtype=torch.float32).reshape(-1)
        if not bool((self.std > 0).all()):
            raise UsageError(f"Normalize: std must be positive, got {std}: give the standard deviation of each channel")

    def __call__(self, inputs: Tensor) -> Tensor:
        axis = 2 if inputs.ndim == 5 and inputs.shape[2] <= 4 else 1  # clips [batch, frame, channel, height, width]
        n_channels = inputs.shape[axis]
        for name, value in (("mean", self.mean), ("std", self.std)):
            if len(value) not in (1, n_channels):
                raise DataError(
                    f"Normalize: {name} must have one value, or one per channel, got {len(value)} for inputs with "
                    f"{n_channels} channels: inputs are [batch, channel, ...]"
                )
        shape = (1,) * axis + (-1,) + (1,) * (inputs.ndim - axis - 1)
        mean, std = self.mean, self.std
        if inputs.device.type != "cpu":  # cached, because copying to a GPU waits for the GPU
            mean, std = (_constant(tuple(value.tolist()), inputs.dtype, inputs.device) for value in (mean, std))
        return (inputs - mean.to(inputs).view(shape)) / std.to(inputs).view(shape)

    @staticmethod
    def of(model: Any, bounds: tuple[float, float] = (0.0, 1.0)) -> Normalize:
        """The normalisation in the configuration of a timm or transformers model, for raw inputs in `bounds`."""
        statistics = own_statistics(model)
        if statistics is None:
            raise UsageError(
                f"the configuration of {type(model).__name__} must have a mean and a standard deviation, as models of "
                "timm and transformers do, but it has none: write Normalize(mean, std)"
            )
        return Normalize.within(bounds, *statistics)

    @staticmethod
    def within(bounds: tuple[float, float], mean: Sequence[float], std: Sequence[float]) -> Normalize:
        """The normalisation of inputs in `bounds` by the mean and the standard deviation of inputs in 0..1."""
        low, size = bounds[0], bounds[1] - bounds[0]
        return Normalize([low + size * value for value in mean], [size * value for value in std])

    def __repr__(self) -> str:
        return f"Normalize(mean={self.mean.tolist()}, std={self.std.tolist()})"


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """The options that `Target` and `BlackBox` share; the documentation of `Target` describes them."""

    bounds: tuple[float, float] = (0.0, 1.0)
    preprocess: Callable[[Tensor], Tensor] | None = None
    layers: str | Sequence[str] = "auto"
    neurons: Granularity = "element"
    oracle: str | Oracle = "auto"
    output: Output | Detections | None = field(default=None, repr=False)
    label_order: Sequence[int] | None = field(default=None, repr=False)
    channels: Channels = field(default="auto", repr=False)
    perturbed: str | int | None = field(default=None, repr=False)
    version: str = ""

    def settle(self, output: Any, module: nn.Module | None = None) -> None:
        """Check the options, and convert those that can be given in several forms."""
        settled = {
            "bounds": check_bounds(self.bounds),
            "output": choose_output(output),
            "channels": choose_channels(self.channels, module),
        }
        if self.neurons not in get_args(Granularity):
            raise UsageError(f"neurons must be 'element' or 'channel', got {self.neurons!r}")
        choose_oracle(self.oracle)  # refuses an unknown name
        if self.preprocess is not None and not callable(self.preprocess):
            raise UsageError(
                f"preprocess must be a function, such as themis.Normalize(mean, std), got {self.preprocess!r}"
            )
        order = self.label_order
        if order is not None and sorted(order) != list(range(len(order))):
            raise UsageError(f"label_order must hold each label from 0 on once, got {list(order)[:20]}: one per output")
        for name, value in settled.items():
            object.__setattr__(self, name, value)

    def __getstate__(self) -> dict[str, Any]:
        """The options, without anything computed from them, such as a tracer or a cache."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def side_inputs(self) -> SideInputs:
        """The other inputs of the examples, if the data has several inputs per example."""
        return SideInputs()


@dataclass(frozen=True)
class Target(TargetOptions):
    """A model under test.

    Args:
        module: Any `nn.Module`, or `YOLO(...)` of Ultralytics; it is run in evaluation mode and restored afterwards.
        bounds: Lowest and highest value of a raw input; every test stays inside. For a table, `(-inf, inf)` is replaced
            by the range of its features.
        preprocess: Applied to raw inputs before the model: `Normalize`, or any differentiable function. For models that
            take a list with one tensor per input, it may return such a list; `preprocess=list` does only that. It gets
            float32. A float32 result is cast to the type of the weights, another type is passed on to the model.
        layers: `auto` (after each activation, and the output) or glob patterns of layer names.
        neurons: `element` (each element of an activation is a neuron, as in the paper) or `channel` (the mean of each
            channel is a neuron).
        oracle: Defines a fault. One of `wrong`, `changed`, `topK`, `threshold`, `multilabel`, `regression`, `off`,
            `segmentation`, `keypoints` and `detection`, some of which take a number, such as `regression:0.1`; or
            `Compare(function)`; or `auto`, which chooses by the outputs and the labels.
        output: Picks the scores from a result that is not a tensor: the name of a key or attribute, an index, or a
            function. By default, the entry `logits` or `out`, or the only tensor. For a detector, `Detections` or the
            name of its form, such as `yolo`; results of torchvision and DETR are recognised.
        label_order: The label of each output, if the labels are in another order than the outputs.
        channels: Where the model expects the channels of a picture: `first`, `last`, or `auto`, which is `last` for
            Keras models that say so. Perturbations always get the channels first; data with the channels last is
            converted.
        perturbed: The input to perturb, by name or position, if the data has several inputs per example. By default,
            the first one with floating-point numbers.
        version: Identifies the model in addition to its weights, for instance by the hash of its file.
        autocast: `bfloat16` or `float16` to run the model with `torch.autocast`, that is, with fewer bits where that is
            considered safe. Its answers and sensitivities then differ slightly.
    """

    has_gradient: ClassVar[bool] = True
    """Modules can be differentiated, unless `is_differentiable` finds that this one cannot."""

    module: nn.Module
    autocast: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.module, nn.Module):
            kind = type(self.module).__name__
            remedy = "pass program.module()" if kind == "ExportedProgram" else "pass the model itself"
            if is_estimator(self.module):
                remedy = "pass it to themis.run as it is, or as themis.BlackBox(estimator, ...) with options"
            raise UsageError(f"Target needs an nn.Module, got {kind}: {remedy}")
        object.__setattr__(self, "module", without_wrapper(self.module))
        if self.autocast is not None and self.autocast not in AUTOCAST_TYPES:
            raise UsageError(f"autocast must be {' or '.join(AUTOCAST_TYPES)}, or None, got {self.autocast!r}")
        if any(map(_is_compiled, self.module.modules())):
            warn(
                "the model was compiled with torch.compile, and is tested as it was before: the activations of a "
                "compiled model cannot be observed; its outputs may differ in the last bits"
            )
        object.__setattr__(self, "module", getattr(self.module, "_orig_mod", self.module))  # torch.compile's wrapper
        self.settle(own_output(self.module) if self.output is None else self.output, self.module)

    @property
    def device(self) -> torch.device:
        """The device of the model's weights."""
        return next((tensor.device for tensor in _tensors(self.module)), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The model's floating-point type; inputs are cast to it, unless preprocessing chose another."""
        for tensor in chain(self.module.parameters(), self.module.buffers()):
            if tensor.is_floating_point():
                return tensor.dtype
        return torch.float32

    @cached_property
    def tracer(self) -> Tracer:
        """The tracer that suits the module: eager, TorchScript or torch.export."""
        if isinstance(self.module, torch.jit.ScriptModule):
            return ScriptTracer(self.module)
        return ExportTracer(self.module) if is_exported(self.module) else ActivationTracer(self.module)

    def fingerprint(self) -> str:
        """Return the SHA-256 of all parameters and buffers, and of `version`."""
        _refuse_missing_weights(self.module)
        return hash_model(self.module, self.version + (f" autocast {self.autocast}" if self.autocast else ""))

    def find_layers(self, example: Tensor) -> tuple[Layer, ...]:
        """Return the layers whose neurons are tested; `example` is one raw input `[...]`."""

        def batch(n: int) -> Any:
            return self.prepare(example[None].expand(n, *example.shape).contiguous())

        is_detector, prepared = False, batch(1)

        def output(result: Any) -> Tensor:
            nonlocal is_detector
            is_detector = detections_in(result, self.output) is not None
            return self._scores(result, example[None], prepared)

        has_conv1d = any(
            isinstance(module, nn.Conv1d) or getattr(module, "original_name", "") == "Conv1d"
            for module in self.module.modules()
        )
        with explain_errors(example[None], self.bounds, self.module), self._autocast():
            two, three = (trace_activations(self.tracer, batch(n), output) for n in (2, 3))
            if is_detector:  # it may loop over pictures, and what it does not compute for every batch is not a layer
                common = {traced.name for traced in two} & {traced.name for traced in three}
                two, three = ([traced for traced in each if traced.name in common] for each in (two, three))
            is_last = self.channels == "last"
            found = choose_layers(
                two, three, self.layers, self.neurons, has_conv1d=has_conv1d, has_channels_last=is_last
            )
            if not is_detector or self.layers != "auto":
                return found
            others = self.prepare(torch.stack([example, torch.full_like(example, float(example.mean()))]))
            return keep_fixed_layers(self.tracer, others, found)

    def forward(
        self, inputs: Tensor, on_activation: OnActivation | None = None, layers: dict[str, Layer] | None = None
    ) -> Tensor:
        """Return the model's scores on raw `inputs`; `on_activation` gets the activation of each of `layers`."""
        with explain_errors(inputs, self.bounds, self.module):
            prepared = self.prepare(inputs)
            with self._autocast():
                if on_activation is None:
                    result = self.tracer.run(prepared)
                else:
                    result = self.tracer.forward(prepared, on_activation, layers or ())
            return one_per_input(self._scores(result, inputs, prepared), len(inputs))

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Put the model into evaluation mode; afterwards, restore its flags, parameters and buffers to the last bit."""
        _refuse_missing_weights(self.module)
        modules = list(self.module.modules())
        modes = [(module, module.training) for module in modules if hasattr(module, "training")]
        saved = _save(self.module)
        if is_exported(self.module):  # keeps the mode in which it was exported, and refuses eval()
            for module in modules:
                module.training = False
        else:
            self.module.eval()
        try:
            object.__setattr__(self, "_saved", saved)
            set_stance: Any = getattr(torch.compiler, "set_stance", None)  # since torch 2.6
            is_compiled = any(map(_is_compiled, modules))  # runs eagerly, so that activations can be observed
            with set_stance("force_eager") if set_stance and is_compiled else nullcontext():
                yield
        finally:
            self.__dict__.pop("_saved", None)
            for module, training in modes:
                module.training = training
            for each in saved:
                each.put_back()
            for each in _changed(saved):
                each.restore()

    def changed_tensors(self) -> list[str]:
        """Names of parameters and buffers that forward passes have changed since the target was opened.

        Integers are ignored, because they usually count passes and hardly influence answers.
        """
        saved: list[_Saved] = self.__dict__.get("_saved", [])
        return [each.path for each in _changed([each for each in saved if each.copy.is_floating_point()])]

    def prepare(self, inputs: Tensor) -> Any:
        """Return raw `inputs` preprocessed: a tensor, or a list with one per input.

        The model gets copies, which it may overwrite. Tensors with the type of the raw inputs are cast to the type of
        the model; another type was chosen by the preprocessing and is kept.
        """
        own = inputs if isinstance(self.preprocess, Normalize) else inputs.clone()
        prepared: Any = own if self.preprocess is None else self.preprocess(own)

        def cast(item: Tensor) -> Tensor:
            return item.to(self.dtype) if item.dtype == inputs.dtype else item

        if isinstance(prepared, list | tuple):
            return [cast(item) for item in prepared]
        expected = as_expected(cast(prepared), self.channels)
        if self.side_inputs.others is None:
            return expected
        rows = self.side_inputs.rows(len(expected))
        others = {key: row.to(self.dtype) if row.is_floating_point() else row for key, row in rows.items()}
        return self.side_inputs.arguments(expected, others, self.module)

    def scores(self, result: Any) -> Tensor:
        """Return the scores in the module's result."""
        if isinstance(self.output, Detections) or detections_in(result, self.output):
            raise UsageError("the answers of a detector are boxes, not scores by class: use another criterion")
        scores, entry = pick_scores(result, self.output)
        object.__setattr__(self, "_entry", entry)
        return in_label_order(scores, self.label_order)

    @property
    def entry(self) -> str | None:
        """A description of the entry of the model's last result that held the scores; None if it was a tensor."""
        return getattr(self, "_entry", None)

    def _scores(self, result: Any, inputs: Tensor, prepared: Any) -> Tensor:
        """Return the scores, or the detections of a detector, in the module's result for these inputs."""
        detections = detections_in(result, self.output)
        if detections is None:
            return self.scores(result)
        shape = prepared[0].shape
        return detections.read(result, shape[:2] if self.channels == "last" else shape[-2:], inputs.shape)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        # No cache, because copies of weights that outlive a pass cannot be part of a captured graph.
        return torch.autocast(self.device.type, getattr(torch, self.autocast), cache_enabled=False)


def one_per_input(scores: Tensor, n: int) -> Tensor:
    """Refuse scores that do not have one row for each of `n` inputs; otherwise return them."""
    if scores.ndim == 0 or len(scores) != n:
        raise ModelError(
            f"the model must return one output per input, got shape {list(scores.shape)} for {n} inputs: return a row "
            "for each, or pass output=... to pick the scores"
        )
    return scores


@cache
def _constant(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # so that it can take part in a gradient later
        return torch.tensor(numbers, dtype=torch.float32).to(device, dtype)


def check_bounds(bounds: Any) -> tuple[float, float]:
    """Refuse invalid bounds; otherwise return them as two numbers."""
    try:
        low, high = (float(bound) for bound in bounds)
    except (TypeError, ValueError):
        raise UsageError(f"bounds must be two numbers, got {bounds!r}: write bounds=(0, 1)") from None
    is_finite = math.isfinite(low) and math.isfinite(high)
    if not ((is_finite and low < high) or (low, high) == UNBOUNDED):
        raise UsageError(f"bounds must be finite and ascending, got {bounds}: write bounds=(0, 1)")
    return low, high


def refuse_target_options(options: Iterable[str]) -> None:
    """Refuse options of a target that were passed to a campaign."""
    of_target = {field.name for field in fields(Target)}
    for name in options:
        if name in of_target:
            raise UsageError(
                f"{name} is an option of the target, not of the campaign: pass themis.Target(model, {name}=...)"
            )


@contextmanager
def explain_errors(inputs: Tensor, bounds: tuple[float, float], module: nn.Module | None = None) -> Iterator[None]:
    """Turn anything a model raises on `inputs` into a `ModelError` that says what to check."""
    try:
        yield
    except ThemisError:
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        before, free, _ = first_line(error).partition(" is free")  # a list of all processes on the GPU follows
        raise ModelError(
            f"out of memory on {inputs.device} with a batch of {len(inputs)}: pass a smaller clean_memory_gib, use "
            f"neurons='channel' or a smaller model, or run fewer processes beside it ({before}{free})"
        ) from error
    except Exception as error:
        remedy = None if module is None else _remedy(module, tuple(inputs.shape))
        raise ModelError(
            f"the model raised {type(error).__name__} on inputs {list(inputs.shape)} in {bounds}: {_reason(error)}; "
            f"{remedy or 'check that it accepts this shape, and check the preprocess option of Target'}"
        ) from error


def _reason(error: Exception) -> str:
    """The text of an error, or its last line for a TorchScript error, which begins with the program's code."""
    text = str(error).strip()
    is_script = text.startswith("The following operation failed in the TorchScript interpreter")
    return text.splitlines()[-1].strip().removeprefix("RuntimeError: ") if is_script else text


def permutation_that_fits(shape: Sequence[int], fits: Callable[[Sequence[int]], bool]) -> str | None:
    """Return advice on how to permute the axes of inputs `[batch, ...]` so that a model accepts them, or None."""
    if fits(shape):
        return None
    axes = range(1, len(shape))
    # Only moves of a single axis are tried, starting with those to the front, as channels last is a common mistake.
    moves = [(k, *(axis for axis in axes if axis != k)) for k in axes]
    moves += [(*(axis for axis in axes if axis != k), k) for k in axes]
    for move in moves:
        permuted = [shape[0], *(shape[axis] for axis in move)]
        if fits(permuted):
            return f"permute each input to {permuted[1:]}, for instance with inputs.permute{(0, *move)}"
    return None


def _remedy(module: nn.Module, shape: tuple[int, ...]) -> str | None:
    """Return a remedy for an error on inputs of a shape: another order or number of axes, or a single device."""
    devices = sorted({str(tensor.device) for tensor in _tensors(module)})
    if len(devices) > 1:
        return f"its weights are on {' and '.join(devices)}: move them to one device with model.to({devices[0]!r})"
    for path, layer in module.named_modules():
        channels, features = getattr(layer, "in_channels", None), getattr(layer, "in_features", None)
        if not isinstance(channels or features, int):
            continue

        def fits(shape: Sequence[int], channels: Any = channels, features: Any = features) -> bool:
            return len(shape) > 2 and (shape[1] == channels if channels else shape[-1] == features)

        if channels == 1 and len(shape) == 1 + len(getattr(layer, "kernel_size", ())):
            return f"its layer {path!r} expects an axis of channels, which the inputs lack: pass inputs[:, None]"
        if fits(shape):
            return None
        expected = f"{channels} channels first" if channels else f"{features} features last"
        return f"its layer {path!r} expects {expected}: {permutation_that_fits(shape, fits) or 'give such inputs'}"
    return None


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile wrapped a module, or `module.compile()` was called."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _refuse_missing_weights(module: nn.Module) -> None:
    for path, part in module.named_modules():
        if any(map(is_lazy, chain(part.parameters(recurse=False), part.buffers(recurse=False)))):
            raise ModelError(
                f"the model must have its weights, but its {type(part).__name__} {path!r} gets them from the first "
                "batch: load them, or run it once on a batch of inputs"
            )
    if any(tensor.is_meta for tensor in _tensors(module)):
        raise ModelError("the model must have its weights, but some are on device 'meta' and have no values: load them")


@dataclass(frozen=True)
class _Saved:
    """A parameter or buffer of an open target with its values before, because passes may write to it or replace it."""

    path: str
    owner: nn.Module
    table: dict[str, Any]
    """The owner's dict of parameters or buffers; not used for TorchScript."""
    tensor: Tensor | None
    data: Tensor
    """The memory of the tensor."""
    copy: Tensor
    """A copy of the values."""

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    def has_changed(self) -> bool | Tensor:
        """Whether it has; a comparison of values on an accelerator is a tensor, for which nobody has waited yet."""
        tensor: Any = getattr(self.owner, self.name, None)
        is_plain = type(tensor) in (Tensor, nn.Parameter) and not self.copy.is_quantized
        if self.tensor is None or not is_plain or tensor.layout != torch.strided or tensor.is_meta:
            return False
        if tensor is self.tensor and self._has_moved(tensor):
            return True
        if (tensor.shape, tensor.dtype, tensor.device) != (self.copy.shape, self.copy.dtype, self.copy.device):
            return False  # a growing cache, rather than statistics
        return not torch.equal(tensor, self.copy) if tensor.is_cpu else (tensor != self.copy).any()

    def is_different(self) -> bool:
        """Whether a tensor that seems to have changed is not merely NaN where it was NaN before."""
        tensor: Tensor = getattr(self.owner, self.name)
        has_moved = self.tensor is tensor and self._has_moved(tensor)
        return has_moved or not torch.allclose(tensor, self.copy, rtol=0, atol=0, equal_nan=True)

    def _has_moved(self, tensor: Tensor) -> bool:
        """Whether the tensor uses other memory than before."""
        here, before = ((each.data_ptr(), each.shape, each.stride()) for each in (tensor, self.data))
        return here != before

    def put_back(self) -> None:
        """Put the original tensor back into its owner."""
        if not isinstance(self.owner, torch.jit.ScriptModule):
            self.table[self.name] = self.tensor
        elif self.tensor is not None and getattr(self.owner, self.name) is not self.tensor:
            setattr(self.owner, self.name, self.tensor)

    def restore(self) -> None:
        """Restore the values of a tensor that was put back."""
        assert self.tensor is not None
        with torch.inference_mode(self.tensor.is_inference()), torch.no_grad():
            if self._has_moved(self.tensor):
                self.tensor.data = self.data
            self.tensor.copy_(self.copy)


def _changed(saved: Sequence[_Saved]) -> list[_Saved]:
    """Those that have changed; the host waits for an accelerator once rather than for each tensor."""
    flags = [each.has_changed() for each in saved]
    waited_for = [flag for flag in flags if isinstance(flag, Tensor)]
    known = iter(torch.stack([flag.to(waited_for[0].device) for flag in waited_for]).tolist() if waited_for else [])
    seem_changed = [next(known) if isinstance(flag, Tensor) else flag for flag in flags]
    return [each for each, seems in zip(saved, seem_changed, strict=True) if seems and each.is_different()]


def _save(module: nn.Module) -> list[_Saved]:
    saved, nothing = [], torch.empty(0)
    for path, owner in module.named_modules():
        for table in (owner._parameters, owner._buffers):
            for name, tensor in dict(table).items():
                data = nothing if tensor is None else tensor.detach()
                saved.append(_Saved(f"{path}.{name}".lstrip("."), owner, table, tensor, data, data.clone()))
    return saved


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())


class SideInputs:
    """The other inputs of the examples in the next batch, if the data has several inputs per example."""

    def __init__(self) -> None:
        self.others: OtherInputs | None = None

    def rows(self, n: int) -> dict[Key, Tensor]:
        """The other inputs of `n` examples, by name or position; none if the data has one input."""
        tensors = {} if self.others is None else self.others.tensors
        return {key: _rows(tensor, n, key) for key, tensor in tensors.items()}

    def arguments(self, perturbed: Any, others: dict[Key, Any], model: Callable[..., Any]) -> Arguments:
        """The arguments of a model: the perturbed inputs and the others, in the order of the data.

        They are keyword arguments if the data names them and the model accepts the names, or positional arguments if
        the model accepts their number; otherwise, the model gets one dict or tuple.
        """
        assert self.others is not None
        inputs = {key: perturbed if key == self.others.perturbed else others[key] for key in self.others.keys}
        has_names = all(isinstance(key, str) for key in inputs)
        named = {str(key): value for key, value in inputs.items()}
        given = Arguments((), named) if has_names else Arguments(tuple(inputs.values()), {})
        try:
            _signature(model).bind_partial(*given.args, **given.kwargs)
        except TypeError:
            return Arguments((inputs if has_names else given.args,), {})
        return given


def _signature(model: Callable[..., Any]) -> Signature:
    """The signature of a function or a module; a single parameter if it is unknown."""
    if isinstance(model, torch.jit.ScriptModule):
        return Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in script_parameters(model)])
    try:
        return inspect.signature(model.forward if isinstance(model, nn.Module) else model)
    except (TypeError, ValueError):  # a C function
        return Signature([Parameter("inputs", Parameter.POSITIONAL_ONLY)])


def _rows(tensor: Tensor, n: int, key: Key) -> Tensor:
    if len(tensor) == 1:
        return tensor.expand(n, *tensor.shape[1:])
    if len(tensor) != n:
        raise ModelError(
            f"the input {key!r} must have a row for each of {n} perturbed inputs, got {len(tensor)}: several inputs "
            "per example are not supported here"
        )
    return tensor
