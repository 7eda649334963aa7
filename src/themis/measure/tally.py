"""Counts of tests and faults: raw, distinct, failing seeds, and those of the uniform stream alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from themis.measure.tests import Bools, Ints, Results, Tests

NEAR_TIE = 1e-4
"""Margin below which another device or batch shape may give another answer."""
LISTED_TIES = 1000
COUNTS = ("tests", "dropped", "faults", "uniform_tests", "raised", "uniform_unplaced")
ORDER = ("distinct_found_at", "distinct_searched", "uniform_first_seen", "uniform_new")
"""Arrays of a state that say when faults were found and by which stream; earlier versions did not store them."""
Fault = tuple[int, int]
"""A distinct fault: a seed and a wrong outcome."""


class Tally:
    """Counts over a campaign.

    distinct: the test that first showed each distinct fault; if that was not recorded, a test near it.
    searched: the distinct faults that the search stream has seen.
    uniform_first_seen: for each distinct fault of the uniform stream, its first uniform test. Dropped tests are not
        counted, and the faults of the first `uniform_unplaced` tests, whose order was not recorded, have 0.
    uniform_new: those of them that the search had not seen by then.
    """

    def __init__(self, n_seeds: int) -> None:
        self.tests = self.dropped = self.faults = self.uniform_tests = self.raised = self.uniform_unplaced = 0
        self.distinct: dict[Fault, int] = {}
        self.failing_seeds: dict[int, int] = {}
        self.searched: set[Fault] = set()
        self.uniform_tests_by_seed = np.zeros(n_seeds, dtype=np.int64)
        self.uniform_faults_by_seed = np.zeros(n_seeds, dtype=np.int64)
        self.uniform_times_seen: Counter[Fault] = Counter()
        self.uniform_first_seen: dict[Fault, int] = {}
        self.uniform_new: set[Fault] = set()
        self.kinds: dict[str, dict[str, int]] = {}
        self.near_ties: list[int] = []

    def state(self) -> dict[str, Any]:
        """All counts, as arrays and plain data."""
        pairs, distinct = list(self.uniform_times_seen), sorted(self.distinct)
        return {
            "uniform_tests_by_seed": self.uniform_tests_by_seed,
            "uniform_faults_by_seed": self.uniform_faults_by_seed,
            "distinct": np.array(distinct, dtype=np.int64).reshape(-1, 2),
            "distinct_found_at": np.array([self.distinct[fault] for fault in distinct], dtype=np.int64),
            "distinct_searched": np.array([fault in self.searched for fault in distinct], dtype=bool),
            "uniform_distinct": np.array(pairs, dtype=np.int64).reshape(-1, 2),
            "uniform_times_seen": self.times_seen(),
            "uniform_first_seen": self.first_seen(),
            "uniform_new": self.is_among(self.uniform_new),
            "near_ties": np.array(self.near_ties, dtype=np.int64),
            "counts": {name: getattr(self, name) for name in COUNTS},
            "kinds": self.kinds,
        }

    def restore(self, state: dict[str, Any], found_by: Sequence[tuple[int, int]] = ()) -> None:
        """Continue from a state.

        Earlier versions did not record the order of the faults. Then the faults are spread evenly between the points
        of `found_by`: numbers of tests, and of the distinct faults found by then.
        """
        vars(self).update(state["counts"])
        self.kinds, self.near_ties = state["kinds"], state["near_ties"].tolist()
        self.uniform_tests_by_seed[:] = state["uniform_tests_by_seed"]
        self.uniform_faults_by_seed[:] = state["uniform_faults_by_seed"]
        distinct = [(seed, outcome) for seed, outcome in state["distinct"].tolist()]
        uniform = [(seed, outcome) for seed, outcome in state["uniform_distinct"].tolist()]
        self.uniform_times_seen = Counter(dict(zip(uniform, state["uniform_times_seen"].tolist(), strict=True)))
        if any(name in state for name in ORDER):
            found_at, is_searched = state["distinct_found_at"], state["distinct_searched"].astype(bool)
            first_seen, is_new = state["uniform_first_seen"].tolist(), state["uniform_new"].astype(bool)
            if ((found_at < 0) | (found_at >= self.tests)).any():
                raise ValueError("its distinct faults are not those of its tests")
        else:
            found_at = _spread(len(distinct), self.tests, found_by)
            is_searched = np.array([fault not in self.uniform_times_seen for fault in distinct], dtype=bool)
            first_seen, is_new = [0] * len(uniform), np.zeros(len(uniform), dtype=bool)
            self.uniform_unplaced = int(self.uniform_tests_by_seed.sum())
        order = np.argsort(found_at, kind="stable").tolist()
        self.distinct = {distinct[k]: int(found_at[k]) for k in order}
        self.searched = {fault for fault, is_seen in zip(distinct, is_searched, strict=True) if is_seen}
        self.uniform_first_seen = dict(zip(uniform, first_seen, strict=True))
        self.uniform_new = {fault for fault, is_first in zip(uniform, is_new, strict=True) if is_first}
        self.failing_seeds = {}
        for (seed, _), test in self.distinct.items():
            self.failing_seeds.setdefault(seed, test)

    def add(self, tests: Tests, results: Results, is_uniform: bool) -> None:
        """Count some tests; those that were dropped say nothing about the model."""
        at = results.is_fault.nonzero()[0]
        found = list(zip(tests.seed[at].tolist(), results.outcome[at].tolist(), strict=True))
        self.tests += len(tests)
        self.dropped += 0 if results.is_dropped is None else int(results.is_dropped.sum())
        self.faults += len(at)
        self.raised += 0 if results.raised is None else int(results.raised.sum())
        if is_uniform:
            self.uniform_new.update(fault for fault in found if fault not in self.distinct)
        for fault, number in zip(found, tests.number[at].tolist(), strict=True):
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
        self._add_kinds(tests, at)
        if len(self.near_ties) < LISTED_TIES:
            ties = tests.number[np.abs(results.margin) < NEAR_TIE]
            self.near_ties += ties.tolist()[: LISTED_TIES - len(self.near_ties)]

    def _add_kinds(self, tests: Tests, at: Ints) -> None:
        """Count tests by kind, those `at` some rows as faults."""
        n_tests, n_faults = Counter(tests.kind.tolist()), Counter(tests.kind[at].tolist())
        for kind in sorted(n_tests):
            count = self.kinds.setdefault(kind, {"tests": 0, "faults": 0})
            count["tests"] += n_tests[kind]
            count["faults"] += n_faults[kind]

    def times_seen(self) -> Ints:
        """How often the uniform stream saw each of its distinct faults."""
        return np.fromiter(self.uniform_times_seen.values(), dtype=np.int64)

    def first_seen(self) -> Ints:
        """The first uniform test that showed each of the distinct faults of the uniform stream."""
        return np.array([self.uniform_first_seen[fault] for fault in self.uniform_times_seen], dtype=np.int64)

    def is_among(self, faults: set[Fault]) -> Bools:
        """Which of the distinct faults of the uniform stream are among `faults`."""
        return np.array([fault in faults for fault in self.uniform_times_seen], dtype=bool)


def _spread(n: int, n_tests: int, found_by: Sequence[tuple[int, int]]) -> Ints:
    """The tests that showed `n` distinct faults, as far as the counts after some numbers of tests tell."""
    points = sorted({(0, 0), *found_by, (n_tests, n)}, key=lambda point: (point[1], point[0]))
    tests, found = np.array(points, dtype=np.float64).T
    numbers: Ints = np.interp(np.arange(n) + 0.5, found, tests).astype(np.int64)
    return numbers
