"""Tests and their results, as arrays with one row per test, and counts of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Tests:
    """Tests to be run. `seed` is a row of the campaign's seeds, `kind` the kind of proposal."""

    __test__ = False  # not a pytest class

    number: Ints
    seed: Ints
    theta: Floats  # [tests, dimensions]; float32, so that the stored number is the number used
    noise_seed: Ints
    kind: NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.seed)

    def equals(self, other: Tests) -> bool:
        """Whether these are the same tests in the same order."""
        columns = ((getattr(self, column.name), getattr(other, column.name)) for column in fields(self))
        return all(mine.tobytes() == others.tobytes() for mine, others in columns)

    def __getitem__(self, rows: slice | Ints | Bools) -> Tests:
        return Tests(self.number[rows], self.seed[rows], self.theta[rows], self.noise_seed[rows], self.kind[rows])


@dataclass(frozen=True)
class FaultDetails:
    """What is recorded about the faults among some tests, in the order of the tests."""

    columns: dict[str, NDArray[Any]]  # by name: value, confidence, distances, signature, position; none without faults
    inputs: Tensor  # [faults, ...], on the device of the model; only those that are stored are copied
    outputs: Tensor  # for these inputs

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class Results:
    """The results of some tests, in their order. Dropped tests were not run, and have the margin NaN."""

    is_fault: Bools
    outcome: Ints
    margin: Floats
    gradient: Floats | None  # of the objective in theta, [tests, dimensions]; 0 for tests without an objective
    is_dropped: Bools | None = None  # too dissimilar from their seed; None without such tests
    raised: Bools | None = None  # which tests raised the criterion; None without a criterion
    confidence: Floats | None = None  # of classes, in the uniform stream; neither joined nor selected

    def __len__(self) -> int:
        return len(self.is_fault)

    def __getitem__(self, rows: Bools) -> Results:
        """The results of some of the tests."""
        gradient = None if self.gradient is None else self.gradient[rows]
        dropped = None if self.is_dropped is None else self.is_dropped[rows]
        raised = None if self.raised is None else self.raised[rows]
        return Results(self.is_fault[rows], self.outcome[rows], self.margin[rows], gradient, dropped, raised)

    @property
    def was_run(self) -> Bools:
        """Which tests were run."""
        return np.ones(len(self), dtype=bool) if self.is_dropped is None else ~self.is_dropped

    @staticmethod
    def join(parts: Sequence[Results]) -> Results:
        """Join results in order."""
        if len(parts) == 1:
            return parts[0]
        n_dimensions = next((part.gradient.shape[1] for part in parts if part.gradient is not None), None)
        gradient = None
        if n_dimensions is not None:
            gradient = np.concatenate(
                [
                    np.zeros((len(part), n_dimensions), dtype=np.float32) if part.gradient is None else part.gradient
                    for part in parts
                ]
            )
        raised = [part.raised for part in parts if part.raised is not None]
        has_dropped = any(part.is_dropped is not None for part in parts)
        return Results(
            np.concatenate([part.is_fault for part in parts]),
            np.concatenate([part.outcome for part in parts]),
            np.concatenate([part.margin for part in parts]),
            gradient,
            is_dropped=~np.concatenate([part.was_run for part in parts]) if has_dropped else None,
            raised=np.concatenate(raised) if raised else None,
        )


NEAR_TIE = 1e-4
"""Margin below which another device or batch shape may give another answer."""
LISTED_TIES = 1000
COUNTS = ("tests", "dropped", "faults", "uniform_tests", "raised")
Fault = tuple[int, int]
"""A distinct fault: a seed and a wrong outcome."""


class Tally:
    """Counts over a campaign.

    distinct: the test that first showed each distinct fault.
    searched: the distinct faults that the search stream has seen.
    uniform_first_seen: the first uniform test of each of its distinct faults, not counting dropped tests.
    uniform_new: distinct faults of the uniform stream that the search had not seen by then.
    uniform_known: for each fault of the uniform stream, whether an earlier test had shown it.
    """

    def __init__(self, n_seeds: int) -> None:
        self.tests = self.dropped = self.faults = self.uniform_tests = self.raised = 0
        self.distinct: dict[Fault, int] = {}
        self.failing_seeds: dict[int, int] = {}
        self.searched: set[Fault] = set()
        self.uniform_tests_by_seed = np.zeros(n_seeds, dtype=np.int64)
        self.uniform_faults_by_seed = np.zeros(n_seeds, dtype=np.int64)
        self.uniform_times_seen: Counter[Fault] = Counter()
        self.uniform_first_seen: dict[Fault, int] = {}
        self.uniform_new: set[Fault] = set()
        self.uniform_known: list[bool] = []
        self.kinds: dict[str, dict[str, int]] = {}
        self.near_ties: list[int] = []

    def state(self) -> dict[str, Any]:
        """All counts, as arrays and plain data."""
        pairs, distinct = list(self.uniform_times_seen), sorted(self.distinct)
        times_seen, first_seen, is_new, _ = self.uniform_columns()
        return {
            "uniform_tests_by_seed": self.uniform_tests_by_seed,
            "uniform_faults_by_seed": self.uniform_faults_by_seed,
            "distinct": np.array(distinct, dtype=np.int64).reshape(-1, 2),
            "distinct_found_at": np.array(list(map(self.distinct.__getitem__, distinct)), dtype=np.int64),
            "distinct_searched": np.array(list(map(self.searched.__contains__, distinct)), dtype=bool),
            "uniform_distinct": np.array(pairs, dtype=np.int64).reshape(-1, 2),
            "uniform_times_seen": times_seen,
            "uniform_first_seen": first_seen,
            "uniform_new": is_new,
            "uniform_known": np.array(self.uniform_known, dtype=bool),
            "near_ties": np.array(self.near_ties, dtype=np.int64),
            "counts": {name: getattr(self, name) for name in COUNTS},
            "kinds": self.kinds,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        vars(self).update({name: state["counts"][name] for name in COUNTS})
        self.kinds, self.near_ties = state["kinds"], state["near_ties"].tolist()
        self.uniform_known = state["uniform_known"].tolist() if "uniform_known" in state else []
        self.uniform_tests_by_seed[:] = state["uniform_tests_by_seed"]
        self.uniform_faults_by_seed[:] = state["uniform_faults_by_seed"]
        distinct = [(seed, outcome) for seed, outcome in state["distinct"].tolist()]
        uniform = [(seed, outcome) for seed, outcome in state["uniform_distinct"].tolist()]
        self.uniform_times_seen = Counter(dict(zip(uniform, state["uniform_times_seen"].tolist(), strict=True)))
        found_at, is_searched = state["distinct_found_at"], state["distinct_searched"].astype(bool)
        first_seen, is_new = state["uniform_first_seen"].tolist(), state["uniform_new"].astype(bool)
        if ((found_at < 0) | (found_at >= self.tests)).any():
            raise ValueError("its distinct faults are not those of its tests")
        order = np.argsort(found_at, kind="stable").tolist()
        self.distinct = {distinct[k]: int(found_at[k]) for k in order}
        self.searched = {fault for fault, is_seen in zip(distinct, is_searched, strict=True) if is_seen}
        self.uniform_first_seen = dict(zip(uniform, first_seen, strict=True))
        self.uniform_new = {fault for fault, is_first in zip(uniform, is_new, strict=True) if is_first}
        self.failing_seeds = {}
        for (seed, _), test in self.distinct.items():
            self.failing_seeds.setdefault(seed, test)

    def add(self, tests: Tests, results: Results, is_uniform: bool) -> None:
        """Count some tests; dropped tests say nothing about the model."""
        at = results.is_fault.nonzero()[0]
        found = list(zip(tests.seed[at].tolist(), results.outcome[at].tolist(), strict=True))
        self.tests += len(tests)
        self.dropped += 0 if results.is_dropped is None else int(results.is_dropped.sum())
        self.faults += len(at)
        self.raised += 0 if results.raised is None else int(results.raised.sum())
        for fault, number in zip(found, tests.number[at].tolist(), strict=True):
            if is_uniform:
                self.uniform_known.append(fault in self.distinct)
                if fault not in self.distinct:
                    self.uniform_new.add(fault)
            self.distinct.setdefault(fault, number)
            self.failing_seeds.setdefault(fault[0], number)
        if is_uniform:
            n_seeds, run = len(self.uniform_tests_by_seed), results.was_run
            place = int(self.uniform_tests_by_seed.sum()) + np.cumsum(run) - 1
            for fault, test in zip(found, place[at].tolist(), strict=True):
                self.uniform_first_seen.setdefault(fault, test)
            self.uniform_tests += len(tests)
            self.uniform_tests_by_seed += np.bincount(tests.seed[run], minlength=n_seeds)
            self.uniform_faults_by_seed += np.bincount(tests.seed[at], minlength=n_seeds)
            self.uniform_times_seen.update(found)
        else:
            self.searched.update(found)
        n_tests, n_faults = Counter(tests.kind.tolist()), Counter(tests.kind[at].tolist())
        for kind in sorted(n_tests):
            count = self.kinds.setdefault(kind, {"tests": 0, "faults": 0})
            count["tests"] += n_tests[kind]
            count["faults"] += n_faults[kind]
        if len(self.near_ties) < LISTED_TIES:
            ties = tests.number[np.abs(results.margin) < NEAR_TIE]
            self.near_ties += ties.tolist()[: LISTED_TIES - len(self.near_ties)]

    def uniform_columns(self) -> tuple[Ints, Ints, Bools, Bools]:
        """For each distinct fault of the uniform stream: how often it was seen, and by which test first.

        Also whether the search had not seen it by then, and whether the search has seen it at all.
        """
        faults = list(self.uniform_times_seen)
        return (
            np.fromiter(self.uniform_times_seen.values(), dtype=np.int64),
            np.array(list(map(self.uniform_first_seen.__getitem__, faults)), dtype=np.int64),
            np.array(list(map(self.uniform_new.__contains__, faults)), dtype=bool),
            np.array(list(map(self.searched.__contains__, faults)), dtype=bool),
        )
