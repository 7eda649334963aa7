"""Search policies: distinct faults and failing seeds for the passes paid.

    THEMIS_DATA=FOLDER python benchmarks/search.py [--device cuda] [--workers 8] [--json FILE]

All policies, and `fuzz` guided by the paper's four criteria, get the same right-answered seeds, share of uniform tests
and passes. Passes are counted from the end of the clean sweep, which costs all of them one a seed. A campaign is run
once a random seed: mean, least and most are shown. With `--json` what the file has is not run again; `--again POLICY`
drops a policy's campaigns first. On a CPU `--quick` is the default: LeNet-5 and the PDF model, two random seeds, 5,000
passes. `--holdout 'MODEL|DATA|PERTURBATION|MAGNITUDE'` runs a row of your own: `dave2-udacity||rain|` of the zoo, or
`mine:model|mine:data|fog|2`; with `--rows` beside those. `--planted` shows instead how often policies find a small
failing region that is known. `--pack FILE` keeps models and data in one file, to be read with `--packed FILE` on a
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
from searching.rows import ROWS, Row, write_pack

from themis.criteria.names import PAPER

POLICIES = ("random", "corners", "paper", "scheduled")
QUICK: dict[str, Any] = {"rows": ["lenet5*", "pdf*"], "random_seeds": 2, "passes": 5_000, "seeds": 1_000}
FULL: dict[str, Any] = {"rows": ["*"], "random_seeds": 5, "passes": 20_000, "seeds": 2_000}


def planted(policies: list[str], n_runs: int, console: Console) -> dict[str, dict[str, int]]:
    """In how many campaigns each policy finds the failing region of the models that have a known one."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "search"))
    hidden = [make() for make in importlib.import_module("hidden").HIDDEN]
    torch.set_num_threads(1)
    console.print(f"Campaigns of {n_runs} that found the small failing region")
    table = Table()
    for head in ("model", "region", "passes", *policies):
        table.add_column(head, justify="left" if head == "model" else "right")
    results = {}
    for each in hidden:
        found = {
            name: sum(each.finds(lambda name=name: make_policy(name), k) for k in range(n_runs)) for name in policies
        }
        table.add_row(each.name, f"{each.share(400_000):.3%}", f"{each.passes:,}", *map(str, found.values()))
        results[each.name] = found
    console.print(table)
    return results


def compare(tasks: list[Task], results: dict[str, Any], arguments: argparse.Namespace, console: Console) -> None:
    """Run what is missing, and show each row as soon as it is whole."""
    at, names = counts(arguments.passes), list(dict.fromkeys(task.row.name for task in tasks))
    left = {name: [task for task in tasks if task.row.name == name and task.random_seeds] for name in names}
    for name in [name for name in names if not left[name]]:
        _conclude(results["rows"][name], name, arguments.policies, at, console)
    for task, records, broken in run_tasks([each for name in names for each in left[name]], arguments.workers):
        row = results["rows"].setdefault(task.row.name, {"ever_broken": "", "techniques": {}})
        row["techniques"].setdefault(task.technique, []).extend(records)
        row["techniques"][task.technique].sort(key=lambda each: each["random_seed"])
        row["ever_broken"] = " ".join(map(str, sorted({*map(int, row["ever_broken"].split()), *broken})))
        left[task.row.name].remove(task)
        if not left[task.row.name]:
            _conclude(row, task.row.name, arguments.policies, at, console)
        if arguments.json:
            write_results(arguments.json, arguments.device, results)
    whole = [name for name in names if name in results["rows"]]
    show_aims({name: results["rows"][name].get("aims", {}) for name in whole}, at, console)


def _conclude(row: dict[str, Any], name: str, order: list[str], at: list[int], console: Console) -> None:
    found, n_ever = row["techniques"], len(row["ever_broken"].split())
    found = {each: found[each] for each in [*order, *found] if each in found}
    row["aims"] = judge(found, at, n_ever)
    show_row(name, found, at, n_ever, console)


def parse() -> argparse.Namespace:
    parser = row_parser(__doc__)
    parser.add_argument("--holdout", action="append", default=[], metavar="MODEL|DATA|PERTURBATION|MAGNITUDE")
    parser.add_argument("--policies", nargs="+", default=[*POLICIES, *PAPER], help="names, criteria or module:class")
    parser.add_argument("--random-seeds", type=int, help="campaigns each")
    parser.add_argument("--passes", type=int)
    parser.add_argument("--seeds", type=int, help="right-answered seeds, a fixed random sample")
    parser.add_argument("--json", help="file of the raw figures, rewritten after each technique of a row")
    parser.add_argument("--again", nargs="+", default=[], help="policies whose campaigns in the file are run again")
    parser.add_argument("--planted", action="store_true")
    arguments = parser.parse_args()
    if arguments.holdout and arguments.rows is None:
        arguments.rows = []
    return complete(arguments, QUICK, FULL)


def main() -> None:
    arguments, console = parse(), Console(width=None if sys.stdout.isatty() else 160)
    if arguments.planted:
        found = planted([each for each in arguments.policies if each not in PAPER], 100, console)
        if arguments.json:
            write_results(arguments.json, arguments.device, {"planted": found})
        return
    rows = [each for each in ROWS if any(fnmatch(each.name, glob) for glob in arguments.rows)]
    rows += map(Row.of, arguments.holdout)
    if not (os.environ.get("THEMIS_DATA") or arguments.packed or arguments.holdout):
        print("skipped: it runs on real data; set THEMIS_DATA to the data folder, or pass --packed")
        return
    settings = {"passes": arguments.passes, "seeds": arguments.seeds}
    results = read_results(arguments.json, settings, arguments.again)
    tasks = []
    for row in rows:
        kept = results["rows"].get(row.name, {"techniques": {}})["techniques"]
        for technique in arguments.policies:
            done = {each["random_seed"] for each in kept.get(technique, [])}
            missing = tuple(each for each in range(arguments.random_seeds) if each not in done)
            threads = 1 if arguments.workers > 1 else None
            how = (arguments.passes, arguments.seeds, arguments.device, arguments.packed, threads)
            tasks.append(Task(row, technique, missing, *how))
    if arguments.pack:
        write_pack(Path(arguments.pack), [task.bench for task in tasks])
        return
    compare(tasks, results, arguments, console)


if __name__ == "__main__":
    main()
