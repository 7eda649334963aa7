"""Residual risk: how often its 95% interval holds the truth, over real campaigns of several policies.

    THEMIS_DATA=FOLDER python benchmarks/risk.py [--no-quick] [--processes 14] [--campaigns 200] [--json FILE]

The truth of a campaign is the share of a pool of fresh uniform tests that show a distinct fault (seed and wrong
outcome) which the campaign has not seen. The same campaigns also show what is wrong with two simpler estimates:
`uniform` counts as seen only what the uniform stream saw, `all tests` looks at all uniform tests instead of their later
half. `--quick` is the default: two campaigns of two policies on one row, which say little about intervals.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from searching.arguments import add_quick, complete
from searching.files import write_results

import themis
from themis.judge.estimate import Estimate
from themis.judge.risk import unseen_mass
from themis_lab.zoo import data, load

ROWS = {
    "lenet5 gaussian 0.6": ("lenet5-mnist", "gaussian", 0.6),
    "lenet5 gaussian 0.3": ("lenet5-mnist", "gaussian", 0.3),
    "lenet1 rotate": ("lenet1-mnist", "rotate", 1.0),
    "pdf edit": ("mlp-pdf", "edit", None),
}
POLICIES = ("random", "corners", "scheduled", "paper", "fuzz")
QUICK: dict[str, Any] = {
    "campaigns": 2, "tests": [2_000], "rows": ["pdf edit"], "policies": ["random", "scheduled"], "pool": 20_000,
}  # fmt: skip
FULL: dict[str, Any] = {
    "campaigns": 20, "tests": [2_000, 4_000], "rows": list(ROWS), "policies": list(POLICIES), "pool": 200_000,
}  # fmt: skip
POOL_SEED = 999_983
SEEDS = 600
Pairs = list[tuple[int, int]]


def options(row: str) -> dict[str, Any]:
    return {
        "magnitude": ROWS[row][2], "max_seeds": SEEDS, "coverage": None, "plateau": None, "uniform_share": 0.2,
    }  # fmt: skip


@cache
def subject(row: str) -> tuple[Any, Any]:
    model = ROWS[row][0]
    return load(model), data(model)


def pairs_of(run: themis.Run) -> Pairs:
    if not len(run.faults):
        return []
    columns = run.faults.columns
    return list(zip(columns["seed_id"].tolist(), columns["answer"].tolist(), strict=True))


def run_pool(row: str, part: int, n_tests: int) -> Counter[tuple[int, int]]:
    """How often each distinct fault is seen by uniform tests that belong to no campaign."""
    target, seeds = subject(row)
    settings = {**options(row), "policy": "random", "uniform_share": 1.0}
    run = themis.run(target, seeds, ROWS[row][1], max_tests=n_tests, random_seed=POOL_SEED + part, **settings)
    return Counter(pairs_of(run))


def run_campaign(row: str, policy: str, n_tests: int, random_seed: int) -> tuple[Pairs, list[Estimate]]:
    """The distinct faults that a campaign saw, and what it and the simpler estimates state."""
    target, seeds = subject(row)
    criterion: dict[str, Any] = {"criterion": "kmnc"} if policy == "fuzz" else {}
    run = themis.run(
        target, seeds, ROWS[row][1], policy=policy, max_tests=n_tests, random_seed=random_seed,
        **options(row), **criterion,
    )  # fmt: skip
    pairs = pairs_of(run)
    stream = run.faults.columns["stream"].tolist() if pairs else []
    searched = {pair for pair, of in zip(pairs, stream, strict=True) if of == "search"}
    times = Counter(pair for pair, of in zip(pairs, stream, strict=True) if of == "uniform" and pair not in searched)
    all_tests = unseen_mass(list(times.values()), round(0.2 * n_tests))
    estimates = [run.residual_risk, all_tests, run.residual_risk_uniform]
    assert None not in estimates
    return list(set(pairs)), estimates  # type: ignore[return-value]


def work(task: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return (run_pool if task[0] == "pool" else run_campaign)(*task[1:])


def describe(outcomes: list[tuple[float, list[Estimate]]]) -> dict[str, dict[str, float]]:
    truth = np.array([each for each, _ in outcomes])
    figures = {}
    for k, name in enumerate(("stated", "all tests", "uniform")):
        value, low, high = (
            np.array([getattr(each[k], end) for _, each in outcomes]) for end in ("value", "low", "high")
        )
        figures[name] = {
            "truth": truth.mean(), "value": value.mean(), "low": low.mean(), "high": high.mean(),
            "holds": ((low <= truth) & (truth <= high)).mean(),
            "truth_above": (truth > high).mean(), "truth_below": (truth < low).mean(),
        }  # fmt: skip
    return {name: {key: round(float(each), 5) for key, each in of.items()} for name, of in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=int, default=1)
    add_quick(parser)
    parser.add_argument("--campaigns", type=int)
    parser.add_argument("--tests", type=int, nargs="+")
    parser.add_argument("--rows", nargs="+", help=", ".join(ROWS))
    parser.add_argument("--policies", nargs="+", help=", ".join(POLICIES))
    parser.add_argument("--pool", type=int, help="fresh uniform tests per row")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not os.environ.get("THEMIS_DATA"):
        print("skipped: this benchmark needs real data; set THEMIS_DATA to the data folder")
        return
    arguments = complete(arguments, QUICK, FULL)
    console, n_parts = Console(), max(1, min(8, arguments.processes))
    cells = [(row, policy, n) for row in arguments.rows for policy in arguments.policies for n in arguments.tests]
    pools = [("pool", row, part, arguments.pool // n_parts) for row in arguments.rows for part in range(n_parts)]
    tasks = [("campaign", *cell, k) for cell in cells for k in range(arguments.campaigns)]
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as executor:
        pooled = list(zip(pools, executor.map(work, pools), strict=True))
        results = executor.map(work, tasks, chunksize=4)
        none: Counter[tuple[int, int]] = Counter()
        pool = {row: sum((each for task, each in pooled if task[1] == row), none) for row in arguments.rows}
        table, figures = Table(), {}
        for head in ("row", "policy", "tests", "truth", "stated", "holds", "all tests", "holds", "uniform", "holds"):
            table.add_column(head, justify="right" if head not in ("row", "policy") else "left")
        for cell in cells:
            outcomes = []
            for _ in range(arguments.campaigns):
                seen, estimates = next(results)
                missing = pool[cell[0]].total() - sum(pool[cell[0]][pair] for pair in seen)
                outcomes.append((missing / (arguments.pool // n_parts * n_parts), estimates))
            figure = figures[" | ".join(map(str, cell))] = describe(outcomes)
            shown = [f"{figure['stated']['truth']:.2%}"]
            for name in ("stated", "all tests", "uniform"):
                shown += [f"{figure[name]['value']:.2%}", f"{figure[name]['holds']:.1%}"]
            table.add_row(*map(str, cell), *shown)
            console.print(*cell, *shown)
    console.print(table)
    if arguments.json:
        write_results(arguments.json, "cpu", {"campaigns": arguments.campaigns, "cells": figures})


if __name__ == "__main__":
    main()
