"""How near to the counted fall of the clean score the expected one is kept when a retraining chooses its point.

    THEMIS_DATA=FOLDER python benchmarks/reach.py [--no-quick] [--json FILE]
    python benchmarks/reach.py --table FILE

Small networks are trained as `themis retrain` does. Of test seeds that no part of a training has seen, subsets stand
for the seeds held out: by each, the fall of the clean score is counted and expected, and a share of the way is chosen;
all of them say what it regains and loses. The expected fall is kept within a number of standard errors of the counted
one; 0 is counting alone. Without `--no-quick`, only the smallest network is trained.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from regain import TOLERANCE, Cell, Row, grade, load
from regain import _material as material_of
from searching.files import write_results
from torch import Tensor

from themis.measure.sweep import clean_outputs
from themis.oracle import Wrong
from themis.retraining.frontier import SHARES, mean_fall
from themis.retraining.grading import CHUNK, expected_grades
from themis.retraining.grading import grade as grade_answers
from themis.retraining.recipe import Recipe, named_perturbation
from themis.retraining.tune import tune

ROWS = (
    ("mlp-drebin", "edit:3.0", 0),
    ("mlp-drebin", "edit:3.0", 1),
    ("lenet1-mnist", "fog", 0),
    ("cnn-mnist", "fog", 0),
    ("cnn-mnist", "fog", 1),
    ("cnn-mnist", "gaussian:0.8", 0),
    ("cnn-mnist", "gaussian:0.8", 1),
)
"""Networks, perturbations and random seeds."""
REACHES = (0.0, 0.5, 1.0, 2.0, inf)
"""Standard errors of the counted fall."""
N_DRAWS = 100
MOST = 4_000
"""Judge seeds, from which subsets are drawn."""


def choose(falls: Any, disturbed: list[float]) -> float:
    """The share with the highest disturbed score at which the clean score falls by at most the tolerance."""
    fine = np.linspace(0, 1, 101)
    within = fine[(np.interp(fine, SHARES, falls) <= TOLERANCE) | (fine == 0)]
    return float(within[np.interp(within, SHARES, disturbed).argmax()])


def judge(outputs: list[Tensor], labels: Tensor, disturbed: list[float], n_held: int) -> dict[str, Any]:
    """For every reach, how many choices by `n_held` seeds regain 95% of the best, and how many lose too much."""
    oracle, rng = Wrong(), np.random.default_rng(0)
    right = torch.stack([grade_answers(oracle, each, labels) for each in outputs])
    falls = (right[0] - right).mean(1).numpy()
    best = np.interp(choose(falls, disturbed), SHARES, disturbed) - disturbed[0]
    enough, far = (dict.fromkeys(REACHES, 0) for _ in range(2))
    for _ in range(N_DRAWS):
        rows = torch.from_numpy(rng.permutation(len(labels))[:n_held])
        expected = [expected_grades(oracle, each[rows], labels[rows]) for each in outputs]
        guesses = np.array([mean_fall(expected[0], each, None)[0] for each in expected])
        counted, errors = np.array([mean_fall(right[0, rows], each, None) for each in right[:, rows]]).T
        for reach in REACHES:
            most = reach * np.hypot(errors, 1 / n_held)
            share = choose(np.clip(guesses, counted - most, counted + most), disturbed)
            enough[reach] += int(np.interp(share, SHARES, disturbed) - disturbed[0] >= 0.95 * best)
            far[reach] += int(np.interp(share, SHARES, falls) > 2 * TOLERANCE)
    counts = {"enough": enough, "far": far}
    shares = {name: {f"{reach:g}": int(n) / N_DRAWS for reach, n in each.items()} for name, each in counts.items()}
    return {"seeds": len(labels), "held_out": n_held, "falls": falls.tolist(), "disturbed": disturbed, **shares}


def train(model: str, name: str, random_seed: int) -> list[dict[str, Any]]:
    """Train one network; judge choices by as many seeds as one training holds out, and by twice as many."""
    searched = 1_000 if model == "mlp-drebin" else 2_000
    row = Row(f"{model} {name}", model, (name,), 0, draws=1, searched=searched)
    loaded = load(model, "cpu", None, searched)
    parts = loaded.parts(1.0, None, searched)
    parts = replace(parts, judge=parts.judge[torch.arange(min(MOST, len(parts.judge)))])
    target, perturbations = loaded.with_settled_oracle(None, parts.search), {name: named_perturbation(name)}
    material, _ = material_of(Cell(row, "themis", 0, "cpu", None, 1.0), target, parts, perturbations)
    recipe = Recipe.of(epochs=5, batches=80, patience=None, random_seed=random_seed)
    tuned = tune(target, material, perturbations, recipe)
    outputs, disturbed = [], []
    for share in SHARES:
        moved = tuned.at(share)
        disturbed.append(float(grade(row, moved.target, parts, moved.ledger)[1].mean()))
        with moved.target.opened(), torch.no_grad():
            outputs.append(clean_outputs(moved.target, parts.judge, CHUNK))
    assert parts.judge.labels is not None  # the zoo's data has them
    return [judge(outputs, parts.judge.labels, disturbed, n) for n in (searched // 2, searched)]


def table(rows: dict[str, list[dict[str, Any]]]) -> str:
    """The results as Markdown; the last row is the mean."""
    named = {0.0: "0 (counted)", inf: "any (expected)"}
    lines = ["| training | " + " | ".join(named.get(reach, f"{reach:g}") for reach in REACHES) + " |"]
    lines.append("|---|" + "---|" * len(REACHES))
    for title, trainings in {**{name: [row] for name, row in rows.items()}, "all": list(rows.values())}.items():
        entries = []
        for reach in REACHES:
            key, sizes = f"{reach:g}", range(len(trainings[0]))
            means = [[np.mean([row[k][name][key] for row in trainings]) for name in ("enough", "far")] for k in sizes]
            entries.append(", ".join(f"{enough:.0%} ({far:.0%})" for enough, far in means))
        lines.append(f"| {title} | {' | '.join(entries)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-quick", action="store_true", help="train all networks")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--table", metavar="FILE", help="print the table of these results, and run nothing")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(Path(arguments.table).read_text())["results"]["rows"]))
        return
    if not os.environ.get("THEMIS_DATA"):
        print("skipped: this benchmark needs the data folder: set THEMIS_DATA")
        return
    torch.set_num_threads(1)
    rows: dict[str, list[dict[str, Any]]] = {}
    for model, name, random_seed in ROWS if arguments.no_quick else ROWS[:1]:
        rows[f"{model} {name} ({random_seed})"] = train(model, name, random_seed)
        print(table(rows), flush=True)
        if arguments.json:
            write_results(arguments.json, "cpu", {"rows": rows})


if __name__ == "__main__":
    main()
