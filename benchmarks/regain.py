"""What retraining regains: themis and its rivals at equal compute and at an equal loss of clean score.

    THEMIS_DATA=FOLDER python benchmarks/regain.py [--device cuda] [--workers 6] [--json FILE]

Every technique gets the same number of passes (a forward is 1, a backward 2; search, attacks and the old model's
answers included), the same training seeds and the same optimiser. Each is then moved along its own frontier to the
highest disturbed score whose clean loss, on held-out seeds, is at most the tolerance, and graded on judge seeds that no
technique has searched, trained or chosen on. Intervals are over judge seeds, paired by seed, and over random seeds.
On a CPU, `--quick` is the default: the table models, two techniques, one random seed. `--pack FILE` writes models and
data to one file, which `--packed FILE` reads on a machine without the data folder.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from searching import packs
from searching.arguments import complete, row_parser
from searching.files import write_results
from torch import Tensor

from themis.compute.rng import Rng
from themis.experiments.contest.cells import pack, unpack
from themis.experiments.contest.choosing import choose_competitor, choose_tests, fit_criterion, run_technique
from themis.experiments.retraining.changes import paired
from themis.experiments.retraining.examine import examine
from themis.experiments.retraining.frontier import next_point
from themis.experiments.retraining.material import Material, of_tests
from themis.experiments.retraining.recipe import Recipe
from themis.experiments.retraining.tune import tune
from themis.perturb import Context, Perturbation, Theta, choose_perturbation
from themis.target.ledger import Ledger

BASELINES = ("nc", "kmnc", "idc", "lsa")
TECHNIQUES = ("themis", "random", "augmix", "pgd", *BASELINES)
VARIANTS: dict[str, dict[str, Any]] = {
    "themis": {},
    "themis undistilled": {"distill": 0.0},
    "themis unsteered": {"steer": 0.0},
    "themis updated": {"statistics": "update"},
    "themis updated undistilled": {"statistics": "update", "distill": 0.0},
    "themis sgd": {"optimiser": "sgd", "learning_rate": 0.01},
    "themis sgd updated undistilled": {
        "optimiser": "sgd",
        "learning_rate": 0.01,
        "statistics": "update",
        "distill": 0.0,
    },
    "random": {"steer": 0.0, "distill": 0.0},
    "augmix": {"steer": 0.0, "distill": 0.0},
    "pgd": {"steer": 0.0, "distill": 0.0},
    **{name: {"fresh": 0.0, "steer": 0.0, "distill": 0.0} for name in BASELINES},
}
"""Options of the recipe that differ from its defaults."""
QUICK: dict[str, Any] = {"rows": ["pdf edit"], "random_seeds": 1, "share": 0.3, "techniques": "themis,random"}
FULL: dict[str, Any] = {"rows": ["*"], "random_seeds": 3, "share": 1.0, "techniques": ",".join(TECHNIQUES)}
SEEDS = {"resnet56-cifar10": (5_000, 8_000), "dave2-udacity": (500, 250)}
"""Maximum numbers of test seeds and training inputs."""
TOLERANCE = 0.0025
EPOCHS = 10
DRAWS = 5
N_CHOSEN = 1_000
"""Inputs that a criterion selects, at most."""


@dataclass(frozen=True)
class Row:
    """One setting; passes are those of the whole retraining."""

    name: str
    model: str
    perturbation: str
    magnitude: float | None
    passes: int
    batch_size: int = 64
    learning_rate: float = 3e-4
    oracle: str | None = None
    attack: tuple[str, float] = ("pgd", 2 / 255)
    """The perturbation of adversarial training."""


NEAR = "regression:0.1"
ROWS = (
    Row("resnet56 gaussian 0.1", "resnet56-cifar10", "gaussian", 0.1, 350_000, 128),
    Row("resnet56 fog", "resnet56-cifar10", "fog", None, 350_000, 128),
    Row("pdf table_noise 0.3", "mlp-pdf", "table_noise", 0.3, 200_000, attack=("edit_worst", 3.0)),
    Row("pdf edit", "mlp-pdf", "edit", 3.0, 200_000, attack=("edit_worst", 3.0)),
    Row("drebin edit", "mlp-drebin", "edit", 3.0, 200_000, attack=("edit_worst", 3.0)),
    Row("dave2 fog", "dave2-udacity", "fog", None, 60_000, oracle=NEAR),
    Row("lenet5 gaussian 0.8", "lenet5-mnist", "gaussian", 0.8, 200_000, attack=("pgd", 0.15)),
)


@cache
def load(model: str, device: str, packed: str | None) -> packs.ModelWithData:
    packs.SEEDS = {**packs.SEEDS, **SEEDS}
    return packs.load_model(model, device) if packed is None else packs.read_pack(packed, model, device)


@dataclass(frozen=True)
class Cell:
    """A technique on a row with one random seed."""

    row: Row
    technique: str
    random_seed: int
    device: str
    packed: str | None
    share: float


def run(cell: Cell) -> dict[str, Any]:
    """Train and grade one cell."""
    torch.set_num_threads(1)
    row, start = cell.row, perf_counter()
    loaded = load(row.model, cell.device, cell.packed)
    parts = loaded.parts(cell.share)
    target = loaded.with_settled_oracle(row.oracle, parts.search)
    perturbation = choose_perturbation(row.perturbation, row.magnitude)
    before = examine(target, parts.judge, perturbation, ledger=Ledger(), draws=DRAWS, passes=0)
    trained_on = {"augmix": AUGMIX, "pgd": choose_perturbation(*row.attack)}.get(cell.technique, perturbation)
    material, spent = _material(cell, target, parts, perturbation)
    recipe = Recipe.of(
        batch_size=row.batch_size,
        learning_rate=row.learning_rate,
        epochs=EPOCHS,
        patience=None,
        tolerance=TOLERANCE,
        random_seed=cell.random_seed,
    )
    recipe = replace(recipe, **VARIANTS[cell.technique])
    n_clean, _, n_fresh = recipe.counts()
    per_batch = 3 * row.batch_size + n_fresh * trained_on.passes + n_clean * (recipe.distill > 0)
    recipe = replace(recipe, batches=max(1, round((row.passes * cell.share - spent) / EPOCHS / per_batch)))
    assert not isinstance(target.oracle, str)  # it is settled
    began = perf_counter()
    tuned = tune(target, material, perturbation, recipe, oracle=target.oracle, fresh_from=trained_on)
    trained = perf_counter()
    after = examine(tuned.target, parts.judge, perturbation, ledger=tuned.ledger, draws=DRAWS, passes=0)
    return {
        "technique": cell.technique,
        "random_seed": cell.random_seed,
        "share": tuned.frontier[tuned.chosen].share,
        "clean": after.clean_score,
        "disturbed": after.disturbed_score,
        "clean_before": before.clean_score,
        "disturbed_before": before.disturbed_score,
        "judge_seeds": len(parts.judge),
        "batches": recipe.batches,
        "passes_of_search": spent,
        "passes": round(spent + recipe.batches * EPOCHS * per_batch),
        "frontier": [asdict(point) for point in tuned.frontier],
        "next": next_point(tuned.frontier, tuned.chosen),
        "seconds": {"train": round(trained - began, 2), "all": round(perf_counter() - start, 2)},
        "by_seed": {name: pack(getattr(reading, column)) for name, reading, column in _columns(before, after)},
    }


def _columns(before: Any, after: Any) -> list[tuple[str, Any, str]]:
    pairs = (("before", before), ("after", after))
    return [(f"{column}_{name}", reading, column) for name, reading in pairs for column in ("clean", "disturbed")]


def _material(cell: Cell, target: Any, parts: Any, perturbation: Perturbation) -> tuple[Material, int]:
    """What a technique learns from, and the passes that it spent on it."""
    if cell.technique not in BASELINES:  # all inputs are fresh, so one that is not used will do
        theta = np.array([[theta.low for theta in perturbation.theta]], np.float32)
        zero = np.zeros(1, np.int64)
        return of_tests(zero, theta, zero, parts.search, perturbation, target, clean=parts.train), 0
    technique = choose_competitor(cell.technique)
    passes = round(0.02 * cell.row.passes * cell.share) + len(parts.search)
    executed = run_technique(
        technique,
        target,
        parts.search,
        perturbation,
        passes=passes,
        random_seed=cell.random_seed,
        criterion=fit_criterion(technique, target, parts.train),
        round_size=160,
    )
    tests = executed.tests[choose_tests(executed, N_CHOSEN)]
    chosen = (tests.seed, tests.theta, tests.noise_seed)
    return of_tests(*chosen, parts.search, perturbation, target, clean=parts.train), executed.passes


def mix_augmentations(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Mix three random chains of geometric and tonal changes with the input, as AugMix does."""
    n, strength = len(inputs), theta[:, 0]
    weights = -rng.uniform(3).clamp_min(1e-6).log()
    weights = weights / weights.sum(1, keepdim=True)
    kept = rng.uniform(1).view(n, 1, 1, 1)
    mixed = torch.zeros_like(inputs)
    for chain in range(3):
        draws = rng.uniform(8)
        angle, shear, x, y = ((2 * draws[:, k] - 1) * strength * most for k, most in enumerate((0.5, 0.3, 0.3, 0.3)))
        is_used = (draws[:, 4:8] < 0.5).to(inputs)
        angle, shear, x, y = (value * is_used[:, k] for k, value in enumerate((angle, shear, x, y)))
        matrix = torch.stack(
            [
                torch.stack([angle.cos(), shear - angle.sin(), x], 1),
                torch.stack([angle.sin(), angle.cos(), y], 1),
            ],
            1,
        )
        grid = F.affine_grid(matrix, list(inputs.shape), align_corners=False)
        moved = F.grid_sample(inputs, grid, padding_mode="reflection", align_corners=False)
        tone = rng.uniform(3)
        levels = (2 ** (8 - (4 * strength * tone[:, 0]).round())).view(n, 1, 1, 1)
        posterised = (moved * levels).round() / levels
        inverted = torch.where(moved > 1 - 0.5 * strength.view(n, 1, 1, 1) * tone[:, 1:2, None, None], 1 - moved, moved)
        kind = tone[:, 2].view(n, 1, 1, 1)
        changed = torch.where(kind < 1 / 3, posterised, torch.where(kind < 2 / 3, inverted, moved))
        mixed = mixed + weights[:, chain].view(n, 1, 1, 1) * changed
    return kept * inputs + (1 - kept) * mixed


AUGMIX = Perturbation("augmix", (Theta("strength", 0, 1),), mix_augmentations, inputs="picture", has_identity=False)


def summarise(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Before and after of each technique, and by how much themis is above it, with 95% intervals."""
    by_technique: dict[str, list[dict[str, Any]]] = {}
    for cell in sorted(cells, key=lambda cell: cell["random_seed"]):
        by_technique.setdefault(cell["technique"], []).append(cell)

    def column(technique: str, name: str) -> Any:
        return np.stack([unpack(cell["by_seed"][name]) for cell in by_technique[technique]])

    standings = {}
    for technique in by_technique:
        standing: dict[str, Any] = {"shares": [cell["share"] for cell in by_technique[technique]]}
        for score in ("clean", "disturbed"):
            standing[score] = asdict(
                paired(column(technique, f"{score}_before")[0], column(technique, f"{score}_after"))
            )
        if technique != "themis" and "themis" in by_technique:
            theirs, own = column(technique, "disturbed_after"), column("themis", "disturbed_after")
            n = min(len(theirs), len(own))
            standing["themis_above_by"] = asdict(paired(theirs[:n].mean(0), own[:n]))
        standings[technique] = standing
    rivals = [technique for technique in BASELINES if technique in by_technique]
    if rivals and "themis" in by_technique:
        mean = np.mean([column(technique, "disturbed_after").mean(0) for technique in rivals], 0)
        standings["mean of the baselines"] = {
            "themis_above_by": asdict(paired(mean, column("themis", "disturbed_after")))
        }
    return standings


def parse() -> argparse.Namespace:
    parser = row_parser(__doc__)
    parser.add_argument("--techniques", help=f"names, separated by commas: {', '.join(VARIANTS)}")
    parser.add_argument("--random-seeds", type=int, help="trainings per technique")
    parser.add_argument("--share", type=float, help="share of the seeds and passes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no training after this time")
    parser.add_argument("--json", help="file for the raw results, rewritten after each training")
    return complete(parser.parse_args(), QUICK, FULL)


def main() -> None:
    arguments, start = parse(), perf_counter()
    if not (os.environ.get("THEMIS_DATA") or arguments.packed):
        print("skipped: this benchmark needs real data; set THEMIS_DATA to the data folder, or pass --packed")
        return
    rows = [row for row in ROWS if any(fnmatch(row.name, glob) for glob in arguments.rows)]
    if arguments.pack:
        packs.SEEDS = {**packs.SEEDS, **SEEDS}
        packs.write_pack(Path(arguments.pack), list(dict.fromkeys(row.model for row in rows)))
        return
    names = [name.strip() for name in arguments.techniques.split(",")]
    if unknown := [name for name in names if name not in VARIANTS]:
        sys.exit(f"techniques must be among {', '.join(VARIANTS)}, got {unknown[0]!r}")
    cells = [
        Cell(row, name, random_seed, arguments.device, arguments.packed, arguments.share)
        for random_seed in range(arguments.random_seeds)
        for row in rows
        for name in names
        if name != "augmix" or not row.model.startswith("mlp")
    ]
    results: dict[str, Any] = {"share": arguments.share, "rows": {row.name: {"cells": []} for row in rows}}
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(_within, arguments.seconds, start, cell): cell for cell in cells}
        for done in as_completed(running):
            cell, row = running[done], results["rows"][running[done].row.name]
            record = done.result() if done.exception() is None else {"error": repr(done.exception())}
            if record is None:
                continue
            title = f"{perf_counter() - start:.0f} s  {cell.row.name}: {cell.technique}, random seed {cell.random_seed}"
            if "error" in record:
                row.setdefault("errors", []).append({"technique": cell.technique, **record})
                print(f"{title} failed: {record['error']}", flush=True)
            else:
                row["cells"].append(record)
                print(
                    f"{title}: disturbed {100 * record['disturbed_before']:.2f} -> {100 * record['disturbed']:.2f}, "
                    f"clean {100 * record['clean_before']:.2f} -> {100 * record['clean']:.2f}, share "
                    f"{record['share']:g}, {record['seconds']['all']:.0f} s",
                    flush=True,
                )
                row["standings"] = summarise(row["cells"])
            if arguments.json:
                write_results(arguments.json, arguments.device, results)


def _within(seconds: float, start: float, cell: Cell) -> dict[str, Any] | None:
    """The result of a cell; None if the time is over."""
    return None if perf_counter() - start > seconds else run(cell)


if __name__ == "__main__":
    main()
