"""Retraining from what techniques choose: score regained on judge seeds, with the same inputs, recipe and compute.

    THEMIS_DATA=FOLDER python benchmarks/retrain.py [--device cuda] [--workers 12] [--json FILE]

Each technique searches the same seeds for the same passes and chooses the same number of inputs; a copy of the model is
trained on each choice and on clean inputs of the training data, and judged on other test seeds by the same uniform
tests. Once a random seed; intervals of themis less a rival are Student's t over random seeds, paired. With `--json`
what the file has is not run again. On a CPU `--quick` is the default: LeNet-5 and the PDF model, two random seeds.
`--pack FILE` keeps models and data in one file, to be read with `--packed FILE` on a machine without the data folder.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import cache, lru_cache
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from searching.arguments import complete, row_parser
from searching.files import write_results
from searching.packs import Held, hold, read_pack, write_pack

from themis.errors import ThemisError
from themis.experiments.contest.cells import Case, Contest, failed_cell
from themis.experiments.contest.choosing import choose_competitor
from themis.experiments.contest.plan import ContestCell, ContestPlan
from themis.experiments.contest.standings import show, summarise
from themis.experiments.executors import Failure, attempt
from themis.experiments.retraining.recipe import Recipe
from themis.perturb import choose_perturbation
from themis.target.ledger import Ledger

EVERY = 10
"""Cells after which a row's intervals are made anew before it is whole."""
TECHNIQUES = "themis,nc,kmnc,idc,lsa,random,corners"
QUICK: dict[str, Any] = {"rows": ["lenet5 gaussian*", "pdf*"], "random_seeds": 2, "share": 0.5}
FULL: dict[str, Any] = {"rows": ["*"], "random_seeds": 5, "share": 1.0}


@dataclass(frozen=True)
class Row:
    """One setting. Passes are those of a campaign after its clean sweep; inputs those that each technique chooses."""

    name: str
    model: str
    perturbation: str
    magnitude: float | None
    passes: int
    recipe: str
    draws: int = 5
    oracle: str | None = None
    most_inputs: int = 2_000


RECIPES: dict[str, dict[str, Any]] = {
    "small": {"epochs": 6, "batch_size": 64, "learning_rate": 1e-3, "fresh": 0.0, "share": 0.5},
    "deep": {"epochs": 5, "batch_size": 128, "learning_rate": 1e-4, "fresh": 0.0, "share": 0.35},
    "drive": {"epochs": 6, "batch_size": 64, "learning_rate": 1e-4, "fresh": 0.0, "share": 0.5},
    "table": {"epochs": 8, "batch_size": 64, "learning_rate": 1e-3, "fresh": 0.0, "share": 0.5},
}
NEAR = "regression:0.1"
"""Within a tenth of the label: the usual two standard deviations leave the drive no room to gain."""
ROWS = (
    Row("lenet5 gaussian 0.8", "lenet5-mnist", "gaussian", 0.8, 4_000, "small"),
    Row("resnet56 gaussian 0.1", "resnet56-cifar10", "gaussian", 0.1, 4_000, "deep"),
    Row("pdf table_noise 0.3", "mlp-pdf", "table_noise", 0.3, 4_000, "table"),
    Row("dave2 gaussian 0.5", "dave2-udacity", "gaussian", 0.5, 3_000, "drive", 5, NEAR),
    Row("resnet56 pgd 2/255", "resnet56-cifar10", "pgd", 2 / 255, 40_000, "deep", 1),
    Row("dave2 pgd 2/255", "dave2-udacity", "pgd", 2 / 255, 30_000, "drive", 1, NEAR),
    Row("lenet5 pgd 0.15", "lenet5-mnist", "pgd", 0.15, 40_000, "small", 1),
    Row("pdf edit_worst", "mlp-pdf", "edit_worst", 3.0, 16_000, "table"),
    Row("resnet56 fog", "resnet56-cifar10", "fog", None, 4_000, "deep"),
    Row("dave2 fog", "dave2-udacity", "fog", None, 3_000, "drive", 5, NEAR),
    Row("lenet5 fog", "lenet5-mnist", "fog", None, 4_000, "small"),
    Row("pdf edit", "mlp-pdf", "edit", 3.0, 4_000, "table"),
)
"""In the order in which they are run: noise on every model first, then attacks, which take longest."""


@dataclass(frozen=True)
class Setting:
    """Where a row is run, and on how much of the seeds."""

    row: Row
    device: str
    packed: str | None
    share: float

    def case(self) -> Case:
        held = _held(self.row.model, self.device, self.packed)
        parts = held.parts(self.share)
        target = held.settled(self.row.oracle, parts.search)
        perturbation = choose_perturbation(self.row.perturbation, self.row.magnitude)
        return Case(target, parts, perturbation, Ledger(), parts.train)

    def plan(self, n_search: int, inputs: int | None = None, **options: Any) -> ContestPlan:
        """Passes are counted from the end of the clean sweep."""
        row, passes = self.row, round(self.row.passes * self.share) + n_search + 5
        return ContestPlan.of(inputs=inputs, most_inputs=row.most_inputs, passes=passes, draws=row.draws, **options)


@cache
def _held(model: str, device: str, packed: str | None) -> Held:
    return hold(model, device) if packed is None else read_pack(packed, model, device)


@lru_cache(2)
def _contest(setting: Setting, inputs: int | None) -> Contest:
    case = setting.case()
    return Contest(case, setting.plan(len(case.parts.search), inputs), Recipe.of(**RECIPES[setting.row.recipe]))


def count(setting: Setting) -> tuple[int, dict[str, Any], Any]:
    """How many inputs each technique is to choose: the distinct faults that themis finds; and the model as it came."""
    torch.set_num_threads(1)
    contest = _contest(setting, None)
    return contest.inputs(), contest.recipe.as_dict(), contest.before()


def run(setting: Setting, inputs: int, technique: str, random_seed: int) -> dict[str, Any]:
    """One cell: a technique on a row, once."""
    torch.set_num_threads(1)
    cell = ContestCell(choose_competitor(technique), random_seed)
    outcome = attempt(_contest(setting, inputs).run, cell)
    return failed_cell(cell, outcome.reason) if isinstance(outcome, Failure) else outcome


def contest(settings: list[Setting], results: dict[str, Any], arguments: argparse.Namespace, console: Console) -> None:
    """Run what is missing, a row's random seeds one after the other, and show each row as soon as it is whole."""
    names = [each.name for each in ContestPlan(techniques=arguments.techniques).chosen()]
    began, running, left, before = perf_counter(), {}, {}, {}
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        counted = [(each, pool.submit(count, each)) for each in settings]
        for setting, counting in counted:
            name = setting.row.name
            try:
                inputs, recipe, before[name] = counting.result()
            except ThemisError as error:  # the other rows stand
                console.print(f"{name} failed: {error}", highlight=False)
                continue
            row = results["rows"].setdefault(name, {"row": asdict(setting.row), "cells": []})
            inputs = row.setdefault("inputs", inputs)
            row |= {"before": before[name].as_dict(), "recipe": recipe}
            kept = {(each["technique"], each["random_seed"]) for each in row["cells"]}
            cells = [(who, k) for k in range(arguments.random_seeds) for who in names if (who, k) not in kept]
            left[name] = len(cells)
            running |= {pool.submit(run, setting, inputs, *cell): setting for cell in cells}
            if not cells:
                _conclude(setting, row, before[name], arguments, console)
        for n_done, done in enumerate(as_completed(running), 1):
            setting, record = running[done], done.result()
            row, name = results["rows"][setting.row.name], setting.row.name
            row["cells"].append(record)
            left[name] -= 1
            console.print(_progress(setting, record, n_done, len(running), perf_counter() - began), highlight=False)
            if not left[name] or n_done % EVERY == 0:
                _conclude(setting, row, before[name], arguments, None if left[name] else console)
            _write(arguments, results)
    _write(arguments, results)


def _progress(setting: Setting, record: dict[str, Any], n_done: int, n: int, seconds: float) -> str:
    """A cell in a line."""
    who = (
        f"{n_done}/{n} {seconds:.0f} s  {setting.row.name}: {record['technique']}, random seed {record['random_seed']}"
    )
    if "error" in record:
        return f"{who} failed: {record['error']}"
    took = ", ".join(f"{name} {each:.1f}" for name, each in record["seconds"].items())
    return f"{who}: disturbed {record['reading']['disturbed']:.4f}, clean {record['reading']['clean']:.4f} ({took} s)"


def _conclude(setting: Setting, row: dict[str, Any], reading: Any, arguments: Any, console: Console | None) -> None:
    """The row's intervals beside its cells, and its table where there is a console."""
    plan = setting.plan(0, row["inputs"], techniques=arguments.techniques, random_seeds=arguments.random_seeds)
    recipe = Recipe.of(**row["recipe"])
    result = summarise(setting.row.name, plan, recipe, reading, row["cells"], {})
    row["standings"] = [asdict(each) for each in result.standings]
    if console is not None:
        console.print()
        show(result, console)


def _write(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    if arguments.json:
        write_results(arguments.json, arguments.device, results)


def aims(results: dict[str, Any], console: Console) -> None:
    """All rows: where themis stands against the best rival, and what became of the clean score."""
    from rich.table import Table

    table = Table(title="themis against its best rival, points of disturbed score")
    for head in ("row", "before", "themis", "best rival", "above by (over random seeds)", "clean change"):
        table.add_column(head, justify="left" if head in ("row", "best rival") else "right")
    for name, row in results["rows"].items():
        standings = [each for each in row.get("standings", []) if each["shifts"]]
        own = next((each for each in standings if each["technique"] == "themis"), None)
        rivals = [each for each in standings if each["technique"] != "themis"]
        if own is None or not rivals:
            continue
        best = max(rivals, key=lambda each: each["shifts"]["disturbed"]["after"])
        lead = (best["lead"] or {}).get("over_runs")
        low, value, high = (None if lead is None else 100 * lead[end] for end in ("low", "value", "high"))
        said = "-" if lead is None else f"{value:+.2f} ({low:+.2f}..{high:+.2f})"
        disturbed, clean = own["shifts"]["disturbed"], own["shifts"]["clean"]
        table.add_row(
            name,
            f"{100 * disturbed['before']:.2f}",
            f"{100 * disturbed['after']:.2f}",
            f"{best['technique']} {100 * best['shifts']['disturbed']['after']:.2f}",
            said,
            f"{100 * (clean['after'] - clean['before']):+.2f}",
        )
    console.print(table)


def parse() -> argparse.Namespace:
    parser = row_parser(__doc__)
    parser.add_argument("--techniques", default=TECHNIQUES, help="by commas")
    parser.add_argument("--random-seeds", type=int, help="trainings each")
    parser.add_argument("--share", type=float, help="of the seeds and passes")
    parser.add_argument("--json", help="file of the raw figures, rewritten after each training")
    return complete(parser.parse_args(), QUICK, FULL)


def read_results(path: str | None, share: float) -> dict[str, Any]:
    """What an earlier call left in the file."""
    import json

    if path is None or not os.path.exists(path):
        return {"share": share, "rows": {}}
    results: dict[str, Any] = json.loads(Path(path).read_text())["results"]
    if results["share"] != share:
        sys.exit(f"{path} must hold contests on {share} of the seeds, it has {results['share']}: name another file")
    for row in results["rows"].values():
        row["cells"] = [each for each in row["cells"] if "error" not in each]
    return results


def main() -> None:
    arguments, console = parse(), Console(width=None if sys.stdout.isatty() else 160)
    rows = [each for each in ROWS if any(fnmatch(each.name, glob) for glob in arguments.rows)]
    if not (os.environ.get("THEMIS_DATA") or arguments.packed):
        print("skipped: it runs on real data; set THEMIS_DATA to the data folder, or pass --packed")
        return
    if arguments.pack:
        write_pack(Path(arguments.pack), list(dict.fromkeys(each.model for each in rows)))
        return
    results = read_results(arguments.json, arguments.share)
    settings = [Setting(each, arguments.device, arguments.packed, arguments.share) for each in rows]
    contest(settings, results, arguments, console)
    aims(results, console)


if __name__ == "__main__":
    main()
