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


def _address(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> int:
    """The address of a tensor that C reads or writes, after checking that it is what C takes it for."""
    if tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise TypeError(f"{name} must be contiguous {dtype} on the CPU, got {tensor.dtype} {list(tensor.stride())}")
    if shape is not None and tensor.shape != shape:
        raise TypeError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
    return tensor.data_ptr()


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
    single = torch.float32
    by_test = torch.empty(-(-n // BLOCK), n_tests, dtype=single)
    native.themis_fold(
        _address("activations", activations, single),
        _address("clean", clean, single, (len(clean), n)),
        _address("rows", rows, torch.int64, (n_tests,)),
        n_tests,
        n,
        _address("shift", shift, single, (n,)),
        _address("sums", sums, single, (n,)),
        _address("squares", squares, single, (n,)),
        by_test.data_ptr(),
    )
    return by_test.sum(0)


def accumulate(native: ctypes.CDLL, total: Tensor, part: Tensor) -> None:
    """`total += part`, float64 and float32 `[n]`, without a copy of `part`."""
    n = len(part)
    native.themis_accumulate(
        _address("total", total, torch.float64, (n,)), _address("part", part, torch.float32, (n,)), n
    )


def uniform(native: ctypes.CDLL, low: Tensor, high: Tensor, drawn: int, n: int) -> Tensor:
    """Uniform numbers in (0, 1), `[tests, n]`, from int32 `low` and `high` `[tests]`: the same as those of `Rng`."""
    tests = (len(low),)
    out = torch.empty(len(low), n, dtype=torch.float32)
    native.themis_uniform(
        _address("low", low, torch.int32, tests),
        _address("high", high, torch.int32, tests),
        len(low),
        drawn,
        n,
        out.data_ptr(),
    )
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
    single = torch.float32
    n_set = native.themis_sections(
        _address("activations", activations, single),
        n_tests,
        n,
        _address("low", low, single, (n,)),
        _address("high", high, single, (n,)),
        _address("width", width, single, (n,)),
        k,
        bits.shape[1],
        is_ceil,
        is_clamped,
        _address("bits", bits, torch.int32, (n, bits.shape[1])),
        raised.data_ptr(),
    )
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
    double, flag = torch.float64, torch.bool
    types = {
        "shift": double,
        "clean": activations.dtype,
        "sums": double,
        "squares": double,
        "moved": flag,
        "varied": flag,
    }
    native.themis_converge(
        _address("activations", activations, torch.float32),
        _address("clean", clean, torch.float32, (n_tests, n)),
        n_tests,
        n,
        before,
        unseen,
        _address("limits", limits, double, (n_tests,)),
        *(_address(name, state[name], dtype, (n,)) for name, dtype in types.items()),
        counts.data_ptr(),
    )
    return counts.sum(0)
