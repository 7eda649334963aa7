"""What is usual: how the sensitivities of a model's layers go together in ordinary tests, that did not break."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.errors import DataError
from themis.measure.calculator import Calculator
from themis.measure.chunk import padded
from themis.measure.tests import Tests
from themis.runs.replay import Replayer, open_handle
from themis.runs.run import Run
from themis.search.policy import UNIFORM_STREAM, Space
from themis.target.activations import OUTPUT, Layer, flatten

Floats = NDArray[np.float64]
ORDINARY = 384
"""Tests that the usual is learnt on: some hundred for each of the few numbers of a layer's fit."""
BEFORE = 2
"""Layers before it that a layer's sensitivity is expected from, beside the input: a block and what skips it."""
LEAST = 0.1
"""A neuron's usual sensitivity is at least this share of its layer's: one that hardly ever moves is no infinity."""
FLOOR = 0.05
"""Least spread of a layer's logarithm: a twentieth more than expected is never surprising."""
RIDGE = 1e-3
"""What keeps a fit from dividing by nothing where layers move as one, in variances of a logarithm."""
TUKEY = 4.685
"""Spreads beyond which a test has no say in a fit: Tukey's own, 95% efficient where all is normal."""


@dataclass(frozen=True)
class Usual:
    """What is usual for a model, its data and a perturbation."""

    calculator: Calculator = field(repr=False)
    scale: dict[str, Tensor] = field(repr=False)  # of each neuron's sensitivity, by layer
    slopes: list[Floats] = field(repr=False)  # of each layer's fit
    unscaled: list[Floats] = field(repr=False)  # its covariance for a spread of 1
    spread: Floats
    n_tests: int

    def expect(self, k: int, logs: Floats) -> tuple[Floats, Floats]:
        """What layer `k` is expected to show, and the spread around it: larger, the less like it was ever seen."""
        design = _design(logs, k)
        reach = np.einsum("tp,pq,tq->t", design, self.unscaled[k - 1], design)
        return design @ self.slopes[k - 1], self.spread[k - 1] * np.sqrt(1 + reach)


def learn_usual(source: Run | Replayer | Calculator, n: int = ORDINARY, random_seed: int = 0) -> Usual:
    """Run ordinary tests, of the run's seeds and theta drawn uniformly, and learn from those that do not break.

    source: a finished run in memory, the replayer of a run folder, or a calculator that has swept its seeds.
    """
    calculator = source if isinstance(source, Calculator) else _swept(source, n)
    with calculator.target.opened(), torch.no_grad():
        tests = _ordinary(calculator, n, random_seed)
        sums = {layer.name: torch.zeros(layer.n_neurons, device=calculator.device) for layer in calculator.layers}

        def add(layer: Layer, change: Tensor) -> None:
            sums[layer.name] += change.sum(0)

        walk(calculator, tests, add)
        # Not the root of mean squares: tests in which a layer went wrong and nothing broke would count too much.
        scale = {name: _floored(each / len(tests)) for name, each in sums.items()}
        logs = measure(calculator, tests, scale)
    fits = [_fit(_design(logs, k), logs[:, k]) for k in range(1, logs.shape[1])]
    return Usual(
        calculator,
        scale,
        [slopes for slopes, _, _ in fits],
        [unscaled for _, unscaled, _ in fits],
        np.array([spread for _, _, spread in fits]),
        len(tests),
    )


def _ordinary(calculator: Calculator, n: int, random_seed: int) -> Tests:
    """Uniform tests that did not break."""
    usable = calculator.usable.cpu().numpy()
    seed_id = calculator.seeds.seed_id.numpy()[usable]
    space = Space.of(calculator.perturbation, usable, seed_id, np.zeros(len(usable), dtype=np.float32), random_seed)
    number = np.arange(n)
    tests = space.uniform_tests(number, UNIFORM_STREAM, number)
    holds = [_holds(calculator, tests[first : first + calculator.chunk]) for first in range(0, n, calculator.chunk)]
    ordinary = tests[np.concatenate(holds)]
    least = 4 * (BEFORE + 2)
    if len(ordinary) < least:
        raise DataError(
            f"at least {least} ordinary tests must not break, {len(ordinary)} of {n} did not: the perturbation breaks "
            "nearly every input, take a smaller magnitude"
        )
    return ordinary


def _holds(calculator: Calculator, tests: Tests) -> NDArray[np.bool_]:
    _, outputs = calculator.run_chunk(tests, calculator.chunk)
    rows = torch.from_numpy(tests.seed).to(calculator.device)
    labels = None if calculator.labels is None else calculator.labels[rows]
    holds: NDArray[np.bool_] = (
        ~calculator.oracle.compare(calculator.clean_outputs[rows], outputs, labels).is_fault.cpu().numpy()
    )
    return holds


def walk(calculator: Calculator, tests: Tests, take: Callable[[Layer, Tensor], None]) -> Floats:
    """Show `take` each layer's sensitivities `[tests, neurons]`, chunk by chunk; returns the inputs' change."""
    changes = []
    for first in range(0, len(tests), calculator.chunk):
        part = tests[first : first + calculator.chunk]
        n = len(part)
        rows, theta, noise_seed = (
            padded(torch.from_numpy(np.ascontiguousarray(each)), calculator.chunk).to(calculator.device)
            for each in (part.seed, part.theta, part.noise_seed)
        )
        inputs, disturbed = calculator.disturb(rows, theta, noise_seed, n)
        clean: dict[str, Tensor] = {}

        def keep(layer: Layer, activations: Tensor, clean: dict[str, Tensor] = clean, n: int = n) -> None:
            clean[layer.name] = activations[:n].clone()

        def differ(layer: Layer, activations: Tensor, clean: dict[str, Tensor] = clean, n: int = n) -> None:
            change = (activations[:n] - clean.pop(layer.name)).abs().float()
            take(layer, change.nan_to_num_(0.0, 0.0, 0.0))

        _show(calculator, inputs, keep)
        _show(calculator, disturbed, differ)
        changes.append((disturbed - inputs)[:n].flatten(1).float().square().mean(1).sqrt())
    return np.asarray(torch.cat(changes).cpu().numpy(), dtype=np.float64)


def _show(calculator: Calculator, inputs: Tensor, visit: Callable[[Layer, Tensor], None]) -> None:
    def show(name: str, activation: Tensor) -> None:
        layer = calculator.by_name[name]
        visit(layer, flatten(activation, layer, len(inputs)))

    outputs = calculator.target.forward(inputs, show, calculator.by_name)
    calculator.passes += len(inputs)
    if OUTPUT in calculator.by_name:
        show(OUTPUT, outputs)


def measure(calculator: Calculator, tests: Tests, scale: dict[str, Tensor]) -> Floats:
    """Logarithms of each test's change: of the input, then of each layer in units of its neurons' usual."""
    parts: dict[str, list[Tensor]] = {layer.name: [] for layer in calculator.layers}

    def add(layer: Layer, change: Tensor) -> None:
        parts[layer.name].append((change / scale[layer.name]).square().mean(1).sqrt())

    inputs = walk(calculator, tests, add)
    by_layer = [torch.cat(parts[layer.name]).cpu().numpy().astype(np.float64) for layer in calculator.layers]
    return np.log(np.maximum(np.stack([inputs, *by_layer], 1), 1e-6))


def _design(logs: Floats, k: int) -> Floats:
    """What layer `k` is expected from: a constant, the input, and the layers just before it."""
    before = sorted({0, *range(max(0, k - BEFORE), k)})
    return np.concatenate([np.ones((len(logs), 1)), logs[:, before]], 1)


def _fit(design: Floats, values: Floats) -> tuple[Floats, Floats, float]:
    """Slopes, their covariance for a spread of 1, and the spread; by Tukey's weights, so outliers have no say."""
    weight = np.ones(len(values))
    ridge = RIDGE * len(values) * np.eye(design.shape[1])
    ridge[0, 0] = 0.0
    for _ in range(20):
        weighted = design * weight[:, None]
        gram = weighted.T @ design + ridge
        slopes = np.linalg.solve(gram, weighted.T @ values)
        left = values - design @ slopes
        spread = max(float(1.4826 * np.median(np.abs(left - np.median(left)))), FLOOR)
        weight = np.where(np.abs(left) < TUKEY * spread, (1 - (left / (TUKEY * spread)) ** 2) ** 2, 0.0)
    return np.asarray(slopes), np.asarray(np.linalg.inv(gram)), spread


def _floored(usual: Tensor) -> Tensor:
    return usual.clamp(min=max(float(LEAST * usual.square().mean().sqrt()), 1e-12))


def _swept(source: Run | Replayer, n: int) -> Calculator:
    """A calculator that has swept its seeds: the failing seeds of the run, and `n` more."""
    with open_handle(source) as handle:
        seed_id = handle.seeds.seed_id.numpy()
        spread = np.linspace(0, len(seed_id) - 1, min(n, len(seed_id))).round().astype(np.int64)
        return handle.swept(np.union1d(_failing(source), seed_id[spread]))


def _failing(source: Run | Replayer) -> NDArray[np.int64]:
    if isinstance(source, Run):
        return np.unique(source.faults.columns.get("seed_id", np.zeros(0, np.int64)))
    rows = source.run.select("DISTINCT seed_id", order="seed_id")
    return np.array([seed_id for (seed_id,) in rows], dtype=np.int64)
