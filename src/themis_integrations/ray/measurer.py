"""A campaign whose inputs and tests run in workers, which hold the model; the driver merges what they send in order.

Chunks have the same tests whatever the number of workers, and results are taken in the order of the chunks. The sums
of a chunk stay in its worker until `gather` asks for them: workers then add up what they have, and one sends the sum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.campaign.setup import CampaignPlan, MakeMeasurer, TestedModel, read_tested
from themis.data.seeds import Seeds
from themis.errors import DataError, UsageError
from themis.measure.calculator import Calculator, GradedChunk, Limits
from themis.measure.fold import Objective
from themis.measure.moments import Accumulator, Moments
from themis.measure.runner import Measurement, Portion, TestRunner
from themis.measure.sweep import SWEEP, sweep_chunk, take_sweep
from themis.measure.tests import FaultDetails, Ints, Tests
from themis.oracle import Oracle, choose_oracle
from themis.perturb import Perturbation
from themis.progress import advance, step
from themis.runs.source import Origin
from themis.search.kinds import MARGIN_ASCENT
from themis.settings import Settings
from themis.target.activations import Layer
from themis.target.fingerprint import hash_tensors
from themis.target.target import AnyTarget
from themis_integrations.ray.cluster import RayWorkers, connected
from themis_integrations.ray.pool import RayPool

Array = NDArray[Any]
TakenSums = dict[str, tuple[Array, list[int]]]
"""By stream: the sum over some chunks, and their numbers."""


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

    measurement: Measurement
    """With all tensors on the CPU."""
    first: tuple[Array, Array] | None
    """Of the first chunk of a stream: what is subtracted from sensitivities, and the sums of `D - shift` and of its
    square `[2, neurons]`; the worker keeps those of other chunks."""
    n_folded: int
    own_passes: int


class ChunkWorker:
    """Runs chunks of clean inputs and of tests, and keeps the sums of tests until the driver takes them.

    It holds the clean activations of the seeds that it has run; those it lacks are computed when a test needs them.
    """

    def __init__(
        self, target: AnyTarget, seeds: Seeds, perturbation: Perturbation, layers: tuple[Layer, ...], limits: Limits
    ) -> None:
        self._open = ExitStack()
        self._open.enter_context(target.opened())
        self.calculator = Calculator(target, seeds, perturbation, choose_oracle(target.oracle), layers, limits)
        self.calculator.allocate_clean(self.calculator.device)
        self._sums: dict[int, tuple[str, Array]] = {}
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
        calculator = self.calculator = self.calculator.with_perturbation(perturbation)
        self._sums, self._accumulators = {}, {}
        calculator.has_gradient = clean.has_gradient
        calculator.take_clean(tensor_of(clean.outputs).to(calculator.device), clean.oracle)
        self._runner = None if clean.panel is None else TestRunner(calculator, tensor_of(clean.panel))
        self._scale = None if clean.scale is None else tensor_of(clean.scale).to(calculator.device)

    def measure(self, chunk: ChunkOfTests) -> MeasuredChunk:
        """Run a chunk of tests."""
        calculator, into = self.calculator, self._accumulator(chunk.stream, is_first=chunk.is_first)
        calculator.memory.shrink(chunk.chunk)
        before, objective = into.count, None
        if chunk.objective is not None:
            objective = Objective(tensor_of(chunk.objective).to(calculator.device), self._scale, MARGIN_ASCENT)
        runner = self._runner = self._runner or TestRunner(calculator)
        measurement = runner.measure(chunk.tests, into, objective, chunk.max_passes)
        n_folded, panel, faults = into.count - before, measurement.panel, measurement.faults
        first = None
        if n_folded:
            sums = into.take_sums()
            if chunk.is_first:
                first = array_of(into.shift), array_of(sums)
            else:
                self._sums[chunk.number] = chunk.stream, array_of(sums)
        sent = replace(
            measurement,
            faults=FaultDetails(faults.columns, faults.inputs.cpu(), faults.outputs.cpu()),
            panel=panel and (panel[0].cpu(), panel[1].cpu()),
        )
        return MeasuredChunk(sent, first, n_folded, calculator.own_passes)

    def grade(self, tests: Tests) -> list[Array | None]:
        """A graded chunk of tests, as arrays; nothing is folded."""
        return [None if each is None else array_of(each) for each in self.calculator.grade_chunk(tests)]

    def take_sums(self, numbers: list[int], underway: list[int], n_chunks: int) -> TakenSums:
        """The sums of those chunks that this worker has run, by stream, with their numbers.

        Those of other chunks are dropped, unless they are `underway` or later than the first `n_chunks`.
        """
        taken: TakenSums = {}
        for number in [*self._sums]:  # meanwhile, another chunk may be added
            if number in numbers:
                stream, sums = self._sums.pop(number)
                total, of_stream = taken.setdefault(stream, (np.zeros(sums.shape), []))
                total += sums
                of_stream.append(number)
            elif number < n_chunks and number not in underway:
                del self._sums[number]
        return taken

    def add_sums(self, mine: TakenSums, others: TakenSums) -> TakenSums:
        """What two workers have taken, together."""
        total = dict(mine)
        for stream, (sums, numbers) in others.items():
            before, counted = total.get(stream, (0.0, []))
            total[stream] = before + sums, counted + numbers
        return total

    def _accumulator(self, stream: str, *, is_first: bool = False) -> Accumulator:
        """The accumulator of a stream, without any test if the next chunk is the first of the stream."""
        if is_first or stream not in self._accumulators:
            self._accumulators[stream] = self.calculator.accumulator()
        return self._accumulators[stream]


def array_of(tensor: Tensor) -> Array:
    """A tensor as it is sent."""
    return np.asarray(tensor.detach().cpu())


def tensor_of(array: Array) -> Tensor:
    """A tensor of its own: arrays that Ray sends cannot be written to."""
    return torch.from_numpy(array.copy())


CLEAN = "clean"
SPARE = 4
"""Chunks of uniform tests per worker that are handed out before their turn, for workers that would wait for others."""
MAX_OWED = 16
"""Chunks per worker whose sums it keeps at most, on average."""


@dataclass(frozen=True)
class _StartedChunk:
    """A chunk that was handed to a worker."""

    call: int
    chunk: ChunkOfTests


class RemoteMeasurer:
    """Runs clean inputs and tests in a pool of `ChunkWorker`s."""

    def __init__(self, calculator: Calculator, pool: RayPool) -> None:
        self.calculator, self.pool = calculator, pool
        self._started: dict[int, _StartedChunk] = {}
        """Chunks of the pending and the upcoming portions, by the number of their first test."""
        self._last_pending = -1
        """The number of the last pending test that was started."""
        self._streams: dict[str, Accumulator] = {}
        """The streams whose shift the workers know."""
        self._owed: dict[int, ChunkOfTests] = {}
        """Chunks whose results were taken, and whose sums are still in their workers."""
        self._handed: list[tuple[Any, dict[int, ChunkOfTests]]] = []
        """What workers were asked to add up: the pool's answer, and the chunks."""
        self._n_chunks = 0

    def sweep(self) -> Moments:
        calculator = self.calculator
        calculator.allocate_clean(torch.device("meta"))  # the activations are in the workers
        with step(SWEEP):
            while (swept := self._sweep()) is None:
                pass
        return take_sweep(calculator, *swept)

    def _sweep(self) -> tuple[Moments, list[Tensor]] | None:
        """The moments and outputs of all clean inputs; None if memory ran out, so that chunks are smaller now."""
        calculator, chunk = self.calculator, self.calculator.chunk
        stream, into, outputs = f"{CLEAN}, {chunk} at a time", calculator.accumulator(), []
        firsts = deque(range(0, len(calculator.inputs), chunk))
        calls = deque([self._submit_clean(stream, firsts.popleft())])
        while calls:
            swept: SweptChunk = self.pool.result(calls.popleft())
            if swept.chunk < chunk:
                calculator.memory.shrink(swept.chunk)
                for call in calls:
                    self.pool.discard(call)
                return None
            if swept.shift is not None:
                self._begin_stream(stream, swept.shift, into)
                calls += [self._submit_clean(stream, first) for first in firsts]
            into.commit_sums(self._on_device(swept.sums), len(swept.outputs))
            outputs.append(tensor_of(swept.outputs).to(calculator.device))
            advance(len(outputs) * chunk, len(calculator.inputs), "inputs")
        return into.moments(), outputs

    def _submit_clean(self, stream: str, first: int) -> int:
        chunk = self.calculator.chunk
        label = f"the clean inputs {first:,} to {min(first + chunk, len(self.calculator.inputs)) - 1:,}"
        return self.pool.submit(label, "sweep_chunk", stream, first, chunk)

    def begin(self, panel: Tensor, scale: Tensor | None) -> None:
        self._started, self._streams, self._handed, self._last_pending = {}, {}, [], -1
        self._begin(self.calculator, panel, scale)

    def _begin(self, calculator: Calculator, panel: Tensor | None, scale: Tensor | None) -> None:
        clean = CleanAnswers(
            calculator.clean.oracle,
            array_of(calculator.clean.outputs),
            calculator.has_gradient,
            None if panel is None else array_of(panel),
            None if scale is None else array_of(scale),
        )
        self.pool.broadcast("begin_tests", calculator.perturbation, self.pool.share(clean))

    def measure(self, pending: Portion, upcoming: Iterable[Portion], max_passes: int | None) -> Measurement:
        into, calculator = pending.into, self.calculator
        if not self._is_underway(pending.tests):
            self._start(chain([pending], upcoming))
            self._last_pending = int(pending.tests.number[-1])
            self._hand_over()
        started = self._started.pop(int(pending.tests.number[0]))
        measured: MeasuredChunk = self.pool.result(started.call)
        has_unfolded = measured.n_folded < int(measured.measurement.results.was_run.sum())  # others were not finite
        if has_unfolded and max_passes is not None:  # how many are folded depends on the passes that are left
            started = self._submit(pending.stream, started.chunk.tests, started.chunk.objective, into, max_passes)
            measured = self.pool.result(started.call)
        if measured.first is not None:
            shift, sums = measured.first
            self._begin_stream(pending.stream, shift, into)
            into.commit_sums(self._on_device(sums), measured.n_folded)
        elif measured.n_folded:
            into.count += measured.n_folded
            tests = started.chunk.tests[: len(measured.measurement)]
            self._owed[started.chunk.number] = replace(started.chunk, tests=tests)
            if len(self._owed) >= MAX_OWED * self.pool.n_workers:
                self._hand_over()
        calculator.memory.shrink(measured.measurement.chunk)
        calculator.own_passes = max(calculator.own_passes, measured.own_passes)
        return self._received(measured.measurement)

    def gather(self, upcoming: Iterable[Portion] | None = None) -> None:
        """Add the sums of all chunks that were taken; those of workers that have died are computed again."""
        if upcoming is not None:
            self._start(upcoming)
            self._last_pending = -1
        self._hand_over()
        while self._handed:
            answer, owed = self._handed[0]
            taken = self.pool.combined(answer) or {}
            del self._handed[0]
            for stream, (sums, numbers) in taken.items():
                self._streams[stream].commit_sums(self._on_device(sums), 0)
                for number in numbers:
                    del owed[number]
            size = self.calculator.chunk
            again = [
                self._submit(lost.stream, lost.tests[first : first + size], lost.objective, self._streams[lost.stream])
                for lost in owed.values()
                for first in range(0, len(lost.tests), size)
            ]
            for started in again:
                self.pool.result(started.call)
                self._owed[started.chunk.number] = started.chunk
            self._hand_over()

    def _hand_over(self) -> None:
        """Let workers add up the sums of the chunks that were taken, while they run others."""
        if self._owed:
            underway = [started.chunk.number for started in self._started.values()]
            answer = self.pool.combine_all("take_sums", "add_sums", [*self._owed], underway, self._n_chunks)
            self._handed.append((answer, self._owed))
            self._owed = {}

    def end(self) -> None:
        for started in self._started.values():
            self.pool.discard(started.call)
        self.calculator.release()

    def with_calculator(self, calculator: Calculator) -> RemoteMeasurer:
        return RemoteMeasurer(calculator, self.pool)

    def grade(self, calculator: Calculator, tests: Tests) -> Iterator[GradedChunk]:
        self._begin(calculator, None, None)
        chunks = [tests[first : first + calculator.chunk] for first in range(0, len(tests), calculator.chunk)]
        calls = [self.pool.submit("tests of a level", "grade", chunk) for chunk in chunks]
        for call, chunk in zip(calls, chunks, strict=True):
            calculator.passes += len(chunk)
            outputs, is_fault, labels = self.pool.result(call)
            moved = None if labels is None else self._on_device(labels)
            yield GradedChunk(self._on_device(outputs), self._on_device(is_fault), moved)

    def _is_underway(self, tests: Tests) -> bool:
        """Whether all chunks of the pending tests were started."""
        started = self._started.get(int(tests.number[0]))
        if started is None or self._last_pending != tests.number[-1]:
            return False
        chunk = started.chunk.tests
        return chunk.equals(tests[: self.calculator.chunk][: len(chunk)])

    def _start(self, portions: Iterable[Portion]) -> None:
        """Start all chunks of these portions that were not started, and drop all others."""
        before, self._started = self._started, {}
        n_spare = SPARE * self.pool.n_workers
        for position, portion in enumerate(portions):
            is_first = portion.into.count == 0  # the others need what its first chunk determines
            if n_spare <= 0 or (is_first and position):
                break
            for tests, objective in islice(
                self._chunks(portion), 1 if is_first else None if portion.is_next else n_spare
            ):
                started = self._start_chunk(portion, tests, _describe(objective), before)
                self._started[int(tests.number[0])] = started
                n_spare -= not portion.is_next
            if is_first:
                break
        for started in before.values():
            self.pool.discard(started.call)

    def _start_chunk(
        self, portion: Portion, tests: Tests, objective: Ints | None, before: dict[int, _StartedChunk]
    ) -> _StartedChunk:
        """Hand a chunk of a portion to a worker, unless that was done before."""
        started = before.get(int(tests.number[0]))
        if started is not None:
            chunk = started.chunk
            if chunk.tests.equals(tests) and np.array_equal(chunk.objective, objective):  # type: ignore[arg-type]
                del before[int(tests.number[0])]
                if portion.is_next:
                    self.pool.hasten(started.call)
                return started
        into = portion.into
        if into.count and portion.stream not in self._streams:  # the campaign was resumed
            self._begin_stream(portion.stream, array_of(into.shift), into)
        return self._submit(portion.stream, tests, objective, into, is_urgent=portion.is_next)

    def _chunks(self, pending: Portion) -> Iterator[tuple[Tests, Objective | None]]:
        """The chunks that one call of `measure` after another asks for."""
        chunk = self.calculator.chunk
        for group in pending.by_objective():
            for first in range(0, len(group.tests), chunk):
                yield group.tests[first : first + chunk], group.objective

    def _submit(
        self,
        stream: str,
        tests: Tests,
        objective: Ints | None,
        into: Accumulator,
        max_passes: int | None = None,
        *,
        is_urgent: bool = True,
    ) -> _StartedChunk:
        number, self._n_chunks = self._n_chunks, self._n_chunks + 1
        chunk = ChunkOfTests(number, stream, tests, objective, self.calculator.chunk, into.count == 0, max_passes)
        label = f"the tests {int(tests.number[0]):,} to {int(tests.number[-1]):,}"
        call = self.pool.submit(label, "measure", chunk, is_urgent=is_urgent)
        return _StartedChunk(call, chunk)

    def _begin_stream(self, stream: str, shift: Array, into: Accumulator) -> None:
        """Tell all workers what is subtracted from the sensitivities of a stream."""
        self._streams[stream] = into
        if into.count == 0:
            into.begin(tensor_of(shift).to(self.calculator.device), 0)
        self.pool.broadcast("begin_stream", stream, self.pool.share(shift))

    def _on_device(self, array: Array) -> Tensor:
        return tensor_of(array).to(self.calculator.device)

    def _received(self, sent: Measurement) -> Measurement:
        """What a worker has measured; an array that stays in use would keep all of its message in memory, so copied."""
        device, panel, faults = self.calculator.device, sent.panel, sent.faults
        columns = {name: value.copy() for name, value in faults.columns.items()}
        kept: dict[str, Any] = {name: value for name, value in vars(sent.results).items() if value is not None}
        return replace(
            sent,
            results=replace(sent.results, **{name: value.copy() for name, value in kept.items()}),
            faults=FaultDetails(columns, faults.inputs, faults.outputs),
            panel=panel and (panel[0].to(device), panel[1].to(device)),
        )


def _describe(objective: Objective | None) -> Ints | None:
    """An objective as workers are told it: its neurons."""
    if objective is None:
        return None
    if not objective.is_plain:
        raise UsageError("workers can raise the loss of margin and sensitivities only: use the local executor")
    return array_of(objective.neurons)


@contextmanager
def start_workers(executor: RayWorkers, tested: TestedModel, plan: CampaignPlan) -> Iterator[MakeMeasurer]:
    """What runs the tests of a campaign, whose target is not open yet: workers, in this block."""
    target, seeds, _, origin, _ = tested
    with connected(executor) as ray, ExitStack() as pools:
        words = origin if origin is not None and (origin.data or origin.zoo) else None
        pickled = _pickled(target, words)

        def make_measurer(calculator: Calculator) -> RemoteMeasurer:
            recipe = WorkerRecipe(
                pickled,
                words,
                seeds if words is None else None,
                _sample_hash(seeds),
                plan.perturbation,
                calculator.layers,
                calculator.chunk,
                plan.settings,
                executor.n_sharing,
            )
            pool = pools.enter_context(closing(RayPool(ray, executor, recipe)))
            return RemoteMeasurer(calculator, pool)

        yield make_measurer


@dataclass(frozen=True)
class WorkerRecipe:
    """Creates a worker in its own process. The model is sent with it; data that has a name is read by the worker."""

    pickled_target: bytes | None
    """None if workers create the target from the origin too."""
    origin: Origin | None
    seeds: Seeds | None
    """None if workers read them from the origin."""
    sample_hash: str
    perturbation: Perturbation
    layers: tuple[Layer, ...]
    chunk: int
    settings: Settings
    n_sharing: int

    def __call__(self) -> ChunkWorker:
        import pickle

        target: AnyTarget
        if self.pickled_target is not None:
            target = pickle.loads(self.pickled_target)
        elif self.origin is not None:
            target = self.origin.target()
        seeds = self.seeds
        if seeds is None and self.origin is not None:
            target, seeds, *_ = read_tested(
                target, self.origin.read(), [self.perturbation], self.settings, self.origin, None, None
            )
        assert seeds is not None
        if _sample_hash(seeds) != self.sample_hash:
            raise DataError(
                "workers must read the same data as the driver, but one of them has read other inputs: make the same "
                "files visible on all machines"
            )
        limits = Limits.of(self.settings, target.device, self.chunk, self.n_sharing)
        return ChunkWorker(target, seeds, self.perturbation, self.layers, limits)


def _pickled(target: AnyTarget, words: Origin | None) -> bytes | None:
    """The target with its weights, to be sent once; None if it cannot be pickled but has a name."""
    from ray import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(target)
    except Exception as error:
        if words is not None:
            return None
        raise UsageError(
            f"a model that is sent to workers must be picklable, but pickling it raised {type(error).__name__}: "
            f"{' '.join(str(error).split())}; name it as module:factory, on the command line or in origin=..."
        ) from error
    return pickled


def _sample_hash(seeds: Seeds) -> str:
    """A hash of which seeds there are, and of some of their inputs: reading all would take as long as the data is."""
    rows = torch.tensor(sorted({0, len(seeds) // 2, len(seeds) - 1}))
    return hash_tensors({"seed_id": seeds.seed_id, "inputs": seeds.take(rows).cpu()})
