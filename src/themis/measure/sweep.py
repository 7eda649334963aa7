"""The clean sweep: every clean input is run once, before the first test."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from themis.data.seeds import Seeds
from themis.errors import ModelError
from themis.measure.calculator import Calculator
from themis.measure.captured import capturing
from themis.measure.chunk import padded
from themis.measure.clean import place_others, within_bounds
from themis.measure.moments import Accumulator, Moments
from themis.oracle.oracle import are_finite
from themis.progress import advance, step
from themis.target.activations import Layer
from themis.target.target import AnyTarget, Target

SWEEP = "running the model on the clean inputs"


def sweep(calculator: Calculator) -> Moments:
    """Run every clean input, and set `calculator.clean`. Returns the moments of the clean activations themselves."""
    with step(SWEEP):
        moments, outputs = calculator.memory.attempt(partial(_sweep, calculator))
    return take_sweep(calculator, moments, outputs)


def take_sweep(calculator: Calculator, moments: Moments, outputs: list[Tensor]) -> Moments:
    """Set `calculator.clean` from the outputs of every clean input; return the moments, checked."""
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


MIN_CAPTURED_CHUNKS = 8
"""Number of chunks from which capturing one of them saves time."""


def _sweep(calculator: Calculator) -> tuple[Moments, list[Tensor]]:
    calculator.allocate_clean(calculator.device)
    moments, chunk, n_inputs = calculator.accumulator(), calculator.chunk, len(calculator.inputs)
    outputs, graph = [], None
    for first in range(0, n_inputs, chunk):
        if first == chunk and n_inputs >= MIN_CAPTURED_CHUNKS * chunk:  # the first chunk has set the shift
            graph = _CapturedSweep.of(calculator, moments)
        if graph is not None and first + chunk <= n_inputs:
            outputs.append(graph.run(first))
        else:
            outputs.append(_sweep_chunk(calculator, first, moments))
    return moments.moments(), outputs


class _CapturedSweep:
    """A CUDA graph of a full chunk of clean inputs; all activations are kept."""

    def __init__(self, calculator: Calculator, moments: Accumulator) -> None:
        self.calculator, self.moments = calculator, moments
        self._rows = torch.arange(calculator.chunk, device=calculator.device)
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(calculator.device)  # type: ignore[no-untyped-call, unused-ignore]
        stream.wait_stream(torch.cuda.current_stream(calculator.device))
        with capturing(self._graph, stream, calculator.device):
            self._outputs = calculator.clean_pass(self._rows, self._keep)

    @staticmethod
    def of(calculator: Calculator, moments: Accumulator) -> _CapturedSweep | None:
        """Capture the graph; return None if that is impossible."""
        is_plain = calculator.observer is None and calculator.seeds.others is None
        is_plain = is_plain and isinstance(calculator.inputs, Tensor) and isinstance(calculator.target, Target)
        if calculator.device.type != "cuda" or not is_plain or calculator.clean.kept.is_short:
            return None
        try:
            return _CapturedSweep(calculator, moments)
        except Exception:  # then chunks are run without a graph
            return None
        finally:
            torch.cuda.synchronize(calculator.device)

    def _keep(self, layer: Layer, activations: Tensor) -> None:
        self.calculator.clean.kept.by_layer[layer.name].index_copy_(0, self._rows, activations)
        self.moments.add_copy(activations, layer.start, layer.stop)

    def run(self, first: int) -> Tensor:
        """Run the chunk from the seed `first` on; returns the outputs."""
        kept, seeds = self.calculator.clean.kept, np.arange(first, first + self.calculator.chunk)
        advance(first, len(self.calculator.inputs), "inputs")
        self._rows.copy_(torch.from_numpy(seeds))
        self._graph.replay()
        kept.filled(*kept.make_room(seeds))
        self.moments.commit(len(seeds))
        return self._outputs.clone()


def sweep_chunk(calculator: Calculator, first: int, into: Accumulator) -> Tensor:
    """Run the chunk of clean inputs from `first` on: fold and keep the activations, and return the outputs."""
    return calculator.memory.attempt(lambda: _sweep_chunk(calculator, first, into))


def _sweep_chunk(calculator: Calculator, first: int, moments: Accumulator) -> Tensor:
    n_inputs, observer = len(calculator.inputs), calculator.observer
    seeds, kept = np.arange(first, min(first + calculator.chunk, n_inputs)), calculator.clean.kept
    rows, n = torch.from_numpy(seeds).to(calculator.device), len(seeds)
    advance(first, n_inputs, "inputs")
    new, new_rows = kept.make_room(seeds[: kept.n_empty])
    at = kept.index(new_rows)
    start = int(new[0]) - first if len(new) else 0  # a worker may already have run some of them

    def keep(layer: Layer, activations: Tensor) -> None:
        kept.by_layer[layer.name][at] = activations[start : start + len(new)]
        moments.add_copy(activations[:n], layer.start, layer.stop)

    outputs = calculator.clean_pass(padded(rows, calculator.chunk), keep, observer)[:n]
    kept.filled(new, new_rows)
    moments.commit(n)
    if observer is not None:
        observer.keep_clean(first, n, n_inputs)
    return outputs


def clean_outputs(target: AnyTarget, seeds: Seeds, chunk: int) -> Tensor:
    """The outputs of every clean input, float32 on the target's device; their activations are not computed.

    The target must be open.
    """
    parts = []
    for first in range(0, len(seeds), chunk):
        rows = torch.arange(first, min(first + chunk, len(seeds)))
        inputs = within_bounds(seeds.take(padded(rows, chunk)), target.bounds, seeds.seed_id[rows])
        place_others(target, seeds, padded(rows, chunk))
        parts.append(target.forward(inputs.to(target.device))[: len(rows)].float())
    return torch.cat(parts)
