"""What neurons cross on a GPU: a Triton kernel, where Triton is to be had."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
except Exception:  # not there, or not fit for this machine
    triton = None

SIZE, TESTS = 128, 8
"""Neurons of a program, and tests that it looks at together."""
Cross = Callable[[Tensor, Tensor | None, Tensor, Tensor, bool], Tensor]

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _cover(first, is_open, covered, raised, n_tests):  # type: ignore[no-untyped-def]
        earliest = tl.min(first, 0)
        is_fresh = is_open & (earliest < n_tests)
        tl.store(covered, is_fresh.to(tl.uint8), mask=is_fresh)
        tl.store(raised + earliest, is_fresh.to(tl.uint8), mask=is_fresh)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _cross(  # type: ignore[no-untyped-def]
        values, low, high, covered, raised, n_tests, n,
        has_low: tl.constexpr, n_sides: tl.constexpr, is_met: tl.constexpr, tests: tl.constexpr, size: tl.constexpr,
    ):  # fmt: skip
        neuron = tl.program_id(0) * size + tl.arange(0, size)
        is_real = neuron < n
        last = covered + (n_sides - 1) * n + neuron
        is_open = is_real & (tl.load(last, mask=is_real, other=1) == 0)
        is_asked = is_open
        most = tl.load(high + neuron, mask=is_real, other=0.0)[None, :]
        above = tl.full([tests, size], 2147483647, tl.int32)
        if has_low:
            least = tl.load(low + neuron, mask=is_real, other=0.0)[None, :]
        if n_sides == 2:
            is_open_below = is_real & (tl.load(covered + neuron, mask=is_real, other=1) == 0)
            is_asked = is_open | is_open_below
            below = tl.full([tests, size], 2147483647, tl.int32)
        test = tl.arange(0, tests)[:, None]
        at = values + test.to(tl.int64) * n + neuron[None, :]
        step = tl.full([1, 1], tests, tl.int64) * n
        for _ in range(0, n_tests, tests):
            a = tl.load(at, mask=is_asked[None, :] & (test < n_tests), other=0.0)
            is_above = a > most
            if is_met:
                is_above = is_above | (a == most)
            is_above = is_above & (a < float("inf"))
            if has_low:
                is_below = a < least
                if is_met:
                    is_below = is_below | (a == least)
                is_below = is_below & (a > float("-inf"))
                if n_sides == 2:
                    below = tl.where(is_below, tl.minimum(below, test), below)
                else:
                    is_above = is_above | is_below
            above = tl.where(is_above, tl.minimum(above, test), above)
            test += tests
            at += step
        _cover(above, is_open, last, raised, n_tests)
        if n_sides == 2:
            _cover(below, is_open_below, covered + neuron, raised, n_tests)


def cross(values: Tensor, low: Tensor | None, high: Tensor, covered: Tensor, is_met: bool) -> Tensor:
    """Cover what `values [tests, neurons]`, contiguous, cross; which tests were first at something."""
    n_tests, n = values.shape
    raised = torch.zeros(n_tests, dtype=torch.bool, device=values.device)
    with torch.cuda.device(values.device):
        _cross[(-(-n // SIZE),)](
            values, high if low is None else low, high, covered.view(torch.uint8), raised.view(torch.uint8), n_tests, n,
            has_low=low is not None, n_sides=len(covered), is_met=is_met, tests=TESTS, size=SIZE, num_warps=4,
        )  # fmt: skip
    return raised


@cache
def cross_on(device: torch.device) -> Cross | None:
    """`cross`, if it runs on `device`."""
    if triton is None or device.type != "cuda":
        return None
    try:
        value = torch.ones(1, 1, device=device)
        raised = cross(value, None, value[0] - 1, torch.zeros(1, 1, dtype=torch.bool, device=device), False)
        return cross if bool(raised) else None
    except Exception:  # whatever keeps it from being made: without it all is as right, and slower
        return None
