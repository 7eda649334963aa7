"""Search policies: distinct faults after 5,000 and 20,000 tests on ResNet-56, CIFAR-10.

    THEMIS_DATA=FOLDER python benchmarks/policies.py [--device cuda] [--json FILE]

Every policy gets the same 2,000 correctly classified seeds and the whole budget: no uniform stream, no stop by
coverage. `--data` and `--weights` are as in paper.py. Figures are counted in tests, not in passes: `paper` pays a
backward pass for each of its tests on top.
"""

from __future__ import annotations

from typing import Any

import torch
from paper import correct_seeds, parse, read_pictures, read_target, write_json
from rich.console import Console
from rich.table import Table

import themis
from themis import Target
from themis.data.seeds import Seeds

POLICIES = ("random", "corners", "paper", "scheduled")
AT = (5_000, 20_000)
ROUND_SIZE = 500  # both budgets are whole rounds; near the default of 640
# Perturbation and magnitude, with what a prototype found by random, ascent, corners and its best mix.
ROWS: dict[str, tuple[str, float, dict[str, tuple[int, int]]]] = {
    "Gaussian 0.02": (
        "gaussian", 0.02, {"random": (66, 154), "paper": (89, 271), "corners": (165, 310), "scheduled": (237, 412)},
    ),
    "Gaussian 0.04": (
        "gaussian", 0.04,
        {"random": (273, 592), "paper": (304, 967), "corners": (632, 1093), "scheduled": (773, 1277)},
    ),
    "FGSM 1/255": (
        "fgsm", 1 / 255, {"random": (669, 862), "paper": (613, 920), "corners": (909, 909)},
    ),
}  # fmt: skip


def measure(target: Target, seeds: Seeds, perturbation: str, magnitude: float, policy: str, **more: Any) -> dict:
    """Distinct faults and failing seeds at each of the budgets."""
    never = {"tolerance": 1e-12, "plateau": None, "uniform_share": 0.0, "max_tests": max(AT), "round_size": ROUND_SIZE}
    result = themis.run(target, seeds, perturbation, magnitude=magnitude, policy=policy, **never, **more)
    at = [next(each for each in result.rounds if each.tests == tests) for tests in AT]
    return {
        "policy": policy,
        "tests": list(AT),
        "distinct_faults": [each.distinct_faults for each in at],
        "failing_seeds": [each.failing_seeds for each in at],
        "passes": [each.passes for each in at],
        "kinds": result.kinds,
        "seconds": result.seconds.total,
    }


def show(results: dict[str, list[dict]], console: Console) -> None:
    table = Table(title=f"Distinct faults after {AT[0]:,} / {AT[1]:,} tests (failing seeds); prototype's below")
    table.add_column("perturbation")
    for policy in POLICIES:
        table.add_column(policy, justify="right")
    table.add_column("aim: scheduled best, and the prototype's mix")
    for row, found in results.items():
        prototype = ROWS[row][2]
        by_policy = {each["policy"]: each for each in found}
        ours = [cell(by_policy[policy]) for policy in POLICIES]
        best = [max(each["distinct_faults"][k] for each in found) for k in range(len(AT))]
        aim = [max(prototype.get("scheduled", (0, 0))[k], best[k]) for k in range(len(AT))]
        is_met = [by_policy["scheduled"]["distinct_faults"][k] >= aim[k] for k in range(len(AT))]
        table.add_row(row, *ours, " / ".join("met" if each else "missed" for each in is_met))
        theirs = ["{:,} / {:,}".format(*prototype[policy]) if policy in prototype else "-" for policy in POLICIES]
        table.add_row("  prototype", *theirs, "", end_section=True)
    console.print(table)


def cell(found: dict) -> str:
    faults, seeds = ("{:,} / {:,}".format(*found[each]) for each in ("distinct_faults", "failing_seeds"))
    return f"{faults} ({seeds})"


def main() -> None:
    arguments = parse(__doc__.splitlines()[0], random_seed=0)
    device = torch.device(arguments.device)
    target = read_target(arguments.weights, device, neurons="channel")
    seeds = correct_seeds(target, read_pictures(arguments.data))
    results = {
        row: [
            measure(target, seeds, perturbation, magnitude, policy, random_seed=arguments.random_seed)
            for policy in POLICIES
        ]
        for row, (perturbation, magnitude, _) in ROWS.items()
    }
    show(results, Console())
    if arguments.json:
        write_json(arguments.json, device, results)


if __name__ == "__main__":
    main()
