"""Campaigns of one technique on one row, and their results after given numbers of passes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import themis
from searching.rows import Row, fitted, make_bench
from themis.criteria.names import PAPER
from themis.perturb import choose_perturbation
from themis.search import Policy, choose_policy

AT = (2_000, 5_000, 10_000, 20_000)
ROUND_SIZE = 640
"""Tests per round, the default on a CPU; otherwise `paper`, and all policies on a GPU, would learn less often."""
FINDING_LAYERS = 5
"""Passes of a campaign before its first test, in addition to one per seed."""


@dataclass(frozen=True)
class Task:
    """Campaigns of one technique on one row, for another process."""

    row: Row
    technique: str
    random_seeds: tuple[int, ...]
    passes: int
    seeds: int
    device: str
    packed: str | None
    threads: int | None

    @property
    def bench(self) -> tuple[Any, ...]:
        return (self.row.model, self.row.data, self.seeds, self.device, self.packed)

    def run(self) -> tuple[list[dict[str, Any]], list[int]]:
        """The record of each campaign, and the seeds that failed in any of them."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        records, broken = [], set()
        for random_seed in self.random_seeds:
            record, seeds = self.campaign(random_seed)
            records.append(record)
            broken |= seeds
        return records, sorted(broken)

    def campaign(self, random_seed: int) -> tuple[dict[str, Any], set[int]]:
        bench, row = make_bench(*self.bench), self.row
        criterion = fitted(self.technique, self.bench) if self.technique in PAPER else None
        policy = make_policy("fuzz" if criterion is not None else self.technique)
        own = time_policy(policy)
        perturbation = choose_perturbation(row.perturbation, row.magnitude)
        clean = len(bench.seeds) + FINDING_LAYERS
        run = themis.run(
            bench.target, bench.seeds, perturbation, policy=policy, criterion=criterion, random_seed=random_seed,
            max_passes=clean + self.passes, max_tests=None, coverage=None, plateau=None, round_size=ROUND_SIZE,
        )  # fmt: skip
        columns = run.faults.columns if len(run.faults) else {"seed_id": np.zeros(0, int), "answer": np.zeros(0, int)}
        paid = passes_paid(run, clean, 1 + perturbation.passes)
        counted = [paid <= passes for passes in counts(self.passes)]
        pairs = [np.stack([columns["seed_id"][rows], columns["answer"][rows]], 1) for rows in counted]
        record = {
            "random_seed": random_seed,
            "distinct_faults": [len(np.unique(rows, axis=0)) for rows in pairs],
            "failing_seeds": [len(np.unique(rows[:, 0])) for rows in pairs],
            "tests": run.rounds[-1].tests,
            "passes": run.rounds[-1].passes - clean,
            "kinds": run.kinds,
            "seconds": asdict(run.seconds),
            "policy_seconds": own[0],
        }
        return record, set(columns["seed_id"].tolist())


def passes_paid(run: themis.Run, clean: int, cost: int) -> NDArray[np.float64]:
    """The number of passes, after the clean ones, that had been used when the test of each fault was finished.

    A round runs its uniform tests first, with `cost` passes each; its other tests share the other passes evenly.
    """
    if not len(run.faults):
        return np.zeros(0)
    number = run.faults.columns["id"]
    tests = np.array([0] + [round.tests for round in run.rounds])
    passes = np.array([clean] + [round.passes for round in run.rounds]) - clean
    share, size = run.start.settings.uniform_share, np.diff(tests)
    n_uniform = np.array([round(n * share) for n in size.tolist()])
    each_of_search = (np.diff(passes) - cost * n_uniform) / np.maximum(size - n_uniform, 1)
    at = np.searchsorted(tests, number, side="right") - 1
    within = number - tests[at] + 1
    of_search = np.maximum(within - n_uniform[at], 0)
    paid: NDArray[np.float64] = passes[at] + cost * np.minimum(within, n_uniform[at]) + of_search * each_of_search[at]
    return paid


def counts(passes: int) -> list[int]:
    """The numbers of passes at which results are compared."""
    return [count for count in AT if count < passes] + [passes]


def make_policy(name: str) -> Policy:
    """A policy by name, or `module:class`."""
    module, _, kind = name.partition(":")
    if not kind:
        return choose_policy(name)
    policy: Policy = getattr(importlib.import_module(module), kind)()
    return policy


def time_policy(policy: Policy) -> list[float]:
    """Time a policy from now on; its total seconds are the only element of the returned list."""
    spent = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = perf_counter()
            try:
                return function(*arguments)
            finally:
                spent[0] += perf_counter() - start

        return call

    for name in ("propose", "observe"):
        setattr(policy, name, timed(getattr(policy, name)))
    return spent


def run_tasks(tasks: list[Task], n_workers: int) -> Iterator[tuple[Task, list[dict[str, Any]], list[int]]]:
    """Tasks with their results, in the order of completion."""
    if n_workers == 1:
        for task in tasks:
            yield task, *task.run()
        return
    with ProcessPoolExecutor(n_workers, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(task.run): task for task in tasks}
        for done in as_completed(running):
            yield running[done], *done.result()
