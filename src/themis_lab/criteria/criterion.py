"""The base class of criteria: how they are fitted on training data, updated with tests, merged and described."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from copy import copy
from inspect import signature
from typing import Any, ClassVar, Self, Unpack

import numpy as np
import torch
from torch import Tensor

from themis import criteria
from themis.data.seeds import Seeds
from themis.errors import DataError, UsageError, nearest
from themis.target.activations import OUTPUT, Layer
from themis.target.target import AnyTarget
from themis_lab.criteria.options import CriterionOptions, parse_options
from themis_lab.criteria.readings import Activations, Batch, Layout, Readings, as_neurons, by_layer
from themis_lab.criteria.view import View, fit_to


class Criterion(criteria.Criterion):
    """A test criterion. `fit` it on training data if it needs that, then `update` it with tests.

    neurons: `channel` takes each channel's mean as one neuron, as most published tools do; `element` takes each value.
    layers: which of the layers are read; by default all, or the last hidden one for criteria of a single layer.
    variant: whose definition to follow if public implementations differ; `variants` lists them with their sources.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    """What it needs in addition to activations: `clean`, `predicted`."""
    reads_one_layer: ClassVar[bool] = False
    default_neurons: ClassVar[str] = "channel"
    """The default of the option `neurons`."""
    variants: ClassVar[dict[str, str]] = {}

    def __init__(self, **options: Unpack[CriterionOptions]) -> None:
        neurons, layers = options.get("neurons", self.default_neurons), options.get("layers")
        if neurons not in ("channel", "element"):
            raise UsageError(f"neurons must be 'channel' or 'element', got {neurons!r}")
        variant = options.get("variant") or next(iter(self.variants), None)
        if variant is not None and variant not in self.variants:
            remedy = nearest(variant, self.variants) if self.variants else "leave it out"
            raise UsageError(f"{self.name}: variant must be a known name, got {variant!r}: {remedy}")
        self.neurons, self.variant = neurons, variant
        names = layers if isinstance(layers, Iterable) and not isinstance(layers, str) else (layers,)
        self.requested_layers = None if layers is None else tuple(map(str, names))
        if self.requested_layers == ():
            raise UsageError(f"{self.name}: layers must name at least one, got none: leave it out for the default")
        if self.reads_one_layer and self.requested_layers is not None and len(self.requested_layers) != 1:
            raise UsageError(f"{self.name} reads one layer, got {len(self.requested_layers)}: name one")
        self.layout: Layout | None = None
        self.learnt: dict[str, Tensor] = {}  # the result of fit
        self.state: dict[str, Tensor] = {}  # the result of update; empty before the first test
        self.tests = 0

    # The protocol

    @classmethod
    def parse(cls, options: str) -> Self:
        return cls(**parse_options(cls, options))

    def learn_from(self, target: AnyTarget, seeds: Seeds) -> None:
        fit_to(self, target, seeds)

    def view(self, target: AnyTarget, layers: tuple[Layer, ...], example: Tensor, max_bytes: int | None) -> View:
        return View(self, target, layers, example, max_bytes)

    def prepare(self, target: AnyTarget, inputs: Tensor, labels: Tensor | None) -> None:
        """Before `fit`, learn what activations do not show, from the model itself and a sample of training inputs."""

    def fit(self, batches: Iterable[Activations | Batch | Readings]) -> Self:
        """Learn from the activations of training inputs, batch by batch; discards earlier fits and tests.

        A single batch may be passed instead of an iterable of batches.
        """
        self.reset()
        self.learnt, n = {}, 0
        is_single = isinstance(batches, Tensor | np.ndarray | Mapping | Batch | Readings)
        try:
            for batch in [batches] if is_single else batches:
                readings = self.accept(batch)  # type: ignore[arg-type]
                if not bool(readings.values.isfinite().all()):
                    layers = readings.layers().items()
                    name = next(name for name, values in layers if not bool(values.isfinite().all()))
                    raise DataError(
                        f"{self.name}: training activations must be finite, but layer {name!r} has a NaN or an "
                        "infinity: leave out the layer or the inputs"
                    )
                if len(readings):
                    self._learn(readings)
                n += len(readings)
            if n == 0:
                raise DataError(f"{self.name}: fit must see at least one training input, got none")
            self._finish_fit()
        except BaseException:
            self.learnt = {}
            raise
        return self

    def update(
        self,
        activations: Activations | Batch | Readings,
        *,
        clean: Activations | None = None,
        predicted: Tensor | None = None,
    ) -> Tensor:
        """Add tests, in order; return which of them raised the score, bool `[tests]`.

        The result is the same as if each test were passed alone. A non-finite activation covers nothing.
        """
        if self.learns and not self.learnt:
            raise UsageError(f"{self.name} must be fitted on training data before it is updated: call fit(batches)")
        if not isinstance(activations, Batch | Readings):
            activations = Batch(activations, clean, predicted)
        readings = self.accept(activations)
        if len(readings) == 0:
            return torch.zeros(0, dtype=torch.bool, device=readings.values.device)
        if not self.state:
            self.state = self._initial_state(readings)
        raised = self._update(readings)
        self.tests += len(readings)
        return raised

    def merge(self, other: Self) -> Self:
        """Return a criterion with the tests of both; both must have learned the same."""
        if not self.laws.mergeable:
            raise UsageError(f"{self.name} cannot be merged: its score depends on the order of the tests")
        self._check_same(other)
        merged = self.fresh()
        merged.layout = self.layout or other.layout
        if not self.state or not other.state:
            merged.state = {name: tensor.clone() for name, tensor in (self.state or other.state).items()}
        else:
            merged.state = self._merge_state(
                {name: tensor.to(self.state[name].device) for name, tensor in other.state.items()}
            )
        merged.tests = self.tests + other.tests
        return merged

    def fresh(self) -> Self:
        fresh = copy(self)
        fresh.learnt = dict(self.learnt)
        fresh.reset()
        return fresh

    def reset(self) -> None:
        """Forget all tests."""
        self.state, self.tests = {}, 0

    def restore(self, state: dict[str, Tensor], tests: int, layout: Layout | None) -> None:
        self.state = {name: tensor.clone() for name, tensor in state.items()}
        self.tests, self.layout = tests, layout

    def report(self) -> dict[str, Any]:
        return {}

    def options(self) -> dict[str, Any]:
        """The options of the criterion, as plain data."""
        internal = ("laws", "layout", "learnt", "state", "tests", "requested_layers")
        return {name: value for name, value in vars(self).items() if name not in internal and name[0] != "_"} | {
            "layers": None if self.requested_layers is None else list(self.requested_layers)
        }

    def __str__(self) -> str:
        """The specification that `choose_criterion` reads: its name and the options that differ from the defaults."""
        defaults = {name: parameter.default for name, parameter in signature(type(self)).parameters.items()}
        defaults |= {"neurons": self.default_neurons, "layers": None, "variant": next(iter(self.variants), None)}
        options = [f"{name}={value}" for name, value in self.options().items() if value != defaults.get(name, value)]
        return f"{self.name}({', '.join(options)})" if options else self.name

    __repr__ = __str__

    # Reading batches

    def read(self, batch: Activations | Batch) -> Readings:
        """The readings of a batch for this criterion."""
        batch = batch if isinstance(batch, Batch) else Batch(batch)
        layers = by_layer(batch.activations)
        predicted = batch.predicted
        if predicted is None and OUTPUT in layers and layers[OUTPUT].ndim == 2 and layers[OUTPUT].shape[1] > 1:
            predicted = layers[OUTPUT].argmax(1)
        names = self.choose_layers(tuple(layers))
        axes = batch.axes or {}
        values = [self.read_layer(layers[name].detach(), axes.get(name)) for name in names]
        layout = Layout(names, tuple(layer.shape[1] for layer in values))
        clean = None
        if batch.clean is not None:
            of_clean = by_layer(batch.clean, "clean activations")
            if missing := [name for name in names if name not in of_clean]:
                raise DataError(
                    f"clean activations must have the same layers as the others, but {missing[0]!r} is missing"
                )
            clean = _side_by_side([self.read_layer(of_clean[name].detach(), axes.get(name)) for name in names])
        return Readings(_side_by_side(values), layout, clean, predicted, batch.labels)

    def accept(self, batch: Activations | Batch | Readings) -> Readings:
        """Read a batch and check that its layers match those of earlier batches; moves the state to its device."""
        readings = batch if isinstance(batch, Readings) else self.read(batch)
        layout = readings.layout
        if self.layout is None or not (self.learnt or self.state):
            self.layout = layout
        elif layout != self.layout:
            before, now = (dict(zip(shape.names, shape.widths, strict=True)) for shape in (self.layout, layout))
            name = next((name for name in {**before, **now} if before.get(name) != now.get(name)), "order")
            raise DataError(
                f"{self.name}: every batch must have the same layers and neurons, but {name!r} has "
                f"{now.get(name, 'none')} and had {before.get(name, 'none')}: use activations of one model and one "
                "size of inputs"
            )
        clean_rows = readings.clean if readings.clean_rows is None else readings.clean_rows
        columns = (clean_rows, readings.predicted, readings.labels)
        for subject, column in zip(("clean activations", "predicted classes", "labels"), columns, strict=True):
            if column is not None and len(column) != len(readings):
                raise DataError(f"{subject} must have one row per input, got {len(column)} for {len(readings)} inputs")
        device = readings.values.device
        for tensors in (self.learnt, self.state):
            if tensors and next(iter(tensors.values())).device != device:
                tensors.update({name: tensor.to(device) for name, tensor in tensors.items()})
        return readings

    def choose_layers(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Which of the layers `names` are read, in the order of the forward pass."""
        if self.requested_layers is None:
            hidden = [name for name in names if name != OUTPUT]
            return (hidden or list(names))[-1:] if self.reads_one_layer else names  # type: ignore[return-value]
        for name in self.requested_layers:
            if name not in names:
                raise UsageError(f"{self.name}: layers must be among those given, got {name!r}: {nearest(name, names)}")
        return tuple(name for name in names if name in self.requested_layers)

    def read_layer(self, activation: Tensor, channel_axis: int | None = None, out: Tensor | None = None) -> Tensor:
        """A layer's activation `[inputs, ...]` as the values `[inputs, neurons]` that this criterion works on.

        out: where to write them.
        """
        values = as_neurons(activation, self.neurons, channel_axis)
        return values if out is None else out.copy_(values)

    # What each criterion implements

    def _learn(self, readings: Readings) -> None:
        """Update `learnt` with a batch of training inputs."""

    def _finish_fit(self) -> None:
        """Called after the last batch of training inputs."""

    @abstractmethod
    def _initial_state(self, readings: Readings) -> dict[str, Tensor]:
        """The state before the first test, on the device of the readings."""

    @abstractmethod
    def _update(self, readings: Readings) -> Tensor:
        """Add at least one test to `state`; return which tests raised the score."""

    def _merge_state(self, other: dict[str, Tensor]) -> dict[str, Tensor]:
        """The merged state; neither of the two is empty."""
        raise AssertionError(f"{self.name} declares itself mergeable but does not implement _merge_state")

    def _check_same(self, other: Self) -> None:
        if type(other) is not type(self) or self.options() != other.options():
            raise UsageError(f"merge needs two criteria with the same options, got {self!r} and {other!r}")
        is_same = self.learnt.keys() == other.learnt.keys() and all(
            torch.equal(tensor, other.learnt[name].to(tensor.device)) for name, tensor in self.learnt.items()
        )
        if not is_same or (self.layout and other.layout and self.layout != other.layout):
            raise UsageError(
                "merge needs two criteria that have learned the same: fit one and create the others with its fresh()"
            )


def _side_by_side(layers: list[Tensor]) -> Tensor:
    return layers[0] if len(layers) == 1 else torch.cat(layers, 1)
