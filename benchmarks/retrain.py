"""Retraining on inputs chosen by different techniques: the score on judge seeds, with the same recipe and compute.

    THEMIS_DATA=FOLDER python benchmarks/retrain.py [--device cuda] [--workers 12] [--json FILE]

Each technique searches the same seeds with the same number of passes and chooses the same number of inputs. A copy of
the model is trained on each choice and on clean inputs of the training data, and judged on other test seeds by the
same uniform tests, once per random seed. Intervals of the difference between themis and a rival are Student's t
intervals over random seeds, paired. With `--json`, results that the file already has are not computed again. On a
CPU, `--quick` is the default: LeNet-5 and the PDF model, one random seed. `--pack FILE` writes models and data to
one file, which `--packed FILE` reads on a machine without the data folder.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
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
from searching.packs import ModelWithData, load_model, read_pack, write_pack

from themis.errors import ThemisError
from themis.perturb import choose_perturbation
from themis.retraining.recipe import Recipe
from themis.target.ledger import Ledger
from themis_lab.contest.cells import Case, Contest, failed_cell
from themis_lab.contest.plan import ContestCell, ContestPlan, choose_competitor
from themis_lab.contest.standings import show, summarise
from themis_lab.executors import Failure, attempt

EVERY = 10
"""The intervals of an incomplete row are updated after this many cells."""
TECHNIQUES = "themis,nc,kmnc,idc,lsa,random,corners"
QUICK: dict[str, Any] = {"rows": ["lenet5 gaussian*", "pdf edit"], "random_seeds": 1, "share": 0.3}
FULL: dict[str, Any] = {"rows": ["*"], "random_seeds": 5, "share": 1.0}


@dataclass(frozen=True)
class Row:
    """One setting. Passes are those after the clean passes; inputs are those that each technique chooses."""

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
"""Within a tenth of the label: the default of two standard deviations leaves no room for a gain on the drive."""
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
"""In the order in which they are run: noise on every model first, attacks (the slowest) later."""


@dataclass(frozen=True)
class Setting:
    """The device of a row, and the share of the seeds that is used."""

    row: Row
    device: str
    packed: str | None
    share: float

    def case(self) -> Case:
        loaded = _model(self.row.model, self.device, self.packed)
        parts = loaded.parts(self.share)
        target = loaded.with_settled_oracle(self.row.oracle, parts.search)
        perturbation = choose_perturbation(self.row.perturbation, self.row.magnitude)
        return Case(target, parts, perturbation, Ledger(), parts.train)

    def plan(self, n_search: int, inputs: int | None = None, **options: Any) -> ContestPlan:
        """The plan of a contest; passes are counted from the end of the clean passes."""
        row, passes = self.row, round(self.row.passes * self.share) + n_search + 5
        return ContestPlan.of(inputs=inputs, most_inputs=row.most_inputs, passes=passes, draws=row.draws, **options)


@cache
def _model(model: str, device: str, packed: str | None) -> ModelWithData:
    return load_model(model, device) if packed is None else read_pack(packed, model, device)


@lru_cache(2)
def _contest(setting: Setting, inputs: int | None) -> Contest:
    case = setting.case()
    return Contest(case, setting.plan(len(case.parts.search), inputs), Recipe.of(**RECIPES[setting.row.recipe]))


def count(setting: Setting) -> tuple[int, dict[str, Any], Any]:
    """The number of inputs to choose (the distinct faults that themis finds), the recipe, and the original reading."""
    torch.set_num_threads(1)
    contest = _contest(setting, None)
    return contest.inputs(), contest.recipe.as_dict(), contest.before()


def run(setting: Setting, inputs: int, technique: str, random_seed: int) -> dict[str, Any]:
    """One cell: a technique on a row with one random seed."""
    torch.set_num_threads(1)
    cell = ContestCell(choose_competitor(technique), random_seed)
    outcome = attempt(_contest(setting, inputs).run, cell)
    return failed_cell(cell, outcome.reason) if isinstance(outcome, Failure) else outcome


def contest(settings: list[Setting], results: dict[str, Any], arguments: argparse.Namespace, console: Console) -> None:
    """Run missing cells, ordered by random seed within a row, and show each row as soon as it is complete."""
    names = [technique.name for technique in ContestPlan(techniques=arguments.techniques).chosen()]
    running: dict[Future[dict[str, Any]], Setting] = {}
    start, left, before = perf_counter(), {}, {}
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        counted = [(setting, pool.submit(count, setting)) for setting in settings]
        for setting, counting in counted:
            name = setting.row.name
            try:
                inputs, recipe, before[name] = counting.result()
            except ThemisError as error:  # the other rows are not affected
                console.print(f"{name} failed: {error}", highlight=False)
                continue
            row = results["rows"].setdefault(name, {"row": asdict(setting.row), "cells": []})
            inputs = row.setdefault("inputs", inputs)
            row |= {"before": before[name].as_dict(), "recipe": recipe}
            finished = {(cell["technique"], cell["random_seed"]) for cell in row["cells"]}
            pairs = ((technique, k) for k in range(arguments.random_seeds) for technique in names)
            cells = [pair for pair in pairs if pair not in finished]
            left[name] = len(cells)
            running |= {pool.submit(run, setting, inputs, *cell): setting for cell in cells}
            if not cells:
                _conclude(setting, row, before[name], arguments, console)
        for n_done, done in enumerate(as_completed(running), 1):
            setting, record = running[done], done.result()
            row, name = results["rows"][setting.row.name], setting.row.name
            row["cells"].append(record)
            left[name] -= 1
            console.print(_progress(setting, record, n_done, len(running), perf_counter() - start), highlight=False)
            if not left[name] or n_done % EVERY == 0:
                _conclude(setting, row, before[name], arguments, None if left[name] else console)
            _write(arguments, results)
    _write(arguments, results)


def _progress(setting: Setting, record: dict[str, Any], n_done: int, n: int, seconds: float) -> str:
    """One line about a cell."""
    prefix = (
        f"{n_done}/{n} {seconds:.0f} s  {setting.row.name}: {record['technique']}, random seed {record['random_seed']}"
    )
    if "error" in record:
        return f"{prefix} failed: {record['error']}"
    seconds_text = ", ".join(f"{name} {value:.1f}" for name, value in record["seconds"].items())
    reading = record["reading"]
    return f"{prefix}: disturbed {reading['disturbed']:.4f}, clean {reading['clean']:.4f} ({seconds_text} s)"


def _conclude(setting: Setting, row: dict[str, Any], reading: Any, arguments: Any, console: Console | None) -> None:
    """Add the intervals of a row, and print its table if there is a console."""
    plan = setting.plan(0, row["inputs"], techniques=arguments.techniques, random_seeds=arguments.random_seeds)
    recipe = Recipe.of(**row["recipe"])
    result = summarise(setting.row.name, plan, recipe, reading, row["cells"], {})
    row["standings"] = [asdict(standing) for standing in result.standings]
    if console is not None:
        console.print()
        show(result, console)


def _write(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    if arguments.json:
        write_results(arguments.json, arguments.device, results)


def aims(results: dict[str, Any], console: Console) -> None:
    """Show all rows: themis compared with its best rival, and the change of the clean score."""
    from rich.table import Table

    table = Table(title="themis against its best rival, points of disturbed score")
    for head in ("row", "before", "themis", "best rival", "above by (random and judge seeds)", "clean change"):
        table.add_column(head, justify="left" if head in ("row", "best rival") else "right")
    for name, row in results["rows"].items():
        standings = [standing for standing in row.get("standings", []) if standing["shifts"]]
        own = next((standing for standing in standings if standing["technique"] == "themis"), None)
        rivals = [standing for standing in standings if standing["technique"] != "themis"]
        if own is None or not rivals:
            continue
        best = max(rivals, key=lambda rival: rival["shifts"]["disturbed"]["after"])
        lead = (best["lead"] or {}).get("combined")
        low, value, high = (None if lead is None else 100 * lead[end] for end in ("low", "value", "high"))
        lead_text = "-" if lead is None else f"{value:+.2f} ({low:+.2f}..{high:+.2f})"
        disturbed, clean = own["shifts"]["disturbed"], own["shifts"]["clean"]
        table.add_row(
            name,
            f"{100 * disturbed['before']:.2f}",
            f"{100 * disturbed['after']:.2f}",
            f"{best['technique']} {100 * best['shifts']['disturbed']['after']:.2f}",
            lead_text,
            f"{100 * (clean['after'] - clean['before']):+.2f}",
        )
    console.print(table)


def parse() -> argparse.Namespace:
    parser = row_parser(__doc__)
    parser.add_argument("--techniques", default=TECHNIQUES, help="names, separated by commas")
    parser.add_argument("--random-seeds", type=int, help="trainings per technique")
    parser.add_argument("--share", type=float, help="share of the seeds and passes")
    parser.add_argument("--json", help="file for the raw results, rewritten after each training")
    return complete(parser.parse_args(), QUICK, FULL)


def read_results(path: str | None, share: float) -> dict[str, Any]:
    """The results of an earlier call in the file."""
    import json

    if path is None or not os.path.exists(path):
        return {"share": share, "rows": {}}
    results: dict[str, Any] = json.loads(Path(path).read_text())["results"]
    if results["share"] != share:
        sys.exit(f"{path} must hold contests on {share} of the seeds, but it has {results['share']}: give another file")
    for row in results["rows"].values():
        row["cells"] = [cell for cell in row["cells"] if "error" not in cell]
    return results


def main() -> None:
    arguments, console = parse(), Console(width=None if sys.stdout.isatty() else 160)
    rows = [row for row in ROWS if any(fnmatch(row.name, glob) for glob in arguments.rows)]
    if not (os.environ.get("THEMIS_DATA") or arguments.packed):
        print("skipped: this benchmark needs real data; set THEMIS_DATA to the data folder, or pass --packed")
        return
    if arguments.pack:
        write_pack(Path(arguments.pack), {row.model: load_model(row.model, "cpu") for row in rows})
        return
    results = read_results(arguments.json, arguments.share)
    settings = [Setting(row, arguments.device, arguments.packed, arguments.share) for row in rows]
    contest(settings, results, arguments, console)
    aims(results, console)


if __name__ == "__main__":
    main()
