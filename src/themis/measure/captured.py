"""Chunks on a GPU: disturbing, forward pass, fold and gradient are captured once as a CUDA graph and then replayed.

Python then runs once per launch of several chunks, and not once per operation. While the host records the results of
one launch, the GPU works on the next ones. Each graph has a stream and memory of its own, so that the few tests of
gradient ascents run beside the many others.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.measure.chunk import is_out_of_memory, padded
from themis.measure.clean import NO_SEEDS, CleanActivations
from themis.measure.fold import Objective, by_backward
from themis.measure.kernels_cuda import ChunkFolder, slopes
from themis.measure.moments import Accumulator
from themis.measure.tests import Ints, Tests
from themis.oracle.motion import Motion
from themis.oracle.oracle import Verdict, are_finite
from themis.target.activations import Layer, flatten

CHUNK_PRIORITY, ASCENT_PRIORITY, FOREGROUND_PRIORITY = 0, -1, -2
"""Priorities of streams. Gradient ascents and what the host waits for are small kernels, which would otherwise queue
behind the large ones of the tests in flight."""
N_COLUMNS = 5
"""Columns that `CapturedChunk.columns` returns, not counting the gradient."""
MAX_UNFOLDED_LAYERS = 4
"""Layers that the model may compute before the fold, which runs on another stream, has finished the first of them."""
MAX_CHUNKS, MAX_KEPT_BYTES = 64, 1 << 29
"""Maximum number of chunks per launch, and of bytes for their inputs and outputs."""

Disturb = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Motion | None]]
"""Maps seeds, theta and noise seeds to clean and disturbed inputs, and how the disturbed ones have moved."""
Forward = Callable[[Tensor, Callable[[Layer, Tensor], None]], Tensor]
"""Runs the model on inputs and shows each layer's activations."""
Compare = Callable[[Tensor, Tensor, Motion | None], Verdict]
"""Maps seeds, outputs and the motion of the inputs to a verdict."""


@contextmanager
def foreground(device: torch.device) -> Iterator[None]:
    """What is computed within, outside of captured chunks, need not wait for the chunks in flight."""
    if device.type != "cuda":
        yield
        return
    outside = torch.cuda.current_stream(device)
    stream = torch.cuda.Stream(device, priority=FOREGROUND_PRIORITY)  # type: ignore[no-untyped-call, unused-ignore]
    stream.wait_stream(outside)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        outside.wait_stream(stream)


class CaptureError(Exception):
    """The model or the perturbation cannot be captured, for example because it waits for the GPU."""


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, device: torch.device) -> Iterator[None]:
    """Capture what is computed within; if that fails, the GPU can be used as before.

    `torch.cuda.graph` would stay in the stream of the capture, keep its memory, and refuse to draw random numbers; and
    it always gives back what torch has cached, also page-locked memory of the host, which takes longer than a capture.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    generator, pool = torch.cuda.default_generators[index], torch.cuda.graph_pool_handle()
    before = generator.clone_state()
    torch.cuda.synchronize(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if 4 * unused > torch.cuda.mem_get_info(device)[0]:  # a graph cannot use what is cached
        torch.cuda.empty_cache()
    collects = gc.isenabled()
    gc.disable()  # a graph of an earlier campaign cannot be freed meanwhile
    try:
        with torch.cuda.stream(stream):
            # Another thread may fetch a checkpoint from the GPU meanwhile.
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()
    except BaseException:
        generator.graphsafe_set_state(before)
        _give_back(pool, index)
        raise
    finally:
        if collects:
            gc.enable()


def _give_back(pool: Any, index: int) -> None:
    """Give back the memory of a capture that failed."""
    try:
        torch._C._cuda_endAllocateToPool(index, pool)
    except (RuntimeError, AttributeError):  # the capture has ended, so the graph owns the memory; or torch is too old
        return
    torch._C._cuda_releasePool(index, pool)


@dataclass(frozen=True)
class Launch:
    """Chunks that were started, and the event after which their results are valid: until the launch after the next."""

    tests: Tests
    done: torch.cuda.Event
    half: int
    """Which half of the graph's buffers it uses; the launch before and the launch after use the other one."""


class _WeightedSensitivity(torch.autograd.Function):
    """Has the gradient of `sum(by_test * weight * |activations - clean[rows]|)`; its value is not needed, and is 0."""

    @staticmethod
    def forward(ctx: Any, activations: Tensor, clean: Tensor, rows: Tensor, weight: Tensor, by_test: Tensor) -> Tensor:
        ctx.save_for_backward(activations, rows, weight, by_test)
        ctx.clean = clean
        return activations.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        activations, rows, weight, by_test = ctx.saved_tensors
        return slopes(activations, ctx.clean, rows, weight, by_test * gradient), None, None, None, None


@dataclass(frozen=True)
class ChunkSteps:
    """What all graphs of a calculator have in common: what a chunk is made of, and on which device."""

    layers: tuple[Layer, ...]
    clean: CleanActivations
    panel: dict[str, Tensor]
    """The watched neurons' positions within each layer; empty if none are watched."""
    disturb: Disturb
    forward: Forward
    compare: Compare
    device: torch.device
    n_dimensions: int
    """Of theta."""
    input: Tensor
    output: Tensor
    """Of one test, `[1, ...]`."""
    is_observed: bool
    """Whether a launch is one chunk."""


class CapturedChunk:
    """A CUDA graph of one chunk, with the gradient of an objective in theta or without.

    The objective is that which each launch names. The inputs and the results of a chunk have a slot of their own in
    buffers on the GPU, and the graph itself goes on to the next slot, so that the host replays it for chunk after chunk
    and waits once for all of them.
    """

    def __init__(
        self,
        steps: ChunkSteps,
        chunk: int,
        *,
        ascends: bool = False,
        like: CapturedChunk | None = None,
        is_shared: bool = False,
    ) -> None:
        """like: another graph of the same model and seeds, if there is one. is_shared: see `with_disturbing`."""
        n_neurons, device = steps.layers[-1].stop, steps.device
        self.steps, self.chunk, self.device, self.ascends = steps, chunk, device, ascends
        self._is_shared = is_shared
        fitting = max(1, min(MAX_CHUNKS, MAX_KEPT_BYTES // (chunk * (steps.input.nbytes + steps.output.nbytes))))
        self.most_chunks = 1 if steps.is_observed else fitting
        n_slots = 2 * self.most_chunks
        self._staged = [
            torch.zeros(n_slots, chunk, dtype=torch.int64).pin_memory(),
            torch.zeros(n_slots, chunk, steps.n_dimensions, dtype=torch.float32).pin_memory(),
            torch.zeros(n_slots, chunk, dtype=torch.int64).pin_memory(),
            torch.zeros(n_slots, chunk, dtype=torch.bool).pin_memory(),
            torch.zeros(n_slots, chunk, dtype=torch.int64).pin_memory(),
            torch.full((n_slots, 1), chunk, dtype=torch.int64).pin_memory(),
        ]
        self._given = [staged.to(device) for staged in self._staged]
        self._slot = torch.zeros(1, dtype=torch.int64, device=device)
        self._kept = {name: row.new_zeros(n_slots, chunk, *row.shape[1:]) for name, row in self._rows().items()}
        self._shift = torch.zeros(n_neurons, device=device)
        self._shift_of: Accumulator | None = None
        self._disturbing: torch.cuda.CUDAGraph | None = None
        """Disturbs the inputs of a chunk before the graph runs it, if that does not do so itself."""
        self._totals = torch.zeros(2, 2, n_neurons, dtype=torch.float64, device=device)
        self._folder = ChunkFolder(steps.layers, chunk, steps.panel, device)
        self._weight = torch.zeros(n_neurons if ascends else 0, device=device)
        self._weighted: Tensor | None = None
        self._half = 0
        self._overwritten: set[str] = set() if like is None else {*like._overwritten}
        """The layers that the model overwrites after they were computed."""
        self._fold_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]
        priority = ASCENT_PRIORITY if ascends else CHUNK_PRIORITY
        self._stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call, unused-ignore]
        self._graph = self._capture(self._body, is_first=like is None)
        self._on_host = torch.zeros(self._kept["columns"].shape, dtype=torch.float64).pin_memory()

    @property
    def most_tests(self) -> int:
        """The maximum number of tests of a launch."""
        return self.most_chunks * self.chunk

    def _rows(self) -> dict[str, Tensor]:
        """A row of all that is kept of a test. Memory of the graph itself would not do: each replay uses it again."""
        steps, n_columns = self.steps, N_COLUMNS + self.steps.n_dimensions * self.ascends
        widths = {"by_layer": len(steps.layers), "panel": sum(map(len, steps.panel.values()))}
        rows = {name: torch.empty(1, width, device=self.device) for name, width in widths.items()}
        columns = torch.empty(1, n_columns, dtype=torch.float64, device=self.device)
        return {**rows, "columns": columns, "disturbed": steps.input, "outputs": steps.output}

    def with_disturbing(self, disturb: Disturb, n_dimensions: int) -> CapturedChunk:
        """A shared graph for tests that are disturbed like this, by theta with so many dimensions.

        Only the disturbing is captured. Tests of another perturbation must have ended, as all use the same memory.
        """
        other, n_slots = copy(self), 2 * self.most_chunks
        other.steps, other._shift_of = replace(self.steps, disturb=disturb), None
        theta = torch.zeros(n_slots, self.chunk, n_dimensions).pin_memory()
        other._staged = [self._staged[0], theta, *self._staged[2:]]
        other._given = [self._given[0], theta.to(self.device), *self._given[2:]]
        other._disturbing = other._capture(other._disturb, is_first=False)
        return other

    def _capture(self, body: Callable[[], None], *, is_first: bool) -> torch.cuda.CUDAGraph:
        """Capture what the body does, at once if that is possible.

        Else a run comes first, in which libraries load their kernels and allocate their workspaces. If need be, a run
        without gradient precedes it: it shows which layers the model overwrites, and so spoils for the gradient.
        """
        try:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            graph = self._try_to_record(body)
            if graph is None:
                for has_gradient in (False, True) if self.ascends and is_first else (self.ascends,):
                    with torch.cuda.stream(self._stream), torch.set_grad_enabled(has_gradient):
                        body()
                graph = self._record(body)
            torch.cuda.synchronize(self.device)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            torch.cuda.synchronize(self.device)
            raise CaptureError(str(error)) from error
        return graph

    def _try_to_record(self, body: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """The recorded graph; None if that fails."""
        try:
            return self._record(body)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return None

    def _record(self, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with (
            torch.set_grad_enabled(self.ascends),
            capturing(graph, self._stream, self.device),
            self._fold_stream_joins(),
        ):
            body()
        return graph

    @contextmanager
    def _fold_stream_joins(self) -> Iterator[None]:
        """A capture must end in one stream, even after an error, which would otherwise be hidden by another."""
        self._fold_stream.wait_stream(self._stream)
        try:
            yield
        finally:
            self._stream.wait_stream(self._fold_stream)

    def _disturb(self) -> None:
        """What is captured for each perturbation if the graph is shared: the inputs of the tests in the slot."""
        rows, theta, noise_seed = (given.index_select(0, self._slot)[0] for given in self._given[:3])
        with torch.no_grad():
            self._keep("disturbed", self.steps.disturb(rows, theta, noise_seed)[1])

    def _body(self) -> None:
        """What is captured: one chunk, from the tests in its slot to the results in the same slot.

        While the model computes the next layers, a layer is folded, unless the model was seen to overwrite it
        meanwhile, or a gradient is needed.
        """
        is_forked = not self.ascends and torch.cuda.is_current_stream_capturing()
        value = torch.zeros((), device=self.device)
        rows, theta, noise_seed, of_margin, clean_rows, n_tests = (
            given.index_select(0, self._slot)[0] for given in self._given
        )
        of_sensitivity = (~of_margin).float()
        in_use: deque[tuple[str, Tensor, int, torch.cuda.Event]] = deque()

        def on_activation(layer: Layer, activation: Tensor) -> None:
            forks, folded = is_forked and layer.name not in self._overwritten, torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
            stream = self._fold_stream if forks else self._stream
            stream.wait_stream(self._stream)
            with torch.cuda.stream(stream):
                fold(layer, activation)
                folded.record(stream)
            in_use.append((layer.name, activation, activation._version, folded))
            if len(in_use) > MAX_UNFOLDED_LAYERS:
                release_oldest()

        def fold(layer: Layer, activation: Tensor) -> None:
            nonlocal value
            activations = flatten(activation, layer, self.chunk).contiguous()
            clean = self.steps.clean.by_layer[layer.name]
            part = slice(layer.start, layer.stop)
            if self.ascends:
                weighted: Any = _WeightedSensitivity
                kept = activations.clone() if layer.name in self._overwritten else activations
                value = value + weighted.apply(kept, clean, clean_rows, self._weight[part], of_sensitivity)
            self._folder.fold(layer.name, activations.detach(), clean, clean_rows, self._shift[part], n_tests)

        def release_oldest() -> None:
            """Wait for the fold of the first layer in use: its memory may be used again."""
            name, activation, version, folded = in_use.popleft()
            self._stream.wait_event(folded)
            if activation._version != version:
                if is_forked and name not in self._overwritten:
                    raise CaptureError(f"the model overwrites {name!r} in some passes and not in others")
                self._overwritten.add(name)

        theta.requires_grad_(self.ascends)
        if self._is_shared:
            disturbed, motion = self._kept["disturbed"].index_select(0, self._slot)[0], None
        else:
            _, disturbed, motion = self.steps.disturb(rows, theta, noise_seed)
        outputs = self.steps.forward(disturbed, on_activation).float()
        while in_use:
            release_oldest()
        gradient = []
        if self.ascends:
            value = value - self.steps.compare(rows, outputs, motion).margin.where(of_margin, 0.0).sum()
            gradient = [by_backward(value, theta).nan_to_num(0.0).double()]
        with torch.no_grad():
            outputs = outputs.detach()
            is_finite, verdict = are_finite(outputs), self.steps.compare(rows, outputs, motion)
            is_counted, half = is_finite.all().long()[None], self._slot // self.most_chunks
            by_layer, panel = self._folder.finish(is_counted, half, self._totals)
            number = torch.full_like(verdict.margin, torch.nan) if verdict.value is None else verdict.value
            columns = (verdict.is_fault, verdict.outcome, verdict.margin, number, is_finite)
            self._keep("columns", torch.cat([torch.stack([column.double() for column in columns], 1), *gradient], 1))
            if not self._is_shared:
                self._keep("disturbed", disturbed.detach())
            self._keep("outputs", outputs)
            self._keep("by_layer", by_layer)
            self._keep("panel", panel)
            self._slot += 1

    def _keep(self, name: str, values: Tensor) -> None:
        if values.numel():  # else it is the panel, and there is none
            self._kept[name].index_copy_(0, self._slot, values[None])

    def launch(self, tests: Tests, into: Accumulator, objective: Objective | None = None) -> Launch:
        """Start chunks of at most `most_tests` tests. The launch before the one before must have been taken."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))  # which may still read that launch
        with torch.cuda.stream(self._stream):
            return self._launch(tests, into, objective)

    def _launch(self, tests: Tests, into: Accumulator, objective: Objective | None) -> Launch:
        if objective is not None and self._weighted is not objective.neurons:
            self._weighted = objective.neurons
            scale = 1.0 if objective.scale is None else 1 / objective.scale[objective.neurons].float()
            self._weight.zero_()[objective.neurons] = scale
        if self._shift_of is not into:
            self._shift.copy_(into.shift)
            self._shift_of = into if into.count else None  # until it has a test, its shift may change
        self._half = 1 - self._half
        n_chunks, first = -(-len(tests) // self.chunk), self._half * self.most_chunks
        slots = slice(first, first + n_chunks)
        sizes = np.minimum(len(tests) - self.chunk * np.arange(n_chunks), self.chunk)[:, None]
        of_margin = np.zeros(len(tests), dtype=bool) if objective is None else objective.of_margin(tests)
        columns = (tests.seed, tests.theta, tests.noise_seed, of_margin, self.steps.clean.rows(tests.seed))
        rows = [padded(torch.from_numpy(np.ascontiguousarray(column)), n_chunks * self.chunk) for column in columns]
        for staged, given, values in zip(self._staged, self._given, [*rows, torch.from_numpy(sizes)], strict=True):
            staged[slots].copy_(values.view(staged[slots].shape))
            given[slots].copy_(staged[slots], non_blocking=True)
        self._slot.fill_(first)
        self._totals[self._half].zero_()
        for _ in range(n_chunks):
            if self._disturbing is not None:
                self._disturbing.replay()
            self._graph.replay()
        self._on_host[slots].copy_(self._kept["columns"][slots], non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
        done.record(self._stream)
        return Launch(tests, done, self._half)

    def take_shift(self, test: Tests, into: Accumulator) -> None:
        """Set the shift of an empty accumulator: the sensitivities of one test; 0 if its outputs are not finite."""
        into.shift.zero_()
        launch = self.launch(test, into)
        launch.done.synchronize()
        into.shift.copy_(self._totals[launch.half, 0])

    def columns(self, launch: Launch) -> NDArray[np.float64]:
        """Waits for a launch. Returns is_fault, outcome, margin, value, is_finite and the gradient in theta, if any."""
        launch.done.synchronize()
        return self._of(launch, self._on_host).numpy().copy()

    def seeds(self, launch: Launch) -> Tensor:
        """The seeds of a launch's tests, on the GPU; a view."""
        return self._of(launch, self._given[0])

    def kept(self, launch: Launch, name: str) -> Tensor:
        """What a launch has of each test: its "disturbed" input, "outputs", "by_layer" or "panel"; a view."""
        return self._of(launch, self._kept[name])

    def _of(self, launch: Launch, kept: Tensor) -> Tensor:
        first = launch.half * self.most_chunks
        return kept[first : first + self.most_chunks].flatten(0, 1)[: len(launch.tests)]

    def take_sums(self, launch: Launch, into: Accumulator, n_tests: int) -> None:
        """Commit the sums of a launch, in whose chunks with finite outputs only there are `n_tests` tests."""
        into.commit_sums(self._totals[launch.half], n_tests)


def captured_function(function: Callable[..., Tensor], *examples: Tensor) -> Callable[..., Tensor]:
    """Runs arguments of the shapes of `examples` as a CUDA graph; `function` itself if it cannot be captured.

    What else it reads, such as weights, must stay where it is.
    """
    device = examples[0].device
    if device.type != "cuda":
        return function
    given, graph = [example.clone() for example in examples], torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.no_grad(), capturing(graph, stream, device):
            result = function(*given)
    except Exception:  # whatever prevents it
        return function
    finally:
        torch.cuda.synchronize(device)

    def replay(*arguments: Tensor) -> Tensor:
        if any(each.shape != own.shape or each.dtype != own.dtype for each, own in zip(arguments, given, strict=True)):
            return function(*arguments)
        for each, own in zip(arguments, given, strict=True):
            own.copy_(each)
        graph.replay()
        return result.clone()

    return replay


SMALL_PASS, MAX_FEW_ASCENTS = 32, 128
"""Rows of a small pass, and the number of gradient ascents up to which they run in small passes on any model."""
OCCUPYING_ACTIVATIONS = 1 << 27
"""Activations of a pass that keep a GPU busy. If a small pass has as many, a test takes about as long in it as in a
chunk, so that all ascents run in small passes, and so do other tests that would leave much of a chunk empty."""
MIN_SPLIT_CHUNK, SMALL_PASS_SHARE = 4 * SMALL_PASS, 0.625
"""The smallest chunk for which capturing small passes as well pays, and the share of a chunk up to which tests run in
them."""
N_JOINED_CHUNKS, MIN_PENDING_CHUNKS, MAX_IDLE_ACTIVATIONS = 4, 8, 1 << 28
"""This many chunks run as one once so many are pending, if a chunk has at most so many activations: a single one then
leaves a part of the GPU idle."""

Capture = Callable[[int, bool], CapturedChunk | None]
"""Captures a chunk of so many rows, with a gradient or without; returns None if that is impossible."""


def rows_of_pass(n_tests: int, chunk: int, wide_chunk: int, *, ascends: bool, few_occupy: bool) -> int:
    """The rows of the forward pass in which the first of `n_tests` tests run.

    ascends: whether they have a gradient. few_occupy: whether `SMALL_PASS` tests occupy the GPU. wide_chunk: 0 if there
    is none.
    """
    if ascends:
        is_few = few_occupy or n_tests <= MAX_FEW_ASCENTS
    elif wide_chunk and n_tests >= wide_chunk:
        return wide_chunk
    else:
        is_few = few_occupy and chunk >= MIN_SPLIT_CHUNK and n_tests <= SMALL_PASS_SHARE * chunk
    return min(SMALL_PASS, chunk) if is_few else chunk


class Graphs:
    """All graphs of a calculator.

    The size of a graph follows from the number of tests, the chunk, the model and `wide_chunk`, which a run records, so
    that a resumed campaign runs its tests in passes of the same size.
    """

    def __init__(self, chunk: int, n_activations: int, wide_chunk: int | None) -> None:
        """`n_activations` are those of one test."""
        self._chunk, self._few_occupy = chunk, SMALL_PASS * n_activations >= OCCUPYING_ACTIVATIONS
        self._idles = chunk * n_activations <= MAX_IDLE_ACTIVATIONS
        self.wide_chunk = wide_chunk
        """Tests per forward pass where many are pending; 0 if chunks are never joined, None before that is decided."""
        self.shared: dict[int, CapturedChunk] | None = None
        """Shared graphs by their rows, for campaigns on the same clean inputs that take turns."""
        self._captured: dict[tuple[int, bool], CapturedChunk | None] = {}
        self._in_flight: dict[CapturedChunk, tuple[Accumulator, Launch]] = {}

    def choose(self, n_tests: int, chunk: int, capture: Capture, *, ascends: bool) -> CapturedChunk | None:
        """The graph that runs the first of `n_tests` tests; None if it cannot be captured, which is decided once."""
        if chunk != self._chunk:  # memory ran out
            self.drop()
            self._chunk, self.wide_chunk = chunk, 0
            if self.shared is not None:
                self.shared.clear()
        if not ascends and self.wide_chunk is None and n_tests >= MIN_PENDING_CHUNKS * chunk:
            self._decide_wide_chunk(capture)
        return self._graph(self._rows(n_tests, ascends), ascends, capture)

    def first(self, graph: CapturedChunk, tests: Tests) -> Tests:
        """The first of the tests, as many as are launched at once; the last of them may be left to a smaller graph."""
        n = len(tests)
        n_left = n % graph.chunk
        has_smaller = self._few_occupy or graph.chunk > self._chunk
        if has_smaller and self._rows(n_left, graph.ascends) < graph.chunk:
            n -= n_left
        return tests[: min(n, graph.most_tests)]

    def start(self, graph: CapturedChunk | None, tests: Tests, into: Accumulator, objective: Objective | None) -> None:
        """Start the first of some tests before anybody waits for them."""
        if graph is not None and self.can_start(graph, into):
            self._in_flight[graph] = (into, graph.launch(self.first(graph, tests), into, objective))

    def can_start(self, graph: CapturedChunk, into: Accumulator) -> bool:
        """Whether tests can be started ahead: sums have a shift, and no others are in flight."""
        return into.count > 0 and graph not in self._in_flight

    def launch(self, graph: CapturedChunk, tests: Tests, into: Accumulator, objective: Objective | None) -> Launch:
        """Tests that have been launched: now, or ahead if they are what was started."""
        accumulator, launch = self._in_flight.pop(graph, (None, None))
        if launch is not None:
            if accumulator is into and launch.tests.equals(tests):
                return launch
            launch.done.synchronize()  # its buffers are used again
        return graph.launch(tests, into, objective)

    def seeds_in_flight(self) -> Ints:
        """The seeds of the tests that were started ahead."""
        return np.concatenate([NO_SEEDS, *(launch.tests.seed for _, launch in self._in_flight.values())])

    @property
    def any_captured(self) -> CapturedChunk | None:
        """One of the graphs; None before one was captured."""
        return next((graph for graph in self._captured.values() if graph is not None), None)

    def drop(self) -> None:
        """Free all graphs and their memory, after what is in flight has ended."""
        for graph in self._captured.values():
            if graph is not None:
                torch.cuda.synchronize(graph.device)
        self._captured, self._in_flight = {}, {}

    def _rows(self, n_tests: int, ascends: bool) -> int:
        wide_chunk = 0 if ascends else self.wide_chunk or 0
        return rows_of_pass(n_tests, self._chunk, wide_chunk, ascends=ascends, few_occupy=self._few_occupy)

    def _graph(self, rows: int, ascends: bool, capture: Capture) -> CapturedChunk | None:
        if (rows, ascends) not in self._captured:
            self._captured[rows, ascends] = capture(rows, ascends)
        return self._captured[rows, ascends]

    def _decide_wide_chunk(self, capture: Capture) -> None:
        """Decide, once for a campaign, whether several chunks run as one."""
        self.wide_chunk, usual = 0, self._graph(self._chunk, False, capture)
        if usual is None or usual.steps.is_observed or not self._idles:
            return
        try:
            wide = capture(N_JOINED_CHUNKS * self._chunk, False)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return
        if wide is not None:
            self.wide_chunk, self._captured[wide.chunk, False] = wide.chunk, wide
