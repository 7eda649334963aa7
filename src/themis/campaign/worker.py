"""A worker of a campaign: holds the model, and runs the chunks that it is given."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.data.seeds import Seeds
from themis.measure.calculator import Calculator, Limits
from themis.measure.fold import Objective
from themis.measure.moments import Accumulator
from themis.measure.runner import TestRunner
from themis.measure.sweep import sweep_chunk
from themis.measure.tests import Ints, Results, Tests
from themis.oracle import Oracle, choose_oracle
from themis.perturb import Perturbation
from themis.search.kinds import MARGIN_ASCENT
from themis.target.activations import Layer
from themis.target.target import AnyTarget

Array = NDArray[Any]


@dataclass(frozen=True)
class SweptChunk:
    """What a worker returns of a chunk of clean inputs."""

    outputs: Array
    sums: Array
    shift: Array | None
    chunk: int


@dataclass(frozen=True)
class CleanAnswers:
    """What the driver knows after the clean sweep, and workers need for tests."""

    oracle: Oracle
    outputs: Array
    has_gradient: bool
    panel: Array | None
    """None if nothing is folded."""
    scale: Array | None


@dataclass(frozen=True)
class ChunkOfTests:
    """What a worker is given for a chunk of tests."""

    number: int
    """Of the chunk in its campaign."""
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
    first: tuple[Array, Array] | None
    """Of the first chunk of a stream: what is subtracted from sensitivities, and the sums of `D - shift` and of its
    square `[2, neurons]`; the worker keeps those of other chunks."""
    n_folded: int
    passes: int
    chunk: int
    pass_size: int
    own_passes: int


class ChunkWorker:
    """Runs chunks of clean inputs and of tests, and keeps the sums of tests until the driver takes them.

    It holds the clean activations of the seeds that it has run; those it lacks are computed when a test needs them.
    """

    def __init__(
        self,
        target: AnyTarget,
        seeds: Seeds,
        perturbation: Perturbation,
        layers: tuple[Layer, ...],
        limits: Limits,
    ) -> None:
        self._open = ExitStack()
        self._open.enter_context(target.opened())
        self.calculator = Calculator(target, seeds, perturbation, choose_oracle(target.oracle), layers, limits)
        self.calculator.allot_clean(self.calculator.device)
        self._sums: dict[int, tuple[str, Tensor]] = {}
        """By the number of the chunk: its stream, and the sums of `D - shift` and of its square `[2, neurons]`."""
        self._runner: TestRunner | None = None
        self._accumulators: dict[str, Accumulator] = {}
        self._scale: Tensor | None = None

    def begin_stream(self, stream: str, shift: Array) -> None:
        """Take the shift of a stream, which its first chunk has determined."""
        self._accumulator(stream).begin(tensor_of(shift), 1)

    def sweep_chunk(self, stream: str, first: int, chunk: int) -> SweptChunk:
        """Run a chunk of clean inputs."""
        self.calculator.memory.shrink(chunk)
        into = self._accumulator(stream, is_first=first == 0)
        outputs = sweep_chunk(self.calculator, first, into)
        shift = array_of(into.shift) if first == 0 else None
        return SweptChunk(array_of(outputs), array_of(into.take_sums()), shift, self.calculator.chunk)

    def begin_tests(self, perturbation: Perturbation, clean: CleanAnswers) -> None:
        """Prepare for tests of a perturbation; what is left of other tests is dropped."""
        calculator = self.calculator = self.calculator.under(perturbation)
        self._sums, self._accumulators = {}, {}
        calculator.has_gradient = clean.has_gradient
        calculator.take_clean(tensor_of(clean.outputs).to(calculator.device), clean.oracle)
        self._runner = None if clean.panel is None else TestRunner(calculator, tensor_of(clean.panel))
        self._scale = None if clean.scale is None else tensor_of(clean.scale).to(calculator.device)

    def measure(self, chunk: ChunkOfTests) -> MeasuredChunk:
        """Run a chunk of tests."""
        calculator, into = self.calculator, self._accumulator(chunk.stream, is_first=chunk.is_first)
        calculator.memory.shrink(chunk.chunk)
        before = into.count
        runner = self._runner = self._runner or TestRunner(calculator)
        measurement = runner.measure(chunk.tests, into, self._objective(chunk.objective), chunk.max_passes)
        n_folded, panel = into.count - before, measurement.panel
        first = None
        if n_folded:
            sums = into.take_sums()
            if chunk.is_first:
                first = array_of(into.shift), array_of(sums)
            else:
                self._sums[chunk.number] = chunk.stream, sums
        return MeasuredChunk(
            measurement.results,
            {name: array_of(torch.as_tensor(value)) for name, value in measurement.faults.arrays().items()},
            None if panel is None else (array_of(panel[0]), array_of(panel[1])),
            first,
            n_folded,
            measurement.passes,
            measurement.chunk,
            measurement.pass_size,
            calculator.own_passes,
        )

    def grade(self, tests: Tests) -> list[Array | None]:
        """A graded chunk of tests, as arrays; nothing is folded."""
        return [None if each is None else array_of(each) for each in self.calculator.grade_chunk(tests)]

    def take_sums(self, numbers: list[int], underway: list[int]) -> dict[str, tuple[Array, list[int]]]:
        """The sums of those chunks that this worker has run, by stream, with their numbers; keeps others underway."""
        taken: dict[str, tuple[Array, list[int]]] = {}
        for number in numbers:
            if number in self._sums:
                stream, sums = self._sums.pop(number)
                total, of_stream = taken.setdefault(stream, (np.zeros(sums.shape), []))
                total += array_of(sums)
                of_stream.append(number)
        self._sums = {number: kept for number, kept in self._sums.items() if number in underway}
        return taken

    def _objective(self, objective: Ints | None) -> Objective | None:
        if objective is None:
            return None
        return Objective(tensor_of(objective).to(self.calculator.device), self._scale, MARGIN_ASCENT)

    def _accumulator(self, stream: str, *, is_first: bool = False) -> Accumulator:
        """The accumulator of a stream, without any test if the next chunk is the first of the stream."""
        if is_first or stream not in self._accumulators:
            self._accumulators[stream] = self.calculator.accumulator()
        return self._accumulators[stream]


def array_of(tensor: Tensor) -> Array:
    """A tensor as it is sent."""
    array: Array = tensor.detach().cpu().numpy()
    return array


def tensor_of(array: Array) -> Tensor:
    """A tensor of its own: arrays that Ray sends cannot be written to."""
    return torch.from_numpy(array.copy())
