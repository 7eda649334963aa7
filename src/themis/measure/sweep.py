"""The clean sweep: every clean input is run once, before the first test."""

from __future__ import annotations

from functools import partial

import numpy as np
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
    with step(SWEEP):
        moments, outputs = calculator.memory.attempt(partial(_sweep, calculator))
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
    seeds, kept = np.arange(first, min(first + calculator.chunk, n_inputs)), calculator.clean.kept
    rows, n = torch.from_numpy(seeds).to(calculator.device), len(seeds)
    advance(first, n_inputs, "inputs")
    new, new_rows = kept.make_room(seeds[: kept.n_empty])
    at = kept.index(new_rows)
    start = int(new[0]) - first if len(new) else 0  # a worker may have run a part of them before

    def keep(layer: Layer, activations: Tensor) -> None:
        kept.by_layer[layer.name][at] = activations[start : start + len(new)]
        moments.add_copy(activations[:n], layer.start, layer.stop, buffers[layer.name][0][:n])

    outputs = calculator.clean_pass(padded(rows, calculator.chunk), keep, observer)[:n]
    kept.filled(new, new_rows)
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
