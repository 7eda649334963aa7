"""Functions in C that need a single pass over memory: folding a layer, drawing noise, counting sections, convergence.

If they were not compiled, torch computes the same in eight passes or more.
"""

import ctypes
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FOLD_BLOCK = 1024
"""Neurons per block; the same as in native.c."""
LANES = 256
"""Neurons per block of `converge`; the same as in native.c."""
INTERFACE = 4
"""Number of the functions' names and arguments, the same as in native.c; raise it in both when one of them changes."""
FUNCTIONS = {
    "fold_layer": "FFLiipppppipi",
    "sums": "FiiFFF",
    "accumulate": "DFi",
    "add_panel": "FLiiLiLFFF",
    "add_powers": "FiiD",
    "uniform": "LiiiF",
    "normal": "LiiippF",
    "mix": "upppiiibbp",
    "sections": "FiiFFFiibbWB>i",
    "converge": "FFiiiiDDFDDBBW",
    "verdict": "FLiiBLF>i",
    "choose_kinds": "uiiiippppppp",
    "choose_seeds": "pduiiibppp>b",
    "thetas": "puuipppp>b",
    "learn_margins": "pippppp>b",
    "learn_faults": "piippppppppp>i",
    "keep_least": "pippp>b",
}
"""The arguments of each function in native.c and what it returns, if anything, as letters of `TYPES`."""


class _Elements:
    """The type of an argument that C reads or writes through: a contiguous tensor on the CPU."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def address(self, tensor: Tensor) -> int:
        """The address of a tensor, after checking that it is what C takes it for."""
        if tensor.dtype != self.dtype or not tensor.is_contiguous() or not tensor.is_cpu:
            raise TypeError(f"expected contiguous {self.dtype} on the CPU, got {tensor.dtype} {list(tensor.stride())}")
        return tensor.data_ptr()

    def from_param(self, tensor: Tensor) -> ctypes.c_void_p:
        """Called by ctypes with each argument."""
        return ctypes.c_void_p(self.address(tensor))


SINGLE, INTEGER = _Elements(torch.float32), _Elements(torch.int64)
TYPES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int64,
    "u": ctypes.c_uint64,
    "b": ctypes.c_int32,
    "d": ctypes.c_double,
    "F": SINGLE,
    "D": _Elements(torch.float64),
    "L": INTEGER,
    "W": _Elements(torch.int32),
    "B": _Elements(torch.bool),
}
Library = ctypes.CDLL
NO_NEURONS = torch.empty(0, dtype=torch.int64)
NO_DIFFERENCES = torch.empty(0, 0)


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
    for name, types in FUNCTIONS.items():
        function, (arguments, _, result) = getattr(functions, f"themis_{name}"), types.partition(">")
        function.argtypes, function.restype = [TYPES[letter] for letter in arguments], TYPES.get(result)
    return functions


def library_for(tensor: Tensor) -> Library | None:
    """The compiled functions, if they support `tensor`: float32, on the CPU."""
    return library() if tensor.dtype == torch.float32 and tensor.is_cpu else None


def expect(shape: tuple[int, ...], *tensors: Tensor) -> None:
    """Refuse tensors of another shape, in which C would read or write beyond the end."""
    for tensor in tensors:
        if tensor.shape != shape:
            raise TypeError(f"expected the shape {list(shape)}, got {list(tensor.shape)}")


def addresses(types: list[np.dtype[Any]], *arrays: Any) -> list[int]:
    """The addresses of arrays that C reads or writes, after checking that they are of these types and contiguous."""
    if [array.dtype for array in arrays] != types:
        raise TypeError(f"expected arrays of {types}, got {[array.dtype for array in arrays]}")
    return list(map(address, arrays))


def address(array: Any) -> int:
    """The address of one array, after checking that it is contiguous."""
    if not array.flags.c_contiguous:
        raise TypeError(f"expected a contiguous array, got one of {array.dtype} with strides {array.strides}")
    start: int = array.__array_interface__["data"][0]
    return start


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
        (n_neurons,), (n_panel,) = shift.shape, panel.shape
        self._native, self._n_tests, self._n_neurons, self._n_panel = native, n_tests, n_neurons, n_panel
        expect((n_neurons,), sums, squares)
        if n_panel:
            expect((n_tests, n_panel), differences)
        self._shift, self._sums, self._squares, self._differences = map(
            SINGLE.address, (shift, sums, squares, differences)
        )
        self._panel = INTEGER.address(panel)
        self._in_use = (shift, sums, squares, panel, differences)  # must not be freed before this
        self.by_block = torch.empty(n_neurons // FOLD_BLOCK + n_layers, n_tests, dtype=torch.float32)
        """The sum of D over each block of the neurons of a layer, `[blocks, tests]`."""
        self._n_blocks = 0

    def add(self, activations: Tensor, clean: Tensor, rows: Tensor, start: int, columns: slice) -> slice:
        """Fold the next layer, whose neurons are those from `start` on; returns its rows of `by_block`.

        activations: `n` numbers for each test, and for others after them; clean `[any, n]`; both float32; rows int64,
        one per test or more. columns: the layer's part of the panel.
        """
        n_tests, (_, n), first = self._n_tests, clean.shape, self._n_blocks
        last = first + -(-n // FOLD_BLOCK)
        if activations.numel() < n_tests * n or rows.shape[0] < n_tests:
            raise TypeError(f"activations must have {n} numbers and rows one for each of {n_tests} tests, got fewer")
        if start + n > self._n_neurons or last > self.by_block.shape[0] or columns.stop > self._n_panel:
            raise TypeError(f"a chunk must have room for {n} neurons from {start} on and the panel's {columns}")
        self._native.themis_fold_layer(
            activations,
            clean,
            rows,
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


def mix(native: Library, prefix: int, words: Sequence[NDArray[np.int64]], *, is_uniform: bool) -> NDArray[Any]:
    """A hash of integers, or uniform numbers in [0, 1), by the steps of `mix` in rng.py."""
    out = np.empty(np.broadcast(*words).shape, dtype=np.float64 if is_uniform else np.int64)
    words = [np.ascontiguousarray(np.broadcast_to(word, out.shape)) for word in words]
    n_words = len(words)
    integers = ctypes.c_int64 * n_words
    starts, steps = integers(*map(address, words)), integers(*[1] * n_words)
    native.themis_mix(prefix, starts, steps, steps, n_words, 1, out.size, is_uniform, False, address(out))
    return out


def verdict(native: Library, scores: Tensor, reference: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The class with the highest of the `scores [tests, classes]`, int64, and how far `reference` is above all others.

    Before them, whether that class is another than `reference`. Scores that are not finite have the class -1 and the
    margin minus infinity. scores float32, reference int64 `[tests]`.
    """
    n_tests, n = scores.shape
    expect((n_tests,), reference)
    is_fault = torch.empty(n_tests, dtype=torch.bool)
    outcome = torch.empty(n_tests, dtype=torch.int64)
    margin = torch.empty(n_tests, dtype=torch.float32)
    n_wrong = native.themis_verdict(scores, reference, n_tests, n, is_fault, outcome, margin)
    if n_wrong:
        raise IndexError(f"reference must be a class, 0 to {n - 1}, got {n_wrong} of {n_tests} that are not")
    return is_fault, outcome, margin
