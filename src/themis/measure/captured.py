"""Chunks on a GPU: disturbing, forward pass, fold and gradient are captured once as a CUDA graph and then replayed.

Python then runs once per chunk and not once per operation. While the host records the results of one chunk, the GPU
works on the next one of the same portion.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from themis.measure.chunk import is_out_of_memory, padded
from themis.measure.fold import NeuronSelection, Objective
from themis.measure.gradient import by_backward
from themis.measure.kernels_cuda import fold, take_panel
from themis.measure.moments import Accumulator
from themis.measure.tests import Tests
from themis.oracle.motion import Motion
from themis.oracle.oracle import Verdict
from themis.target.activations import Layer

WARM_UP = 2
"""Runs before the capture, in which libraries choose their kernels and allocate their workspaces."""

Disturb = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Motion | None]]
"""Maps seeds, theta and noise seeds to clean and disturbed inputs, and how the disturbed ones have moved."""
Forward = Callable[[Tensor, Callable[[Layer, Tensor], None]], Tensor]
"""Runs the model on inputs and shows each layer's activations `[inputs, neurons]`."""
Compare = Callable[[Tensor, Tensor, Motion | None], Verdict]
"""Maps seeds, outputs and the motion of the inputs to a verdict."""


class CaptureError(Exception):
    """The model or the perturbation cannot be captured, for example because it waits for the GPU."""


@dataclass(frozen=True)
class ChunkRun:
    """One chunk that was started: copies that no later chunk overwrites, and the event after which they are valid."""

    tests: Tests
    done: torch.cuda.Event
    inputs: Tensor
    disturbed: Tensor
    outputs: Tensor
    verdict: Verdict
    by_layer: Tensor
    panel: Tensor | None
    on_host: Tensor
    """Columns is_fault, outcome, margin, is_finite of each test, then its gradient in theta if there is one; pinned."""


class _WeightedSensitivity(torch.autograd.Function):
    """`sum(weight * |activations - clean[rows]|)`, which keeps no copy of the clean activations for its gradient."""

    @staticmethod
    def forward(ctx: Any, activations: Tensor, clean: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(activations, rows, weight)
        ctx.clean = clean
        return (activations - clean.index_select(0, rows)).abs_().mul_(weight).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        activations, rows, weight = ctx.saved_tensors
        slope = (activations - ctx.clean.index_select(0, rows)).sign_().mul_(weight).mul_(gradient)
        return slope, None, None, None


class CapturedChunk:
    """A CUDA graph of one chunk, with the gradient of an objective in theta or without.

    `ascends`: None, "sensitivity" (of the neurons that each launch names) or "margin" (its loss).
    """

    def __init__(
        self,
        chunk: int,
        n_dimensions: int,
        layers: tuple[Layer, ...],
        clean: dict[str, Tensor],
        panel: NeuronSelection | None,
        disturb: Disturb,
        forward: Forward,
        compare: Compare,
        is_finite: Callable[[Tensor], Tensor],
        device: torch.device,
        ascends: str | None = None,
        pool: Any = None,
    ) -> None:
        """`clean` has the clean activations `[seeds, neurons]` by layer. Graphs may share a `pool` of memory."""
        n_neurons = layers[-1].stop
        self.chunk, self.device, self.layers, self.clean = chunk, device, layers, clean
        self._disturb, self._forward, self._compare, self._is_finite = disturb, forward, compare, is_finite
        self._rows = torch.zeros(chunk, dtype=torch.int64, device=device)
        self._theta = torch.zeros(chunk, n_dimensions, dtype=torch.float32, device=device)
        self._noise_seed = torch.zeros(chunk, dtype=torch.int64, device=device)
        self._n_tests = torch.full((1,), chunk, dtype=torch.int64, device=device)
        self._staged = [
            torch.zeros_like(tensor, device="cpu").pin_memory()
            for tensor in (self._rows, self._theta, self._noise_seed, self._n_tests)
        ]
        self._shift = torch.zeros(n_neurons, device=device)
        self._shift_of: Accumulator | None = None
        self._sums = torch.zeros(2, n_neurons, device=device)
        self._selection = panel
        self._panel = None if panel is None else torch.zeros(chunk, _width(panel), device=device)
        self.ascends, self._pool = ascends, pool
        self._weight = torch.zeros(n_neurons if ascends == "sensitivity" else 0, device=device)
        self._weighted: Tensor | None = None
        width = 4 + (0 if ascends is None else n_dimensions)
        self._pinned = [torch.zeros(chunk, width, dtype=torch.float64).pin_memory() for _ in range(2)]
        self._turn = 0
        self._capture()

    def _capture(self) -> None:
        try:
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call, unused-ignore]
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream), torch.set_grad_enabled(self.ascends is not None):
                for _ in range(WARM_UP):
                    self._body()
            torch.cuda.current_stream(self.device).wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with torch.set_grad_enabled(self.ascends is not None), torch.cuda.graph(self._graph, pool=self._pool):
                self._body()
            torch.cuda.synchronize(self.device)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            torch.cuda.synchronize(self.device)
            raise CaptureError(str(error)) from error

    def _body(self) -> None:
        """What is captured: every tensor it leaves in an attribute is overwritten by the next replay."""
        by_layer: list[Tensor] = []
        column, value = 0, torch.zeros((), device=self.device)

        def on_activation(layer: Layer, activations: Tensor) -> None:
            nonlocal column, value
            activations, clean = activations.contiguous(), self.clean[layer.name]
            part = slice(layer.start, layer.stop)
            if self.ascends == "sensitivity":
                weighted: Any = _WeightedSensitivity
                value = value + weighted.apply(activations, clean, self._rows, self._weight[part])
            activations = activations.detach()
            sums = torch.empty(2, layer.n_neurons, device=self.device)
            by_layer.append(fold(activations, clean, self._rows, self._shift[part], self._n_tests, sums))
            self._sums[:, part] = sums
            positions = None if self._selection is None else self._selection.within[layer.name]
            if positions is not None and self._panel is not None and len(positions):
                out = self._panel[:, column : column + len(positions)]
                take_panel(activations, clean, self._rows, positions, out)
                column += len(positions)

        theta = self._theta.detach().requires_grad_(self.ascends is not None)
        self._inputs, disturbed, motion = self._disturb(self._rows, theta, self._noise_seed)
        outputs = self._forward(disturbed, on_activation).float()
        if self.ascends == "margin":
            value = -self._compare(self._rows, outputs, motion).margin.sum()
        gradient = [] if self.ascends is None else [by_backward(value, theta).nan_to_num(0.0).double()]
        with torch.no_grad():
            self._disturbed, self._outputs = disturbed.detach(), outputs.detach()
            self._by_layer = torch.stack(by_layer, 1)
            verdict = self._verdict = self._compare(self._rows, self._outputs, motion)
            columns = (verdict.is_fault, verdict.outcome, verdict.margin, self._is_finite(self._outputs))
            self._columns = torch.cat([torch.stack([column.double() for column in columns], 1), *gradient], 1)

    def launch(self, tests: Tests, into: Accumulator, objective: Objective | None = None) -> ChunkRun:
        """Start a chunk of at most `chunk` tests. The one before must be finished, and its sums taken."""
        if self.ascends == "sensitivity" and objective is not None and self._weighted is not objective.neurons:
            self._weighted = objective.neurons
            scale = 1.0 if objective.scale is None else 1 / objective.scale[objective.neurons].float()
            self._weight.zero_()[objective.neurons] = scale
        if self._shift_of is not into:
            self._shift.copy_(into.shift)
            self._shift_of = into
        columns = (tests.seed, tests.theta, tests.noise_seed, np.array([len(tests)]))
        for staged, column in zip(self._staged, columns, strict=True):
            staged.copy_(padded(torch.from_numpy(np.ascontiguousarray(column)), len(staged)))
        for tensor, staged in zip(
            (self._rows, self._theta, self._noise_seed, self._n_tests), self._staged, strict=True
        ):
            tensor.copy_(staged, non_blocking=True)
        self._graph.replay()
        self._turn = 1 - self._turn
        on_host = self._pinned[self._turn]
        on_host.copy_(self._columns, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
        n, verdict = len(tests), self._verdict
        run = ChunkRun(
            tests,
            done,
            self._inputs[:n].clone(),
            self._disturbed[:n].clone(),
            self._outputs[:n].clone(),
            Verdict(
                verdict.is_fault[:n].clone(),
                verdict.outcome[:n].clone(),
                verdict.margin[:n].clone(),
                None if verdict.value is None else verdict.value[:n].clone(),
            ),
            self._by_layer[:n].clone(),
            None if self._panel is None else self._panel[:n].clone(),
            on_host[:n],
        )
        done.record(torch.cuda.current_stream(self.device))
        return run

    def take_sums(self, into: Accumulator, n_tests: int) -> None:
        """Commit the sums of the chunk launched last."""
        into.commit_sums(self._sums[0], self._sums[1], n_tests)


def _width(panel: NeuronSelection) -> int:
    return sum(len(positions) for positions in panel.within.values())
