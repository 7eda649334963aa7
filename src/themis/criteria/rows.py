"""A layer's values put among those of others."""

from __future__ import annotations

import torch
from torch import Tensor


def placed(values: Tensor, out: Tensor) -> Tensor:
    """`out` with `values [inputs, neurons]` in it."""
    if _is_paired(values) and _is_paired(out):
        # Torch copies into rows that lie apart one number at a time: give it numbers twice as long.
        out.view(torch.float64).copy_(values.view(torch.float64))
    else:
        out.copy_(values)
    return out


def _is_paired(rows: Tensor) -> bool:
    """Whether the float32 numbers of each row can be taken for half as many of 64 bits."""
    return (
        rows.dtype == torch.float32
        and rows.stride(1) == 1
        and rows.shape[1] % 2 == rows.stride(0) % 2 == rows.storage_offset() % 2 == 0
        and rows.data_ptr() % 8 == 0
    )
