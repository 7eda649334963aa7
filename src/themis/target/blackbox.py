"""Any function as a target: ONNX, another framework, a remote service."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from math import isfinite
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from themis.data.features import Coding
from themis.data.items import Key
from themis.data.rows import as_array
from themis.errors import ModelError, UsageError
from themis.options import check_count
from themis.target.activations import OUTPUT, Layer, OnActivation, TracedActivation, choose_layers
from themis.target.detections import DETECTION_FORMS, Detections, detections_in, scale_boxes
from themis.target.estimator import Estimator, FileModel, MaiteModel, is_estimator, is_maite_model
from themis.target.fingerprint import hash_text
from themis.target.output import in_label_order
from themis.target.requests import Answers, Examples, Requests, rows_of
from themis.target.target import UNBOUNDED, AnyTarget, Target, TargetOptions, explain_errors, one_per_input
from themis.target.traits import as_expected

Array = NDArray[Any]


@dataclass(frozen=True)
class BlackBox(TargetOptions):
    """A function under test, from NumPy arrays to NumPy arrays.

    It has no gradient, so policies that need one use finite differences. It is sent exactly the inputs that count as
    passes; `requests.sent` has their number. The options `bounds`, `preprocess`, `layers`, `neurons`, `oracle`,
    `label_order`, `channels` and `perturbed` are those of `Target`.

    Args:
        predict: Maps `inputs [inputs, ...]` (float32, or what `preprocess` returns) to scores with one row per input,
            or to a pair of such scores and a dict of activations by layer, each with one row per input. Without
            activations, the output is the only layer. Instead of a function, an estimator of scikit-learn, XGBoost or
            LightGBM, another object with a method `predict_proba`, `decision_function` or `predict`, or a MAITE model.
            If the data has several inputs per example, it gets one array for each, like the `forward` of a module.
        output: A function that picks the scores from the result of `predict`; for a detector, as for `Target`.
        version: Identifies the model, for instance by the hash of its file; a run can only be resumed with the same
            version. By default, it is the hash of an estimator or an ONNX file, or the name of a function, which does
            not identify its weights.
        batch_size: Most inputs per call of `predict`; by default, and at most, a chunk of tests, which is up to 256.
        workers: Number of concurrent calls, in threads, for a remote model.
        retries: How often a call that raises is repeated, after 0.5 s, 1 s, 2 s, and so on up to a minute.
        rate: Largest number of calls per second.
        coding: How to convert inputs to rows of a DataFrame, which `predict` then gets. A campaign takes it from data
            with names or missing values.
    """

    device: ClassVar[torch.device] = torch.device("cpu")
    dtype: ClassVar[torch.dtype] = torch.float32
    has_gradient: ClassVar[bool] = False

    predict: Callable[..., Any]
    _: KW_ONLY
    batch_size: int | None = None
    workers: int = 1
    retries: int = 0
    rate: float | None = None
    coding: Coding | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if is_maite_model(self.predict):
            object.__setattr__(self, "predict", MaiteModel(self.predict))
        if not callable(self.predict) and is_estimator(self.predict):
            object.__setattr__(self, "predict", Estimator(self.predict))
        if not callable(self.predict):
            raise UsageError(f"BlackBox: predict must be a function of an array, got {type(self.predict).__name__}")
        if isinstance(self.output, str | int) and self.output not in DETECTION_FORMS:
            raise UsageError(
                f"output must be a function, Detections or one of {', '.join(DETECTION_FORMS)}, got {self.output!r}"
            )
        self.settle(self.output)
        if self.batch_size is not None:
            check_count("BlackBox: batch_size", self.batch_size)
        check_count("BlackBox: workers", self.workers)
        check_count("BlackBox: retries", self.retries, least=0)
        rate = self.rate
        if rate is not None and not (isinstance(rate, int | float) and isfinite(rate) and rate > 0):
            raise UsageError(f"BlackBox: rate must be a positive number, got {rate!r}")

    @cached_property
    def requests(self) -> Requests:
        """The calls of the function."""
        return Requests(
            self._answer, batch_size=self.batch_size, workers=self.workers, retries=self.retries, rate=self.rate
        )

    @property
    def entry(self) -> str | None:
        """A description of the entry of the model's result that holds the scores, if the function has one."""
        return getattr(self.predict, "entry", None)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the classes in the order of the scores, if the function knows them."""
        return getattr(self.predict, "classes", None)

    @property
    def keeps_padding(self) -> bool:
        """Whether the function is sent batches of a fixed shape, padded with copies of the last input.

        True for local programs whose last bits depend on the shape of a batch, such as ONNX.
        """
        return bool(getattr(self.predict, "keeps_padding", False))

    def fingerprint(self) -> str:
        """Return the SHA-256 of `version`, or of the function's name."""
        kind = self.predict if hasattr(self.predict, "__qualname__") else type(self.predict)
        own = self.predict.version if isinstance(self.predict, Estimator | FileModel | MaiteModel) else ""
        return hash_text(self.version or own or f"{kind.__module__}:{kind.__qualname__}")

    def find_layers(self, example: Tensor) -> tuple[Layer, ...]:
        """Return the layers whose neurons are tested; `example` is one raw input `[...]`."""
        two, three = (self._trace(example[None].expand(n, *example.shape)) for n in (2, 3))
        return choose_layers(two, three, self.layers, self.neurons, has_channels_last=self.channels == "last")

    def forward(
        self, inputs: Tensor, on_activation: OnActivation | None = None, layers: dict[str, Layer] | None = None
    ) -> Tensor:
        """Return the scores on raw `inputs`; `on_activation` gets the activation of each of `layers`."""
        others = self.side_inputs.rows(len(inputs))
        n_sent = len(inputs) if self.keeps_padding else max(map(_without_padding, (inputs, *others.values())))
        sent = {key: values[:n_sent] for key, values in others.items()}
        answers = self._request(inputs[:n_sent], sent, needs_activations=on_activation is not None)
        if n_sent < len(inputs):
            answers = rows_of(answers, torch.arange(len(inputs)).clamp(max=n_sent - 1))
        if on_activation is not None:
            for name, activation in answers.items():
                if name != OUTPUT and name in (layers or ()):
                    on_activation(name, activation)
        return answers[OUTPUT]

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Do nothing, because a function has no mode to set."""
        yield

    def _trace(self, inputs: Tensor) -> list[TracedActivation]:
        answers = self._request(inputs.contiguous(), self.side_inputs.rows(len(inputs)), needs_activations=True)
        return [
            TracedActivation(name, tuple(values.shape), (k, 0, 0), is_activation=True)
            for k, (name, values) in enumerate(answers.items())
        ]

    def _request(self, inputs: Tensor, others: dict[Key, Tensor], needs_activations: bool) -> Answers:
        with explain_errors(inputs, self.bounds), torch.no_grad():
            own = inputs.detach().clone()
            prepared = own if self.preprocess is None else self.preprocess(own)
            expected = as_array(as_expected(prepared, self.channels))
            examples: Examples = {None: expected, **{key: values.numpy() for key, values in others.items()}}
            answers = self.requests(examples, needs_activations)
            if not isinstance(self.output, Detections):
                return answers
            return {**answers, OUTPUT: scale_boxes(answers[OUTPUT], prepared.shape[-2:], inputs.shape[-2:])}

    def _answer(self, batch: Examples, needs_activations: bool) -> Answers:
        """The answers of the function to one batch."""
        inputs, others = batch[None], {key: values for key, values in batch.items() if key is not None}
        if self.coding is not None:
            result = self.predict(self.coding.frame(inputs))
        elif others:
            arguments = self.side_inputs.arguments(inputs, others, self.predict)
            result = self.predict(*arguments.args, **arguments.kwargs)
        else:
            result = self.predict(inputs)
        activations: Mapping[str, Array] = {}
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
            result, activations = result
        outputs = one_per_input(self._outputs(result, inputs), len(inputs))
        if not needs_activations:
            return {OUTPUT: outputs}
        if OUTPUT in activations:
            raise UsageError(f"a layer must not be named {OUTPUT!r}, which is the name of the output: rename it")
        return {**{name: as_tensor(value, f"layer {name!r}") for name, value in activations.items()}, OUTPUT: outputs}

    def _outputs(self, result: Any, inputs: Array) -> Tensor:
        """Return the scores, or the detections of a detector, in the function's result."""
        if isinstance(result, np.ndarray) and result.dtype != object:
            result = as_tensor(result, "the output")
        detections = detections_in(result, self.output)
        if detections is not None:
            if self.output is None and self.preprocess is not None:
                raise UsageError("BlackBox: a detector with preprocess must name its form, such as output='rows'")
            return detections.read(result, inputs.shape[-2:], inputs.shape)
        pick: Any = self.output
        scores = as_tensor(result if pick is None else pick(result), "the output")
        return in_label_order(scores, self.label_order)


def _without_padding(inputs: Tensor) -> int:
    """The number of inputs without the copies of the last one with which a batch may be padded."""
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
    """Return `target` itself, or a target with default options for a module, an estimator or a MAITE model."""
    if isinstance(target, nn.Module) and not is_maite_model(target):
        return Target(target)
    if isinstance(target, AnyTarget):
        return target
    if is_maite_model(target) or is_estimator(target):
        return BlackBox(target, bounds=UNBOUNDED)
    raise UsageError(
        "target must be a themis.Target, a themis.BlackBox, an nn.Module or an estimator with a method predict, got "
        f"{type(target).__name__}: pass a loaded model before the data, or wrap a function that runs it on a batch of "
        "inputs as themis.BlackBox(function)"
    )
