"""A layer's values scaled and put among those of others on a GPU: a Triton kernel, where Triton is to be had."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
except Exception:  # not there, or not fit for this machine
    triton = None

SIZE = 2048
"""Values that a program looks at together."""

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _scale(values, out, n, stride, size: tl.constexpr):  # type: ignore[no-untyped-def]
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
        least, most = tl.min(low, 0), tl.max(high, 0)
        width = most - least
        width = tl.where(width == 0, float("inf"), width)
        width = tl.where(tl.max(n_nan, 0) > 0, float("nan"), width)  # as torch's least and most
        width += tl.zeros([size], tl.float32)
        for start in range(0, n, size):
            at = start + place
            a = tl.load(values + at, mask=at < n, other=0.0)
            tl.store(out + at, tl.div_rn(a - least, width), mask=at < n)  # plain division is not rounded as IEEE asks


def scale(values: Tensor, out: Tensor) -> Tensor:
    """`out` with rows `[inputs, neurons]` in it, each brought from its own range to 0..1.

    Values are float32 and contiguous; so is each row of `out`.
    """
    with torch.cuda.device(values.device):
        _scale[(len(values),)](values, out, values.shape[1], out.stride(0), size=SIZE, num_warps=8)
    return out


@cache
def works_on(device: torch.device) -> bool:
    """Whether `scale` runs on `device`."""
    if triton is None or device.type != "cuda":
        return False
    try:
        row = torch.tensor([[1.0, 3.0, 2.0]], device=device)
        return bool(scale(row, torch.empty_like(row)).tolist() == [[0.0, 1.0, 0.5]])
    except Exception:  # whatever keeps it from being made: without it all is as right, and slower
        return False
