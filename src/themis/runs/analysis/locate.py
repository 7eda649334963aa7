"""Which layers and neurons carry the change of a fault, against their usual.

A change that enters in one layer moves all later ones too. So each layer's sensitivity is held against what the layers
before it, and the input, let expect: how these go together is learnt on ordinary tests, drawn uniformly, that did not
break. The earliest layer with a large unexpected rise comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from themis.errors import DataError, UsageError
from themis.measure.calculator import Calculator
from themis.measure.tests import Tests
from themis.runs.analysis.group import Group
from themis.runs.analysis.usual import Floats, Usual, learn_usual, measure, walk
from themis.runs.faults import Fault
from themis.target.activations import Layer

__all__ = ["Carrier", "Located", "Neuron", "Usual", "learn_usual", "locate"]
MEMBERS = 24
"""Faults of a group that are run again at most: the spread of their median is then a quarter of theirs."""
NEARLY = 0.5
"""Share of the largest score from which a layer may be the entry: half of what is far out is still far out."""
NEURONS, LAYERS = 5, 3
"""Neurons that are named in each of the first layers."""


@dataclass(frozen=True)
class Neuron:
    """A neuron by its place in the layer, and how many times its usual sensitivity it has."""

    place: tuple[int, ...]
    times: float


@dataclass(frozen=True)
class Carrier:
    """A layer: how unexpected its sensitivity is, in spreads of ordinary tests, and what it is to the expected."""

    layer: str
    score: float
    times: float
    neurons: tuple[Neuron, ...] = ()


@dataclass(frozen=True)
class Located:
    """Layers of one fault, or of several: where the change enters, then the others, the most unexpected first."""

    layers: tuple[Carrier, ...]
    n_faults: int
    n_ordinary: int
    """Ordinary tests that they were held against."""

    @property
    def first(self) -> str:
        """The layer that the change most likely enters in."""
        return self.layers[0].layer

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def locate(what: Fault | Group | Sequence[Fault], usual: Usual, faults: Sequence[Fault] | None = None) -> Located:
    """The layers that carry the change of a fault, of several, or of a group, with their neurons.

    faults: all of the run's, where a group is to be judged by more than its representatives.
    """
    chosen = _members(what, faults)
    calculator = usual.calculator
    with calculator.target.opened(), torch.no_grad():
        tests = _tests_of(calculator, chosen)
        logs = measure(calculator, tests, usual.scale)
        scores, rises = [], []
        for k in range(1, logs.shape[1]):
            expected, spread = usual.expect(k, logs)
            scores.append(np.median((logs[:, k] - expected) / spread))
            rises.append(np.median(logs[:, k] - expected))
        order = _rank(np.array(scores))
        named = [calculator.layers[k].name for k in order[:LAYERS]]
        neurons = _neurons(calculator, tests, usual.scale, named)
    carriers = [
        Carrier(layer.name, float(scores[k]), float(np.exp(rises[k])), neurons.get(layer.name, ()))
        for k, layer in ((k, calculator.layers[k]) for k in order)
    ]
    return Located(tuple(carriers), len(chosen), usual.n_tests)


def _rank(scores: Floats) -> list[int]:
    """Layers, the entry first: the earliest of those that surprise nearly as much as any, then the others by score.

    A wrong layer may surprise the ones after it even more than itself, but never one before it.
    """
    entry = int((scores >= NEARLY * scores.max()).argmax()) if scores.max() > 0 else int(scores.argmax())
    return [entry, *(k for k in np.argsort(-scores, kind="stable").tolist() if k != entry)]


def _members(what: Fault | Group | Sequence[Fault], faults: Sequence[Fault] | None) -> list[Fault]:
    if isinstance(what, Fault):
        return [what]
    if isinstance(what, Group):
        ids = set(what.ids)
        what = what.representatives if faults is None else [fault for fault in faults if fault.id in ids]
    if not what:
        raise UsageError("there must be a fault to locate, got none: give one of run.faults, or a group")
    at = np.linspace(0, len(what) - 1, min(MEMBERS, len(what))).round().astype(int)
    return [what[k] for k in at.tolist()]


def _tests_of(calculator: Calculator, faults: Sequence[Fault]) -> Tests:
    row_of = {int(id): row for row, id in enumerate(calculator.seeds.seed_id.tolist())}
    missing = [fault.seed_id for fault in faults if fault.seed_id not in row_of]
    if missing:
        raise DataError(f"the data must hold the fault's seed {missing[0]}, it has {len(row_of)}: give the run's data")
    return Tests(
        np.array([fault.id for fault in faults]),
        np.array([row_of[fault.seed_id] for fault in faults]),
        np.array([list(fault.theta.values()) for fault in faults], dtype=np.float32),
        np.array([fault.noise_seed for fault in faults]),
        np.array([fault.kind for fault in faults]),
    )


def _neurons(
    calculator: Calculator, tests: Tests, scale: dict[str, Tensor], names: Sequence[str]
) -> dict[str, tuple[Neuron, ...]]:
    """Of some layers the neurons that are farthest above their usual, on average over the tests."""
    sums = {name: torch.zeros_like(scale[name]) for name in names}

    def add(layer: Layer, change: Tensor) -> None:
        if layer.name in sums:
            sums[layer.name] += change.sum(0)

    walk(calculator, tests, add)
    found = {}
    for name, total in sums.items():
        times = total / len(tests) / scale[name]
        best = times.topk(min(NEURONS, len(times)))
        layer = calculator.by_name[name]
        shape = layer.shape if layer.channel_axis is None else (layer.n_neurons,)
        places = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        found[name] = tuple(Neuron(tuple(map(int, np.unravel_index(at, shape))), value) for at, value in places)
    return found
