"""The arithmetic of policy `scheduled` in C, a few calls instead of hundreds of NumPy operations.

Results may differ from NumPy's in the last bits, because sums are computed in another order.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from themis.compute import native, rng
from themis.compute.native import Library, address, addresses
from themis.measure.tests import Floats, Ints, Results
from themis.search.kinds import FIRST_ASCENT
from themis.search.policy import FOR_KIND, FOR_PICK, FOR_SEED, FOR_THETA, SEARCH_STREAM, Numbers, Space, State

AnyArray = NDArray[Any]
DOUBLE, SINGLE, INTEGER = np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.int64)
BOOL = np.dtype(np.bool_)

SEED_PARTS = (
    *("margin", "answer_index", "tests", "broke", "faults", "seen_once", "corners", "ahead"),
    *("total_margin", "margin_losses", "answer_faults", "curve", "precision", "squared_shortfall"),
    *("seen_faults", "new_faults"),
)
THETA_PARTS = ("margin", "theta", "fault_theta")
"""The parts of the state that C reads and updates, in the order of the structures in native.c."""
OF_SEEDS, OF_THETAS = operator.itemgetter(*SEED_PARTS), operator.itemgetter(*THETA_PARTS)
NO_LIMIT = np.iinfo(np.int64).max


class Compiled:
    """The same methods as `Arithmetic`, for one space."""

    def __init__(self, library: Library, space: Space, initial: State) -> None:
        """`initial` is the state before the first test."""
        self._library, self._space = library, space
        self._first_spread = float(np.median(space.margin) / 4)
        clean, answer = space.margin.astype(np.float32), space.answer.astype(np.int64)
        self._n_seeds, self._n_dimensions = initial["theta"].shape
        self._n_answers = initial["margin_losses"].shape[1]
        self._seeds = _Structure(2, [clean], OF_SEEDS(initial))
        box = [end.astype(np.float32) for end in (space.low, space.high, space.identity, space.width)]
        patterns = *OF_THETAS(initial), answer[:0], answer[:0]
        self._thetas = _Structure(3, [*box, answer, clean], patterns)
        self._fault_answer = self._order = self._answers = answer[:0]
        self._prefixes = [rng.prefix(space.random_seed, purpose) for purpose in (FOR_PICK, FOR_THETA)]

    @staticmethod
    def of(space: Space, initial: State) -> Compiled | None:
        """None without the C library."""
        library = native.library()
        return None if library is None else Compiled(library, space, initial)

    def choose_seeds(self, state: State, depth: int, n: int, first: int) -> tuple[Ints, Numbers]:
        """The seeds of the `n` most valuable tests, and `spreads_above`."""
        space, position, spreads = self._space, np.empty(n, dtype=np.int64), np.empty(self._n_seeds)
        scratch = np.empty(2 * depth * self._n_seeds + self._n_answers)
        prefix = rng.prefix(space.random_seed, FOR_SEED, SEARCH_STREAM, first)
        n_corners = NO_LIMIT if space.is_random else 1 << len(space.free_dimensions)
        numbers = (self._first_spread, prefix, depth, n, n_corners, len(state["known"]) > 0)
        arrays = addresses([DOUBLE, DOUBLE, INTEGER], spreads, scratch, position)
        _check(self._library.themis_choose_seeds(self._bind(state), *numbers, *arrays))
        return position, spreads

    def learn_margins(self, state: State, position: Ints, results: Results, spreads: Numbers) -> Numbers:
        is_fault, margin = np.ascontiguousarray(results.is_fault), np.ascontiguousarray(results.margin)
        shortfall = np.empty(len(position))
        types = [INTEGER, BOOL, SINGLE, DOUBLE, DOUBLE]
        arrays = addresses(types, position, is_fault, margin, spreads, shortfall)
        _check(self._library.themis_learn_margins(self._bind(state), len(position), *arrays))
        return shortfall

    def learn_faults(self, state: State, position: Ints, outcome: Ints) -> Ints:
        key = position << 32 | outcome & 0xFFFFFFFF
        known, times, n = state["known"], state["times"], len(key)
        merged, change, first = np.empty((2, len(known) + n), dtype=INTEGER), np.zeros(n, dtype=INTEGER), key.copy()
        order = key.argsort(kind="stable")
        arrays = addresses([INTEGER] * 9, position, key, order, known, times, *merged, change, first)
        n_new = self._library.themis_learn_faults(self._bind(state), n, len(known), *arrays)
        _check(n_new < 0)
        state["known"], state["times"] = merged[:, : len(known) + n_new]
        return first[:n_new]

    def keep_least(self, state: State, theta: Floats, position: Ints, margin: Floats) -> None:
        theta, margin = np.ascontiguousarray(theta), np.ascontiguousarray(margin)
        arrays = addresses([INTEGER, SINGLE, SINGLE], position, margin, theta)
        _check(self._library.themis_keep_least(self._bind_thetas(state), len(position), *arrays))

    def thetas(self, state: State, chosen: Ints, position: Ints, number: Ints) -> Floats:
        theta = np.empty((len(number), self._n_dimensions), dtype=np.float32)
        if self._fault_answer is not state["fault_answer"]:
            self._fault_answer = state["fault_answer"]
            self._order = self._fault_answer.argsort(kind="stable")
            self._answers = self._fault_answer[self._order]
        tests = addresses([INTEGER, INTEGER, INTEGER, SINGLE], chosen, position, number, theta)
        _check(self._library.themis_thetas(self._bind_thetas(state), *self._prefixes, len(number), *tests))
        return theta

    def sample_kinds(self, number: Ints, state: State, prior: Numbers, costs: Numbers, n: int) -> tuple[Ints, Ints]:
        plain, best = np.empty_like(number), np.empty_like(number)
        types = [DOUBLE] * 4 + [INTEGER] * 3
        arrays = addresses(types, prior, costs, state["tried"], state["paid"], number, plain, best)
        prefix, n_tests = rng.prefix(self._space.random_seed, FOR_KIND), len(number)
        self._library.themis_choose_kinds(prefix, n_tests, FIRST_ASCENT, n, len(prior), *arrays)
        return plain, best

    def _bind_thetas(self, state: State) -> int:
        n_faults = min(len(self._order), len(state["fault_theta"]))
        arrays = *OF_THETAS(state), self._order, self._answers
        return self._thetas.bind(arrays, self._n_seeds, self._n_dimensions, n_faults)

    def _bind(self, state: State) -> int:
        return self._seeds.bind(OF_SEEDS(state), self._n_seeds, self._n_answers)


class _Structure:
    """A C struct: numbers, constant arrays, and arrays with the types and shapes of `patterns`, which may be longer."""

    def __init__(self, n_counts: int, constants: Sequence[AnyArray], patterns: Sequence[AnyArray]) -> None:
        self._constants, self._patterns = constants, patterns
        self._counts, self._first = slice(n_counts), n_counts + len(constants)
        self._words = np.zeros(self._first + len(patterns), dtype=INTEGER)  # numbers and addresses have 64 bits
        self._words[n_counts : self._first] = list(map(address, constants))
        self._address = address(self._words)
        self._bound: list[AnyArray | None] = [None] * len(patterns)

    def bind(self, arrays: Sequence[AnyArray], *counts: int) -> int:
        """Return the address of the struct; an array is checked only when it is replaced."""
        if any(map(operator.is_not, arrays, self._bound)):
            for k, (array, pattern, bound) in enumerate(zip(arrays, self._patterns, self._bound, strict=True)):
                if array is bound:
                    continue
                is_alike = array.dtype == pattern.dtype and array.shape[1:] == pattern.shape[1:]
                if not is_alike or array.shape[:1] < pattern.shape[:1]:
                    raise TypeError(f"expected {pattern.dtype} {pattern.shape}, got {array.dtype} {array.shape}")
                self._words[self._first + k], self._bound[k] = address(array), array
            self._words[self._counts] = counts
        return self._address


def _check(is_damaged: int) -> None:
    if is_damaged:
        raise IndexError("cannot search: the position of a seed, or the number of its clean answer, is out of range")
