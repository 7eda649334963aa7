"""Functions in C that need a single pass over memory: folding a layer, drawing noise, counting sections, convergence.

If they were not compiled, torch computes the same in eight passes or more.
"""

from __future__ import annotations

import ctypes
import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

BLOCK = 1024
"""Neurons per block; the same as in native.c."""
LANES = 256
"""Neurons per block of `converge`; the same as in native.c."""


@cache
def library() -> ctypes.CDLL | None:
    """The compiled functions, or None if there was no compiler at installation or torch does not use GNU OpenMP."""
    path = Path(__file__).with_name("_native" + (sysconfig.get_config_var("EXT_SUFFIX") or ".so"))
    if not path.exists() or not hasattr(ctypes.CDLL(None), "GOMP_parallel"):  # torch's own; see native.c
        return None
    functions = ctypes.CDLL(str(path))
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    functions.themis_fold.argtypes = [pointer, pointer, pointer, integer, integer, pointer, pointer, pointer, pointer]
    functions.themis_accumulate.argtypes = [pointer, pointer, integer]
    functions.themis_uniform.argtypes = [pointer, pointer, integer, integer, integer, pointer]
    functions.themis_sections.argtypes = [
        *(pointer, integer, integer, pointer, pointer, pointer),
        *(integer, integer, ctypes.c_int32, ctypes.c_int32, pointer, pointer),
    ]
    functions.themis_sections.restype = integer
    functions.themis_converge.argtypes = [pointer, pointer, *[integer] * 4, *[pointer] * 8]
    functions.themis_converge.restype = None
    functions.themis_fold.restype = functions.themis_accumulate.restype = functions.themis_uniform.restype = None
    return functions


def library_for(tensor: Tensor) -> ctypes.CDLL | None:
    """The compiled functions, if they support `tensor`: float32, on the CPU."""
    return library() if tensor.dtype == torch.float32 and tensor.device.type == "cpu" else None


def fold(
    native: ctypes.CDLL,
    activations: Tensor,
    clean: Tensor,
    rows: Tensor,
    shift: Tensor,
    sums: Tensor,
    squares: Tensor,
) -> Tensor:
    """Sum `D - shift` and its square over tests into `sums` and `squares`, where `D = |activations - clean[rows]|`.

    activations `[tests, n]`, clean `[any, n]`, rows int64 `[tests]`, the others `[n]`; float32, contiguous, on the CPU.
    Returns the sum of D over the neurons for each test, `[tests]`.
    """
    n_tests, n = activations.shape
    by_test = torch.empty(-(-n // BLOCK), n_tests)
    native.themis_fold(
        activations.data_ptr(), clean.data_ptr(), rows.data_ptr(), n_tests, n,
        shift.data_ptr(), sums.data_ptr(), squares.data_ptr(), by_test.data_ptr(),
    )  # fmt: skip
    return by_test.sum(0)


def accumulate(native: ctypes.CDLL, total: Tensor, part: Tensor) -> None:
    """`total += part`, float64 and float32 `[n]`, without a copy of `part`."""
    native.themis_accumulate(total.data_ptr(), part.data_ptr(), len(part))


def uniform(native: ctypes.CDLL, low: Tensor, high: Tensor, drawn: int, n: int) -> Tensor:
    """Uniform numbers in (0, 1), `[tests, n]`, from int32 `low` and `high` `[tests]`: the same as those of `Rng`."""
    out = torch.empty(len(low), n)
    native.themis_uniform(low.data_ptr(), high.data_ptr(), len(low), drawn, n, out.data_ptr())
    return out


def sections(
    native: ctypes.CDLL,
    activations: Tensor,
    low: Tensor,
    high: Tensor,
    width: Tensor,
    k: int,
    bits: Tensor,
    *,
    is_ceil: bool,
    is_clamped: bool,
) -> tuple[Tensor, int]:
    """Set the bits of the sections that `activations [tests, n]` hit; see `Sections` in criteria/kmnc.py.

    low, high, width `[n]`, float32; bits int32 `[n, words]`; all contiguous, on the CPU. Returns which tests set a bit,
    bool `[tests]`, and how many bits were set.
    """
    n_tests, n = activations.shape
    raised = torch.zeros(n_tests, dtype=torch.bool)
    n_set = native.themis_sections(
        activations.data_ptr(), n_tests, n, low.data_ptr(), high.data_ptr(), width.data_ptr(),
        k, bits.shape[1], is_ceil, is_clamped, bits.data_ptr(), raised.data_ptr(),
    )  # fmt: skip
    return raised, n_set


def converge(
    native: ctypes.CDLL,
    activations: Tensor,
    clean: Tensor,
    before: int,
    unseen: int,
    limits: Tensor,
    state: dict[str, Tensor],
) -> Tensor:
    """Count converged neurons test by test, from `activations` and `clean [tests, n]`; see criteria/scc.py.

    limits float64 `[tests]`. state: `shift, sums, squares` float64, `moved, varied` bool and `clean`, all `[n]`, of
    which sums, squares, moved and varied are updated. All contiguous, on the CPU. Returns int64 `[3, tests]`.
    """
    n_tests, n = activations.shape
    counts = torch.empty(-(-n // LANES), 3, n_tests, dtype=torch.int32)
    names = ("shift", "clean", "sums", "squares", "moved", "varied")
    native.themis_converge(
        activations.data_ptr(), clean.data_ptr(), n_tests, n, before, unseen, limits.data_ptr(),
        *(state[name].data_ptr() for name in names), counts.data_ptr(),
    )  # fmt: skip
    return counts.sum(0)
