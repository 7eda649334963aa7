"""What a test criterion is: it learns from training data, tests raise it, and it says how far it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from themis.criteria.readings import Activations, Batch, Layout, Readings, as_neurons, by_layer
from themis.criteria.rows import placed
from themis.errors import DataError, UsageError, nearest
from themis.target.activations import OUTPUT

if TYPE_CHECKING:
    from themis.target.target import AnyTarget


@dataclass(frozen=True)
class Laws:
    """What holds for a criterion's score, and is tested."""

    bounded: bool
    """It lies in 0..1."""
    monotone: bool
    """Further tests never lower it."""
    order_free: bool
    """The same tests in another order give the same score."""
    mergeable: bool
    """Merging two halves gives what all tests give."""


class Common(TypedDict, total=False):
    """Options of every criterion."""

    neurons: str
    layers: Sequence[str] | str | None
    variant: str | None


class Criterion(ABC):
    """A test criterion. `fit` it on training data if it needs that, then `update` it with tests.

    neurons: `channel` takes each channel's mean as one neuron, as most published tools do, `element` each value.
    layers: which of the given layers count; by default all, or the last hidden one for criteria of a single layer.
    variant: whose definition, where public implementations differ; `variants` names them and their sources.
    """

    name: ClassVar[str]
    laws: Laws
    learns: ClassVar[bool] = True
    """Whether it must be fitted."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """What it must be given beside activations: `clean`, `predicted`."""
    is_of_one_layer: ClassVar[bool] = False
    own_neurons: ClassVar[str] = "channel"
    """What it takes for a neuron by default."""
    guides: ClassVar[bool] = True
    """Whether it can take part in a campaign, which shows it activations."""
    variants: ClassVar[dict[str, str]] = {}

    def __init__(self, **common: Unpack[Common]) -> None:
        neurons, layers, variant = common.get("neurons", self.own_neurons), common.get("layers"), common.get("variant")
        if neurons not in ("channel", "element"):
            raise UsageError(f"neurons must be 'channel' or 'element', got {neurons!r}")
        variant = variant or next(iter(self.variants), None)
        if variant is not None and variant not in self.variants:
            remedy = nearest(variant, self.variants) if self.variants else "leave it out"
            raise UsageError(f"{self.name}: variant must be a known name, got {variant!r}: {remedy}")
        self.neurons, self.variant = neurons, variant
        named = layers if isinstance(layers, Iterable) and not isinstance(layers, str) else (layers,)
        self.wanted = None if layers is None else tuple(map(str, named))
        if self.wanted == ():
            raise UsageError(f"{self.name}: layers must name at least one, got none: leave it out for the default")
        if self.is_of_one_layer and self.wanted is not None and len(self.wanted) != 1:
            raise UsageError(f"{self.name} reads one layer, got {len(self.wanted)}: name one")
        self.layout: Layout | None = None
        self.learnt: dict[str, Tensor] = {}  # what fit leaves
        self.state: dict[str, Tensor] = {}  # what tests leave; empty before the first
        self.tests = 0

    # What every criterion does

    def prepare(self, target: AnyTarget, inputs: Tensor, labels: Tensor | None) -> None:  # noqa: B027 (few need it)
        """Learn from the model itself what cannot be seen in activations, before `fit`; from some training inputs."""

    def fit(self, batches: Iterable[Activations | Batch | Readings]) -> Self:
        """Learn from the activations of training inputs, batch by batch; forgets what was learnt and seen before.

        Activations that are no iterable of batches are one.
        """
        self.reset()
        self.learnt = {}
        is_one = isinstance(batches, Tensor | np.ndarray | Mapping | Batch | Readings)
        try:
            self._fit([batches] if is_one else batches)  # type: ignore[list-item]
        except BaseException:
            self.learnt = {}
            raise
        return self

    def _fit(self, batches: Iterable[Activations | Batch | Readings]) -> None:
        n = 0
        for batch in batches:
            readings = self._readings(batch)
            if not bool(readings.values.isfinite().all()):
                name = next(name for name, each in readings.layers().items() if not bool(each.isfinite().all()))
                raise DataError(
                    f"{self.name}: training activations must be finite, layer {name!r} has a NaN or an infinity: leave "
                    "the layer or the inputs out"
                )
            if len(readings):
                self._learn(readings)
            n += len(readings)
        if n == 0:
            raise DataError(f"{self.name}: fit must see at least one training input, got none")
        self._conclude()

    def update(
        self,
        activations: Activations | Batch | Readings,
        *,
        clean: Activations | None = None,
        predicted: Tensor | None = None,
    ) -> Tensor:
        """Take in tests, in order; returns which of them raised the score when they came, bool `[tests]`.

        Exactly as if each test came alone. An activation that is not finite covers nothing.
        """
        if self.learns and not self.learnt:
            raise UsageError(f"{self.name} must be fitted on training data before it is updated: call fit(batches)")
        if not isinstance(activations, Batch | Readings):
            activations = Batch(activations, clean, predicted)
        readings = self._readings(activations)
        if len(readings) == 0:
            return torch.zeros(0, dtype=torch.bool, device=readings.values.device)
        if not self.state:
            self.state = self._begin(readings)
        raised = self._take(readings)
        self.tests += len(readings)
        return raised

    @abstractmethod
    def score(self) -> float:
        """How far the criterion is; 0 before the first test."""

    def merge(self, other: Self) -> Self:
        """A criterion that has seen both sets of tests; both must have learnt the same."""
        if not self.laws.mergeable:
            raise UsageError(f"{self.name} cannot be merged: its score depends on the order of the tests")
        self._check_same(other)
        merged = self.fresh()
        merged.layout = self.layout or other.layout
        if not self.state or not other.state:
            merged.state = {name: each.clone() for name, each in (self.state or other.state).items()}
        else:
            merged.state = self._merge({name: each.to(self.state[name].device) for name, each in other.state.items()})
        merged.tests = self.tests + other.tests
        return merged

    def fresh(self) -> Self:
        """The same, fitted as it is, that has seen no test."""
        made = copy(self)
        made.learnt = dict(self.learnt)
        made.reset()
        return made

    def reset(self) -> None:
        """Forget all tests."""
        self.state, self.tests = {}, 0

    def restore(self, state: dict[str, Tensor], tests: int, layout: Layout | None) -> None:
        """Go on from the `state` that another one, fitted alike, had after so many tests of this layout."""
        self.state = {name: each.clone() for name, each in state.items()}
        self.tests, self.layout = tests, layout

    def report(self) -> dict[str, Any]:
        """What else it can say of its tests, as plain data."""
        return {}

    def options(self) -> dict[str, Any]:
        """All that it was made with, as plain data."""
        hidden = ("laws", "layout", "learnt", "state", "tests", "wanted")
        return {name: value for name, value in vars(self).items() if name not in hidden and name[0] != "_"} | {
            "layers": None if self.wanted is None else list(self.wanted)
        }

    def __repr__(self) -> str:
        said = ", ".join(f"{name}={value!r}" for name, value in self.options().items() if value is not None)
        return f"{type(self).__name__}({said})"

    def __str__(self) -> str:
        """In words, as `choose_criterion` reads them: its name and what differs from the defaults."""
        plain = {name: each.default for name, each in signature(type(self)).parameters.items()}
        plain |= {"neurons": self.own_neurons, "layers": None, "variant": next(iter(self.variants), None)}
        said = [f"{name}={value}" for name, value in self.options().items() if value != plain.get(name, value)]
        return f"{self.name}({', '.join(said)})" if said else self.name

    # What it reads

    def read(self, batch: Activations | Batch) -> Readings:
        """A batch as this criterion sees it."""
        batch = batch if isinstance(batch, Batch) else Batch(batch)
        layers = by_layer(batch.activations)
        predicted = batch.predicted
        if predicted is None and OUTPUT in layers and layers[OUTPUT].ndim == 2 and layers[OUTPUT].shape[1] > 1:
            predicted = layers[OUTPUT].argmax(1)
        chosen = self.choose(tuple(layers))
        axes = batch.axes or {}
        values = self._side_by_side(layers, chosen, axes)
        layout = Layout(chosen, tuple(each.shape[1] for each in values))
        clean = None
        if batch.clean is not None:
            others = by_layer(batch.clean, "clean activations")
            if missing := [name for name in chosen if name not in others]:
                raise DataError(f"clean activations must have the same layers, {missing[0]!r} is missing")
            clean = _joined(self._side_by_side(others, chosen, axes))
        return Readings(_joined(values), layout, clean, predicted, batch.labels)

    def _side_by_side(
        self, layers: dict[str, Tensor], chosen: tuple[str, ...], axes: Mapping[str, int]
    ) -> list[Tensor]:
        return [self.read_layer(layers[name].detach(), axes.get(name)) for name in chosen]

    def _readings(self, batch: Activations | Batch | Readings) -> Readings:
        """A batch as this criterion sees it; refuses one that is unlike those before."""
        readings = batch if isinstance(batch, Readings) else self.read(batch)
        layout, given = readings.layout, (readings.clean, readings.predicted, readings.labels)
        if self.layout is None or not (self.learnt or self.state):
            self.layout = layout
        elif layout != self.layout:
            before, now = (dict(zip(each.names, each.widths, strict=True)) for each in (self.layout, layout))
            name = next((name for name in {**before, **now} if before.get(name) != now.get(name)), "order")
            names = "" if before.keys() == now.keys() else f" (layers {', '.join(now)}; before {', '.join(before)})"
            raise DataError(
                f"{self.name}: every batch must have the same layers and neurons, {name!r} has {now.get(name, 'none')} "
                f"and had {before.get(name, 'none')}{names}: take activations of one model and one size of inputs"
            )
        for what, each in zip(("clean activations", "predicted classes", "labels"), given, strict=True):
            if each is not None and len(each) != len(readings):
                raise DataError(f"{what} must have one row an input, got {len(each)} for {len(readings)} inputs")
        self._follow(readings.values.device)
        return readings

    def _follow(self, device: torch.device) -> None:
        """Bring what is known to where the readings are."""
        for known in (self.learnt, self.state):
            if known and next(iter(known.values())).device != device:
                known.update({name: each.to(device) for name, each in known.items()})

    def choose(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Which of the layers `names` are read, in the order of the forward pass."""
        if self.wanted is None:
            hidden = [name for name in names if name != OUTPUT]
            return (hidden or list(names))[-1:] if self.is_of_one_layer else names  # type: ignore[return-value]
        for name in self.wanted:
            if name not in names:
                raise UsageError(f"{self.name}: layers must be among those given, got {name!r}: {nearest(name, names)}")
        return tuple(name for name in names if name in self.wanted)

    def read_layer(self, activation: Tensor, channel_axis: int | None = None, out: Tensor | None = None) -> Tensor:
        """A layer's activation `[inputs, ...]` as the values `[inputs, neurons]` that this criterion looks at.

        out: where they are to stand.
        """
        values = as_neurons(activation, self.neurons, channel_axis)
        return values if out is None else placed(values, out)

    # What each criterion says itself

    def _learn(self, readings: Readings) -> None:  # noqa: B027 (not all learn)
        """Take in a batch of training inputs: into `learnt`."""

    def _conclude(self) -> None:  # noqa: B027
        """After the last batch of training inputs."""

    @abstractmethod
    def _begin(self, readings: Readings) -> dict[str, Tensor]:
        """The state before the first test, on the device of the readings."""

    @abstractmethod
    def _take(self, readings: Readings) -> Tensor:
        """Take in at least one test: into `state`; which of them raised the score."""

    def _merge(self, other: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state of both; neither is empty."""
        raise AssertionError(f"{self.name} declares that it can be merged and does not say how")

    def _check_same(self, other: Self) -> None:
        if type(other) is not type(self) or self.options() != other.options():
            raise UsageError(f"merge needs two criteria of one kind and one setting, got {self!r} and {other!r}")
        is_same = self.learnt.keys() == other.learnt.keys() and all(
            torch.equal(each, other.learnt[name].to(each.device)) for name, each in self.learnt.items()
        )
        if not is_same or (self.layout and other.layout and self.layout != other.layout):
            raise UsageError(
                "merge needs two criteria that have learnt the same: fit one, and make others by its fresh()"
            )


def _joined(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.cat(values, 1)
