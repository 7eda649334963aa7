"""`themis_lab.evaluation`: run the cells of a plan that are not finished, and write the page."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote

from themis.campaign.setup import Executor
from themis.errors import UsageError
from themis.experiments import ExperimentFolder, ExperimentPlan, Listener
from themis.perturb import choose_perturbation
from themis.runs.environment import describe_environment, threads
from themis.text import counted
from themis_integrations.ray.executor import RayExecutor
from themis_lab.comparison.plan import GRID, PAPER
from themis_lab.evaluation.cells import CellWorker, Record, failed_evaluation, make_worker
from themis_lab.evaluation.figures import draw_evaluation
from themis_lab.evaluation.page import CELLS_PAGE, cells_page, evaluation_page
from themis_lab.evaluation.plan import EvaluationCell, EvaluationPlan, Kind, ModelSource, PairOptions
from themis_lab.evaluation.summary import Evaluation, conclude_evaluation
from themis_lab.evaluation.truth import can_be_mapped
from themis_lab.executors import CellKind, JsonResults, choose_cell_executor, choose_ray, run_cells
from themis_lab.zoo import ZOO, find_weights
from themis_lab.zoo.nets import INSTALL

EVALUATION_FILE, PAGE_FILE = "evaluation.json", "evaluation.md"
LOOKAHEAD_CELLS = 120
"""Number of cells from which workers choose, about the campaigns of one model under one perturbation."""


def evaluate(
    plan: EvaluationPlan,
    *,
    out: str | Path | None = None,
    workers: int = 1,
    runs_cells: bool = True,
    listener: Listener | None = None,
    executor: Executor | str | None = None,
) -> Evaluation:
    """Run every cell of a plan that is not finished, and write tables, figures and a page to the folder `out`.

    The same call resumes an interrupted evaluation. Another plan can use the same folder: it reuses every finished cell
    that its options do not change. workers: number of processes. Without `runs_cells`, only finished cells count.
    executor: `RayExecutor` runs cells in its workers instead, which load models and data from where they see them.
    """
    listener = listener or Listener()
    if isinstance(workers, bool) or workers < 1:
        raise UsageError(f"workers must be at least 1, got {workers!r}")
    on_ray = choose_ray(executor, 1)
    devices = [plan.pair(*pair).device or plan.origin(pair[0]).device for pair in plan.pairs()]
    if on_ray is not None and any(device is not None and device.startswith("cuda") for device in devices):
        on_ray.check_device("cuda")
    missing = {model.name: reason for model in plan.models if (reason := why_missing(model)) is not None}
    pairs = [pair for pair in plan.pairs() if pair[0] not in missing]
    with closing(ExperimentFolder(out, "evaluation")) as folder, threads(1):
        environment = describe_environment(None)  # each pair records its device
        values = plan.as_dict()
        folder.begin(ExperimentPlan({"plan": values}, tuple(values)), environment)  # cells know what decides them
        if runs_cells and out is not None:
            resume = f"the same command with --out {quote(str(out))} resumes it"
            listener.on_note(f"Results go to {out}. Ctrl-C stops the evaluation; {resume}")
        for name, reason in missing.items():
            listener.on_note(f"{name} is left out: {reason}")
        if runs_cells and pairs:
            n_models, n_perturbations = (len(set(names)) for names in zip(*pairs, strict=True))
            subject = f"{counted(n_models, 'model')} under {counted(n_perturbations, 'perturbation')}"
            listener.on_note(f"{subject}: {counted(len(pairs), 'error rate')}, then campaigns at the magnitudes")
        run = _runner(plan, folder, on_ray or workers, listener, runs_cells)
        rates = run([plan.cell(Kind.RATES, *pair) for pair in pairs], "error rate")
        planned = list_cells(plan, rates)
        records = run(planned, "campaign")
        result = conclude_evaluation(plan, planned, {**rates, **records}, missing, environment)
        folder.write(EVALUATION_FILE, result.content)
        if folder.path is not None:
            figures = {path.stem: path.name for path in draw_evaluation(result, folder.path)}
            folder.write_bytes(PAGE_FILE, f"# Evaluation\n\n{evaluation_page(result, figures)}\n".encode())
            folder.write_bytes(CELLS_PAGE, f"{cells_page(result)}\n".encode())
    return result


def _runner(
    plan: EvaluationPlan, folder: ExperimentFolder, workers: int | RayExecutor, listener: Listener, runs_cells: bool
) -> Callable[[list[EvaluationCell], str], dict[EvaluationCell, Record]]:
    """Return a function from cells to their records; unfinished cells are run first, or left out."""
    results = JsonResults(folder)
    worker = CellWorker(plan, folder.path)
    kept = None if isinstance(workers, RayExecutor) else folder.path  # another host has no such folder
    prepare = (lambda: worker.run) if workers == 1 else partial(make_worker, plan, kept)

    def run(cells: list[EvaluationCell], noun: str) -> dict[EvaluationCell, Record]:
        if not runs_cells:
            return {cell: record for cell in cells if (record := results.load(cell)) is not None}
        return run_cells(
            cells,
            prepare,
            results=results,
            kind=CellKind(noun, describe_cell, failed_evaluation),
            executor=choose_cell_executor(workers, lookahead=LOOKAHEAD_CELLS),
            listener=listener,
        )

    return run


def describe_cell(cell: EvaluationCell, record: Record) -> str:
    """A finished cell in one line."""
    found = record["at"]["passes"] if cell.kind == Kind.CAMPAIGNS else record
    if "distinct_faults" in found:
        return f"{cell}: {found['distinct_faults']:,} distinct faults"
    if "untrained" in record:
        return f"{cell}: nothing to train on"
    if cell.kind == Kind.KILLS and record["score"] is not None:
        return f"{cell}: mutation score {record['score']:.3f}"
    return str(cell)


def list_cells(plan: EvaluationPlan, rates: dict[EvaluationCell, Record]) -> list[EvaluationCell]:
    """The cells that follow from the magnitudes of every pair: rates come first, because they choose the grids.

    They are in the order in which they should end: a first campaign of everything before a second one, one question
    after another, and in each of them one perturbation after another, as the plan names them.
    """
    cells: list[EvaluationCell] = []
    for rate, record in rates.items():
        if "error" in record:
            continue
        options = plan.pair(rate.model, rate.perturbation)
        magnitudes = sorted({magnitude for grid in record["grids"] for magnitude in grid["magnitudes"]})
        techniques = [technique.name for technique in options.comparison().chosen()]
        some = chosen_magnitudes(options, record)
        named = [
            *((Kind.CAMPAIGNS, technique, magnitudes) for technique in techniques if options.asks("faults")),
            *((Kind.DONE, technique, some) for technique in techniques if options.asks("done")),
            *([(Kind.THEORY, "", with_strongest(some, record))] if options.asks("theory") else []),
            *([(Kind.RETRAINING, "", some)] if options.asks("retraining") else []),
            *((Kind.VARIANT, variant, some) for variant in options.chosen_variants() if options.asks("variants")),
        ]
        counts = dict.fromkeys((Kind.CAMPAIGNS, Kind.DONE, Kind.THEORY, Kind.VARIANT, Kind.KILLS), options.campaigns)
        if options.asks("truth"):
            named += [(Kind.KILLS, technique, some) for technique in techniques]
            with plan.origin(rate.model).in_folder():
                perturbation = choose_perturbation(rate.perturbation)
            if can_be_mapped(perturbation):
                named += [(Kind.MAPS, "", some), *((Kind.RECALL, technique, some) for technique in techniques)]
                counts |= dict.fromkeys((Kind.MAPS, Kind.RECALL), options.planted)
        for kind, technique, at in named:
            cell = plan.cell(kind, rate.model, rate.perturbation, technique)
            campaigns = range(counts.get(kind, 1))
            cells += [replace(cell, magnitude=value, campaign=campaign) for value in at for campaign in campaigns]
    return sorted(
        cells,
        key=lambda cell: (cell.campaign, list(Kind).index(cell.kind), plan.perturbations.index(cell.perturbation)),
    )


def chosen_magnitudes(options: PairOptions, rates: Record) -> list[float]:
    """The grid in which techniques run until they are done: the one chosen on separate seeds, or else the last."""
    grids = {grid["name"]: grid["magnitudes"] for grid in rates["grids"]}
    magnitudes = sorted(grids.get(GRID) or list(grids.values())[-1])
    if options.done_magnitudes == "all":
        return magnitudes
    return [magnitudes[len(magnitudes) // 2] if options.done_magnitudes == "middle" else magnitudes[-1]]


def with_strongest(magnitudes: list[float], rates: Record) -> list[float]:
    """Magnitudes and the largest of the paper's, at which some models hardly fail."""
    grids = {grid["name"]: grid["magnitudes"] for grid in rates["grids"]}
    return sorted({*magnitudes, *([max(grids[PAPER])] if PAPER in grids else [])})


def why_missing(model: ModelSource) -> str | None:
    """What is missing for a model of the zoo, and the remedy; None if it can be run."""
    name = model.origin.zoo
    if name is None:
        return None
    if name not in ZOO:
        return f"the zoo has no model {name!r}"
    entry, then = ZOO[name], f"the same command with --models {model.name} runs it once"
    folder = os.environ.get("THEMIS_DATA")
    if not folder:
        return "the data folder is unknown: pass --data FOLDER, or set THEMIS_DATA"
    if not model.origin.data and not (Path(folder) / entry.folder).is_dir():
        return f"the data folder has no {entry.folder} (weights: {entry.source}): {then} data and weights are there"
    if model.origin.weights is None and find_weights(name) is None:
        if callable(entry.weights):
            return f"its weights are not installed: {INSTALL}"
        return f"there are no weights ({entry.source}): {then} they are there"
    return None
