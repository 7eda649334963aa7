"""Triton kernels that fold one layer of a chunk in a single pass over its activations.

If Triton is not available, or a kernel cannot be compiled, torch computes the same sums in several passes.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
except Exception:  # not installed, or not usable on this machine
    triton = None

NEURONS, TESTS = 256, 8
"""Neurons of a program of `fold`, and tests that it loads at a time."""
PROGRAMS = 1024
"""Programs that occupy the GPU: layers with fewer blocks of neurons divide their tests among several programs."""
PANEL_NEURONS = 128

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _fold(  # type: ignore[no-untyped-def]
        activations,
        clean,
        rows,
        shift,
        n_tests,
        sums,
        by_test,
        n,
        chunk,
        tests_per_program,
        neurons: tl.constexpr,
        tests: tl.constexpr,
    ):
        block, part = tl.program_id(0), tl.program_id(1)
        n_parts = tl.num_programs(1)
        neuron = block * neurons + tl.arange(0, neurons)
        is_neuron = neuron < n
        shifts = tl.load(shift + neuron, mask=is_neuron, other=0.0)
        first = part * tests_per_program
        last = tl.minimum(first + tests_per_program, tl.load(n_tests).to(tl.int32))
        total = tl.zeros([neurons], dtype=tl.float32)
        squares = tl.zeros([neurons], dtype=tl.float32)
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
            tl.store(by_test + block * chunk + test, tl.sum(sensitivity, 1), mask=is_test)
            deviation = tl.where(is_value, sensitivity - shifts[None, :], 0.0)
            total += tl.sum(deviation, 0)
            squares += tl.sum(deviation * deviation, 0)
        at = part.to(tl.int64) * n + neuron
        tl.store(sums + at, total, mask=is_neuron)
        tl.store(sums + n_parts.to(tl.int64) * n + at, squares, mask=is_neuron)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _take_panel(  # type: ignore[no-untyped-def]
        activations, clean, rows, positions, out, n, n_positions, width, neurons: tl.constexpr
    ):
        test = tl.program_id(0).to(tl.int64)
        k = tl.program_id(1) * neurons + tl.arange(0, neurons)
        is_neuron = k < n_positions
        position = tl.load(positions + k, mask=is_neuron, other=0)
        row = tl.load(rows + test)
        value = tl.load(activations + test * n + position, mask=is_neuron, other=0.0).to(tl.float32)
        known = tl.load(clean + row * n + position, mask=is_neuron, other=0.0).to(tl.float32)
        tl.store(out + test * width + k, value - known, mask=is_neuron)


def fold(activations: Tensor, clean: Tensor, rows: Tensor, shift: Tensor, n_tests: Tensor, out: Tensor) -> Tensor:
    """Write the sums over tests of `D - shift` and of its square to `out`, where `D = |activations - clean[rows]|`.

    activations `[chunk, neurons]`, clean `[any, neurons]`, rows int64 `[chunk]`, shift `[neurons]`, out `[2, neurons]`;
    n_tests, int64 `[1]`, is how many rows of the chunk are tests. Returns the sum of D over the neurons of each test,
    `[chunk]`; that of padding is not defined. The order of all sums is fixed, so the result repeats to the bit.
    """
    chunk, n = activations.shape
    n_blocks = triton.cdiv(n, NEURONS)
    n_parts = max(1, min(triton.cdiv(chunk, TESTS), PROGRAMS // n_blocks))
    tests_per_program = triton.cdiv(triton.cdiv(chunk, n_parts), TESTS) * TESTS
    n_parts = triton.cdiv(chunk, tests_per_program)
    parts = torch.empty(2, n_parts, n, device=activations.device, dtype=torch.float32)
    by_test = torch.empty(n_blocks, chunk, device=activations.device, dtype=torch.float32)
    _fold[(n_blocks, n_parts)](
        activations, clean, rows, shift, n_tests, parts, by_test, n, chunk, tests_per_program,
        neurons=NEURONS, tests=TESTS, num_warps=4,
    )  # fmt: skip
    torch.sum(parts, 1, out=out)
    return by_test.sum(0)


def take_panel(activations: Tensor, clean: Tensor, rows: Tensor, positions: Tensor, out: Tensor) -> None:
    """Write the signed differences of the neurons at `positions` of a layer to `out [chunk, neurons]`, a view."""
    chunk, n = activations.shape
    grid = (chunk, triton.cdiv(len(positions), PANEL_NEURONS))
    _take_panel[grid](
        activations, clean, rows, positions, out, n, len(positions), out.stride(0), neurons=PANEL_NEURONS, num_warps=2
    )


@cache
def can_fold(device: torch.device) -> bool:
    """Whether the kernels compile on `device` and agree with torch there."""
    if triton is None or device.type != "cuda":
        return False
    try:
        generator = torch.Generator(device).manual_seed(0)
        activations = torch.randn(20, 300, device=device, generator=generator)
        clean = torch.randn(7, 300, device=device, generator=generator)
        rows = torch.randint(0, 7, (20,), device=device, generator=generator)
        shift, n_tests = torch.rand(300, device=device, generator=generator), torch.tensor([13], device=device)
        sums = torch.empty(2, 300, device=device)
        by_test = fold(activations, clean, rows, shift, n_tests, sums)
        expected = (activations - clean[rows]).abs()[:13]
        deviation = expected - shift
        panel, positions = torch.zeros(20, 9, device=device), torch.tensor([2, 299], device=device)
        take_panel(activations, clean, rows, positions, panel[:, 4:6])
        difference = (activations - clean[rows])[:, positions]
        return (
            torch.allclose(sums[0], deviation.sum(0), atol=1e-3)
            and torch.allclose(sums[1], deviation.square().sum(0), atol=1e-2)
            and torch.allclose(by_test[:13], expected.sum(1), rtol=1e-4)
            and torch.equal(panel[:, 4:6], difference)
        )
    except Exception:  # for whatever reason it cannot be compiled: torch gives the same sums, more slowly
        return False
