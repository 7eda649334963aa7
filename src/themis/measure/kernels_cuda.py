"""Triton kernels that fold the layers of a chunk, each in a single pass over its activations.

If Triton is not available, or a kernel cannot be compiled, torch computes the same sums in several passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from threading import Lock

import torch
from torch import Tensor

from themis.compute.gpu import tl, triton, works_on
from themis.target.activations import Layer

NEURONS, TESTS = 512, 4
"""Neurons per program of `_fold`, and tests that it loads at a time."""
PROGRAMS = 1024
"""Programs that occupy the GPU; layers with fewer blocks of neurons divide their tests among several programs."""
SLOPES = 1024
"""Neurons per program of `_slope`, which has one test."""
BLOCKS, FINISHED_TESTS = 64, 32
"""Blocks of neurons that `_finish_tests` loads at a time, and tests per program."""

if triton is not None:
    # Compiled once for all sizes, except that aligned rows have a version of their own.
    @triton.jit(do_not_specialize=["chunk", "tests_per_program", "n_blocks", "n_positions", "width"])  # type: ignore[untyped-decorator, unused-ignore]
    def _fold(  # type: ignore[no-untyped-def]
        activations,
        clean,
        rows,
        shift,
        n_tests,
        sums,
        by_test,
        positions,
        panel,
        n,
        chunk,
        tests_per_program,
        n_blocks,
        n_positions,
        width,
        neurons: tl.constexpr,
        tests: tl.constexpr,
    ):
        block, part = tl.program_id(0), tl.program_id(1)
        n_parts = tl.num_programs(1)
        first = part * tests_per_program
        last = tl.minimum(first + tests_per_program, tl.load(n_tests).to(tl.int32))
        if block < n_blocks:
            neuron = block * neurons + tl.arange(0, neurons)
            is_neuron = neuron < n
            shifts = tl.load(shift + neuron, mask=is_neuron, other=0.0)
            total = tl.zeros([tests, neurons], dtype=tl.float32)
            squares = tl.zeros([tests, neurons], dtype=tl.float32)
            for start in range(first, last, tests):
                test = start + tl.arange(0, tests)
                is_test = test < last
                row = tl.load(rows + test, mask=is_test, other=0)
                is_value = is_test[:, None] & is_neuron[None, :]
                here = test.to(tl.int64)[:, None] * n + neuron[None, :]
                there = row[:, None] * n + neuron[None, :]
                value = tl.load(activations + here, mask=is_value, other=0.0).to(tl.float32)
                known = tl.load(clean + there, mask=is_value, other=0.0).to(tl.float32)
                sensitivity = tl.abs(value - known)
                tl.store(by_test + block.to(tl.int64) * chunk + test, tl.sum(sensitivity, 1), mask=is_test)
                deviation = tl.where(is_value, sensitivity - shifts[None, :], 0.0)
                total += deviation
                squares += deviation * deviation
            at = part.to(tl.int64) * n + neuron
            tl.store(sums + at, tl.sum(total, 0), mask=is_neuron)
            tl.store(sums + n_parts.to(tl.int64) * n + at, tl.sum(squares, 0), mask=is_neuron)
        else:  # the panel
            k = (block - n_blocks) * neurons + tl.arange(0, neurons)
            is_watched = k < n_positions
            position = tl.load(positions + k, mask=is_watched, other=0)
            for start in range(first, last, tests):
                test = start + tl.arange(0, tests)
                is_test = test < last
                row = tl.load(rows + test, mask=is_test, other=0)
                is_value = is_test[:, None] & is_watched[None, :]
                here = test.to(tl.int64)[:, None] * n + position[None, :]
                there = row[:, None] * n + position[None, :]
                value = tl.load(activations + here, mask=is_value, other=0.0).to(tl.float32)
                known = tl.load(clean + there, mask=is_value, other=0.0).to(tl.float32)
                tl.store(panel + test.to(tl.int64)[:, None] * width + k[None, :], value - known, mask=is_value)

    @triton.jit(do_not_specialize=["n"])  # type: ignore[untyped-decorator, unused-ignore]
    def _slope(activations, clean, rows, weight, by_test, out, n, neurons: tl.constexpr):  # type: ignore[no-untyped-def]
        test = tl.program_id(1).to(tl.int64)
        neuron = tl.program_id(0) * neurons + tl.arange(0, neurons)
        is_neuron = neuron < n
        value = tl.load(activations + test * n + neuron, mask=is_neuron, other=0.0)
        known = tl.load(clean + tl.load(rows + test) * n + neuron, mask=is_neuron, other=0.0)
        size = tl.load(weight + neuron, mask=is_neuron, other=0.0) * tl.load(by_test + test)
        slope = tl.where(value > known, size, tl.where(value < known, -size, 0.0))
        tl.store(out + test * n + neuron, slope, mask=is_neuron)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _finish_sums(sums, blocks, is_counted, half, totals, n_neurons, neurons: tl.constexpr):  # type: ignore[no-untyped-def]
        block = blocks + tl.program_id(0) * 5
        start, n_valid, base = tl.load(block), tl.load(block + 1) * tl.load(is_counted), tl.load(block + 2)
        n_parts, stride = tl.load(block + 3), tl.load(block + 4)
        k = tl.arange(0, neurons)
        is_neuron = k < n_valid
        total = tl.zeros([neurons], dtype=tl.float32)
        squares = tl.zeros([neurons], dtype=tl.float32)
        for part in range(0, n_parts):
            at = base + part * stride + k
            total += tl.load(sums + at, mask=is_neuron, other=0.0)
            squares += tl.load(sums + n_parts * stride + at, mask=is_neuron, other=0.0)
        to = totals + tl.load(half) * 2 * n_neurons + start + k
        tl.store(to, tl.load(to, mask=is_neuron, other=0.0) + total, mask=is_neuron)
        tl.store(to + n_neurons, tl.load(to + n_neurons, mask=is_neuron, other=0.0) + squares, mask=is_neuron)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _finish_tests(by_test, layers, out, chunk, blocks: tl.constexpr, tests: tl.constexpr):  # type: ignore[no-untyped-def]
        layer = tl.program_id(0)
        base, n_blocks = tl.load(layers + layer * 2), tl.load(layers + layer * 2 + 1)
        test = tl.program_id(1) * tests + tl.arange(0, tests)
        is_test = test < chunk
        total = tl.zeros([tests], dtype=tl.float32)
        for first in range(0, n_blocks, blocks):
            block = first + tl.arange(0, blocks)
            at = base + block.to(tl.int64)[:, None] * chunk + test[None, :]
            is_value = (block < n_blocks)[:, None] & is_test[None, :]
            total += tl.sum(tl.load(by_test + at, mask=is_value, other=0.0), 0)
        tl.store(out + test * tl.num_programs(0) + layer, total, mask=is_test)


@dataclass(frozen=True)
class _LayerPlan:
    """How one layer is divided into blocks of neurons and parts of the tests."""

    n_blocks: int
    n_parts: int
    tests_per_program: int
    sums: Tensor  # of D - shift and of its square, of [2, parts, neurons]
    by_test: Tensor  # of [blocks, chunk]
    positions: Tensor  # of the panel's neurons in the layer
    column: int  # of the first of them in the panel


class ChunkFolder:
    """Folds the layers of a chunk with one kernel per layer, which reads its activations once, and two at the end.

    The order of all sums is fixed, so the results repeat to the bit.
    """

    def __init__(self, layers: tuple[Layer, ...], chunk: int, panel: dict[str, Tensor], device: torch.device) -> None:
        """`panel` has the positions of the panel's neurons in each layer."""
        self.chunk, self.n_neurons = chunk, layers[-1].stop
        sizes = [_divide(layer.n_neurons, chunk) for layer in layers]
        n_sums = sum(
            2 * n_parts * _aligned(layer.n_neurons) for layer, (_, n_parts, _) in zip(layers, sizes, strict=True)
        )
        self._sums = torch.empty(n_sums, device=device)
        self._by_test = torch.empty(sum(n_blocks for n_blocks, _, _ in sizes) * chunk, device=device)
        self._panel = torch.zeros(chunk, sum(map(len, panel.values())), device=device)
        self._layers: dict[str, _LayerPlan] = {}
        blocks, by_layer = [], []
        first_sum = first_test = column = 0
        for layer, (n_blocks, n_parts, tests_per_program) in zip(layers, sizes, strict=True):
            n, positions = layer.n_neurons, panel.get(layer.name, torch.empty(0, dtype=torch.int64, device=device))
            sums = self._sums[first_sum : first_sum + 2 * n_parts * n]
            by_test = self._by_test[first_test : first_test + n_blocks * chunk]
            self._layers[layer.name] = _LayerPlan(
                n_blocks, n_parts, tests_per_program, sums, by_test, positions, column
            )
            first = torch.arange(0, n, NEURONS)
            size, parts, stride = (n - first).clamp(max=NEURONS), *(torch.full_like(first, of) for of in (n_parts, n))
            blocks.append(torch.stack([layer.start + first, size, first_sum + first, parts, stride], 1))
            by_layer.append((first_test, n_blocks))
            first_sum, first_test = first_sum + 2 * n_parts * _aligned(n), first_test + n_blocks * chunk
            column += len(positions)
        self._blocks, self._by_layer = torch.cat(blocks).to(device), torch.tensor(by_layer, device=device)

    def fold(self, name: str, activations: Tensor, clean: Tensor, rows: Tensor, shift: Tensor, n_tests: Tensor) -> None:
        """Fold one layer's activations `[chunk, neurons]`: `D = |activations - clean[rows]|`.

        clean `[any, neurons]`, rows int64 `[chunk]`, shift `[neurons]`; n_tests, int64 `[1]`, is how many rows of the
        chunk are tests.
        """
        plan, n = self._layers[name], activations.shape[1]
        n_positions, panel = len(plan.positions), self._panel[:, plan.column :]
        _fold[(plan.n_blocks + triton.cdiv(n_positions, NEURONS), plan.n_parts)](
            activations, clean, rows, shift, n_tests, plan.sums, plan.by_test, plan.positions, panel,
            n, self.chunk, plan.tests_per_program, plan.n_blocks, n_positions, self._panel.shape[1],
            neurons=NEURONS, tests=TESTS, num_warps=4,
        )  # fmt: skip

    def finish(self, is_counted: Tensor, half: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
        """After all layers: add their sums to a half of `totals [2, 2, neurons]`, float64, unless `is_counted` is 0.

        `is_counted` and `half`, the index of the half, are int64 `[1]`. Returns the sum of D over the neurons of each
        layer, `[chunk, layers]`, and the panel's signed differences `[chunk, panel]`; rows of padding are undefined.
        """
        _finish_sums[(len(self._blocks),)](
            self._sums, self._blocks, is_counted, half, totals, self.n_neurons, neurons=NEURONS, num_warps=4
        )
        out = torch.empty(self.chunk, len(self._by_layer), device=totals.device)
        _finish_tests[(len(self._by_layer), triton.cdiv(self.chunk, FINISHED_TESTS))](
            self._by_test, self._by_layer, out, self.chunk, blocks=BLOCKS, tests=FINISHED_TESTS, num_warps=4
        )
        return out, self._panel


def slopes(activations: Tensor, clean: Tensor, rows: Tensor, weight: Tensor, by_test: Tensor) -> Tensor:
    """The derivative of `sum(by_test * weight * |activations - clean[rows]|)` in the activations `[tests, neurons]`."""
    out, (n_tests, n) = torch.empty_like(activations), activations.shape
    _slope[(triton.cdiv(n, SLOPES), n_tests)](activations, clean, rows, weight, by_test, out, n, neurons=SLOPES)
    return out


def _aligned(n: int) -> int:
    """Round up to a multiple of 16, since loads from such addresses are wide."""
    return -(-n // 16) * 16


def _divide(n_neurons: int, chunk: int) -> tuple[int, int, int]:
    """Blocks of neurons, parts of the tests, and tests per part, chosen so that the programs occupy the GPU."""
    n_blocks = triton.cdiv(n_neurons, NEURONS)
    n_parts = max(1, min(triton.cdiv(chunk, TESTS), PROGRAMS // n_blocks))
    tests_per_program = triton.cdiv(triton.cdiv(chunk, n_parts), TESTS) * TESTS
    return n_blocks, triton.cdiv(chunk, tests_per_program), tests_per_program


_CHECKING = Lock()
"""Held while a thread checks the kernels, which a process does once."""


@cache
def can_fold(device: torch.device) -> bool:
    """Whether the kernels compile on `device` and agree with torch there."""

    def check() -> bool:
        generator = torch.Generator(device).manual_seed(0)
        layers = (Layer("first", (300,), 0, 300, None), Layer("second", (10,), 300, 10, None))
        panel = {"first": torch.tensor([2, 299], device=device), "second": torch.tensor([4], device=device)}
        rows, n_tests = torch.randint(0, 7, (20,), device=device, generator=generator), 13
        folder = ChunkFolder(layers, 20, panel, device)
        totals = torch.ones(2, 2, 310, dtype=torch.float64, device=device)
        activations, clean = (torch.randn(n, 310, device=device, generator=generator) for n in (20, 7))
        shift = torch.rand(310, device=device, generator=generator)
        for layer in layers:
            part = slice(layer.start, layer.stop)
            folder.fold(
                layer.name,
                activations[:, part].contiguous(),
                clean[:, part].contiguous(),
                rows,
                shift[part],
                torch.tensor([n_tests], device=device),
            )
        one = torch.ones(1, dtype=torch.int64, device=device)
        by_layer, differences = folder.finish(one, one, totals)
        expected = (activations - clean[rows])[:n_tests]
        deviation = expected.abs() - shift
        sums = torch.stack([deviation.sum(0), deviation.square().sum(0)]).double() + 1
        by_part = torch.stack([expected[:, :300].abs().sum(1), expected[:, 300:].abs().sum(1)], 1)
        return (
            torch.allclose(totals[1], sums, atol=1e-2)
            and bool((totals[0] == 1).all())
            and torch.allclose(by_layer[:n_tests], by_part, rtol=1e-4)
            and torch.equal(differences[:n_tests], expected[:, [2, 299, 304]])
        )

    with _CHECKING:
        return works_on(device, check)
