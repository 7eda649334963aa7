"""What retraining regains: themis and its rivals at equal compute and at an equal loss of clean score.

    THEMIS_DATA=FOLDER python benchmarks/regain.py [--device cuda] [--workers 6] [--json FILE]
    python benchmarks/regain.py --table FILE [FILE ...]

Every technique gets the same number of passes (a forward is 1, a backward 2; search, attacks and the old model's
answers included), the same training seeds and the same optimiser. Its trainings are then moved along their frontier to
the highest disturbed score whose clean loss, on held-out seeds, is at most the tolerance, and graded on judge seeds
that no technique has searched, trained or chosen on. Differences are paired by judge seed and random seed; intervals
are over both. The results have the frontier of every training, on the held-out seeds and on the judge seeds. With
`--json`, trainings that the file already has are not run again. On a CPU, `--quick` is the default: the PDF model, two
techniques, one random seed. The segmentation of the embedded digits needs no data folder. `--pack FILE` writes models
and data to one file, which `--packed FILE` reads on a machine without the data folder. `--table` prints the table of
results, joined if there are several files.

The rows `choice ...` measure how well the point of the frontier is chosen, the rows `alone ...` what is regained
without training data, and the row `suite ...` the mean corruption error after retraining on several perturbations:
`--no-quick --techniques themis --rows 'choice *' --json FILE`, and then `--table FILE`.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
import zlib
from collections.abc import Iterator
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
from searching import packs, segmenter, trained
from searching.arguments import complete, row_parser
from searching.files import write_results
from torch import Tensor

from themis.compute.rng import Rng
from themis.data.seeds import read_seeds
from themis.measure.tests import Tests
from themis.perturb import Context, Perturbation, Theta
from themis.perturb.attack import PGD_STEPS, with_steps
from themis.retraining.changes import Shift, paired, relative_errors
from themis.retraining.examine import Column, Exam, examine
from themis.retraining.frontier import FrontierPoint, choose_share, join_frontiers
from themis.retraining.grading import picture_kind
from themis.retraining.material import Material, join_material, of_tests
from themis.retraining.recipe import Recipe, named_perturbation
from themis.retraining.tune import TrainedModel, tune
from themis.runs.parts import Parts
from themis.target.ledger import Ledger
from themis.target.target import Target
from themis_lab.contest.cells import choose_tests, fit_criterion, run_technique
from themis_lab.contest.plan import choose_competitor
from themis_lab.zoo.datasets import FRAMES_PER_BLOCK

BASELINES = ("nc", "kmnc", "idc", "lsa")
RIVALS = ("random", "augmix", "pgd", *BASELINES)
OWN = "themis"
PLAIN = {"steer": 0.0, "distill": 0.0, "attack_steps": PGD_STEPS}
VARIANTS: dict[str, dict[str, Any]] = {
    OWN: {},
    "themis undistilled": {"distill": 0.0},
    "themis unsteered": {"steer": 0.0},
    "themis labels": {"distill": 0.0, "steer": 0.5},
    "themis unblended": {"blend": 0.0},
    "themis whole attacks": {"attack_steps": PGD_STEPS},
    "themis updated": {"statistics": "update"},
    "themis sgd": {"optimiser": "sgd", "learning_rate": 0.01},
    "themis bfloat16": {"autocast": True},
    "themis rate 6e-4": {"learning_rate": 6e-4},
    "random rate 6e-4": {**PLAIN, "learning_rate": 6e-4},
    "random": PLAIN,
    "augmix": PLAIN,
    "pgd": PLAIN,
    **{name: {**PLAIN, "fresh": 0.0} for name in BASELINES},
}
"""Options of the recipe that differ from its defaults."""
QUICK: dict[str, Any] = {"rows": ["pdf edit"], "random_seeds": 1, "share": 0.3, "techniques": "themis,random"}
FULL: dict[str, Any] = {"rows": ["*"], "random_seeds": 5, "share": 1.0, "techniques": ",".join((OWN, *RIVALS))}
SEEDS = {"resnet56-cifar10": (5_000, 8_000), "dave2-udacity": (1_100, 4_514)}
"""Maximum numbers of test seeds and training inputs."""
MOST, TRAINED_ON = 10_000, 8_000
"""The same in rows that measure the choice of a point."""
TOLERANCE = 0.0025
EPOCHS = 10
N_CHOSEN = 1_000
"""Inputs that a criterion selects, at most."""
SEARCH = 0.02
"""The share of its passes that a criterion searches with."""


@dataclass(frozen=True)
class Row:
    """One setting; passes are those of the whole retraining."""

    name: str
    model: str
    perturbations: tuple[str, ...]
    passes: int
    batch_size: int = 64
    oracle: str | None = None
    attack: str = f"pgd:{2 / 255!r}"
    """The perturbation of adversarial training."""
    draws: int = 5
    stretch: int | None = None
    """Consecutive seeds that are searched, held out or judged together: a frame hardly differs from the next one."""
    searched: int | None = None
    """The number of seeds that are searched, of all test seeds, which are judged otherwise; None for a smaller set."""
    has_train: bool = True
    """Whether training data are at hand; otherwise only the searched seeds are trained on."""

    def suits(self, technique: str) -> bool:
        """Whether a technique differs from the others here: augmix needs pictures, and drawing an attack is pgd."""
        if technique == "augmix":
            return not self.model.startswith("mlp")
        return technique != "pgd" or self.attack not in self.perturbations


NEAR = "regression:0.1"
"""Within a tenth of the label: the default of two standard deviations leaves no room for a gain on the drive."""
DRIVE: dict[str, Any] = {"oracle": NEAR, "stretch": FRAMES_PER_BLOCK}
"""Stretches of the drive that no technique has searched are judged."""
RESNET, DAVE, LENET = ("resnet56-cifar10", 350_000, 128), ("dave2-udacity", 60_000), ("lenet5-mnist", 200_000)
PDF, EDITED = ("mlp-pdf", 200_000), "edit_worst:3.0"


def _row(name: str, model: tuple[Any, ...], *perturbations: str, **options: Any) -> Row:
    return Row(name, model[0], perturbations, *model[1:], **options)


ROWS = (
    _row("resnet56 gaussian 0.1", RESNET, "gaussian:0.1"),
    _row("resnet56 fog", RESNET, "fog"),
    _row("resnet56 gaussian 0.1 and fog", RESNET, "gaussian:0.1", "fog"),
    _row("dave2 gaussian 0.5", DAVE, "gaussian:0.5", **DRIVE),
    _row("dave2 fog", DAVE, "fog", **DRIVE),
    _row("lenet5 gaussian 0.8", LENET, "gaussian:0.8", attack="pgd:0.15"),
    _row("lenet5 fog", LENET, "fog", attack="pgd:0.15"),
    _row("digits segmentation gaussian 0.3", (segmenter.NAME, 200_000), "gaussian:0.3", attack="pgd:0.15"),
    _row("pdf table_noise 0.3", PDF, "table_noise:0.3", attack=EDITED),
    _row("pdf edit", PDF, "edit:3.0", attack=EDITED),
    _row("drebin edit", ("mlp-drebin", 200_000), "edit:3.0", attack=EDITED),
    _row("pdf edit_worst", PDF, EDITED, attack=EDITED),
    _row("lenet5 pgd 0.15", LENET, "pgd:0.15", attack="pgd:0.15", draws=1),
    _row("dave2 pgd 2/255", DAVE, f"pgd:{2 / 255!r}", **DRIVE, draws=1),
    _row("resnet56 pgd 2/255", RESNET, f"pgd:{2 / 255!r}", draws=1),
)
"""In order of value: attacks, the slowest, come last."""


def pack(column: Column) -> str:
    """Numbers as text: float32 and compressed, since most of them repeat."""
    return base64.b85encode(zlib.compress(column.astype("<f4").tobytes(), 9)).decode()


def unpack(text: str) -> Column:
    """The inverse of `pack`."""
    return np.frombuffer(zlib.decompress(base64.b85decode(text)), "<f4").astype(np.float64)


def _choice(model: str, passes: int, *perturbations: str, searched: int = 2_000) -> Iterator[Row]:
    """A row per perturbation, on which it is measured how well the point of the frontier is chosen."""
    for name in perturbations:
        title = f"choice {model} {name.replace(':', ' ')}"
        yield Row(title, model, (name,), passes, draws=1, searched=searched)


CORRUPTIONS, DEFAULT_PASSES = ("gaussian:0.1", "fog", "jpeg", "motion_blur"), 600_000
"""These passes are what `themis retrain` spends by default on 10,000 seeds."""
CHOICES = (
    *_choice("cnn-mnist", 200_000, "rotate", "gaussian:0.8"),
    *_choice("mlp-drebin", 300_000, "edit:3.0", searched=1_000),
    *_choice("mlp-pdf", 300_000, "table_noise:0.3", "edit_worst:3.0"),
    *_choice("resnet8-cifar10", 200_000, "jpeg", "motion_blur"),
    *_choice("resnet56-cifar10", DEFAULT_PASSES, *CORRUPTIONS),
    *_choice("resnet20-cifar10", DEFAULT_PASSES, *CORRUPTIONS),
)
"""None of these models was in view when the expected fall was chosen to decide how far the weights go."""
ALONE = tuple(
    Row(
        f"alone {model} {name.replace(':', ' ')}, {searched:,} seeds, {passes:,} passes",
        model,
        (name,),
        passes,
        draws=1,
        searched=searched,
        has_train=False,
    )
    for model, name in (
        ("lenet5-mnist", "gaussian:0.8"),
        ("resnet8-cifar10", "jpeg"),
        ("mlp-pdf", "table_noise:0.3"),
        ("mlp-drebin", "edit:3.0"),
    )
    for searched, passes in ((300, 200_000), (1_000, 50_000), (1_000, 200_000), (1_000, 800_000))
)
"""What is regained from the searched seeds alone."""
SUITE = Row("suite resnet56-cifar10", RESNET[0], CORRUPTIONS, *RESNET[1:], draws=1, searched=2_000)
"""A suite that is retrained on as a whole."""
ALL_ROWS = (*ROWS, *CHOICES, *ALONE, SUITE)


@cache
def load(model: str, device: str, packed: str | None, searched: int | None) -> packs.ModelWithData:
    packs.SEEDS = {**packs.SEEDS, **SEEDS} if searched is None else {model: (MOST, TRAINED_ON)}
    if packed is not None:
        return packs.read_pack(packed, model, device)
    if model == segmenter.NAME:
        return segmenter.train_segmenter(device)
    if model in trained.NETWORKS:
        target, test, train = trained.train(model, device)
        return packs.ModelWithData(target, test, read_seeds(train, TRAINED_ON))
    return packs.load_model(model, device)


@dataclass(frozen=True)
class Cell:
    """A technique on a row with one random seed."""

    row: Row
    technique: str
    random_seed: int
    device: str
    packed: str | None
    share: float

    @property
    def passes(self) -> float:
        return self.row.passes * self.share


@cache
def original(row: Row, device: str, packed: str | None, share: float) -> tuple[Target, Parts, Column, Column]:
    """The model of a row, its seeds, and its clean and disturbed grades on the judge seeds."""
    loaded = load(row.model, device, packed, row.searched)
    parts = loaded.parts(share, row.stretch, row.searched)
    if not row.has_train:
        parts = replace(parts, train=parts.train[torch.arange(0)])
    target = loaded.with_settled_oracle(row.oracle, parts.search)
    clean, disturbed = grade(row, target, parts, Ledger())
    return target, parts, clean, disturbed.mean(0)


def grade(row: Row, target: Target, parts: Parts, ledger: Ledger) -> tuple[Column, Column]:
    """Clean grades on the judge seeds, and disturbed ones, `[perturbations, seeds]`."""
    readings = [
        examine(target, parts.judge, named_perturbation(name), Exam(draws=row.draws, passes=0), ledger=ledger)
        for name in row.perturbations
    ]
    return readings[0].clean, np.stack([reading.disturbed for reading in readings])


def run(cell: Cell) -> dict[str, Any]:
    """Train and grade one cell."""
    torch.set_num_threads(1)
    row, start = cell.row, perf_counter()
    target, parts, clean, disturbed = original(row, cell.device, cell.packed, cell.share)
    perturbations = {name: named_perturbation(name) for name in row.perturbations}
    other = {"augmix": AUGMIX, "pgd": named_perturbation(row.attack)}.get(cell.technique)
    recipe = Recipe.of(
        batch_size=row.batch_size,
        epochs=EPOCHS,
        patience=None,
        tolerance=TOLERANCE,
        random_seed=cell.random_seed,
    )
    recipe = replace(recipe, **VARIANTS[cell.technique])
    assert not isinstance(target.oracle, str)  # it is settled
    material, spent = _material(cell, target, parts, perturbations)
    _, _, n_fresh = recipe.counts()
    sources = [with_steps(each, recipe.attack_steps) for each in (perturbations.values() if other is None else [other])]
    attacks = max(source.passes + (source.passes > 0) for source in sources)  # one more shows what to attack
    asks_old_model = recipe.distill > 0 and picture_kind(target.oracle, parts.search) != ""
    spent += (len(parts.train) + len(parts.search)) * asks_old_model
    is_blended = asks_old_model and recipe.blend > 0
    per_batch = (3 + is_blended) * row.batch_size + n_fresh * attacks
    recipe = replace(recipe, batches=max(1, round((cell.passes - spent) / EPOCHS / per_batch)))
    began = perf_counter()
    groups = None
    if row.stretch is not None:
        groups = parts.search.seed_id.numpy() // row.stretch, parts.train.seed_id.numpy() // row.stretch
    tuned = tune(target, replace(material, groups=groups), perturbations, recipe, fresh_from=other)
    trained = perf_counter()
    after = dict(zip(("clean", "disturbed"), grade(row, tuned.target, parts, tuned.ledger), strict=True))
    after["disturbed"] = after["disturbed"].mean(0)
    return {
        "technique": cell.technique,
        "random_seed": cell.random_seed,
        "share": tuned.share,
        "before": {"clean": pack(clean), "disturbed": pack(disturbed)},
        **{name: float(column.mean()) for name, column in after.items()},
        "judge_seeds": len(parts.judge),
        "batches": recipe.batches,
        "passes_of_search": spent,
        "passes": round(spent + (recipe.batches or 0) * EPOCHS * per_batch),
        "frontier": [asdict(point) for point in tuned.frontier],
        "judge_frontier": list(_judge_frontier(row, tuned, parts)),
        "seconds": {"train": round(trained - began, 2), "all": round(perf_counter() - start, 2)},
        "after": {name: pack(column) for name, column in after.items()},
    }


def _judge_frontier(row: Row, tuned: TrainedModel, parts: Parts) -> Iterator[dict[str, Any]]:
    """The frontier on the judge seeds, which nothing is chosen by; at most two uniform tests per seed."""
    for point in tuned.frontier:
        model = tuned.at(point.share)
        clean, disturbed = grade(replace(row, draws=min(2, row.draws)), model.target, parts, model.ledger)
        columns = {"clean": clean, "disturbed": disturbed.mean(0)}
        scores = {name: float(column.mean()) for name, column in columns.items()}
        if len(row.perturbations) > 1:
            columns |= dict(zip(row.perturbations, disturbed, strict=True))
        yield {"share": point.share, **scores, "by_seed": {name: pack(column) for name, column in columns.items()}}


def _material(cell: Cell, target: Target, parts: Parts, perturbations: dict[str, Perturbation]) -> tuple[Material, int]:
    """What a technique learns from, and the passes that it spent on it."""
    if cell.technique not in BASELINES:  # all inputs are fresh, so one that is not used will do
        first = next(iter(perturbations.values()))
        theta, zero = np.array([[theta.low for theta in first.theta]], np.float32), np.zeros(1, np.int64)
        tests = Tests(zero, zero, theta, zero, np.array(["unused"]))
        return of_tests(tests, parts.search, first, target, clean=parts.train), 0
    technique = choose_competitor(cell.technique)
    criterion = fit_criterion(technique, target, parts.train)
    materials, spent = [], 0
    for perturbation in perturbations.values():
        executed = run_technique(
            technique,
            target,
            parts.search,
            perturbation,
            passes=round(SEARCH * cell.passes) + len(parts.search),
            random_seed=cell.random_seed,
            criterion=criterion,
            round_size=160,
        )
        tests = executed.tests[choose_tests(executed, N_CHOSEN // len(perturbations))]
        materials.append(of_tests(tests, parts.search, perturbation, target, clean=parts.train))
        spent += executed.passes
    return join_material(materials), spent


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


class Standings:
    """The cells of a row, by technique and random seed, with the grades of the point that is chosen for each technique.

    As in `themis retrain`, the seeds that all trainings of a technique held out choose one point for them together. If
    the judge frontier of a training is not stored, each training of its technique stays at the point of its own that it
    was graded at; and all trainings of the row do, if it is one of themis, of random or of a baseline.
    """

    def __init__(self, cells: list[dict[str, Any]]) -> None:
        self.cells: dict[str, dict[int, dict[str, dict[str, str]]]] = {}
        by_technique: dict[str, list[dict[str, Any]]] = {}
        for cell in sorted(cells, key=lambda cell: cell["random_seed"]):
            by_technique.setdefault(cell["technique"], []).append(cell)
        has_frontiers = all(
            cell["judge_frontier"] for cell in cells if cell["technique"] in (OWN, "random", *BASELINES)
        )
        for technique, trainings in by_technique.items():
            settled = _settled(trainings) if has_frontiers else ((cell, cell) for cell in trainings)
            self.cells[technique] = {cell["random_seed"]: grades for cell, grades in settled}
        self.trained = by_technique

    def rows(self, technique: str, name: str, random_seeds: list[int] | None = None) -> Column:
        """The grades after training, `[random seeds, judge seeds]`."""
        cells = self.cells[technique]
        return np.stack([unpack(cells[seed]["after"][name]) for seed in random_seeds or cells])

    def gain(self, technique: str, name: str) -> Shift:
        """The clean or disturbed score before and after."""
        before = next(iter(self.cells[technique].values()))["before"]
        return paired(unpack(before[name]), self.rows(technique, name))

    def lead(self, rivals: list[str]) -> Shift:
        """By how much themis is above the mean of rivals, paired by judge seed and random seed."""
        shared = [seed for seed in self.cells[OWN] if all(seed in self.cells[rival] for rival in rivals)]
        own = self.rows(OWN, "disturbed", shared)
        theirs = np.mean([self.rows(rival, "disturbed", shared) for rival in rivals], 0)
        return paired(np.zeros(own.shape[1]), own - theirs)

    def best_rival(self) -> str | None:
        """The rival with the highest disturbed score."""
        rivals = [name for name in self.cells if name in RIVALS]
        return max(rivals, key=lambda name: self.gain(name, "disturbed").after, default=None)

    def at_loss(self, technique: str, loss: float) -> float | None:
        """The highest disturbed score at a clean loss of at most `loss`, on the judge seeds, whatever point was chosen.

        Both are means over the trainings, interpolated between shares. None if the frontiers are not known.
        """
        trainings = self.trained[technique]
        return _best_within(trainings, loss) if all(cell["judge_frontier"] for cell in trainings) else None


def _settled(cells: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, dict[str, str]]]]:
    """The trainings of a technique, each with the grades before and after at the point that all of them choose."""
    if not all(cell["judge_frontier"] for cell in cells):
        yield from ((cell, cell) for cell in cells)
        return
    settled = cells[0].get("settled")  # the index of the point, by an earlier rule
    share = _share_of(cells) if settled is None else cells[0]["judge_frontier"][settled]["share"]
    for cell in cells:
        yield cell, {"before": cell["judge_frontier"][0]["by_seed"], "after": _grades_at(cell, share)}


def _share_of(cells: list[dict[str, Any]]) -> float:
    """The share of the way that trainings choose together."""
    frontiers = [[FrontierPoint(**point) for point in cell["frontier"]] for cell in cells]
    return choose_share(join_frontiers(frontiers), TOLERANCE)


def _grades_at(cell: dict[str, Any], share: float) -> dict[str, str]:
    """The grades on the judge seeds at a share of the way, interpolated between those that were measured."""
    points = cell["judge_frontier"]
    shares = [point["share"] for point in points]
    if share in shares:
        return dict(points[shares.index(share)]["by_seed"])
    k = int(np.searchsorted(shares, share))
    part = (share - shares[k - 1]) / (shares[k] - shares[k - 1])
    ends = [{name: unpack(text) for name, text in point["by_seed"].items()} for point in points[k - 1 : k + 1]]
    return {name: pack(low + part * (ends[1][name] - low)) for name, low in ends[0].items()}


def choices(rows: dict[str, list[dict[str, Any]]]) -> str:
    """How well points were chosen, as Markdown: of each training alone, and of the trainings of a row together.

    The best is the highest disturbed score on the judge seeds at a clean loss of at most the tolerance.
    """
    lines = [
        "| row | trainings | before | best within the tolerance | share of it regained, alone | together | clean "
        "change, alone | together |",
        "|---|---|---|---|---|---|---|---|",
    ]
    found: dict[str, list[tuple[float, float]]] = {"alone": [], "together": []}
    for name, every in rows.items():
        cells = [cell for cell in every if cell["technique"] == OWN]
        chosen = {"alone": [_judged([cell]) for cell in cells], "together": [_judged(cells)]}
        before, best = cells[0]["judge_frontier"][0]["disturbed"], _best_within(cells)
        entries = [name.removeprefix("choice "), str(len(cells)), f"{100 * before:.1f}", f"{100 * best:.1f}"]
        entries += [", ".join(f"{100 * gain:.0f}%" for gain, _ in each) for each in chosen.values()]
        entries += [", ".join(_points(change) for _, change in each) for each in chosen.values()]
        lines.append(f"| {' | '.join(entries)} |")
        for kind, each in chosen.items():
            found[kind] += each
    for kind, each in found.items():
        n_enough, n_far = sum(gain >= 0.95 for gain, _ in each), sum(change < -2 * TOLERANCE for _, change in each)
        lines.append(
            f"\n{kind}: {n_enough} of {len(each)} regain 95% of the best; the clean score of {n_far} falls by more "
            "than twice the tolerance"
        )
    return "\n".join(lines)


def _judged(cells: list[dict[str, Any]]) -> tuple[float, float]:
    """Which share of the best gain within the tolerance trainings regain where they choose to go, and at which loss."""
    shares, clean, disturbed = _mean_frontier(cells)
    share = _share_of(cells)
    gain = float(np.interp(share, shares, disturbed)) - disturbed[0]
    return gain / (_best_within(cells) - disturbed[0]), float(np.interp(share, shares, clean)) - clean[0]


def _mean_frontier(cells: list[dict[str, Any]]) -> Column:
    """Shares, clean and disturbed scores on the judge seeds, a mean over trainings, `[3, points]`."""
    frontiers = [
        [(point["share"], point["clean"], point["disturbed"]) for point in cell["judge_frontier"]] for cell in cells
    ]
    mean: Column = np.mean(frontiers, 0).T
    return mean


def _best_within(cells: list[dict[str, Any]], loss: float = TOLERANCE) -> float:
    """The highest disturbed score at a clean loss of at most `loss`, on the judge seeds."""
    shares, clean, disturbed = _mean_frontier(cells)
    fine = np.linspace(0, 1, 201)
    is_within = np.interp(fine, shares, clean[0] - clean) <= loss
    return float(np.interp(fine, shares, disturbed)[is_within].max())


def suites(rows: dict[str, list[dict[str, Any]]]) -> str:
    """The mean corruption error of each technique at the point that its trainings choose together, as Markdown."""
    lines = [
        "| row | technique | trainings | share | clean change | mCE | themis below it |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, every in rows.items():
        by_technique: dict[str, dict[int, dict[str, Any]]] = {}
        for cell in every:
            by_technique.setdefault(cell["technique"], {})[cell["random_seed"]] = cell
        for technique, cells in by_technique.items():
            trainings, gap = list(cells.values()), "-"
            errors = _corruption_errors(trainings)
            if technique != OWN and OWN in by_technique:
                shared = [seed for seed in cells if seed in by_technique[OWN]]
                own, theirs = (_corruption_errors([each[k] for k in shared]) for each in (by_technique[OWN], cells))
                gap = _interval(paired(np.zeros(own.shape[1]), theirs - own))
            error = paired(np.ones(errors.shape[1]), errors)
            change = _points(_judged(trainings)[1])
            entries = [name.removeprefix("suite "), technique, str(len(cells)), f"{_share_of(trainings):g}", change]
            lines.append(f"| {' | '.join([*entries, _spread(error), gap])} |")
    return "\n".join(lines)


def _corruption_errors(cells: list[dict[str, Any]]) -> Column:
    """What each judge seed adds to the mean corruption error of each training, `[trainings, seeds]`."""
    share, first = _share_of(cells), cells[0]["judge_frontier"][0]["by_seed"]
    grades = [_grades_at(cell, share) for cell in cells]
    names = [name for name in first if name not in ("clean", "disturbed")]
    pairs = [(1 - unpack(first[name]), 1 - np.stack([unpack(each[name]) for each in grades])) for name in names]
    return relative_errors(pairs)


def table(rows: dict[str, list[dict[str, Any]]], loss: float = TOLERANCE) -> str:
    """Themis, its best rival and the mean of the four baselines on each row, as Markdown.

    loss: the clean loss at which the last column compares them.
    """
    lines = [
        "| row | before | themis | clean | best rival | its score, clean | themis above it | above the mean of "
        "NC, KMNC, IDC, LSA | at equal clean loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, cells in rows.items():
        standings = Standings(cells)
        if OWN not in standings.cells:
            continue
        own, clean, best = standings.gain(OWN, "disturbed"), standings.gain(OWN, "clean"), standings.best_rival()
        entries = [name, f"{100 * own.before:.1f}", _spread(own), _points(clean.difference)]
        if best is not None:
            theirs, their_clean = standings.gain(best, "disturbed"), standings.gain(best, "clean")
            scores = f"{_spread(theirs)}, {_points(their_clean.difference)}"
            entries += [best, scores, _interval(standings.lead([best]))]
            entries.append(_above_baselines(standings))
        else:
            entries += ["-"] * 4
        entries.append(_at_equal_loss(standings, loss))
        lines.append(f"| {' | '.join(entries)} |")
    return "\n".join(lines)


def _above_baselines(standings: Standings) -> str:
    """How far Themis is above the mean of the baselines, with the names of those that have no training."""
    found = [name for name in BASELINES if name in standings.cells]
    if not found:
        return "-"
    others = [name.upper() for name in BASELINES if name not in found]
    return _interval(standings.lead(found)) + (f", without {', '.join(others)}" if others else "")


def _at_equal_loss(standings: Standings, loss: float) -> str:
    """Themis and the best rival at a clean loss of at most `loss`."""
    scores = {name: standings.at_loss(name, loss) for name in standings.cells if name in (OWN, *RIVALS)}
    known = {name: score for name, score in scores.items() if score is not None}
    if OWN not in known:
        return "-"
    own = known.pop(OWN)
    best = max(known, key=lambda name: known[name], default=None)
    return f"{100 * own:.1f}" if best is None else f"{100 * own:.1f}, {best} {100 * known[best]:.1f}"


def _spread(shift: Shift) -> str:
    mean, ends = f"{100 * shift.after:.1f}", [f"{100 * end:.1f}" for end in (shift.least, shift.most)]
    return mean if ends[0] == ends[1] else f"{mean} ({ends[0]} to {ends[1]})"


def _points(difference: float) -> str:
    return f"{100 * difference:+.2f}"


def _interval(shift: Shift) -> str:
    between = shift.combined
    if between is None:
        return _points(shift.difference)
    return f"{_points(shift.difference)} ({_points(between.low)} to {_points(between.high)})"


def read_cells(paths: list[str]) -> dict[str, list[dict[str, Any]]]:
    """The cells of every row in some files; of a training that is in several files, the last counts."""
    found: dict[str, dict[tuple[str, int], dict[str, Any]]] = {row.name: {} for row in ALL_ROWS}
    for path in paths:
        for name, row in json.loads(Path(path).read_text())["results"]["rows"].items():
            found.setdefault(name, {}).update({(cell["technique"], cell["random_seed"]): cell for cell in row["cells"]})
    return {name: list(cells.values()) for name, cells in found.items() if cells}


def in_order(cells: list[Cell]) -> list[Cell]:
    """Cells in order of value: themis on the first two rows, its rivals there, the other rows, further random seeds."""

    def key(cell: Cell) -> tuple[int, int]:
        is_first = cell.row in ROWS[:2]
        if is_first and cell.random_seed < 2 and cell.technique == OWN:
            return 0, cell.random_seed
        return 1 + cell.random_seed, 0 if is_first else 1

    return sorted(cells, key=key)


def parse() -> argparse.Namespace:
    parser = row_parser(__doc__)
    parser.add_argument("--techniques", help=f"names, separated by commas: {', '.join(VARIANTS)}")
    parser.add_argument("--random-seeds", type=int, help="trainings per technique")
    parser.add_argument("--share", type=float, help="share of the seeds and passes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no training after this time")
    parser.add_argument("--json", help="file for the raw results, rewritten after each training")
    parser.add_argument("--table", nargs="+", metavar="FILE", help="print the table of these results, and run nothing")
    parser.add_argument("--loss", type=float, default=TOLERANCE, help="clean loss of the last column of --table")
    arguments = parser.parse_args()
    return arguments if arguments.table else complete(arguments, QUICK, FULL)


def main() -> None:
    arguments, start = parse(), perf_counter()
    if arguments.table:
        found = read_cells(arguments.table)
        for kind, show in (("choice ", choices), ("suite ", suites), ("", lambda rows: table(rows, arguments.loss))):
            if shown := {name: found.pop(name) for name in list(found) if name.startswith(kind)}:
                print(show(shown))
        return
    known = ROWS if arguments.rows == FULL["rows"] else ALL_ROWS
    rows = [row for row in known if any(fnmatch(row.name, glob) for glob in arguments.rows)]
    if not (os.environ.get("THEMIS_DATA") or arguments.packed):
        print("skipped: rows on real data; set THEMIS_DATA to the data folder, or pass --packed", flush=True)
        rows = [row for row in rows if row.model == segmenter.NAME]
    if arguments.pack:
        packs.write_pack(Path(arguments.pack), {row.model: load(row.model, "cpu", None, row.searched) for row in rows})
        return
    if not rows:
        return
    names = [name.strip() for name in arguments.techniques.split(",")]
    if unknown := [name for name in names if name not in VARIANTS]:
        sys.exit(f"techniques must be among {', '.join(VARIANTS)}, got {unknown[0]!r}")
    has_results = arguments.json and os.path.exists(arguments.json)
    found = read_cells([arguments.json]) if has_results else {}
    results: dict[str, Any] = {
        "share": arguments.share,
        "rows": {name: {"cells": each} for name, each in found.items()},
    }
    finished = {(name, cell["technique"], cell["random_seed"]) for name, cells in found.items() for cell in cells}
    cells = [
        Cell(row, name, random_seed, arguments.device, arguments.packed, arguments.share)
        for random_seed in range(arguments.random_seeds)
        for row in rows
        for name in names
        if row.suits(name) and (row.name, name, random_seed) not in finished
    ]
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(_within, arguments.seconds, start, cell): cell for cell in in_order(cells)}
        for done in as_completed(running):
            cell = running[done]
            record: dict[str, Any] | None = (
                done.result() if done.exception() is None else {"error": repr(done.exception())}
            )
            if record is None:
                continue
            row = results["rows"].setdefault(cell.row.name, {"cells": []})
            title = f"{perf_counter() - start:.0f} s  {cell.row.name}: {cell.technique}, random seed {cell.random_seed}"
            if "error" in record:
                row.setdefault("errors", []).append({"technique": cell.technique, **record})
                print(f"{title} failed: {record['error']}", flush=True)
            else:
                row["cells"].append(record)
                gains = (Standings([record]).gain(cell.technique, name) for name in ("disturbed", "clean"))
                scores = [f"{100 * gain.before:.2f} -> {100 * gain.after:.2f}" for gain in gains]
                print(
                    f"{title}: disturbed {scores[0]}, clean {scores[1]}, share {record['share']:g}, "
                    f"{record['seconds']['all']:.0f} s",
                    flush=True,
                )
            if arguments.json:
                write_results(arguments.json, arguments.device, results)
    print(table({name: row["cells"] for name, row in results["rows"].items() if row["cells"]}))


def _within(seconds: float, start: float, cell: Cell) -> dict[str, Any] | None:
    """The result of a cell; None if the time is over."""
    return None if perf_counter() - start > seconds else run(cell)


if __name__ == "__main__":
    main()
