"""Campaigns of one technique on one row, and what they had found when so many passes were paid."""

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
"""Tests a round for all, the default on a CPU: left to themselves `paper`, and all on a GPU, would learn less often."""
FINDING_LAYERS = 5
"""Passes of a campaign before its first test, beside one a seed."""


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
        """What each campaign found, and the seeds that any of them broke."""
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
        counted = [paid <= each for each in counts(self.passes)]
        pairs = [np.stack([columns["seed_id"][rows], columns["answer"][rows]], 1) for rows in counted]
        record = {
            "random_seed": random_seed,
            "distinct_faults": [len(np.unique(each, axis=0)) for each in pairs],
            "failing_seeds": [len(np.unique(each[:, 0])) for each in pairs],
            "tests": run.rounds[-1].tests,
            "passes": run.rounds[-1].passes - clean,
            "kinds": run.kinds,
            "seconds": asdict(run.seconds),
            "policy_seconds": own[0],
        }
        return record, set(columns["seed_id"].tolist())


def passes_paid(run: themis.Run, clean: int, cost: int) -> NDArray[np.float64]:
    """The passes after the clean sweep that had been paid once each fault's test was run.

    A round runs its uniform tests first, for `cost` passes each; what is left of its passes falls evenly on the others.
    """
    if not len(run.faults):
        return np.zeros(0)
    number = run.faults.columns["id"]
    tests = np.array([0] + [each.tests for each in run.rounds])
    passes = np.array([clean] + [each.passes for each in run.rounds]) - clean
    share, size = run.start.settings.uniform_share, np.diff(tests)
    n_uniform = np.array([round(each * share) for each in size.tolist()])
    each_of_search = (np.diff(passes) - cost * n_uniform) / np.maximum(size - n_uniform, 1)
    at = np.searchsorted(tests, number, side="right") - 1
    within = number - tests[at] + 1
    of_search = np.maximum(within - n_uniform[at], 0)
    paid: NDArray[np.float64] = passes[at] + cost * np.minimum(within, n_uniform[at]) + of_search * each_of_search[at]
    return paid


def counts(passes: int) -> list[int]:
    """The counts of passes at which is looked."""
    return [each for each in AT if each < passes] + [passes]


def make_policy(name: str) -> Policy:
    """A policy by name, or `module:class`."""
    module, _, kind = name.partition(":")
    if not kind:
        return choose_policy(name)
    policy: Policy = getattr(importlib.import_module(module), kind)()
    return policy


def time_policy(policy: Policy) -> list[float]:
    """From now on the seconds that a policy takes are added up in the first place of what is returned."""
    spent = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = perf_counter()
            try:
                return function(*arguments)
            finally:
                spent[0] += perf_counter() - began

        return call

    for name in ("propose", "observe"):
        setattr(policy, name, timed(getattr(policy, name)))
    return spent


def run_tasks(tasks: list[Task], n_workers: int) -> Iterator[tuple[Task, list[dict[str, Any]], list[int]]]:
    """Tasks with their results, in the order in which they are done."""
    if n_workers == 1:
        for task in tasks:
            yield task, *task.run()
        return
    with ProcessPoolExecutor(n_workers, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(task.run): task for task in tasks}
        for done in as_completed(running):
            yield running[done], *done.result()
