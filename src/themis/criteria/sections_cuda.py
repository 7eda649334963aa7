"""The walk of `sections` on a GPU: a Triton kernel, where Triton is to be had."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from themis.criteria.sections import Sections

try:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
except Exception:  # not there, or not fit for this machine
    triton = None

BLOCK = 512
"""Neurons of a program: as many as it has threads, so that one thread keeps a neuron and finds what it wrote."""
Walk = Callable[["Sections", Tensor, Tensor], tuple[Tensor, Tensor]]

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _find(a, least, most, one, times, is_ceil: tl.constexpr, is_clamped: tl.constexpr):  # type: ignore[no-untyped-def]
        # Whether a value has a section, the section's word and its bit there.
        place = tl.div_rn(a - least, one)  # plain division is not rounded as IEEE asks
        if is_ceil:
            place = tl.ceil(place * times) - 1.0
        is_in = (a >= least) & (a <= most) & (place >= 0.0)
        if not is_clamped:
            is_in = is_in & (place < times)
        section = tl.where(is_in, tl.minimum(place, times - 1.0), 0.0).to(tl.int32)
        return is_in, section >> 5, tl.full(a.shape, 1, tl.int32) << (section & 31)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _mark(mark, is_new):  # type: ignore[no-untyped-def]
        is_first = tl.load(mark, mask=is_new, other=1) == 0  # else a million stores to one byte wait in line
        tl.store(mark, is_first.to(tl.int8), mask=is_first)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _walk(  # type: ignore[no-untyped-def]
        activations, low, high, width, bits, raised, counts, n_tests, n, words, times,
        is_ceil: tl.constexpr, is_clamped: tl.constexpr, size: tl.constexpr,
    ):  # fmt: skip
        neuron = tl.program_id(0) * size + tl.arange(0, size)
        is_real = neuron < n
        least = tl.load(low + neuron, mask=is_real, other=0.0)
        most = tl.load(high + neuron, mask=is_real, other=0.0)
        one = tl.load(width + neuron, mask=is_real, other=1.0)
        row = bits + neuron.to(tl.int64) * words
        at = activations + neuron
        mark = raised + neuron * 0
        n_set = tl.zeros([size], dtype=tl.int32)
        ahead = tl.load(at, mask=is_real, other=float("nan"), cache_modifier=".cg")
        beyond = tl.load(at + n, mask=is_real & (n_tests > 1), other=float("nan"), cache_modifier=".cg")
        for t in range(0, n_tests, 2):  # two tests at a time: their bits are looked up together
            a, b = ahead, beyond
            at += n
            at += n
            # These come meanwhile; past the first cache, which is for the bits.
            ahead = tl.load(at, mask=is_real & (t + 2 < n_tests), other=float("nan"), cache_modifier=".cg")
            beyond = tl.load(at + n, mask=is_real & (t + 3 < n_tests), other=float("nan"), cache_modifier=".cg")
            is_in, word, bit = _find(a, least, most, one, times, is_ceil, is_clamped)
            is_in_b, word_b, bit_b = _find(b, least, most, one, times, is_ceil, is_clamped)
            found = tl.load(row + word, mask=is_in, other=-1)
            found_b = tl.load(row + word_b, mask=is_in_b, other=-1)
            is_new = is_in & ((found & bit) == 0)
            found = found | bit
            found_b = tl.where(is_new & (word == word_b), found, found_b)
            is_new_b = is_in_b & ((found_b & bit_b) == 0)
            tl.store(row + word, found, mask=is_new)
            tl.store(row + word_b, found_b | bit_b, mask=is_new_b)
            _mark(mark, is_new)
            _mark(mark + 1, is_new_b)
            n_set += is_new.to(tl.int32) + is_new_b.to(tl.int32)
            mark += 2
        tl.store(counts + tl.program_id(0), tl.sum(n_set, 0))


def walk(sections: Sections, values: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """`cover` of float32 values on a GPU, contiguous as `bits` are."""
    n_tests, n = values.shape
    n_programs = -(-n // BLOCK)
    raised = torch.zeros(n_tests, dtype=torch.int8, device=values.device)
    counts = torch.zeros(n_programs, dtype=torch.int32, device=values.device)
    low, high, width = (each.contiguous() for each in (sections.low, sections.high, sections.width))
    with torch.cuda.device(values.device):
        _walk[(n_programs,)](
            values, low, high, width, bits, raised, counts, n_tests, n, bits.shape[1], float(sections.k),
            is_ceil=sections.is_ceil, is_clamped=sections.is_clamped, size=BLOCK, num_warps=BLOCK // 32, num_stages=1,
        )  # fmt: skip
    return raised.bool(), counts.sum(dtype=torch.int64)


@cache
def walk_on(device: torch.device) -> Walk | None:
    """`walk`, if it runs on `device`."""
    from themis.criteria.sections import Sections, no_bits

    if triton is None or device.type != "cuda":
        return None
    try:
        example = torch.zeros(1, 1, device=device)
        tried = Sections(example[0], example[0] + 1, example[0] + 1, 1)
        n_set = walk(tried, example, no_bits(1, 1, device))[1]
        return walk if int(n_set) == 1 else None
    except Exception:  # whatever keeps it from being made: without it all is as right, and slower
        return None
