"""Search policies: distinct faults and failing seeds for a given number of passes, or of tests.

    THEMIS_DATA=FOLDER python benchmarks/search.py [--device cuda] [--workers 8] [--json FILE]

All policies, and `fuzz` guided by the paper's four criteria, get the same correctly answered seeds, share of uniform
tests and passes. Passes are counted from the end of the clean passes, of which every policy needs one per seed. A
campaign is run once per random seed; mean, minimum and maximum are shown. With `--json`, campaigns that the file
already has are not run again; `--again POLICY` first drops those of a policy. On a CPU, `--quick` is the default:
LeNet-5 and the PDF model, two random seeds, 5,000 passes.

`--tests 1000` limits campaigns by tests instead, compares them from the 25th test on, and adds rows of attacks (CW,
PGD) whose tests cost many passes; its policies are `random`, `corners` and `scheduled`. A small version for a CPU:

    THEMIS_DATA=FOLDER python benchmarks/search.py --tests 200 --rows 'pdf*' 'drebin*' 'lenet5 g*' 'lenet1 pgd*'

`--holdout 'MODEL|DATA|PERTURBATION|MAGNITUDE'` runs a row of your own, such as `dave2-udacity||rain|` from the zoo or
`mine:model|mine:data|fog|2`; with `--rows`, in addition to those. `--planted` instead shows how often policies find a
small failing region that is known. `--pack FILE` writes models and data to one file, which `--packed FILE` reads on a
machine without the data folder.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from searching.aims import judge, show_aims, show_row
from searching.arguments import complete, row_parser
from searching.campaigns import Task, counts, make_policy, run_tasks
from searching.files import read_results, write_results
from searching.rows import ATTACK_ROWS, ROWS, Row, write_pack

from themis_lab.criteria import PAPER

POLICIES = ("random", "corners", "paper", "scheduled")
QUICK: dict[str, Any] = {"rows": ["lenet5*", "pdf*"], "random_seeds": 2, "passes": 5_000, "seeds": 1_000}
FULL: dict[str, Any] = {"rows": ["*"], "random_seeds": 5, "passes": 20_000, "seeds": 2_000}
FEW_TESTS = ("random", "corners", "scheduled")
"""Policies that are compared with `--tests`."""


def planted(policies: list[str], n_runs: int, console: Console) -> dict[str, dict[str, int]]:
    """The number of campaigns in which each policy finds the known failing region of a model."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
    models = [make() for make in importlib.import_module("hidden").HIDDEN]
    torch.set_num_threads(1)
    console.print(f"Number of campaigns, out of {n_runs}, that found the small failing region")
    table = Table()
    for head in ("model", "region", "passes", *policies):
        table.add_column(head, justify="left" if head == "model" else "right")
    results = {}
    for model in models:
        hits = {
            name: sum(model.finds(lambda name=name: make_policy(name), k) for k in range(n_runs)) for name in policies
        }
        table.add_row(model.name, f"{model.share(400_000):.3%}", f"{model.passes:,}", *map(str, hits.values()))
        results[model.name] = hits
    console.print(table)
    return results


def compare(tasks: list[Task], results: dict[str, Any], arguments: argparse.Namespace, console: Console) -> None:
    """Run missing campaigns, and show each row as soon as it is complete."""
    unit, limit = _limit(arguments)
    at, names = counts(unit, limit), list(dict.fromkeys(task.row.name for task in tasks))
    left = {name: [task for task in tasks if task.row.name == name and task.random_seeds] for name in names}

    def conclude(name: str) -> None:
        row = results["rows"][name]
        techniques, n_ever = row["techniques"], len(row["ever_broken"].split())
        order = [technique for technique in [*arguments.policies, *techniques] if technique in techniques]
        campaigns = {technique: techniques[technique] for technique in order}
        row["aims"] = judge(campaigns, unit, at, n_ever)
        show_row(name, campaigns, unit, at, n_ever, console)

    for name in [name for name in names if not left[name]]:
        conclude(name)
    for task, records, broken in run_tasks([task for name in names for task in left[name]], arguments.workers):
        row = results["rows"].setdefault(task.row.name, {"ever_broken": "", "techniques": {}})
        row["techniques"].setdefault(task.technique, []).extend(records)
        row["techniques"][task.technique].sort(key=lambda record: record["random_seed"])
        row["ever_broken"] = " ".join(map(str, sorted({*map(int, row["ever_broken"].split()), *broken})))
        left[task.row.name].remove(task)
        if not left[task.row.name]:
            conclude(task.row.name)
        if arguments.json:
            write_results(arguments.json, arguments.device, results)
    complete_rows = [name for name in names if name in results["rows"]]
    show_aims({name: results["rows"][name].get("aims", {}) for name in complete_rows}, unit, at, console)


def _limit(arguments: argparse.Namespace) -> tuple[str, int]:
    """What limits campaigns, `passes` or `tests`, and to how many."""
    return ("passes", arguments.passes) if arguments.tests is None else ("tests", arguments.tests)


def parse() -> argparse.Namespace:
    parser = row_parser(__doc__)
    parser.add_argument("--holdout", action="append", default=[], metavar="MODEL|DATA|PERTURBATION|MAGNITUDE")
    parser.add_argument("--policies", nargs="+", help="names, criteria or module:class")
    parser.add_argument("--random-seeds", type=int, help="campaigns per policy")
    parser.add_argument("--passes", type=int)
    parser.add_argument("--tests", type=int, help="limit campaigns by tests instead of passes")
    parser.add_argument("--seeds", type=int, help="correctly answered seeds, a fixed random sample")
    parser.add_argument("--json", help="file for the raw results, rewritten after each technique of a row")
    parser.add_argument("--again", nargs="+", default=[], help="policies whose campaigns in the file are run again")
    parser.add_argument("--planted", action="store_true")
    arguments = parser.parse_args()
    if arguments.policies is None:
        arguments.policies = [*POLICIES, *PAPER] if arguments.tests is None else list(FEW_TESTS)
    if arguments.holdout and arguments.rows is None:
        arguments.rows = []
    return complete(arguments, QUICK, FULL)


def main() -> None:
    arguments, console = parse(), Console(width=None if sys.stdout.isatty() else 160)
    if arguments.planted:
        hits = planted([name for name in arguments.policies if name not in PAPER], 100, console)
        if arguments.json:
            write_results(arguments.json, arguments.device, {"planted": hits})
        return
    known = ROWS if arguments.tests is None else (*ROWS, *ATTACK_ROWS)
    rows = [row for row in known if any(fnmatch(row.name, glob) for glob in arguments.rows)]
    rows += map(Row.of, arguments.holdout)
    if not (os.environ.get("THEMIS_DATA") or arguments.packed or arguments.holdout):
        print("skipped: this benchmark needs real data; set THEMIS_DATA to the data folder, or pass --packed")
        return
    unit, limit = _limit(arguments)
    settings = {unit: limit, "seeds": arguments.seeds}
    results = read_results(arguments.json, settings, arguments.again)
    tasks = []
    for row in rows:
        stored = results["rows"].get(row.name, {"techniques": {}})["techniques"]
        for technique in arguments.policies:
            done = {record["random_seed"] for record in stored.get(technique, [])}
            missing = tuple(k for k in range(arguments.random_seeds) if k not in done)
            threads = 1 if arguments.workers > 1 else None
            options = (unit, limit, arguments.seeds, arguments.device, arguments.packed, threads)
            tasks.append(Task(row, technique, missing, *options))
    if arguments.pack:
        write_pack(Path(arguments.pack), [task.bench for task in tasks])
        return
    compare(tasks, results, arguments, console)


if __name__ == "__main__":
    main()
