"""Checks of campaigns on a GPU: reproducible faults, replay, half precision, and constant memory.

    THEMIS_DATA=FOLDER python benchmarks/gpu.py [--device cuda] [--json FILE]

`--data` and `--weights` are as in paper.py.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from paper import correct_seeds, parse, read_pictures, read_target, write_json
from rich.console import Console
from rich.table import Table

import themis
from themis import Run, Target
from themis.data.seeds import Seeds

TESTS = 4_000
REPLAYED = 100
CAMPAIGNS: dict[str, dict[str, Any]] = {
    "Gaussian, scheduled": {"perturbation": "gaussian", "magnitude": 0.05},
    "FGSM, scheduled": {"perturbation": "fgsm", "magnitude": 1 / 255},
    "Gaussian, paper": {"perturbation": "gaussian", "magnitude": 0.05, "policy": "paper"},
}


def campaign(target: Target, seeds: Seeds, options: dict[str, Any], tests: int = TESTS) -> tuple[Run, float]:
    """A campaign of `tests` tests, and the peak memory of the device in GiB."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    result = themis.run(target, seeds, **options, max_tests=tests, tolerance=1e-12, plateau=None)
    return result, torch.cuda.max_memory_allocated() / 2**30


def same_faults(one: Run, other: Run) -> bool:
    """Whether both runs found exactly the same faults."""
    a, b = one.faults.columns, other.faults.columns
    return a.keys() == b.keys() and all(
        len(a[name]) == len(b[name]) and np.array_equal(a[name], b[name], equal_nan=a[name].dtype.kind == "f")
        for name in a
    )


def check(target: Target, seeds: Seeds, options: dict[str, Any]) -> dict[str, Any]:
    peak_long = campaign(target, seeds, options, 3 * TESTS)[1]
    first, peak = campaign(target, seeds, options)
    second, _ = campaign(target, seeds, options)
    replays = [fault.replay() for fault in first.faults[:REPLAYED]]
    columns = [{(f.id, f.seed_id, f.answer) for f in run.faults} for run in (first, second)]
    return {
        "faults": len(first.faults),
        "distinct_faults": first.rounds[-1].distinct_faults,
        "is_same_table": same_faults(first, second),
        "faults_in_one_only": len(columns[0] ^ columns[1]),
        "near_ties": len(first.near_ties),
        "replayed": len(replays),
        "replays_same": sum(replay.is_same for replay in replays),
        "seconds": first.seconds.total,
        "peak_gib": peak,
        "peak_gib_long": peak_long,
        "coverage_all": first.judged.all,
    }


def main() -> None:
    arguments = parse(__doc__.splitlines()[0])
    if not torch.cuda.is_available():
        print("skipped: this benchmark needs a GPU")
        sys.exit(0)
    device = torch.device("cuda")
    target = read_target(arguments.weights, device)
    seeds = correct_seeds(target, read_pictures(arguments.data))
    results = {name: check(target, seeds, options) for name, options in CAMPAIGNS.items()}
    target = replace(target, module=target.module.half())
    results["Gaussian, scheduled, float16"] = check(target, seeds, CAMPAIGNS["Gaussian, scheduled"])
    table = Table(title=f"{TESTS:,} tests each, ResNet-56, {len(seeds):,} seeds, {torch.cuda.get_device_name()}")
    for column in (
        "campaign",
        "faults",
        "same twice",
        "in one only",
        "replays same",
        "peak GiB",
        "3x tests",
        "seconds",
    ):
        table.add_column(column, justify="left" if column == "campaign" else "right")
    for name, r in results.items():
        table.add_row(
            name, f"{r['faults']:,}", "yes" if r["is_same_table"] else "no", str(r["faults_in_one_only"]),
            f"{r['replays_same']}/{r['replayed']}", f"{r['peak_gib']:.2f}", f"{r['peak_gib_long']:.2f}",
            f"{r['seconds']:.1f}",
        )  # fmt: skip
    Console().print(table)
    if arguments.json:
        write_json(arguments.json, device, results)


if __name__ == "__main__":
    main()
