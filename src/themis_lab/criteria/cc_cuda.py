"""Triton kernels for cluster coverage: which tests are far from all kept ones, and which of these are kept.

They replace dozens of small steps in torch, each of which waits for the host. If Triton is not available, or a kernel
cannot be compiled, torch finds the same tests.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from themis.compute.gpu import tl, triton, works_on
from themis.criteria.readings import LayerSpan

MOST_TESTS = 1024
"""Tests of a call at most."""
TESTS, ROWS = 32, 32
"""Tests of a program of `_find`, and kept tests that it compares them with at a time."""
PAIRS = 16
"""Tests of a program of `_compare`, and others that it compares them with."""
SELECTED = 32
"""Tests that `_select` decides at a time."""
LEAST_WIDTH, MOST_WIDTH = 16, 64
"""Neurons that are loaded at a time."""
EPSILON = torch.finfo(torch.float64).eps

if triton is not None:

    @triton.jit(do_not_specialize=["n_tests", "n_rows"])  # type: ignore[untyped-decorator, unused-ignore]
    def _find(  # type: ignore[no-untyped-def]
        values, kept, squares, longest, counts, threshold, is_far, n_tests, n_neurons, width, n_rows,
        epsilon: tl.constexpr, tests: tl.constexpr, rows: tl.constexpr, neurons: tl.constexpr,
    ):  # fmt: skip
        layer = tl.program_id(1).to(tl.int64)
        test = tl.program_id(0) * tests + tl.arange(0, tests)
        is_test = test < n_tests
        values += test.to(tl.int64)[:, None] * n_neurons + layer * width
        kept += layer * n_rows * width
        square = tl.zeros([tests], dtype=tl.float64)
        n_infinite = tl.zeros([tests], dtype=tl.int32)
        for start in range(0, width, neurons):
            neuron = start + tl.arange(0, neurons)
            x = tl.load(values + neuron[None, :], mask=is_test[:, None] & (neuron < width)[None, :], other=0.0)
            is_finite = tl.abs(x) < float("inf")
            n_infinite += tl.sum(tl.where(is_finite, 0, 1), 1)
            x = tl.where(is_finite, x, 0.0).to(tl.float64)
            square += tl.sum(x * x, 1)
        nearest = tl.full([tests], float("inf"), dtype=tl.float64)
        count = tl.load(counts + layer).to(tl.int32)
        for first in range(0, count, rows):
            row = first + tl.arange(0, rows)
            is_row = row < count
            product = tl.zeros([tests, rows], dtype=tl.float64)
            for start in range(0, width, neurons):
                neuron = start + tl.arange(0, neurons)
                is_neuron = neuron < width
                x = tl.load(values + neuron[None, :], mask=is_test[:, None] & is_neuron[None, :], other=0.0)
                x = tl.where(tl.abs(x) < float("inf"), x, 0.0).to(tl.float64)
                at = row.to(tl.int64)[None, :] * width + neuron[:, None]
                y = tl.load(kept + at, mask=is_row[None, :] & is_neuron[:, None], other=0.0)
                product = tl.dot(x, y, product, out_dtype=tl.float64)
            length = tl.load(squares + layer * n_rows + row, mask=is_row, other=float("inf"))
            nearest = tl.minimum(nearest, tl.min(length[None, :] - 2 * product, 1))
        nearest += square
        # The rounding error of a sum of products (Higham, 3.1), twice and a bit more.
        reach = tl.sqrt(square) + tl.load(longest + layer)
        error = (width + 8) * epsilon * reach * reach
        limit = tl.load(threshold)
        is_unsure = (tl.abs(nearest - limit) <= error) & (n_infinite == 0)
        if tl.sum(is_unsure.to(tl.int32)) > 0:  # measured by differences
            exact = tl.full([tests], float("inf"), dtype=tl.float64)
            for row in range(0, count):
                distance = tl.zeros([tests], dtype=tl.float64)
                for start in range(0, width, neurons):
                    neuron = start + tl.arange(0, neurons)
                    is_neuron = neuron < width
                    x = tl.load(values + neuron[None, :], mask=is_unsure[:, None] & is_neuron[None, :], other=0.0)
                    y = tl.load(kept + row * width + neuron, mask=is_neuron, other=0.0)
                    difference = tl.where(is_neuron[None, :], x.to(tl.float64) - y[None, :], 0.0)
                    distance += tl.sum(difference * difference, 1)
                exact = tl.minimum(exact, distance)
            nearest = tl.where(is_unsure, exact, nearest)
        is_open = (nearest > limit) & (n_infinite == 0)
        tl.store(is_far + layer * n_tests + test, is_open.to(tl.int8), mask=is_test)

    @triton.jit(do_not_specialize=["n_tests"])  # type: ignore[untyped-decorator, unused-ignore]
    def _list(is_far, order, n_far, n_tests, most_tests: tl.constexpr):  # type: ignore[no-untyped-def]
        layer = tl.program_id(0).to(tl.int64)
        test = tl.arange(0, most_tests)
        is_open = tl.load(is_far + layer * n_tests + test, mask=test < n_tests, other=0).to(tl.int32)
        tl.store(order + layer * n_tests + tl.cumsum(is_open, 0) - 1, test, mask=is_open > 0)
        tl.store(n_far + layer, tl.sum(is_open))

    @triton.jit(do_not_specialize=["n_tests", "most"])  # type: ignore[untyped-decorator, unused-ignore]
    def _compare(  # type: ignore[no-untyped-def]
        values, order, n_far, threshold, is_near, n_tests, n_neurons, width, most,
        tests: tl.constexpr, neurons: tl.constexpr,
    ):  # fmt: skip
        layer = tl.program_id(2).to(tl.int64)
        values += layer * width
        order += layer * n_tests
        n = tl.load(n_far + layer)
        i = tl.program_id(0) * tests + tl.arange(0, tests)
        j = tl.program_id(1) * tests + tl.arange(0, tests)
        if (tl.program_id(1) <= tl.program_id(0)) & (tl.program_id(0) * tests < n):
            left = values + tl.load(order + i, mask=i < n, other=0).to(tl.int64) * n_neurons
            right = values + tl.load(order + j, mask=j < n, other=0).to(tl.int64) * n_neurons
            distance = tl.zeros([tests, tests], dtype=tl.float64)
            for start in range(0, width, neurons):
                neuron = start + tl.arange(0, neurons)
                is_neuron = (neuron < width)[None, :]
                x = tl.load(left[:, None] + neuron[None, :], mask=is_neuron, other=0.0).to(tl.float64)
                y = tl.load(right[:, None] + neuron[None, :], mask=is_neuron, other=0.0).to(tl.float64)
                difference = x[:, None, :] - y[None, :, :]
                distance += tl.sum(difference * difference, 2)
            is_before = (j[None, :] < i[:, None]) & (i < n)[:, None]
            near = ((distance <= tl.load(threshold)) & is_before).to(tl.int8)
            at = (layer * most + i[:, None]) * most + j[None, :]
            tl.store(is_near + at, near, mask=(i < most)[:, None] & (j < most)[None, :])

    @triton.jit(do_not_specialize=["n_tests", "n_rows", "most"])  # type: ignore[untyped-decorator, unused-ignore]
    def _select(  # type: ignore[no-untyped-def]
        values, kept, squares, longest, counts, order, n_far, is_near, is_new, raised,
        n_tests, n_neurons, width, n_rows, most, size: tl.constexpr, tests: tl.constexpr, neurons: tl.constexpr,
    ):  # fmt: skip
        layer = tl.program_id(0).to(tl.int64)
        values += layer * width
        order += layer * n_tests
        is_near += layer * most * most
        is_new += layer * size
        n = tl.load(n_far + layer)
        every = tl.arange(0, size)
        tl.store(is_new + every, (every < n).to(tl.int8))
        tl.debug_barrier()
        # The first test is right from the start, and each step corrects those that depend only on right ones.
        n_changed = n
        while n_changed > 0:
            before = tl.load(is_new + every)
            tl.debug_barrier()
            n_changed = n * 0
            for first in range(0, n, tests):
                i = first + tl.arange(0, tests)
                at = i[:, None] * most + every[None, :]
                near = tl.load(is_near + at, mask=(i < n)[:, None] & (every[None, :] < i[:, None]), other=0)
                is_kept = (tl.sum((near & before[None, :]).to(tl.int32), 1) == 0) & (i < n)
                was_kept = tl.load(is_new + i, mask=i < n, other=0)
                n_changed += tl.sum((is_kept.to(tl.int8) != was_kept).to(tl.int32))
                tl.debug_barrier()
                tl.store(is_new + i, is_kept.to(tl.int8), mask=i < n)
            tl.debug_barrier()
        count = tl.load(counts + layer).to(tl.int32)
        most_length = tl.load(longest + layer)
        for first in range(0, n, tests):
            i = first + tl.arange(0, tests)
            is_kept = tl.load(is_new + i, mask=i < n, other=0).to(tl.int32)
            test = tl.load(order + i, mask=i < n, other=0)
            place = layer * n_rows + count + tl.cumsum(is_kept, 0) - 1
            square = tl.zeros([tests], dtype=tl.float64)
            for start in range(0, width, neurons):
                neuron = start + tl.arange(0, neurons)
                mask = (is_kept > 0)[:, None] & (neuron < width)[None, :]
                x = tl.load(values + test.to(tl.int64)[:, None] * n_neurons + neuron[None, :], mask=mask, other=0.0)
                x = x.to(tl.float64)
                tl.store(kept + place[:, None] * width + neuron[None, :], x, mask=mask)
                square += tl.sum(x * x, 1)
            tl.store(squares + place, square, mask=is_kept > 0)
            tl.store(raised + test, is_kept.to(tl.int8), mask=is_kept > 0)
            most_length = tl.maximum(most_length, tl.sqrt(tl.max(square, 0)))
            count += tl.sum(is_kept)
        tl.store(longest + layer, most_length)
        tl.store(counts + layer, count.to(tl.int64))


def find_far(values: Tensor, span: LayerSpan, state: list[Tensor], threshold: Tensor, is_far: Tensor) -> None:
    """Find the tests that are farther than the threshold from all kept ones; int8 `[layers, tests]`.

    values: float32 `[tests, neurons]` of all layers, at most `MOST_TESTS` rows. state: the kept tests
    `[layers, rows, neurons]`, their squared lengths, the largest length and the number of kept tests of each layer.
    threshold: float64 `[1]`. A test that is not finite is not far.
    """
    _find[(triton.cdiv(len(values), TESTS), len(span))](
        values[:, span.start :], *state, threshold, is_far,
        len(values), values.stride(0), span.width, state[0].shape[1],
        epsilon=EPSILON, tests=TESTS, rows=ROWS, neurons=_neurons(span.width), num_warps=4,
    )  # fmt: skip


def list_far(is_far: Tensor) -> tuple[Tensor, Tensor]:
    """The far tests of each layer in order, int32 `[layers, tests]`, and how many they are, int32 `[layers]`."""
    n_layers, n_tests = is_far.shape
    order = torch.empty(n_layers, n_tests, dtype=torch.int32, device=is_far.device)
    n_far = torch.empty(n_layers, dtype=torch.int32, device=is_far.device)
    _list[(n_layers,)](is_far, order, n_far, n_tests, most_tests=MOST_TESTS, num_warps=4)
    return order, n_far


def keep_far(
    values: Tensor,
    span: LayerSpan,
    state: list[Tensor],
    threshold: Tensor,
    order: Tensor,
    n_far: Tensor,
    most: int,
    raised: Tensor,
) -> None:
    """Keep the far tests of some layers, in order, unless they are near one that is kept before; sets `raised`, int8.

    order and n_far: what `list_far` returned for these layers, of which none has more than `most`. The other arguments
    are those of `find_far`; the state, which must have room for the far tests, is updated in place.
    """
    n_tests, device, n_blocks = len(values), values.device, triton.cdiv(most, PAIRS)
    part, neurons, size = values[:, span.start :], _neurons(span.width), max(SELECTED, 1 << (most - 1).bit_length())
    is_near = torch.empty(len(span), most, most, dtype=torch.int8, device=device)
    is_new = torch.empty(len(span), size, dtype=torch.int8, device=device)
    _compare[(n_blocks, n_blocks, len(span))](
        part, order, n_far, threshold, is_near, n_tests, values.stride(0), span.width, most,
        tests=PAIRS, neurons=LEAST_WIDTH, num_warps=4,
    )  # fmt: skip
    _select[(len(span),)](
        part, *state, order, n_far, is_near, is_new, raised,
        n_tests, values.stride(0), span.width, state[0].shape[1], most,
        size=size, tests=SELECTED, neurons=neurons, num_warps=8,
    )  # fmt: skip


def _neurons(width: int) -> int:
    return max(LEAST_WIDTH, min(MOST_WIDTH, 1 << (width - 1).bit_length()))


@cache
def can_keep(device: torch.device) -> bool:
    """Whether these functions work on `device`."""

    def check() -> bool:
        span, threshold = LayerSpan(("a", "b"), 1, 3), torch.full((1,), 4.0, dtype=torch.float64, device=device)
        values = torch.zeros(5, 7, device=device)
        values[:, 1] = torch.tensor([0.0, 2.0, 2.5, 5.0, torch.inf])
        values[:, 4] = torch.tensor([0.0, 9.0, 9.0, 9.0, 9.0])
        kept = torch.zeros(2, 6, 3, dtype=torch.float64, device=device)
        state = [kept, kept.sum(2), kept.sum((1, 2)), kept.sum((1, 2)).long()]
        state[3][1] = 1  # the second layer has kept the origin
        is_far, raised = (torch.zeros(n, 5, dtype=torch.int8, device=device) for n in (2, 1))
        find_far(values, span, state, threshold, is_far)
        keep_far(values, span, state, threshold, *list_far(is_far), 4, raised[0])
        return (
            is_far.tolist() == [[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]]
            and raised[0].tolist() == [1, 1, 1, 1, 0]
            and state[3].tolist() == [3, 2]
            and kept[0, :4, 0].tolist() == [0.0, 2.5, 5.0, 0.0]
        )

    return works_on(device, check)
