"""Campaigns of one technique on one row, and their results after given numbers of passes or tests."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import themis
from searching.rows import Row, fitted, make_bench
from themis.campaign.loop import stage_end
from themis.perturb import choose_perturbation
from themis.search import Policy, choose_policy
from themis_lab.criteria import PAPER

AT = {"passes": (2_000, 5_000, 10_000, 20_000), "tests": (25, 50, 100, 200, 500, 1_000)}
"""Numbers of passes, or of tests, at which results are compared."""
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
    unit: str
    """What limits a campaign: `passes` or `tests`."""
    limit: int
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
        in_passes = self.unit == "passes"
        clean = len(bench.seeds) + FINDING_LAYERS
        cpu_start = process_time()
        run = themis.run(
            bench.target, bench.seeds, perturbation, policy=policy, criterion=criterion, random_seed=random_seed,
            max_passes=clean + self.limit if in_passes else None, max_tests=None if in_passes else self.limit,
            coverage=None, plateau=None, round_size=ROUND_SIZE,
        )  # fmt: skip
        cpu_seconds = process_time() - cpu_start
        n_tests, n_passes = run.rounds[-1].tests, run.rounds[-1].passes - clean
        none = dict.fromkeys(("id", "seed_id", "answer"), np.zeros(0, int))
        columns = run.faults.columns if len(run.faults) else none
        paid = passes_paid(run, clean, 1 + perturbation.passes)
        spent = paid if in_passes else np.arange(1, n_tests + 1)
        n_done = [int(np.searchsorted(spent, count, side="right")) for count in counts(self.unit, self.limit)]
        found = [columns["id"] < n for n in n_done]
        pairs = [np.stack([columns["seed_id"][rows], columns["answer"][rows]], 1) for rows in found]
        record = {
            "random_seed": random_seed,
            "distinct_faults": [len(np.unique(rows, axis=0)) for rows in pairs],
            "failing_seeds": [len(np.unique(rows[:, 0])) for rows in pairs],
            "tests_at": n_done,
            "passes_at": [round(float(paid[n - 1])) if n else 0 for n in n_done],
            "tests": n_tests,
            "passes": n_passes,
            "kinds": run.kinds,
            "seconds": asdict(run.seconds),
            "policy_seconds": own[0],
            "policy_cpu_seconds": own[1],
            "cpu_seconds": cpu_seconds,
        }
        return record, set(columns["seed_id"].tolist())


def passes_paid(run: themis.Run, clean: int, cost: int) -> NDArray[np.float64]:
    """The number of passes, after the clean ones, that had been used when each test was finished.

    A uniform test takes `cost` passes; the other tests of a round share its other passes evenly.
    """
    paid, is_uniform = [np.zeros(0)], are_uniform(run)
    first, before = 0, clean
    for round_ in run.rounds:
        own = is_uniform[first : round_.tests]
        left = round_.passes - before - cost * own.sum()
        each = np.where(own, cost, left / max(1, (~own).sum()))
        paid.append(before - clean + each.cumsum())
        first, before = round_.tests, round_.passes
    return np.concatenate(paid)


def are_uniform(run: themis.Run) -> NDArray[np.bool_]:
    """Which tests of a run are of the uniform stream."""
    share, n_uniform, at = run.start.settings.uniform_share, 0, 0
    is_uniform = np.zeros(run.rounds[-1].tests, dtype=bool)
    for round_ in run.rounds:
        while at < round_.tests:
            end = stage_end(at, round_.tests, share)
            due = min(end - at, max(0, round(end * share) - n_uniform))
            is_uniform[at : at + due] = True
            at, n_uniform = end, n_uniform + due
    return is_uniform


def counts(unit: str, limit: int) -> list[int]:
    """The numbers of passes or tests at which results are compared."""
    return [count for count in AT[unit] if count < limit] + [limit]


def make_policy(name: str) -> Policy:
    """A policy by name, or `module:class`."""
    module, _, kind = name.partition(":")
    if not kind:
        return choose_policy(name)
    policy: Policy = getattr(importlib.import_module(module), kind)()
    return policy


def time_policy(policy: Policy) -> list[float]:
    """Time a policy from now on; its total seconds, and CPU seconds, are the elements of the returned list."""
    spent = [0.0, 0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start, cpu_start = perf_counter(), process_time()
            try:
                return function(*arguments)
            finally:
                spent[0] += perf_counter() - start
                spent[1] += process_time() - cpu_start

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
