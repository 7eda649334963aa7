"""Locating faults: the layers and neurons that change unusually in a fault, compared with a baseline.

A change that enters in one layer moves all later layers too. So each layer's sensitivity is compared with what the
input and the layers before it predict; this relation is learned from ordinary tests, drawn uniformly, that the model
passed. The earliest layer with a large unexpected increase comes first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.errors import DataError, UsageError
from themis.measure.calculator import Calculator
from themis.measure.chunk import columns_of
from themis.measure.tests import Tests
from themis.progress import advance, step
from themis.runs.analysis.bench import tests_of
from themis.runs.fault import Fault
from themis.runs.replay import AnyRun, as_run
from themis.search.policy import UNIFORM_STREAM, Space
from themis.target.activations import Layer

Floats = NDArray[np.float64]
N_BASELINE_TESTS = 384
"""Tests from which the baseline is learned: about a hundred per parameter of a layer's fit."""
PRECEDING_LAYERS = 2
"""Preceding layers that predict a layer's sensitivity together with the input: a block and its shortcut."""
MIN_SENSITIVITY = 0.1
"""Least baseline sensitivity of a neuron, as a share of its layer's: one that hardly ever moves must not dominate."""
MIN_DEVIATION = 0.05
"""Least standard deviation of the logarithm of a layer, so that 5% more than predicted is never unusual."""
RIDGE_PENALTY = 1e-3
"""Ridge penalty, in variances of a logarithm, which keeps a fit solvable if layers are correlated."""
TUKEY_CONSTANT = 4.685
"""Standard deviations beyond which a test is ignored by a fit: Tukey's constant, 95% efficient for normal errors."""
MAX_LOCATED = 24
"""Limit for the faults that are run again; the standard error of their median is then a quarter of their deviation."""
MIN_ENTRY_SHARE = 0.5
"""Least score of a layer where a change may start, as a share of the largest score: half of an extreme is extreme."""
NAMED_NEURONS, NAMED_LAYERS = 5, 3
"""Neurons that are named in each of the first layers."""


@dataclass(frozen=True)
class NeuronExcess:
    """A neuron by its place in the layer, and its sensitivity as a multiple of its baseline."""

    place: tuple[int, ...]
    times: float


@dataclass(frozen=True)
class LayerExcess:
    """A layer's unexpected sensitivity: in standard deviations of ordinary tests, and as a multiple of the expected."""

    layer: str
    score: float
    times: float
    neurons: tuple[NeuronExcess, ...] = ()


@dataclass(frozen=True)
class Localization:
    """The layers of one fault, or of several: first where the change enters, then by unexpected sensitivity."""

    layers: tuple[LayerExcess, ...]
    n_faults: int
    n_ordinary: int
    """Ordinary tests that the baseline was learned from."""

    @property
    def first(self) -> str:
        """The layer in which the change most likely enters."""
        return self.layers[0].layer

    def as_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Baseline:
    """How the sensitivities of a model's layers depend on each other in ordinary tests that the model passed."""

    calculator: Calculator = field(repr=False)
    scale: dict[str, Tensor] = field(repr=False)  # each neuron's mean sensitivity, by layer
    fits: list[tuple[Floats, Floats, float]] = field(repr=False)  # of each layer, see `_fit`
    n_tests: int

    def predict(self, k: int, logs: Floats) -> tuple[Floats, Floats]:
        """The predicted value of layer `k` and its standard deviation, which grows away from the ordinary tests."""
        design, (slopes, unscaled, spread) = _design(logs, k), self.fits[k - 1]
        leverage = np.einsum("tp,pq,tq->t", design, unscaled, design)
        return design @ slopes, spread * np.sqrt(1 + leverage)


def learn_baseline(run: AnyRun, n: int = N_BASELINE_TESTS, random_seed: int = 0) -> Baseline:
    """Run ordinary tests, of the run's seeds with uniform theta, and learn from those that the model passes."""
    run = as_run(run)
    seed_id = run.handle.seeds.seed_id.numpy()
    spread = np.linspace(0, len(seed_id) - 1, min(n, len(seed_id))).round().astype(np.int64)
    with run.handle.opened(np.union1d(run.faults.columns["seed_id"], seed_id[spread])) as calculator:
        tests = _ordinary_tests(calculator, n, random_seed)
        with step("measuring how much layers usually move"):
            # Not the root mean square: passed tests in which a layer went wrong would count too much.
            scale = _mean_changes(calculator, tests, [layer.name for layer in calculator.layers])
            for mean in scale.values():
                mean.clamp_(min=max(float(MIN_SENSITIVITY * mean.square().mean().sqrt()), 1e-12))
            logs = _log_changes(calculator, tests, scale)
    fits = [_fit(_design(logs, k), logs[:, k]) for k in range(1, logs.shape[1])]
    return Baseline(calculator, scale, fits, len(tests))


def locate(faults: Sequence[Fault], baseline: Baseline) -> Localization:
    """The layers that change unusually in these faults, such as those of a group, with their neurons."""
    if not faults:
        raise UsageError("there must be a fault to locate, got none: pass some of run.faults")
    at = np.linspace(0, len(faults) - 1, min(MAX_LOCATED, len(faults))).round().astype(int)
    chosen = [faults[k] for k in at.tolist()]
    calculator = baseline.calculator
    with calculator.target.opened(), torch.no_grad():
        tests = tests_of(chosen, calculator.seeds)
        logs = _log_changes(calculator, tests, baseline.scale)
        scores, rises = [], []
        for k in range(1, logs.shape[1]):
            predicted, spread = baseline.predict(k, logs)
            scores.append(np.median((logs[:, k] - predicted) / spread))
            rises.append(np.median(logs[:, k] - predicted))
        order = _rank(np.array(scores))
        named = [calculator.layers[k].name for k in order[:NAMED_LAYERS]]
        neurons = _neurons(calculator, tests, baseline.scale, named)
    layers = []
    for k in order:
        name = calculator.layers[k].name
        layers.append(LayerExcess(name, float(scores[k]), float(np.exp(rises[k])), neurons.get(name, ())))
    return Localization(tuple(layers), len(chosen), baseline.n_tests)


def _rank(scores: Floats) -> list[int]:
    """Layers, the entry first: the earliest of those with nearly the largest score, then the others by score.

    A faulty layer may affect the layers after it even more than itself, but never one before it.
    """
    entry = int((scores >= MIN_ENTRY_SHARE * scores.max()).argmax()) if scores.max() > 0 else int(scores.argmax())
    return [entry, *(k for k in np.argsort(-scores, kind="stable").tolist() if k != entry)]


def _neurons(
    calculator: Calculator, tests: Tests, scale: dict[str, Tensor], names: Sequence[str]
) -> dict[str, tuple[NeuronExcess, ...]]:
    """The neurons of these layers that are furthest above their baseline, on average over the tests."""
    neurons = {}
    for name, mean in _mean_changes(calculator, tests, names).items():
        times = mean / scale[name]
        best = times.topk(min(NAMED_NEURONS, len(times)))
        layer = calculator.by_name[name]
        shape = layer.shape if layer.channel_axis is None else (layer.n_neurons,)
        places = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        neurons[name] = tuple(NeuronExcess(tuple(map(int, np.unravel_index(k, shape))), value) for k, value in places)
    return neurons


def _ordinary_tests(calculator: Calculator, n: int, random_seed: int) -> Tests:
    """Uniform tests that the model passes."""
    usable = calculator.clean.usable.cpu().numpy()
    seed_id = calculator.seeds.seed_id.numpy()[usable]
    space = Space.of(calculator.perturbation, usable, seed_id, np.zeros(len(usable), dtype=np.float32), random_seed)
    number = np.arange(n)
    tests = space.uniform_tests(number, UNIFORM_STREAM, number)
    is_fault: list[Tensor] = []
    with step("running ordinary tests"):
        for part in _chunks(calculator, tests):
            _, outputs, motion = calculator.run_chunk(part, calculator.chunk)
            rows = torch.from_numpy(part.seed).to(calculator.device)
            is_fault.append(calculator.clean.compare(rows, outputs, motion).is_fault.cpu())
    ordinary = tests[~torch.cat(is_fault).numpy()]
    least = 4 * (PRECEDING_LAYERS + 2)
    if len(ordinary) < least:
        raise DataError(
            f"the model must pass at least {least} ordinary tests, but it passed {len(ordinary)} of {n}: the "
            "perturbation breaks nearly every input, lower the magnitude"
        )
    return ordinary


def _chunks(calculator: Calculator, tests: Tests) -> Iterator[Tests]:
    """The tests chunk by chunk; how far they are is shown."""
    for first in range(0, len(tests), calculator.chunk):
        advance(first, len(tests), "tests")
        yield tests[first : first + calculator.chunk]


def _changes(calculator: Calculator, tests: Tests) -> tuple[Tensor, dict[str, Tensor]]:
    """The change of the inputs of a chunk `[tests]`, and the sensitivities of each layer `[tests, neurons]`."""
    n = len(tests)
    inputs, disturbed, _ = calculator.disturb(*columns_of(tests, calculator.chunk, calculator.device), n)
    changes: dict[str, Tensor] = {}

    def keep(layer: Layer, activations: Tensor) -> None:
        changes[layer.name] = activations[:n].clone()

    def differ(layer: Layer, activations: Tensor) -> None:
        change = (activations[:n] - changes[layer.name]).abs().float()
        changes[layer.name] = change.nan_to_num_(0.0, 0.0, 0.0)

    calculator.forward(inputs, keep)
    calculator.forward(disturbed, differ)
    calculator.passes += 2 * len(inputs)
    return (disturbed - inputs)[:n].flatten(1).float().square().mean(1).sqrt(), changes


def _mean_changes(calculator: Calculator, tests: Tests, names: Sequence[str]) -> dict[str, Tensor]:
    """The mean sensitivity of each neuron of some layers."""
    sums = dict.fromkeys(names, torch.zeros(()))
    for part in _chunks(calculator, tests):
        changes = _changes(calculator, part)[1]
        sums = {name: total.to(calculator.device) + changes[name].sum(0) for name, total in sums.items()}
    return {name: total / len(tests) for name, total in sums.items()}


def _log_changes(calculator: Calculator, tests: Tests, scale: dict[str, Tensor]) -> Floats:
    """Logarithm of each test's change: of the input, then of each layer in units of its neurons' baseline."""
    rows: list[Tensor] = []
    for part in _chunks(calculator, tests):
        of_inputs, changes = _changes(calculator, part)
        layers = [(changes[name] / unit).square().mean(1).sqrt() for name, unit in scale.items()]
        rows.append(torch.stack([of_inputs, *layers], 1))
    return np.log(np.maximum(torch.cat(rows).cpu().numpy().astype(np.float64), 1e-6))


def _design(logs: Floats, k: int) -> Floats:
    """What predicts layer `k`: a constant, the input, and the layers just before it."""
    before = sorted({0, *range(max(0, k - PRECEDING_LAYERS), k)})
    return np.concatenate([np.ones((len(logs), 1)), logs[:, before]], 1)


def _fit(design: Floats, values: Floats) -> tuple[Floats, Floats, float]:
    """Slopes, their covariance for a standard deviation of 1, and the standard deviation; Tukey's weights."""
    weight = np.ones(len(values))
    ridge = RIDGE_PENALTY * len(values) * np.eye(design.shape[1])
    ridge[0, 0] = 0.0
    for _ in range(20):
        weighted = design * weight[:, None]
        gram = weighted.T @ design + ridge
        slopes = np.linalg.solve(gram, weighted.T @ values)
        residuals = values - design @ slopes
        spread = max(float(1.4826 * np.median(np.abs(residuals - np.median(residuals)))), MIN_DEVIATION)
        weight = np.where(
            np.abs(residuals) < TUKEY_CONSTANT * spread, (1 - (residuals / (TUKEY_CONSTANT * spread)) ** 2) ** 2, 0.0
        )
    return np.asarray(slopes), np.asarray(np.linalg.inv(gram)), spread
