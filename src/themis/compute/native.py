"""Functions in C that need a single pass over memory: folding a layer, drawing noise, counting sections, convergence.

If they were not compiled, torch computes the same in eight passes or more.
"""

from __future__ import annotations

import ctypes
import operator
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 1024
"""Neurons per block; the same as in native.c."""
LANES = 256
"""Neurons per block of `converge`; the same as in native.c."""
INTERFACE = 4
"""Number of the functions' names and arguments, the same as in native.c; raise it in both when one of them changes."""
FUNCTIONS = (
    *("fold_layer", "sums", "accumulate", "add_panel", "add_powers"),
    *("uniform", "normal", "mix", "sections", "converge", "verdict"),
    *("choose_kinds", "choose_seeds", "thetas", "learn_margins", "learn_faults", "keep_least"),
)
COUNTING, CHECKING = ("sections", "verdict", "learn_faults"), ("choose_seeds", "thetas", "learn_margins", "keep_least")
"""Functions that return a number, and those that return whether an index was wrong."""
Library = ctypes.CDLL
NO_NEURONS = torch.empty(0, dtype=torch.int64)
NO_DIFFERENCES = torch.empty(0, 0)
NO_BYTES = ctypes.c_char * 0
TYPE_OF = operator.attrgetter("dtype")


@cache
def library() -> Library | None:
    """The compiled functions; None if there was no compiler at installation, or torch does not use GNU OpenMP.

    Also None if they were compiled from an earlier version of the source, whose functions have other arguments.
    """
    path = Path(__file__).with_name("_native" + (sysconfig.get_config_var("EXT_SUFFIX") or ".so"))
    if not path.exists() or not hasattr(ctypes.CDLL(None), "GOMP_parallel"):  # torch's own; see native.c
        return None
    functions = ctypes.CDLL(str(path))
    if not hasattr(functions, "themis_interface") or functions.themis_interface() != INTERFACE:
        return None
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    functions.themis_fold_layer.argtypes = [
        *(pointer, pointer, pointer, integer, integer, pointer, pointer, pointer, pointer),
        *(pointer, integer, pointer, integer),
    ]
    functions.themis_sums.argtypes = [pointer, integer, integer, pointer, pointer, pointer]
    functions.themis_accumulate.argtypes = [pointer, pointer, integer]
    functions.themis_add_panel.argtypes = [
        *(pointer, pointer, integer, integer, pointer, integer, pointer, pointer, pointer, pointer),
    ]
    functions.themis_verdict.argtypes = [pointer, pointer, integer, integer, pointer, pointer, pointer]
    functions.themis_add_powers.argtypes = [pointer, integer, integer, pointer]
    functions.themis_uniform.argtypes = [pointer, integer, integer, integer, pointer]
    functions.themis_normal.argtypes = [pointer, integer, integer, integer, pointer, pointer, pointer]
    functions.themis_mix.argtypes = [
        *(
            ctypes.c_uint64,
            pointer,
            pointer,
            pointer,
            integer,
            integer,
            integer,
            ctypes.c_int32,
            ctypes.c_int32,
            pointer,
        ),
    ]
    functions.themis_sections.argtypes = [
        *(pointer, integer, integer, pointer, pointer, pointer),
        *(integer, integer, ctypes.c_int32, ctypes.c_int32, pointer, pointer),
    ]
    functions.themis_converge.argtypes = [pointer, pointer, *[integer] * 4, *[pointer] * 8]
    functions.themis_choose_kinds.argtypes = [ctypes.c_uint64, *[integer] * 4, *[pointer] * 7]
    functions.themis_choose_seeds.argtypes = [
        *(pointer, ctypes.c_double, ctypes.c_uint64, integer, integer, integer, ctypes.c_int32),
        *(pointer, pointer, pointer),
    ]
    functions.themis_thetas.argtypes = [pointer, *[ctypes.c_uint64] * 2, integer, *[pointer] * 4]
    functions.themis_learn_margins.argtypes = [pointer, integer, *[pointer] * 5]
    functions.themis_learn_faults.argtypes = [pointer, integer, integer, *[pointer] * 9]
    functions.themis_keep_least.argtypes = [pointer, integer, *[pointer] * 3]
    results = {**dict.fromkeys(COUNTING, integer), **dict.fromkeys(CHECKING, ctypes.c_int32)}
    for name in FUNCTIONS:
        getattr(functions, f"themis_{name}").restype = results.get(name)
    return functions


def library_for(tensor: Tensor) -> Library | None:
    """The compiled functions, if they support `tensor`: float32, on the CPU."""
    return library() if tensor.dtype == torch.float32 and tensor.is_cpu else None


def _address(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> int:
    """The address of a tensor that C reads or writes, after checking that it is what C takes it for."""
    if tensor.dtype != dtype or not tensor.is_contiguous() or not tensor.is_cpu:
        raise TypeError(f"{name} must be contiguous {dtype} on the CPU, got {tensor.dtype} {list(tensor.stride())}")
    if shape is not None and tensor.shape != shape:
        raise TypeError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
    return tensor.data_ptr()


def addresses(types: list[np.dtype[Any]], *arrays: Any) -> list[int]:
    """The addresses of arrays that C reads or writes, after checking that they are of these types and contiguous."""
    if list(map(TYPE_OF, arrays)) != types:
        raise TypeError(f"expected arrays of {types}, got {[array.dtype for array in arrays]}")
    try:
        return list(map(ctypes.addressof, map(NO_BYTES.from_buffer, arrays)))
    except TypeError:  # one is read-only, or not contiguous
        return list(map(address, arrays))


def address(array: Any) -> int:
    """The address of one array, after checking that it is contiguous."""
    flags = array.flags
    if not flags.c_contiguous:
        raise TypeError(f"expected a contiguous array, got one of {array.dtype} with strides {array.strides}")
    return ctypes.addressof(NO_BYTES.from_buffer(array)) if flags.writeable else _start(array)


def _start(array: NDArray[Any]) -> int:
    """The address of the first element of any array; takes four times as long."""
    data: int = array.__array_interface__["data"][0]
    return data


class CompiledFold:
    """Folds the layers of one chunk, one after another; what they have in common is checked once.

    With `D = |activations - clean[rows]|`, the sums of `D - shift` and of its square over the tests are written to
    `sums` and `squares`, all `[neurons]`. The signed differences of the neurons `panel`, which are int64 indices within
    their layers, ascending in each, are written to `differences [tests, panel]`. All others are float32; contiguous, on
    the CPU.
    """

    def __init__(
        self,
        native: Library,
        n_layers: int,
        n_tests: int,
        shift: Tensor,
        sums: Tensor,
        squares: Tensor,
        panel: Tensor = NO_NEURONS,
        differences: Tensor = NO_DIFFERENCES,
    ) -> None:
        single, (n_neurons,), (n_panel,) = torch.float32, shift.shape, panel.shape
        self._native, self._n_tests, self._n_neurons, self._n_panel = native, n_tests, n_neurons, n_panel
        self._shift, self._sums, self._squares = (
            _address(name, tensor, single, (n_neurons,))
            for name, tensor in (("shift", shift), ("sums", sums), ("squares", squares))
        )
        self._panel = _address("panel", panel, torch.int64)
        self._differences = _address("differences", differences, single, (n_tests, n_panel) if n_panel else None)
        self.by_block = torch.empty(n_neurons // BLOCK + n_layers, n_tests, dtype=single)
        """The sum of D over each block of the neurons of a layer, `[blocks, tests]`."""
        self._n_blocks = 0
        self._in_use = (shift, sums, squares, panel, differences)  # must not be freed before this

    def add(self, activations: Tensor, clean: Tensor, rows: Tensor, start: int, columns: slice) -> slice:
        """Fold the next layer, whose neurons are those from `start` on; returns its rows of `by_block`.

        activations: `n` numbers for each test, and for others after them; clean `[any, n]`; both float32; rows int64,
        one per test or more. columns: the layer's part of the panel.
        """
        n_tests, (_, n), first = self._n_tests, clean.shape, self._n_blocks
        last = first + -(-n // BLOCK)
        if activations.numel() < n_tests * n or rows.shape[0] < n_tests:
            raise TypeError(f"activations must have {n} numbers and rows one for each of {n_tests} tests, got fewer")
        if start + n > self._n_neurons or last > self.by_block.shape[0] or columns.stop > self._n_panel:
            raise TypeError(f"a chunk must have room for {n} neurons from {start} on and the panel's {columns}")
        self._native.themis_fold_layer(
            _address("activations", activations, torch.float32),
            _address("clean", clean, torch.float32),
            _address("rows", rows, torch.int64),
            n_tests,
            n,
            self._shift + 4 * start,
            self._sums + 4 * start,
            self._squares + 4 * start,
            self.by_block.data_ptr() + 4 * first * n_tests,
            self._panel + 8 * columns.start,
            columns.stop - columns.start,
            self._differences + 4 * columns.start,
            self._n_panel,
        )
        self._n_blocks = last
        return slice(first, last)


def sums_of(native: Library, activations: Tensor, shift: Tensor, sums: Tensor, squares: Tensor) -> None:
    """Sum `activations - shift` and its square over inputs into `sums` and `squares`.

    activations `[inputs, n]`, the others `[n]`; float32, contiguous, on the CPU.
    """
    n_inputs, n = activations.shape
    single = torch.float32
    native.themis_sums(
        _address("activations", activations, single),
        n_inputs,
        n,
        _address("shift", shift, single, (n,)),
        _address("sums", sums, single, (n,)),
        _address("squares", squares, single, (n,)),
    )


def mix(native: Library, prefix: int, words: Sequence[NDArray[np.int64]], *, is_uniform: bool) -> NDArray[Any] | None:
    """A hash of integers, or uniform numbers in [0, 1), by the steps of `mix` in rng.py; None if it has three axes."""
    shape = np.broadcast(*words).shape
    if len(shape) > 2 or 0 in shape:
        return None
    n_rows, n = (1, *shape)[-2:]
    addresses, across, down = [], [], []
    for word in words:
        addresses.append(address(word) if word.flags.c_contiguous else _start(word))
        steps = [stride // 8 if size > 1 else 0 for stride, size in zip(word.strides, word.shape, strict=True)]
        rows, columns = (0, 0, *steps)[-2:]
        across.append(columns)
        down.append(rows)
    out = np.empty(shape, dtype=np.float64 if is_uniform else np.int64)
    n_words = len(words)
    integers = ctypes.c_int64 * n_words
    is_transposed = n < n_rows  # many columns at once are faster than many rows
    if is_transposed:
        across, down, n_rows, n = down, across, n, n_rows
    native.themis_mix(
        prefix,
        (ctypes.c_void_p * n_words)(*addresses),
        integers(*across),
        integers(*down),
        n_words,
        n_rows,
        n,
        is_uniform,
        is_transposed,
        address(out),
    )
    return out


def accumulate(native: Library, total: Tensor, part: Tensor) -> None:
    """`total += part`, float64 and float32 `[n]`, without a copy of `part`."""
    n = len(part)
    native.themis_accumulate(
        _address("total", total, torch.float64, (n,)), _address("part", part, torch.float32, (n,)), n
    )


def add_panel(
    native: Library, differences: Tensor, seed: Tensor, table: Tensor, count: Tensor, shift: Tensor, sums: Tensor
) -> None:
    """Add `|differences| - shift`, and its square, to `sums [2, blocks, n]` at the block of each test's seed.

    differences `[tests, n]`, seed int64 `[tests]`, shift `[n]`; table int64: the block of a seed by its index modulo
    its length; count int64 `[blocks]`, which is updated too; the others float32; contiguous, on the CPU.
    """
    n_tests, n = differences.shape
    single, integer, n_blocks = torch.float32, torch.int64, sums.shape[1]
    address = _address("sums", sums, single, (2, n_blocks, n))
    native.themis_add_panel(
        _address("differences", differences, single),
        _address("seed", seed, integer, (n_tests,)),
        n_tests,
        n,
        _address("table", table, integer),
        table.shape[0],
        _address("count", count, integer, (n_blocks,)),
        _address("shift", shift, single, (n,)),
        address,
        address + 4 * n_blocks * n,
    )


def verdict(native: Library, scores: Tensor, reference: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The class with the highest of the `scores [tests, classes]`, int64, and how far `reference` is above all others.

    Before them, whether that class is another than `reference`. Scores that are not finite have the class -1 and the
    margin minus infinity. scores float32, reference int64 `[tests]`; contiguous, on the CPU.
    """
    n_tests, n = scores.shape
    types = (torch.bool, torch.int64, torch.float32)
    is_fault, outcome, margin = (torch.empty(n_tests, dtype=dtype) for dtype in types)
    n_wrong = native.themis_verdict(
        _address("scores", scores, torch.float32),
        _address("reference", reference, torch.int64, (n_tests,)),
        n_tests,
        n,
        is_fault.data_ptr(),
        outcome.data_ptr(),
        margin.data_ptr(),
    )
    if n_wrong:
        raise IndexError(f"reference must be a class, 0 to {n - 1}, got {n_wrong} of {n_tests} that are not")
    return is_fault, outcome, margin


def add_powers(native: Library, differences: Tensor, sums: Tensor) -> None:
    """Add powers of `differences [tests, n]` to `sums`, float64 `[6, n]`: 1 to 4, and 1 and 3 of the absolute values.

    Both contiguous, on the CPU.
    """
    n_tests, n = differences.shape
    address = _address("differences", differences, torch.float32)
    native.themis_add_powers(address, n_tests, n, _address("sums", sums, torch.float64, (6, n)))


def uniform(native: Library, noise_seed: Tensor, drawn: int, n: int) -> Tensor:
    """Uniform numbers in (0, 1), `[tests, n]`, from int64 `noise_seed [tests]`: the same as those of `Rng`."""
    (n_tests,) = noise_seed.shape
    out = torch.empty(n_tests, n, dtype=torch.float32)
    native.themis_uniform(_address("noise_seed", noise_seed, torch.int64), n_tests, drawn, n, out.data_ptr())
    return out


def normal(native: Library, noise_seed: Tensor, drawn: int, n: int) -> Tensor:
    """Standard normal numbers, the same as those of `Rng`; see `uniform`."""
    (n_tests,) = noise_seed.shape
    out, seed = torch.empty(n_tests, n, dtype=torch.float32), _address("noise_seed", noise_seed, torch.int64)
    native.themis_normal(seed, n_tests, drawn, n, None, None, out.data_ptr())
    return out


def add_normal(native: Library, noise_seed: Tensor, drawn: int, inputs: Tensor, sigma: Tensor) -> Tensor:
    """`inputs [tests, ...]` plus such numbers times `sigma [tests]`; both float32, contiguous, on the CPU."""
    (n_tests,) = noise_seed.shape
    out, seed = torch.empty_like(inputs), _address("noise_seed", noise_seed, torch.int64)
    native.themis_normal(
        seed,
        n_tests,
        drawn,
        inputs.numel() // n_tests,
        _address("sigma", sigma, torch.float32, (n_tests,)),
        _address("inputs", inputs, torch.float32, (n_tests, *inputs.shape[1:])),
        out.data_ptr(),
    )
    return out


def sections(
    native: Library,
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
    native: Library,
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
