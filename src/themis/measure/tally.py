"""Counts of tests and faults: raw, distinct, failing seeds, and those of the uniform stream alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from themis.measure.tests import Ints, Results, Tests

NEAR_TIE = 1e-4
"""Margin below which another device or batch shape may give another answer."""
LISTED_TIES = 1000
COUNTS = ("tests", "dropped", "faults", "uniform_tests", "raised")


class Tally:
    """Counts over a campaign. A distinct fault is a pair of a seed and a wrong outcome."""

    def __init__(self, n_seeds: int) -> None:
        self.tests = self.dropped = self.faults = self.uniform_tests = self.raised = 0
        self.distinct: set[tuple[int, int]] = set()
        self.failing_seeds: set[int] = set()
        self.uniform_tests_by_seed = np.zeros(n_seeds, dtype=np.int64)
        self.uniform_faults_by_seed = np.zeros(n_seeds, dtype=np.int64)
        self.uniform_times_seen: Counter[tuple[int, int]] = Counter()
        self.kinds: dict[str, dict[str, int]] = {}
        self.near_ties: list[int] = []

    def state(self) -> dict[str, Any]:
        """All counts, as arrays and plain data."""
        pairs = list(self.uniform_times_seen)
        return {
            "uniform_tests_by_seed": self.uniform_tests_by_seed,
            "uniform_faults_by_seed": self.uniform_faults_by_seed,
            "distinct": np.array(sorted(self.distinct), dtype=np.int64).reshape(-1, 2),
            "uniform_distinct": np.array(pairs, dtype=np.int64).reshape(-1, 2),
            "uniform_times_seen": self.times_seen(),
            "near_ties": np.array(self.near_ties, dtype=np.int64),
            "counts": {name: getattr(self, name) for name in COUNTS},
            "kinds": self.kinds,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        vars(self).update(state["counts"])
        self.kinds, self.near_ties = state["kinds"], state["near_ties"].tolist()
        self.uniform_tests_by_seed[:] = state["uniform_tests_by_seed"]
        self.uniform_faults_by_seed[:] = state["uniform_faults_by_seed"]
        self.distinct = {(seed, outcome) for seed, outcome in state["distinct"].tolist()}
        self.failing_seeds = {seed for seed, _ in self.distinct}
        seen = zip(state["uniform_distinct"].tolist(), state["uniform_times_seen"].tolist(), strict=True)
        self.uniform_times_seen = Counter({(seed, outcome): n for (seed, outcome), n in seen})

    def add(self, tests: Tests, results: Results, is_uniform: bool) -> None:
        """Count some tests; those that were dropped say nothing about the model."""
        run = results.was_run
        at = np.flatnonzero(results.is_fault)
        found = list(zip(tests.seed[at].tolist(), results.outcome[at].tolist(), strict=True))
        self.tests += len(tests)
        self.dropped += int((~run).sum())
        self.faults += len(at)
        self.raised += 0 if results.raised is None else int(results.raised.sum())
        self.distinct.update(found)
        self.failing_seeds.update(seed for seed, _ in found)
        if is_uniform:
            n_seeds = len(self.uniform_tests_by_seed)
            self.uniform_tests += len(tests)
            self.uniform_tests_by_seed += np.bincount(tests.seed[run], minlength=n_seeds)
            self.uniform_faults_by_seed += np.bincount(tests.seed[at], minlength=n_seeds)
            self.uniform_times_seen.update(found)
        self._add_kinds(tests, results)
        ties = tests.number[np.abs(results.margin) < NEAR_TIE]
        self.near_ties += ties.tolist()[: LISTED_TIES - len(self.near_ties)]

    def _add_kinds(self, tests: Tests, results: Results) -> None:
        kinds, of = np.unique(tests.kind, return_inverse=True)
        n_tests = np.bincount(of, minlength=len(kinds))
        n_faults = np.bincount(of[results.is_fault], minlength=len(kinds))
        for kind, tests_, faults in zip(kinds.tolist(), n_tests.tolist(), n_faults.tolist(), strict=True):
            count = self.kinds.setdefault(kind, {"tests": 0, "faults": 0})
            count["tests"] += tests_
            count["faults"] += faults

    def times_seen(self) -> Ints:
        """How often the uniform stream saw each of its distinct faults."""
        return np.fromiter(self.uniform_times_seen.values(), dtype=np.int64)
