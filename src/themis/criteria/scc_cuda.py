"""The walk of `scc` on a GPU: a Triton kernel, where Triton is to be had."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from themis.judge.coverage import UNSEEN_TESTS

try:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
except Exception:  # not there, or not fit for this machine
    triton = None

FEW = 1 << 15
"""Neurons of which programs get half as many each, so that all of the GPU has some."""
Walk = Callable[[Tensor, Tensor, Tensor, Tensor, dict[str, Tensor]], Tensor]

if triton is not None:

    @triton.jit(do_not_specialize=["n_tests"])  # type: ignore[untyped-decorator, unused-ignore]
    def _walk(  # type: ignore[no-untyped-def]
        activations, clean, counts, limits, shift, first, sums, squares, moved, varied, found, n_tests, n, unseen,
        size: tl.constexpr,
    ):  # fmt: skip
        neuron = tl.program_id(0) * size + tl.arange(0, size)
        is_real = neuron < n
        start = tl.load(shift + neuron, mask=is_real, other=0.0)
        origin = tl.load(first + neuron, mask=is_real, other=0.0)
        total = tl.load(sums + neuron, mask=is_real, other=0.0)
        square = tl.load(squares + neuron, mask=is_real, other=0.0)
        has_moved = tl.load(moved + neuron, mask=is_real, other=0) != 0
        has_varied = tl.load(varied + neuron, mask=is_real, other=0) != 0
        at, base, to = activations + neuron, clean + neuron, found + tl.program_id(0).to(tl.int64) * n_tests
        for t in tl.range(0, n_tests, num_stages=3):
            a = tl.load(at, mask=is_real, other=0.0)
            c = tl.load(base, mask=is_real, other=0.0)
            at += n
            base += n
            sensitivity = tl.abs(a - c)
            has_moved = has_moved | (sensitivity > 0.0)
            has_varied = has_varied | (is_real & (c != origin))
            deviation = sensitivity.to(tl.float64) - start
            total += deviation
            square += deviation * deviation
            number = tl.load(counts + t)
            mean = total / number.to(tl.float64)
            m2 = square - mean * mean * number.to(tl.float64)
            m2 = tl.where(m2 < 0.0, 0.0, m2)
            is_seen = has_moved | (has_varied & (number >= unseen))
            is_converged = (is_seen & (m2 < tl.load(limits + t))).to(tl.int32)
            is_judged = (has_moved | has_varied).to(tl.int32)
            is_known = (is_real & (sensitivity < float("inf"))).to(tl.int32)
            tl.store(to + t, tl.sum(is_converged + (is_judged << 8) + (is_known << 16), 0))  # a byte for each count
        tl.store(sums + neuron, total, mask=is_real)
        tl.store(squares + neuron, square, mask=is_real)
        tl.store(moved + neuron, has_moved.to(tl.int8), mask=is_real)
        tl.store(varied + neuron, has_varied.to(tl.int8), mask=is_real)


def walk(values: Tensor, clean: Tensor, counts: Tensor, limits: Tensor, state: dict[str, Tensor]) -> Tensor:
    """`walk` of `scc`, of contiguous float32 tensors on a GPU."""
    n_tests, n = values.shape
    size = 64 if n > FEW else 32  # a program is one warp, which sums without waiting for others
    n_programs = -(-n // size)
    found = torch.empty(n_programs, n_tests, dtype=torch.int32, device=values.device)
    numbers = (state[name] for name in ("shift", "clean", "sums", "squares"))
    flags = (state[name].view(torch.int8) for name in ("moved", "varied"))
    with torch.cuda.device(values.device):
        _walk[(n_programs,)](
            values, clean, counts, limits, *numbers, *flags, found, n_tests, n, UNSEEN_TESTS,
            size=size, num_warps=1, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip
    return found.view(torch.uint8).view(n_programs, n_tests, 4).sum(0).T[:3]


@cache
def walk_on(device: torch.device) -> Walk | None:
    """`walk`, if it runs on `device`."""
    if triton is None or device.type != "cuda":
        return None
    try:
        numbers = {name: torch.zeros(1, dtype=torch.float64, device=device) for name in ("shift", "sums", "squares")}
        flags = {name: torch.zeros(1, dtype=torch.bool, device=device) for name in ("moved", "varied")}
        nothing, counts = torch.zeros(5, 1, device=device), torch.arange(1, 6, device=device)
        state = numbers | flags | {"clean": nothing[0]}
        found = walk(nothing + 1, nothing, counts, counts.double() * 9, state)
        return walk if found.tolist() == [[1] * 5] * 3 and state["sums"].tolist() == [5.0] else None
    except Exception:  # whatever keeps it from being made: without it all is as right, and slower
        return None
