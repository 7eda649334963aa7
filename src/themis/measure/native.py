"""The fold of one layer in one pass over memory, in C; where it was not built, torch does it in eight."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

BLOCK = 1024
"""Neurons of a block; the same as in native.c."""

Kernel = Callable[..., None]


@cache
def kernel() -> Kernel | None:
    """The compiled function, or None: no compiler when Themis was installed, or a torch without GNU OpenMP."""
    built = sorted(Path(__file__).parent.glob("_native.*.so"))
    has_openmp = hasattr(ctypes.CDLL(None), "GOMP_parallel")  # torch's own; see native.c
    if not built or not has_openmp:
        return None
    function = ctypes.CDLL(str(built[-1])).themis_fold
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer, pointer, pointer, integer, integer, pointer, pointer, pointer, pointer]
    function.restype = None
    return function


def fold(
    run: Kernel, activations: Tensor, clean: Tensor, rows: Tensor, shift: Tensor, sums: Tensor, squares: Tensor
) -> Tensor:
    """Sums over tests of `D - shift` and its square, where `D = |activations - clean[rows]|`; both are overwritten.

    activations `[tests, n]`, clean `[any, n]`, rows int64 `[tests]`, the others `[n]`; float32, contiguous, on the CPU.
    Returns each test's D summed over the neurons, `[tests]`.
    """
    n_tests, n = activations.shape
    by_test = torch.empty(-(-n // BLOCK), n_tests)
    run(
        activations.data_ptr(), clean.data_ptr(), rows.data_ptr(), n_tests, n,
        shift.data_ptr(), sums.data_ptr(), squares.data_ptr(), by_test.data_ptr(),
    )  # fmt: skip
    return by_test.sum(0)
