"""The most active neurons of each layer on a GPU: two Triton kernels, where Triton is to be had.

The first takes the largest value of each block of a layer, in one pass over all values. The second takes the largest
block, looks up its largest value, puts the next one of the block in its place, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from themis.criteria.readings import Layout

try:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
except Exception:  # not there, or not fit for this machine
    triton = None

SIZE = 32
"""Neurons of a block, in layers of no more than MANY blocks; others have larger ones."""
MANY = 512
TILE = 2048
"""Values that a program of the first kernel looks at."""
FURTHEST = 128
"""Ranks: for more of them this is slow."""
NONE = -(1 << 63)
"""The key of what is not there."""
Tops = Callable[[Tensor, Layout, int], tuple[Tensor, Tensor]]

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _peaks(  # type: ignore[no-untyped-def]
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
    def _key(a, place, none):  # type: ignore[no-untyped-def]
        # Larger for a larger value, and of equal ones for the first.
        bits = tl.where(a == 0, 0.0, a).to(tl.int32, bitcast=True)  # zero has no sign
        order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
        key = order * 4294967296 + (0x7FFFFFFF - place).to(tl.int64)
        return tl.where((a > float("-inf")) & (a < float("inf")), key, none)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _select(  # type: ignore[no-untyped-def]
        values, members, starts, widths, firsts, peaks, found, n, n_layers, n_blocks, k, none,
        size: tl.constexpr, most: tl.constexpr,
    ):  # fmt: skip
        layer, test = tl.load(members + tl.program_id(0)), tl.program_id(1).to(tl.int64)
        first, width = tl.load(firsts + layer), tl.load(widths + layer)
        block = tl.arange(0, most)
        is_real = block * size < width
        peak = tl.load(peaks + test * n_blocks + first + block, mask=is_real, other=float("-inf"))
        best = _key(peak, block * size, none)  # as if each block's largest value stood first in it
        near = tl.arange(0, size)
        row = values + test * n + tl.load(starts + layer)
        found += (test * n_layers + layer) * k
        for rank in range(k):
            key = tl.max(best, 0)
            is_any = key > none
            number = tl.where(is_any, (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32) // size, 0)
            place = number * size + near
            a = tl.load(row + place, mask=is_any & (place < width), other=float("-inf"))
            keys = _key(a, place, none)
            taken = tl.max(tl.where(keys <= key, keys, none), 0)
            following = tl.max(tl.where(keys < taken, keys, none), 0)
            best = tl.where(block == number, following, best)
            where = (0x7FFFFFFF - (taken & 0x7FFFFFFF)).to(tl.int32)
            tl.store(found + rank, tl.where(is_any, where, -1))


def tops(values: Tensor, layout: Layout, k: int) -> tuple[Tensor, Tensor]:
    """`tops` of contiguous float32 values."""
    size = max(SIZE, triton.next_power_of_2(-(-max(layout.widths) // MANY)))
    tile = max(TILE, size)
    (layers, offsets, starts, widths, firsts), n_blocks, groups = _tables(layout, size, tile, values.device)
    n_tests, n = values.shape
    n_layers = len(layout.widths)
    peaks = torch.empty(n_tests, n_blocks, device=values.device)
    broken = torch.zeros(n_tests, n_layers, dtype=torch.bool, device=values.device)
    found = torch.empty(n_tests, n_layers, k, dtype=torch.int32, device=values.device)
    with torch.cuda.device(values.device):
        _peaks[(len(layers), n_tests)](
            values, layers, offsets, starts, widths, firsts, peaks, broken.view(torch.uint8), n, n_layers, n_blocks,
            size=size, blocks=tile // size, num_warps=4,
        )  # fmt: skip
        for most, members in groups.items():
            _select[(len(members), n_tests)](
                values, members, starts, widths, firsts, peaks, found, n, n_layers, n_blocks, k, NONE,
                size=size, most=most, num_warps=1,
            )  # fmt: skip
    return found.long(), ~broken


@lru_cache(maxsize=8)
def _tables(layout: Layout, size: int, tile: int, device: torch.device) -> tuple[list[Tensor], int, dict[int, Tensor]]:
    """Of each tile its layer and where in it it begins; of each layer its first neuron, width and first block.

    How many blocks there are; and which layers have up to 2, 4, 8, ... of them.
    """
    tiles = [(layer, at) for layer, width in enumerate(layout.widths) for at in range(0, width, tile)]
    starts = [at.start for at in layout.slices().values()]
    blocks = [-(-width // size) for width in layout.widths]
    firsts = [0, *accumulate(blocks)]
    parts = ([layer for layer, _ in tiles], [at for _, at in tiles], starts, layout.widths, firsts[:-1])
    groups: dict[int, list[int]] = {}
    for layer, n in enumerate(blocks):
        groups.setdefault(max(triton.next_power_of_2(n), 2), []).append(layer)

    def table(numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    return [table(each) for each in parts], firsts[-1], {most: table(each) for most, each in groups.items()}


def fits(n_tests: int, layout: Layout, k: int) -> bool:
    """Whether the kernels can take it on: a grid has only so many rows, and a block so many values."""
    return n_tests < 1 << 16 and k <= FURTHEST and max(layout.widths) <= MANY << 12


@cache
def tops_on(device: torch.device) -> Tops | None:
    """`tops`, if it runs on `device`."""
    if triton is None or device.type != "cuda":
        return None
    try:
        row = torch.tensor([[1.0, 3.0, 3.0]], device=device)
        return tops if tops(row, Layout(("a",), (3,)), 2)[0].tolist() == [[[1, 2]]] else None
    except Exception:  # whatever keeps it from being made: without it all is as right, and slower
        return None
