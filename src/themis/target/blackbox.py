"""Any function as a target: ONNX, another framework, a remote service."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from themis.data.features import Coding
from themis.data.rows import as_array
from themis.data.several import Key
from themis.errors import DataError, ModelError, UsageError
from themis.options import check_count
from themis.oracle import Oracle
from themis.target.activations import OUTPUT, Granularity, Layer, OnActivation, TracedActivation, choose_layers
from themis.target.detections import FORMS, Detections, choose_output, not_pictures, recognise, scale_boxes
from themis.target.estimator import Estimator, is_estimator
from themis.target.fingerprint import hash_text
from themis.target.output import check_label_order, in_label_order
from themis.target.requests import CACHE_MIB, Answers, Examples, Requests
from themis.target.several import SideInputs
from themis.target.target import UNBOUNDED, AnyTarget, Target, check_options, check_preprocess, explain_errors
from themis.target.traits import Channels, as_expected, choose_channels

Array = NDArray[Any]


@dataclass(frozen=True)
class BlackBox:
    """A function under test, from NumPy arrays to NumPy arrays.

    It has no gradient: policies that need one use finite differences. It is sent exactly the inputs that are counted as
    passes; `requests.sent` counts them.

    Args:
        predict: Maps `inputs [inputs, ...]` (float32, or what `preprocess` returns) to scores with one row per input,
            or to a pair of such scores and a dict of activations by layer, each with one row per input. Or an estimator
            of scikit-learn, XGBoost or LightGBM, or any other with a method `predict_proba`, `decision_function` or
            `predict`. If the data has several inputs per example, it gets one array for each, as the `forward` of a
            module would.
        bounds: As for `Target`.
        activations: A separate function that returns such a dict. Without activations, the output is the only layer.
        preprocess: As for `Target`.
        layers: As for `Target`.
        neurons: As for `Target`.
        oracle: As for `Target`.
        output: A function that picks the scores from what `predict` returned; for a detector, as for `Target`.
        version: Identifies the model, for instance by the hash of its file; a run can only be resumed with the same
            version. By default it is the hash of an estimator, or the name of a function, which says nothing about
            its weights.
        label_order: As for `Target`.
        channels: As for `Target`; `auto` is `first`.
        perturbed: As for `Target`.
        batch_size: Most inputs per call of `predict`; by default, and at most, those of a chunk of tests, up to 256.
        workers: Calls that are made at the same time, in threads: for a remote model.
        retries: How often a call that raises is made again, after 0.5 s, 1 s, 2 s, and so on up to a minute.
        rate: Most calls per second.
        cache: True keeps answers in memory, up to 256 MiB, and sends no input again whose answer is kept; a number is
            another limit in MiB. Replaying a fault asks the model in any case.
        coding: How inputs become rows of a DataFrame, which `predict` then gets. A campaign takes it from data with
            names or missing values.
    """

    predict: Callable[..., Any]
    _: KW_ONLY
    bounds: tuple[float, float] = (0.0, 1.0)
    activations: Callable[..., Mapping[str, Array]] | None = None
    preprocess: Callable[[Tensor], Tensor] | None = None
    layers: str | Sequence[str] = "auto"
    neurons: Granularity = "element"
    oracle: str | Oracle = "auto"
    output: Callable[[Any], Tensor] | Detections | str | None = None
    version: str = ""
    label_order: Sequence[int] | None = None
    channels: Channels = "auto"
    perturbed: str | int | None = None
    batch_size: int | None = None
    workers: int = 1
    retries: int = 0
    rate: float | None = None
    cache: bool | float = False
    coding: Coding | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.predict) and is_estimator(self.predict):
            object.__setattr__(self, "predict", Estimator(self.predict))
        for name, function in (("predict", self.predict), ("activations", self.activations)):
            if function is not None and not callable(function):
                raise UsageError(f"BlackBox: {name} must be a function of an array, got {type(function).__name__}")
        object.__setattr__(self, "bounds", check_options(self.bounds, self.neurons, self.oracle))
        check_preprocess(self.preprocess)
        check_label_order(self.label_order)
        object.__setattr__(self, "channels", choose_channels(self.channels))
        if isinstance(self.output, str | int) and self.output not in FORMS:
            raise UsageError(
                f"BlackBox: output must be a function, Detections, or one of {', '.join(FORMS)}, got {self.output!r}"
            )
        object.__setattr__(self, "output", choose_output(self.output))
        if self.batch_size is not None:
            check_count("BlackBox: batch_size", self.batch_size)
        check_count("BlackBox: workers", self.workers)
        check_count("BlackBox: retries", self.retries, least=0)
        for name, value in (("rate", self.rate), ("cache", self.cache)):
            is_number = isinstance(value, int | float) and isfinite(value)
            if value is not None and not (is_number and (value > 0 or (name == "cache" and value == 0))):
                raise UsageError(f"BlackBox: {name} must be a positive number, got {value!r}")

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the counts, the cache and the examples at hand, which belong to this process."""
        return {name: value for name, value in self.__dict__.items() if name not in ("requests", "side_inputs")}

    @cached_property
    def requests(self) -> Requests:
        """The calls of the function."""
        mib = CACHE_MIB if self.cache is True else float(self.cache)
        return Requests(
            self._answer,
            batch_size=self.batch_size,
            workers=self.workers,
            retries=self.retries,
            rate=self.rate,
            cache_bytes=int(mib * 2**20),
        )

    @cached_property
    def side_inputs(self) -> SideInputs:
        """The other inputs of the examples, if the data has several inputs per example."""
        return SideInputs()

    @property
    def entry(self) -> str | None:
        """Which entry of the model's result holds the scores, in words, if the function says so."""
        entry: str | None = getattr(self.predict, "entry", None)
        return entry

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the classes in the order of the scores, if the function knows them."""
        classes: tuple[str, ...] | None = getattr(self.predict, "classes", None)
        return classes

    @property
    def keeps_padding(self) -> bool:
        """Whether the function is sent batches of a fixed shape, padded by copies of the last input.

        True for programs on this machine whose last bits depend on the shape of a batch, such as ONNX.
        """
        return bool(getattr(self.predict, "keeps_padding", False))

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
        own = self.predict.version if isinstance(self.predict, Estimator) else ""
        return hash_text(self.version or own or f"{kind.__module__}:{kind.__qualname__}")

    def find_layers(self, example: Tensor) -> tuple[Layer, ...]:
        """Return the layers whose neurons are tested; `example` is one raw input `[...]`."""
        two, three = (self._trace(example[None].expand(n, *example.shape)) for n in (2, 3))
        layers = self.layers if isinstance(self.layers, str) else tuple(self.layers)
        return choose_layers(two, three, layers, self.neurons, has_channels_last=self.channels == "last")

    def forward(
        self, inputs: Tensor, on_activation: OnActivation | None = None, layers: dict[str, Layer] | None = None
    ) -> Tensor:
        """Return the scores on raw `inputs`; `on_activation` gets the activation of each of `layers`."""
        others = self.side_inputs.rows(len(inputs))
        n_sent = len(inputs) if self.keeps_padding else max(map(_without_padding, (inputs, *others.values())))
        sent = {key: values[:n_sent] for key, values in others.items()}
        answers = self._request(inputs[:n_sent], sent, needs_activations=on_activation is not None)
        if n_sent < len(inputs):
            answers = answers.rows(torch.arange(len(inputs)).clamp(max=n_sent - 1))
        if on_activation is not None:
            for name, activation in (answers.activations or {}).items():
                if name in (layers or ()):
                    on_activation(name, activation)
        return answers.outputs

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Do nothing: a function has no mode to set."""
        yield

    def _trace(self, inputs: Tensor) -> list[TracedActivation]:
        with self.requests.fresh():
            answers = self._request(inputs.contiguous(), self.side_inputs.rows(len(inputs)), needs_activations=True)
        shapes = {name: tuple(values.shape) for name, values in (answers.activations or {}).items()}
        if OUTPUT in shapes:
            raise UsageError(f"a layer must not be named {OUTPUT!r}, which is the name of the output: rename it")
        shapes[OUTPUT] = tuple(answers.outputs.shape)
        return [
            TracedActivation(name, shape, (k, 0, 0), is_activation=True)
            for k, (name, shape) in enumerate(shapes.items())
        ]

    def _request(self, inputs: Tensor, others: dict[Key, Tensor], needs_activations: bool) -> Answers:
        with explain_errors(inputs, self.bounds), torch.no_grad():
            own = inputs.detach().clone()
            prepared = own if self.preprocess is None else self.preprocess(own)
            expected = as_array(as_expected(prepared, self.channels))
            batch = Examples(expected, {key: values.numpy() for key, values in others.items()})
            answers = self.requests(batch, needs_activations)
            if not isinstance(self.output, Detections):
                return answers
            return replace(answers, outputs=scale_boxes(answers.outputs, prepared.shape[-2:], inputs.shape[-2:]))

    def _answer(self, batch: Examples, needs_activations: bool) -> Answers:
        """The answers of the function to one batch."""
        inputs = batch.inputs
        kept = batch.copy() if needs_activations and self.activations is not None else batch
        result = self._call(self.predict, batch)
        activations: Mapping[str, Array] = {}
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
            result, activations = result
        if needs_activations and self.activations is not None:
            activations = {**activations, **self._call(self.activations, kept)}
        outputs = self._outputs(result, inputs)
        if outputs.ndim == 0 or len(outputs) != len(inputs):
            raise ModelError(
                f"the model must return one output per input, got shape {list(outputs.shape)} for {len(inputs)} "
                "inputs: return an array with one row per input"
            )
        if not needs_activations:
            return Answers(outputs, None)
        return Answers(outputs, {name: as_tensor(value, f"layer {name!r}") for name, value in activations.items()})

    def _call(self, function: Callable[..., Any], batch: Examples) -> Any:
        """What a function returns for a batch: with one array, or with those of several inputs per example."""
        if self.coding is not None:
            return function(self.coding.frame(batch.inputs))
        if not batch.others:
            return function(batch.inputs)
        arguments = self.side_inputs.arguments(batch.inputs, dict(batch.others), function)
        return function(*arguments.args, **arguments.kwargs)

    def _outputs(self, result: Any, inputs: Array) -> Tensor:
        """Return what the function returned as a tensor: its scores, or the detections of a detector."""
        if isinstance(result, np.ndarray) and result.dtype != object:
            result = as_tensor(result, "the output")
        output = self.output
        if output is None and recognise(result) is not None:
            if self.preprocess is not None:
                raise UsageError(
                    "BlackBox: a detector with a preprocess function must name its form: pass output='rows' or another"
                )
            output = Detections()
        if isinstance(output, Detections):
            if inputs.ndim != 4:
                raise DataError(not_pictures(inputs.shape[1:]))
            return output.read(result, inputs.shape[-2:], inputs.shape[-2:])
        assert not isinstance(output, str)
        scores = as_tensor(result if output is None else output(result), "the output")
        return in_label_order(scores, self.label_order)


def fresh_answers(target: AnyTarget) -> AbstractContextManager[None]:
    """A block in which a target computes every answer anew, even if a cache has it."""
    return target.requests.fresh() if isinstance(target, BlackBox) else nullcontext()


def _without_padding(inputs: Tensor) -> int:
    """The number of inputs up to the first of the copies of the last one that a batch may end with."""
    differs = (inputs != inputs[-1:]).reshape(len(inputs), -1).any(1).nonzero()
    return 1 if not len(differs) else int(differs[-1]) + 2


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


def as_target(target: Any) -> AnyTarget:
    """Return `target` itself, or a target with default options if it is a bare module or an estimator."""
    if isinstance(target, nn.Module):
        return Target(target)
    if isinstance(target, AnyTarget):
        return target
    if is_estimator(target):
        return BlackBox(target, bounds=UNBOUNDED)
    raise UsageError(
        "target must be a themis.Target, a themis.BlackBox, an nn.Module or an estimator with a method predict, got "
        f"{type(target).__name__}: {_how_to_pass(target)}"
    )


def _how_to_pass(target: Any) -> str:
    """What to write instead of an object that is no target."""
    if isinstance(target, str | Path):
        if str(target).endswith(".ckpt"):
            return "a checkpoint has no class: pass LitModel.load_from_checkpoint(path), with your LightningModule"
        return "load the model first, or name it in the shell: themis run --model"
    if isinstance(target, type):
        return f"pass a model of this class, such as {target.__name__}()"
    if isinstance(target, Mapping):
        return "load weights into a model with load_state_dict, and pass the model"
    if isinstance(target, tuple | list) or hasattr(target, "shape"):
        return "the model comes first, then the data"
    return "wrap a function that runs it on a batch of inputs as themis.BlackBox(function)"
