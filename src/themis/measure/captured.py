"""Chunks on a GPU: disturbing, forward pass, fold and gradient are captured once as a CUDA graph and then replayed.

Python then runs once per launch of several chunks, and not once per operation. While the host records the results of
one launch, the GPU works on the next ones. Each graph has a stream and memory of its own, so that the few tests of
gradient ascents run beside the many others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.measure.chunk import is_out_of_memory, padded
from themis.measure.fold import Objective, by_backward
from themis.measure.kernels_cuda import ChunkFolder, slopes
from themis.measure.moments import Accumulator
from themis.measure.tests import Tests
from themis.oracle.motion import Motion
from themis.oracle.oracle import Verdict, are_finite
from themis.target.activations import Layer, flatten

TIMED = 3
"""Runs from which the duration of a chunk is taken."""
MANY_TESTS, FEW_TESTS, FOREGROUND = 0, -1, -2
"""Priorities of streams: the kernels of gradient ascents, which have few tests, and those that the host waits for are
small, and would otherwise wait for the large ones of the tests in flight."""
LAG = 4
"""Layers that the model may be ahead of the fold, which runs beside it."""
MOST_CHUNKS, KEPT_BYTES = 64, 1 << 29
"""Maximum number of chunks of a launch, and of bytes of the inputs and outputs that are kept of them."""

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
    stream = torch.cuda.Stream(device, priority=FOREGROUND)  # type: ignore[no-untyped-call, unused-ignore]
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

    By itself, torch would stay in the stream of the capture, keep its memory, and refuse to draw random numbers.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    generator, pool = torch.cuda.default_generators[index], torch.cuda.graph_pool_handle()
    before, outside = generator.clone_state(), torch.cuda.current_stream(device)
    # Another thread may fetch a checkpoint from the GPU meanwhile.
    capture = torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local")
    try:
        with torch.cuda.stream(outside), capture:
            yield
    except BaseException:
        generator.graphsafe_set_state(before)
        _give_back(pool, index)
        raise


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
    clean: dict[str, Tensor]
    """The clean activations `[seeds, neurons]` by layer."""
    panel: dict[str, Tensor]
    """The watched neurons' positions within each layer; empty if none are watched."""
    disturb: Disturb
    forward: Forward
    compare: Compare
    device: torch.device
    n_dimensions: int
    """Of theta."""
    test_bytes: int
    """The size of the input and the output of one test."""
    is_observed: bool
    """Whether a launch is one chunk."""


class CapturedChunk:
    """A CUDA graph of one chunk, with the gradient of an objective in theta or without.

    The objective is that which each launch names. The inputs and the results of a chunk have a slot of their own in
    buffers on the GPU, and the graph itself goes on to the next slot, so that the host replays it for chunk after chunk
    and waits once for all of them.
    """

    def __init__(
        self, steps: ChunkSteps, chunk: int, *, ascends: bool = False, overwritten: frozenset[str] | None = None
    ) -> None:
        """`overwritten`: the layers that the model overwrites, if another graph has found out."""
        n_neurons, device = steps.layers[-1].stop, steps.device
        self.steps, self.chunk, self.device, self.ascends = steps, chunk, device, ascends
        fitting = max(1, min(MOST_CHUNKS, KEPT_BYTES // (chunk * steps.test_bytes)))
        self.most_chunks = 1 if steps.is_observed else fitting
        n_slots = 2 * self.most_chunks
        self._staged = [
            torch.zeros(n_slots, chunk, dtype=torch.int64).pin_memory(),
            torch.zeros(n_slots, chunk, steps.n_dimensions, dtype=torch.float32).pin_memory(),
            torch.zeros(n_slots, chunk, dtype=torch.int64).pin_memory(),
            torch.zeros(n_slots, chunk, dtype=torch.bool).pin_memory(),
            torch.full((n_slots, 1), chunk, dtype=torch.int64).pin_memory(),
        ]
        self._given = [staged.to(device) for staged in self._staged]
        self._slot = torch.zeros(1, dtype=torch.int64, device=device)
        self._kept: dict[str, Tensor] = {}
        self._shift = torch.zeros(n_neurons, device=device)
        self._shift_of: Accumulator | None = None
        self._totals = torch.zeros(2, 2, n_neurons, dtype=torch.float64, device=device)
        self._folder = ChunkFolder(steps.layers, chunk, steps.panel, device)
        self._weight = torch.zeros(n_neurons if ascends else 0, device=device)
        self._weighted: Tensor | None = None
        self._half = 0
        self._overwritten = set(overwritten or ())
        self._fold_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]
        priority = FEW_TESTS if ascends else MANY_TESTS
        self._stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call, unused-ignore]
        self._capture(knows_overwritten=overwritten is not None)
        self._on_host = torch.zeros(self._kept["columns"].shape, dtype=torch.float64).pin_memory()

    @property
    def most_tests(self) -> int:
        """The maximum number of tests of a launch."""
        return self.most_chunks * self.chunk

    @property
    def overwritten(self) -> frozenset[str]:
        """The layers that the model overwrites after they were computed."""
        return frozenset(self._overwritten)

    def _capture(self, *, knows_overwritten: bool) -> None:
        """Capture the graph after a run in which libraries choose their kernels and allocate their workspaces.

        If need be, a run without gradient comes first: it shows which layers the model overwrites, and so spoils for
        the gradient.
        """
        try:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            for has_gradient in (False, True) if self.ascends and not knows_overwritten else (self.ascends,):
                with torch.cuda.stream(self._stream), torch.set_grad_enabled(has_gradient):
                    self._body(is_forked=False)
            self._graph = torch.cuda.CUDAGraph()
            with (
                torch.set_grad_enabled(self.ascends),
                capturing(self._graph, self._stream, self.device),
                self._fold_stream_joins(),
            ):
                self._body(is_forked=not self.ascends)
            torch.cuda.synchronize(self.device)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            torch.cuda.synchronize(self.device)
            raise CaptureError(str(error)) from error

    @contextmanager
    def _fold_stream_joins(self) -> Iterator[None]:
        """A capture must end in one stream, even after an error, which would otherwise be hidden by another."""
        self._fold_stream.wait_stream(self._stream)
        try:
            yield
        finally:
            self._stream.wait_stream(self._fold_stream)

    def _body(self, *, is_forked: bool) -> None:
        """What is captured: one chunk, from the tests in its slot to the results in the same slot.

        If it is forked, a layer is folded while the model computes the next ones, unless the model was seen to
        overwrite it meanwhile.
        """
        value = torch.zeros((), device=self.device)
        rows, theta, noise_seed, of_margin, n_tests = (given.index_select(0, self._slot)[0] for given in self._given)
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
            if len(in_use) > LAG:
                let_go()

        def fold(layer: Layer, activation: Tensor) -> None:
            nonlocal value
            activations, clean = flatten(activation, layer, self.chunk).contiguous(), self.steps.clean[layer.name]
            part = slice(layer.start, layer.stop)
            if self.ascends:
                weighted: Any = _WeightedSensitivity
                kept = activations.clone() if layer.name in self._overwritten else activations
                value = value + weighted.apply(kept, clean, rows, self._weight[part], of_sensitivity)
            self._folder.fold(layer.name, activations.detach(), clean, rows, self._shift[part], n_tests)

        def let_go() -> None:
            """Wait for the fold of the first layer in use: its memory may be used again."""
            name, activation, version, folded = in_use.popleft()
            self._stream.wait_event(folded)
            if activation._version != version:
                if is_forked and name not in self._overwritten:
                    raise CaptureError(f"the model overwrites {name!r} in some passes and not in others")
                self._overwritten.add(name)

        theta.requires_grad_(self.ascends)
        _, disturbed, motion = self.steps.disturb(rows, theta, noise_seed)
        outputs = self.steps.forward(disturbed, on_activation).float()
        while in_use:
            let_go()
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
            self._keep("disturbed", disturbed.detach())
            self._keep("outputs", outputs)
            self._keep("by_layer", by_layer)
            self._keep("panel", panel)
            self._slot += 1

    def _keep(self, name: str, values: Tensor) -> None:
        if not values.numel():  # the panel, if there is none
            return
        if name not in self._kept:
            self._kept[name] = values.new_zeros(2 * self.most_chunks, *values.shape)
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
            self._shift_of = into
        self._half = 1 - self._half
        n_chunks, first = -(-len(tests) // self.chunk), self._half * self.most_chunks
        slots = slice(first, first + n_chunks)
        sizes = np.minimum(len(tests) - self.chunk * np.arange(n_chunks), self.chunk)[:, None]
        of_margin = np.zeros(len(tests), dtype=bool) if objective is None else objective.of_margin(tests)
        columns = (tests.seed, tests.theta, tests.noise_seed, of_margin)
        rows = [padded(torch.from_numpy(np.ascontiguousarray(column)), n_chunks * self.chunk) for column in columns]
        for staged, given, values in zip(self._staged, self._given, [*rows, torch.from_numpy(sizes)], strict=True):
            staged[slots].copy_(values.view(staged[slots].shape))
            given[slots].copy_(staged[slots], non_blocking=True)
        self._slot.fill_(first)
        self._totals[self._half].zero_()
        for _ in range(n_chunks):
            self._graph.replay()
        self._on_host[slots].copy_(self._kept["columns"][slots], non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
        done.record(self._stream)
        return Launch(tests, done, self._half)

    def milliseconds(self) -> float:
        """How long a chunk takes, by measurement; only while at most one launch has not been taken."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call, unused-ignore]
        with torch.cuda.stream(self._stream):
            for number in range(1 + TIMED):
                if number == 1:
                    began.record(self._stream)
                self._slot.fill_((1 - self._half) * self.most_chunks)
                self._graph.replay()
            ended.record(self._stream)
        ended.synchronize()
        elapsed: float = began.elapsed_time(ended)
        return elapsed / TIMED

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
        sums, squares = self._totals[launch.half]
        into.commit_sums(sums, squares, n_tests)
