"""The clean sweep: every clean input is run once, before the first test."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from themis.errors import ModelError
from themis.measure.calculator import Calculator
from themis.measure.chunk import padded
from themis.measure.moments import Accumulator, Moments
from themis.oracle.oracle import are_finite
from themis.progress import advance, step
from themis.target.activations import Layer

SWEEP = "running the model on the clean inputs"


def sweep(calculator: Calculator) -> Moments:
    """Run every clean input, and set `calculator.clean`. Returns the moments of the clean activations themselves."""
    before = calculator.passes
    with step(SWEEP):
        moments, outputs = calculator.memory.attempt(partial(_sweep, calculator))
    calculator.passes = before
    return take_sweep(calculator, moments, outputs)


def take_sweep(calculator: Calculator, moments: Moments, outputs: list[Tensor]) -> Moments:
    """Set what a sweep sets, from the moments and the outputs of every clean input; returns the moments."""
    calculator.passes += len(calculator.inputs)
    clean = torch.cat(outputs).float()
    is_finite = are_finite(clean)
    if not bool(is_finite.all()):
        broken = calculator.seeds.seed_id[(~is_finite).cpu()]
        raise ModelError(
            f"the model must give finite outputs on clean inputs, but {len(broken)} of {len(is_finite)} have a NaN "
            f"or an infinity, first seed {int(broken[0])}: check the weights and the preprocessing"
        )
    calculator.take_clean(clean, settles=True)
    return moments.checked(calculator.layers)


def _sweep(calculator: Calculator) -> tuple[Moments, list[Tensor]]:
    calculator.allot_clean(calculator.device)
    moments = calculator.accumulator()
    outputs = [_sweep_chunk(calculator, first, moments) for first in range(0, len(calculator.inputs), calculator.chunk)]
    return moments.moments(), outputs


def sweep_chunk(calculator: Calculator, first: int, into: Accumulator) -> Tensor:
    """Run one chunk of clean inputs, from `first` on: fold the activations, keep them, and return the outputs."""
    return calculator.memory.attempt(lambda: _sweep_chunk(calculator, first, into))


def _sweep_chunk(calculator: Calculator, first: int, moments: Accumulator) -> Tensor:
    n_inputs, observer, buffers = len(calculator.inputs), calculator.observer, calculator.memory.buffers
    rows = torch.arange(first, min(first + calculator.chunk, n_inputs), device=calculator.device)
    n = len(rows)
    advance(first, n_inputs, "inputs")

    def keep(layer: Layer, activations: Tensor) -> None:
        calculator.clean.kept.keep(layer.name, first, activations[:n])
        moments.add_copy(activations[:n], layer.start, layer.stop, buffers[layer.name][0][:n])

    outputs = calculator.clean_pass(rows, keep, observer)[:n]
    moments.commit(n)
    if observer is not None:
        observer.keep_clean(first, n, n_inputs)
    return outputs


def clean_outputs(calculator: Calculator) -> Tensor:
    """The outputs of every clean input, in chunks; their activations are not computed."""
    n, parts = len(calculator.inputs), []
    for first in range(0, n, calculator.chunk):
        rows = torch.arange(first, min(first + calculator.chunk, n), device=calculator.device)
        inputs = calculator.read(padded(rows, calculator.chunk))
        parts.append(calculator.target.forward(inputs)[: len(rows)].float())
    calculator.passes += n
    return torch.cat(parts)


def keep_clean(calculator: Calculator, rows: Tensor) -> None:
    """Run the clean inputs of the seeds `rows` and keep their activations; the passes count as part of a sweep."""
    before = calculator.passes
    while len(rows):
        rows = rows[calculator.memory.attempt(partial(_keep_clean, calculator, rows)) :]
    calculator.passes = before


def _keep_clean(calculator: Calculator, rows: Tensor) -> int:
    """Keep the clean activations of the first chunk of `rows`; returns how many these are."""
    rows = rows[: calculator.chunk]

    def keep(layer: Layer, activations: Tensor) -> None:
        calculator.clean.kept.put(layer.name, rows, activations[: len(rows)])

    calculator.clean_pass(rows, keep)
    return len(rows)
