"""Triton kernels for the criteria whose inner loop is slow in torch on a GPU.

Each kernel has a function that launches it and a `can_...` function that says whether it works on a device. If Triton
is not available, or a kernel cannot be compiled, the criteria compute the same values in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache, lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from themis.compute.gpu import tl, triton, works_on
from themis.judge.coverage import MIN_UNMOVED_TESTS
from themis_lab.criteria.readings import Layout

CROSS_NEURONS, CROSS_TESTS = 128, 8
"""Neurons of a program of `cross`, and tests that it compares at a time."""
SCALE_VALUES = 2048
"""Values that a program of `scale_rows` processes at a time."""
SECTION_NEURONS = 512
"""Neurons of a program of `cover_sections`: as many as it has threads, so that one thread owns a neuron's bits."""
TOP_BLOCK = 32
"""Neurons per block of `top_neurons`, in layers of at most `TOP_MAX_BLOCKS` blocks; wider layers have larger ones."""
TOP_MAX_BLOCKS = 512
TOP_TILE = 2048
"""Values that a program of the first kernel of `top_neurons` processes."""
TOP_MAX_RANKS = 128
"""Above this many ranks, `top_neurons` is slower than torch."""
NO_KEY = -(1 << 63)
"""The sort key of a missing value."""
CONVERGE_FEW_NEURONS = 1 << 15
"""Up to this many neurons, programs of `converge` take half as many each, so that they occupy the whole GPU."""


# Values that cross their neurons' bounds (NC, NBC, SNAC)

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _mark_crossed(first, is_open, covered, raised, n_tests):  # type: ignore[no-untyped-def]
        earliest = tl.min(first, 0)
        is_fresh = is_open & (earliest < n_tests)
        tl.store(covered, is_fresh.to(tl.uint8), mask=is_fresh)
        tl.store(raised + earliest, is_fresh.to(tl.uint8), mask=is_fresh)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _cross_kernel(  # type: ignore[no-untyped-def]
        values, low, high, covered, raised, n_tests, n,
        has_low: tl.constexpr, n_sides: tl.constexpr, includes_bound: tl.constexpr,
        tests: tl.constexpr, size: tl.constexpr,
    ):  # fmt: skip
        neuron = tl.program_id(0) * size + tl.arange(0, size)
        is_real = neuron < n
        last = covered + (n_sides - 1) * n + neuron
        is_open = is_real & (tl.load(last, mask=is_real, other=1) == 0)
        is_needed = is_open
        highest = tl.load(high + neuron, mask=is_real, other=0.0)[None, :]
        above = tl.full([tests, size], 2147483647, tl.int32)
        if has_low:
            lowest = tl.load(low + neuron, mask=is_real, other=0.0)[None, :]
        if n_sides == 2:
            is_open_below = is_real & (tl.load(covered + neuron, mask=is_real, other=1) == 0)
            is_needed = is_open | is_open_below
            below = tl.full([tests, size], 2147483647, tl.int32)
        test = tl.arange(0, tests)[:, None]
        at = values + test.to(tl.int64) * n + neuron[None, :]
        step = tl.full([1, 1], tests, tl.int64) * n
        for _ in range(0, n_tests, tests):
            a = tl.load(at, mask=is_needed[None, :] & (test < n_tests), other=0.0)
            is_above = a > highest
            if includes_bound:
                is_above = is_above | (a == highest)
            is_above = is_above & (a < float("inf"))
            if has_low:
                is_below = a < lowest
                if includes_bound:
                    is_below = is_below | (a == lowest)
                is_below = is_below & (a > float("-inf"))
                if n_sides == 2:
                    below = tl.where(is_below, tl.minimum(below, test), below)
                else:
                    is_above = is_above | is_below
            above = tl.where(is_above, tl.minimum(above, test), above)
            test += tests
            at += step
        _mark_crossed(above, is_open, last, raised, n_tests)
        if n_sides == 2:
            _mark_crossed(below, is_open_below, covered + neuron, raised, n_tests)


def device_of(tensor: Tensor) -> AbstractContextManager[None]:
    """A context in which kernels are launched on the GPU of `tensor`, if it has one."""
    return torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call, no-any-return, unused-ignore]


def cross(values: Tensor, low: Tensor | None, high: Tensor, covered: Tensor, includes_bound: bool) -> Tensor:
    """Mark in `covered [sides, neurons]` the bounds that `values [tests, neurons]`, contiguous float32, cross.

    Returns which tests were the first to cross a bound, bool `[tests]`.
    """
    n_tests, n = values.shape
    raised = torch.zeros(n_tests, dtype=torch.bool, device=values.device)
    with device_of(values):
        _cross_kernel[(-(-n // CROSS_NEURONS),)](
            values, high if low is None else low, high, covered.view(torch.uint8), raised.view(torch.uint8), n_tests, n,
            has_low=low is not None, n_sides=len(covered), includes_bound=includes_bound,
            tests=CROSS_TESTS, size=CROSS_NEURONS, num_warps=4,
        )  # fmt: skip
    return raised


@cache
def can_cross(device: torch.device) -> bool:
    """Whether `cross` works on `device`."""

    def check() -> bool:
        value = torch.ones(1, 1, device=device)
        return bool(cross(value, None, value[0] - 1, torch.zeros(1, 1, dtype=torch.bool, device=device), False))

    return works_on(device, check)


# Rows scaled to 0..1 (NC)

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _scale_kernel(values, out, n, stride, size: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        values += row * n
        out += row * stride
        place = tl.arange(0, size)
        low = tl.full([size], float("inf"), tl.float32)
        high = tl.full([size], float("-inf"), tl.float32)
        n_nan = tl.zeros([size], tl.int32)
        for start in range(0, n, size):
            at = start + place
            a = tl.load(values + at, mask=at < n, other=0.0)
            low = tl.where((at < n) & (a < low), a, low)
            high = tl.where((at < n) & (a > high), a, high)
            n_nan += (a != a).to(tl.int32)
        lowest, highest = tl.min(low, 0), tl.max(high, 0)
        width = highest - lowest
        width = tl.where(width == 0, float("inf"), width)
        width = tl.where(tl.max(n_nan, 0) > 0, float("nan"), width)  # like torch's amin and amax
        width += tl.zeros([size], tl.float32)
        for start in range(0, n, size):
            at = start + place
            a = tl.load(values + at, mask=at < n, other=0.0)
            tl.store(out + at, tl.div_rn(a - lowest, width), mask=at < n)  # plain division is not rounded as in IEEE


def scale_rows(values: Tensor, out: Tensor) -> Tensor:
    """Write rows `[inputs, neurons]` to `out`, each scaled from its own range to 0..1.

    `values` is float32 and contiguous, and so is each row of `out`.
    """
    with device_of(values):
        _scale_kernel[(len(values),)](values, out, values.shape[1], out.stride(0), size=SCALE_VALUES, num_warps=8)
    return out


@cache
def can_scale_rows(device: torch.device) -> bool:
    """Whether `scale_rows` works on `device`."""

    def check() -> bool:
        row = torch.tensor([[1.0, 3.0, 2.0]], device=device)
        return bool(scale_rows(row, torch.empty_like(row)).tolist() == [[0.0, 1.0, 0.5]])

    return works_on(device, check)


# Sections of the neurons' ranges (KMNC)

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _find_section(  # type: ignore[no-untyped-def]
        a, lowest, highest, one, times, is_ceil: tl.constexpr, is_clamped: tl.constexpr
    ):
        # Whether a value lies in a section, the word of that section and its bit there.
        place = tl.div_rn(a - lowest, one)  # plain division is not rounded as in IEEE
        if is_ceil:
            place = tl.ceil(place * times) - 1.0
        is_in = (a >= lowest) & (a <= highest) & (place >= 0.0)
        if not is_clamped:
            is_in = is_in & (place < times)
        section = tl.where(is_in, tl.minimum(place, times - 1.0), 0.0).to(tl.int32)
        return is_in, section >> 5, tl.full(a.shape, 1, tl.int32) << (section & 31)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _mark_raised(mark, is_new):  # type: ignore[no-untyped-def]
        is_first = tl.load(mark, mask=is_new, other=1) == 0  # otherwise a million stores to one byte are serialised
        tl.store(mark, is_first.to(tl.int8), mask=is_first)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _sections_kernel(  # type: ignore[no-untyped-def]
        activations, low, high, width, bits, raised, counts, n_tests, n, words, times,
        is_ceil: tl.constexpr, is_clamped: tl.constexpr, size: tl.constexpr,
    ):  # fmt: skip
        neuron = tl.program_id(0) * size + tl.arange(0, size)
        is_real = neuron < n
        lowest = tl.load(low + neuron, mask=is_real, other=0.0)
        highest = tl.load(high + neuron, mask=is_real, other=0.0)
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
            # Prefetch the next two tests, bypassing the first-level cache, which is left to the bits.
            ahead = tl.load(at, mask=is_real & (t + 2 < n_tests), other=float("nan"), cache_modifier=".cg")
            beyond = tl.load(at + n, mask=is_real & (t + 3 < n_tests), other=float("nan"), cache_modifier=".cg")
            is_in, word, bit = _find_section(a, lowest, highest, one, times, is_ceil, is_clamped)
            is_in_b, word_b, bit_b = _find_section(b, lowest, highest, one, times, is_ceil, is_clamped)
            old = tl.load(row + word, mask=is_in, other=-1)
            old_b = tl.load(row + word_b, mask=is_in_b, other=-1)
            is_new = is_in & ((old & bit) == 0)
            old = old | bit
            old_b = tl.where(is_new & (word == word_b), old, old_b)
            is_new_b = is_in_b & ((old_b & bit_b) == 0)
            tl.store(row + word, old, mask=is_new)
            tl.store(row + word_b, old_b | bit_b, mask=is_new_b)
            _mark_raised(mark, is_new)
            _mark_raised(mark + 1, is_new_b)
            n_set += is_new.to(tl.int32) + is_new_b.to(tl.int32)
            mark += 2
        tl.store(counts + tl.program_id(0), tl.sum(n_set, 0))


def cover_sections(
    values: Tensor, low: Tensor, high: Tensor, width: Tensor, k: int, bits: Tensor, *, is_ceil: bool, is_clamped: bool
) -> tuple[Tensor, Tensor]:
    """Set the bits of the sections that `values [tests, neurons]`, float32, lie in; see `kmnc.Sections`.

    low, high, width `[neurons]`; bits int32 `[neurons, words]`; all contiguous. Returns which tests set a bit, bool
    `[tests]`, and how many bits were set, int64 `[]`.
    """
    n_tests, n = values.shape
    n_programs = -(-n // SECTION_NEURONS)
    raised = torch.zeros(n_tests, dtype=torch.int8, device=values.device)
    counts = torch.zeros(n_programs, dtype=torch.int32, device=values.device)
    with device_of(values):
        _sections_kernel[(n_programs,)](
            values, low, high, width, bits, raised, counts, n_tests, n, bits.shape[1], float(k),
            is_ceil=is_ceil, is_clamped=is_clamped, size=SECTION_NEURONS, num_warps=SECTION_NEURONS // 32, num_stages=1,
        )  # fmt: skip
    return raised.bool(), counts.sum(dtype=torch.int64)


@cache
def can_cover_sections(device: torch.device) -> bool:
    """Whether `cover_sections` works on `device`."""

    def check() -> bool:
        value, bits = torch.zeros(1, 1, device=device), torch.zeros(1, 1, dtype=torch.int32, device=device)
        low, high = value[0], value[0] + 1
        return int(cover_sections(value, low, high, high, 1, bits, is_ceil=False, is_clamped=True)[1]) == 1

    return works_on(device, check)


# The most active neurons of each layer (TKNC, TKNP)
#
# The first kernel takes the largest value of each block of a layer, in one pass over all values. The second takes the
# largest block, looks up its largest value, replaces it by the next largest one of the block, and so on.

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _peaks_kernel(  # type: ignore[no-untyped-def]
        values, layers, offsets, starts, widths, firsts, peaks, broken, n, n_layers, n_blocks,
        size: tl.constexpr, blocks: tl.constexpr,
    ):  # fmt: skip
        test = tl.program_id(1).to(tl.int64)
        layer = tl.load(layers + tl.program_id(0))
        offset = tl.load(offsets + tl.program_id(0))
        width = tl.load(widths + layer)
        block = tl.arange(0, blocks)
        place = offset + block[:, None] * size + tl.arange(0, size)[None, :]
        is_real = place < width
        a = tl.load(values + test * n + tl.load(starts + layer) + place, mask=is_real, other=0.0)
        is_finite = (a > float("-inf")) & (a < float("inf"))
        peak = tl.max(tl.where(is_real & is_finite, a, float("-inf")), 1)
        first = tl.load(firsts + layer) + offset // size
        tl.store(peaks + test * n_blocks + first + block, peak, mask=offset + block * size < width)
        is_broken = tl.max(tl.max((~is_finite).to(tl.int32), 0), 0)
        tl.store(broken + test * n_layers + layer, is_broken.to(tl.uint8), mask=is_broken > 0)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _sort_key(a, place, none):  # type: ignore[no-untyped-def]
        # Larger for a larger value; of equal values, larger for the one that comes first.
        bits = tl.where(a == 0, 0.0, a).to(tl.int32, bitcast=True)  # -0 and 0 are equal
        order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
        key = order * 4294967296 + (0x7FFFFFFF - place).to(tl.int64)
        return tl.where((a > float("-inf")) & (a < float("inf")), key, none)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _select_kernel(  # type: ignore[no-untyped-def]
        values, members, starts, widths, firsts, peaks, top, n, n_layers, n_blocks, k, none,
        size: tl.constexpr, blocks: tl.constexpr,
    ):  # fmt: skip
        layer, test = tl.load(members + tl.program_id(0)), tl.program_id(1).to(tl.int64)
        first, width = tl.load(firsts + layer), tl.load(widths + layer)
        block = tl.arange(0, blocks)
        is_real = block * size < width
        peak = tl.load(peaks + test * n_blocks + first + block, mask=is_real, other=float("-inf"))
        best = _sort_key(peak, block * size, none)  # as if each block's largest value came first in it
        near = tl.arange(0, size)
        row = values + test * n + tl.load(starts + layer)
        top += (test * n_layers + layer) * k
        for rank in range(k):
            key = tl.max(best, 0)
            is_any = key > none
            number = tl.where(is_any, (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32) // size, 0)
            place = number * size + near
            a = tl.load(row + place, mask=is_any & (place < width), other=float("-inf"))
            keys = _sort_key(a, place, none)
            taken = tl.max(tl.where(keys <= key, keys, none), 0)
            following = tl.max(tl.where(keys < taken, keys, none), 0)
            best = tl.where(block == number, following, best)
            where = (0x7FFFFFFF - (taken & 0x7FFFFFFF)).to(tl.int32)
            tl.store(top + rank, tl.where(is_any, where, -1))


def top_neurons(values: Tensor, layout: Layout, k: int) -> tuple[Tensor, Tensor]:
    """`topk.top_neurons` of contiguous float32 values."""
    size = max(TOP_BLOCK, triton.next_power_of_2(-(-max(layout.widths) // TOP_MAX_BLOCKS)))
    tile = max(TOP_TILE, size)
    (layers, offsets, starts, widths, firsts), n_blocks, groups = _block_tables(layout, size, tile, values.device)
    n_tests, n = values.shape
    n_layers = len(layout.widths)
    peaks = torch.empty(n_tests, n_blocks, device=values.device)
    broken = torch.zeros(n_tests, n_layers, dtype=torch.bool, device=values.device)
    top = torch.empty(n_tests, n_layers, k, dtype=torch.int32, device=values.device)
    with device_of(values):
        _peaks_kernel[(len(layers), n_tests)](
            values, layers, offsets, starts, widths, firsts, peaks, broken.view(torch.uint8), n, n_layers, n_blocks,
            size=size, blocks=tile // size, num_warps=4,
        )  # fmt: skip
        for max_blocks, members in groups.items():
            _select_kernel[(len(members), n_tests)](
                values, members, starts, widths, firsts, peaks, top, n, n_layers, n_blocks, k, NO_KEY,
                size=size, blocks=max_blocks, num_warps=1,
            )  # fmt: skip
    return top.long(), ~broken


@lru_cache(maxsize=8)
def _block_tables(
    layout: Layout, size: int, tile: int, device: torch.device
) -> tuple[list[Tensor], int, dict[int, Tensor]]:
    """How layers are divided into tiles and blocks.

    Returns the layer of each tile and the offset in that layer; the first neuron, width and first block of each layer;
    then the number of blocks; then the layers that have up to 2, 4, 8, ... blocks.
    """
    tiles = [(layer, at) for layer, width in enumerate(layout.widths) for at in range(0, width, tile)]
    starts = [at.start for at in layout.slices().values()]
    blocks = [-(-width // size) for width in layout.widths]
    firsts = [0, *accumulate(blocks)]
    tables = ([layer for layer, _ in tiles], [at for _, at in tiles], starts, layout.widths, firsts[:-1])
    groups: dict[int, list[int]] = {}
    for layer, n in enumerate(blocks):
        groups.setdefault(max(triton.next_power_of_2(n), 2), []).append(layer)

    def on_device(numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    members = {max_blocks: on_device(layers) for max_blocks, layers in groups.items()}
    return [on_device(table) for table in tables], firsts[-1], members


def fits_top_neurons(n_tests: int, layout: Layout, k: int) -> bool:
    """Whether `top_neurons` can process this many tests, ranks and neurons: grids and blocks have a maximum size."""
    return n_tests < 1 << 16 and k <= TOP_MAX_RANKS and max(layout.widths) <= TOP_MAX_BLOCKS << 12


@cache
def can_top_neurons(device: torch.device) -> bool:
    """Whether `top_neurons` works on `device`."""

    def check() -> bool:
        row = torch.tensor([[1.0, 3.0, 3.0]], device=device)
        return bool(top_neurons(row, Layout(("a",), (3,)), 2)[0].tolist() == [[[1, 2]]])

    return works_on(device, check)


# Neurons whose sensitivity has converged (SCC)

if triton is not None:

    @triton.jit(do_not_specialize=["n_tests"])  # type: ignore[untyped-decorator, unused-ignore]
    def _converge_kernel(  # type: ignore[no-untyped-def]
        activations, clean, rows, counts, inverses, limits, shift, first, sums, squares, moved, varied, totals, n_tests,
        n, unseen,
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
        at, to = activations + neuron, totals + tl.program_id(0).to(tl.int64) * n_tests
        for t in tl.range(0, n_tests, num_stages=3):
            a = tl.load(at, mask=is_real, other=0.0)
            c = tl.load(clean + tl.load(rows + t) * n + neuron, mask=is_real, other=0.0)
            at += n
            sensitivity = tl.abs(a - c)
            has_moved = has_moved | (sensitivity > 0.0)
            has_varied = has_varied | (is_real & (c != origin))
            deviation = sensitivity.to(tl.float64) - start
            total += deviation
            square += deviation * deviation
            count = tl.load(counts + t)
            number = count.to(tl.float64)
            inverse = tl.load(inverses + t)
            # total / number to the last bit (Markstein): an estimate, corrected twice by its exact remainder.
            mean = total * inverse
            mean = tl.fma(tl.fma(-mean, number, total), inverse, mean)
            mean = tl.fma(tl.fma(-mean, number, total), inverse, mean)
            m2 = square - mean * mean * number
            m2 = tl.where(m2 < 0.0, 0.0, m2)
            is_seen = has_moved | (has_varied & (count >= unseen))
            is_converged = (is_seen & (m2 < tl.load(limits + t))).to(tl.int32)
            is_judged = (has_moved | has_varied).to(tl.int32)
            is_finite = (is_real & (sensitivity < float("inf"))).to(tl.int32)
            tl.store(to + t, tl.sum(is_converged + (is_judged << 8) + (is_finite << 16), 0))  # one byte per count
        tl.store(sums + neuron, total, mask=is_real)
        tl.store(squares + neuron, square, mask=is_real)
        tl.store(moved + neuron, has_moved.to(tl.int8), mask=is_real)
        tl.store(varied + neuron, has_varied.to(tl.int8), mask=is_real)


def converge(
    values: Tensor, clean: Tensor, rows: Tensor | None, counts: Tensor, limits: Tensor, state: dict[str, Tensor]
) -> Tensor:
    """`scc.converge` of contiguous float32 tensors."""
    n_tests, n = values.shape
    size = 64 if n > CONVERGE_FEW_NEURONS else 32  # a program is one warp, which needs no synchronisation to sum
    n_programs = -(-n // size)
    totals = torch.empty(n_programs, n_tests, dtype=torch.int32, device=values.device)
    numbers = (state[name] for name in ("shift", "clean", "sums", "squares"))
    flags = (state[name].view(torch.int8) for name in ("moved", "varied"))
    with device_of(values):
        _converge_kernel[(n_programs,)](
            values, clean, torch.arange(n_tests, device=values.device) if rows is None else rows.contiguous(), counts,
            counts.double().reciprocal(), limits, *numbers, *flags, totals, n_tests, n, MIN_UNMOVED_TESTS,
            size=size, num_warps=1, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip
    return totals.view(torch.uint8).view(n_programs, n_tests, 4).sum(0).T[:3]


@cache
def can_converge(device: torch.device) -> bool:
    """Whether `converge` works on `device`."""

    def check() -> bool:
        numbers = {name: torch.zeros(1, dtype=torch.float64, device=device) for name in ("shift", "sums", "squares")}
        flags = {name: torch.zeros(1, dtype=torch.bool, device=device) for name in ("moved", "varied")}
        zeros, counts = torch.zeros(5, 1, device=device), torch.arange(1, 6, device=device)
        state = numbers | flags | {"clean": zeros[0]}
        totals = converge(zeros + 1, zeros, None, counts, counts.double() * 9, state)
        return bool(totals.tolist() == [[1] * 5] * 3 and state["sums"].tolist() == [5.0])

    return works_on(device, check)
