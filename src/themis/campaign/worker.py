"""A worker of a campaign: holds the model, and runs the chunks that it is given."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.compute.shared_memory import can_share
from themis.data.seeds import Seeds
from themis.measure.calculator import Calculator, Limits
from themis.measure.fold import Objective
from themis.measure.moments import Accumulator, ChunkSums
from themis.measure.runner import TestRunner
from themis.measure.sweep import keep_clean, sweep_chunk
from themis.measure.tests import Ints, Results, Tests
from themis.oracle import Oracle
from themis.perturb import Perturbation
from themis.search.ascent import MARGIN_ASCENT
from themis.settings import Settings
from themis.target.activations import Layer
from themis.target.target import AnyTarget

Array = NDArray[Any]


@dataclass(frozen=True)
class CampaignCase:
    """What a campaign tests, as its workers build it: nothing in it changes."""

    target: AnyTarget
    seeds: Seeds
    perturbation: Perturbation
    oracle: Oracle
    layers: tuple[Layer, ...]
    chunk: int
    settings: Settings
    name: str
    """Of the campaign, under which workers on one machine share the clean activations."""

    def calculator(self) -> Calculator:
        """The calculator of a worker, which has not run anything."""
        limits = Limits.of(self.settings, self.chunk)
        return Calculator(self.target, self.seeds, self.perturbation, self.oracle, self.layers, limits)


@dataclass(frozen=True)
class SweptChunk:
    """What a worker returns of a chunk of clean inputs."""

    outputs: Array
    sums: tuple[Array, Array]
    shift: Array | None
    chunk: int


@dataclass(frozen=True)
class CleanAnswers:
    """What the driver knows after the clean sweep, and workers need for tests."""

    oracle: Oracle
    outputs: Array
    usable: Array
    has_gradient: bool
    panel: Array
    scale: Array | None


@dataclass(frozen=True)
class ChunkOfTests:
    """What a worker is given for a chunk of tests."""

    stream: str
    tests: Tests
    objective: Ints | None
    """The neurons whose sensitivity is raised by tests of that kind, if the tests have an objective."""
    chunk: int
    is_first: bool
    """Whether its first test determines what is subtracted from all sensitivities of the stream."""
    max_passes: int | None = None


@dataclass(frozen=True)
class MeasuredChunk:
    """What a worker returns of a chunk of tests."""

    results: Results
    faults: dict[str, Array]
    panel: tuple[Array, Array] | None
    sums: tuple[Array, Array] | None
    """Sums of `D - shift` and of its square over the tests that were folded; None if none was."""
    shift: Array | None
    """What is subtracted, if this was the first chunk of its stream."""
    n_folded: int
    passes: int
    chunk: int
    pass_size: int
    own_passes: int

    @property
    def has_unfolded(self) -> bool:
        """Whether outputs of some tests were not finite, so that the others were run again, as far as passes allow."""
        return self.n_folded < int(self.results.was_run.sum())


class ChunkWorker:
    """Runs chunks of clean inputs and of tests, and returns their sums instead of folding them.

    It holds the clean activations of the seeds that it, or another worker on its machine, has run; those it lacks are
    computed when a test needs them.
    """

    def __init__(self, case: CampaignCase) -> None:
        self._open = ExitStack()
        self._open.enter_context(case.target.opened())
        self.calculator = case.calculator()
        device = self.calculator.device
        self.calculator.allot_clean(device, case.name if device.type == "cpu" and can_share() else None)
        self._is_kept = self.calculator.clean.kept.is_kept
        self._usable = torch.arange(self.calculator.clean.kept.n_kept)
        self._runner: TestRunner | None = None
        self._accumulators: dict[str, Accumulator] = {}
        self._scale: Tensor | None = None

    def close(self) -> None:
        """Leave the target as it was."""
        self._open.close()

    def begin_stream(self, stream: str, shift: Array) -> None:
        """Take the shift of a stream, which its first chunk has determined."""
        self._accumulator(stream).begin(tensor_of(shift), 1)

    def sweep_chunk(self, stream: str, first: int, chunk: int) -> SweptChunk:
        """Run a chunk of clean inputs."""
        self.calculator.memory.shrink(chunk)
        into = self._accumulator(stream, is_first=first == 0)
        outputs = sweep_chunk(self.calculator, first, into)
        self._is_kept[first : first + len(outputs)] = True
        shift = array_of(into.shift) if first == 0 else None
        return SweptChunk(array_of(outputs), _take_sums(into), shift, self.calculator.chunk)

    def begin_tests(self, clean: CleanAnswers) -> None:
        """Prepare for tests."""
        calculator = self.calculator
        calculator.has_gradient = clean.has_gradient
        self._usable = tensor_of(clean.usable)
        calculator.clean.kept.populate()
        calculator.take_clean(tensor_of(clean.outputs).to(calculator.device), clean.oracle)
        self._runner = TestRunner(calculator, tensor_of(clean.panel), are_kept=False)
        self._scale = None if clean.scale is None else tensor_of(clean.scale).to(calculator.device)

    def measure(self, chunk: ChunkOfTests) -> MeasuredChunk:
        """Run a chunk of tests."""
        calculator, into = self.calculator, self._accumulator(chunk.stream, is_first=chunk.is_first)
        calculator.memory.shrink(chunk.chunk)
        self._keep_clean(torch.from_numpy(np.unique(chunk.tests.seed)))
        before = into.count
        runner = self._runner = self._runner or TestRunner(calculator)
        measurement = runner.measure(chunk.tests, into, self._objective(chunk.objective), chunk.max_passes)
        n_folded, panel = into.count - before, measurement.panel
        shift = array_of(into.shift) if chunk.is_first and n_folded else None
        return MeasuredChunk(
            measurement.results,
            {name: array_of(torch.as_tensor(value)) for name, value in measurement.faults.arrays().items()},
            None if panel is None else (array_of(panel[0]), array_of(panel[1])),
            _take_sums(into) if n_folded else None,
            shift,
            n_folded,
            measurement.passes,
            measurement.chunk,
            measurement.pass_size,
            calculator.own_passes,
        )

    def _keep_clean(self, rows: Tensor) -> None:
        """Compute the clean activations that this worker lacks; the driver has counted their passes in its sweep."""
        rows = rows[rows < len(self._is_kept)]
        missing = rows[~self._is_kept[rows]]
        if not len(missing):
            return
        n_idle = -len(missing) % self.calculator.chunk  # rows of the last pass: they cost the same if they are used
        lacking = self._lacking()
        rows = torch.cat([missing, lacking[~torch.isin(lacking, missing)][:n_idle]])
        keep_clean(self.calculator, rows.to(self.calculator.device))
        self._is_kept[rows] = True  # after the activations, since other processes may read them from now on

    def keep_more(self) -> bool:
        """Compute one chunk of the clean activations that this worker lacks; returns whether it still lacks some."""
        self._keep_clean(self._lacking()[: self.calculator.chunk])
        return len(self._lacking()) > 0

    def _lacking(self) -> Tensor:
        """The seeds that tests may have, and whose clean activations there is room for but which are not kept."""
        rows = self._usable[self._usable < len(self._is_kept)]
        return rows[~self._is_kept[rows]]

    def _objective(self, objective: Ints | None) -> Objective | None:
        if objective is None:
            return None
        return Objective(tensor_of(objective).to(self.calculator.device), self._scale, MARGIN_ASCENT)

    def _accumulator(self, stream: str, *, is_first: bool = False) -> Accumulator:
        """The accumulator of a stream, without any test if the next chunk is the first of the stream."""
        if is_first or stream not in self._accumulators:
            calculator = self.calculator
            is_on_cpu = calculator.device.type == "cpu"  # a GPU may run several chunks at once
            self._accumulators[stream] = (
                ChunkSums(calculator.n_neurons, dtype=calculator.dtype) if is_on_cpu else calculator.accumulator()
            )
        return self._accumulators[stream]


def array_of(tensor: Tensor) -> Array:
    """A tensor as it is sent."""
    array: Array = tensor.detach().cpu().numpy()
    return array


def tensor_of(array: Array) -> Tensor:
    """A tensor of its own: arrays from shared memory cannot be written to."""
    return torch.from_numpy(array.copy())


def _take_sums(into: Accumulator) -> tuple[Array, Array]:
    """The sums of the last chunk. They need no copy: what a worker returns is serialised before its next call."""
    sums, squares = into.take_sums()
    return array_of(sums), array_of(squares)
