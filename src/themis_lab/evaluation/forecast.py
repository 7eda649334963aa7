"""What an evaluation will take, told before it begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from themis.errors import ThemisError
from themis.perturb import Perturbation, choose_perturbation
from themis.text import counted, duration
from themis_lab.comparison.grid import POINTS, list_grids
from themis_lab.comparison.plan import GRID
from themis_lab.evaluation.cells import Record, least_cost
from themis_lab.evaluation.plan import (
    CAMPAIGNS,
    DONE,
    KILLS,
    MAPS,
    RATES,
    RECALL,
    RETRAINING,
    THEORY,
    VARIANT,
    EvaluationCell,
    EvaluationPlan,
)
from themis_lab.techniques import PRESET, choose_technique

SPEED = 3000
"""Passes of LeNet-5 per second on one core of a CPU, in the campaigns behind docs/lab/evaluation.md (median)."""


def expect_rates(plan: EvaluationPlan, pairs: Iterable[tuple[str, str]]) -> dict[EvaluationCell, Record]:
    """The magnitudes that pairs will have, if all can be chosen; pairs that cannot be run are left out."""
    expected = {}
    for pair in pairs:
        try:
            grids = list_grids(plan.pair(*pair).comparison(), _perturbation(plan, *pair))
        except ThemisError:  # its cells say why
            continue
        magnitudes = {grid.name: grid.magnitudes for grid in grids}
        if GRID in magnitudes:
            magnitudes[GRID] = tuple(-1.0 - k for k in range(POINTS))  # unlike any that is known
        expected[plan.cell(RATES, *pair)] = {
            "grids": [{"name": name, "magnitudes": values} for name, values in magnitudes.items()]
        }
    return expected


def forecast(plan: EvaluationPlan, cells: list[EvaluationCell]) -> str:
    """How many cells there are beside error rates, and how long they may take, in words."""
    alike = Counter(replace(cell, magnitude=0.0, campaign=0) for cell in cells)
    costs = {cell: _cost(plan, cell) for cell in alike}
    passes, trainings = (sum(n * costs[cell][k] for cell, n in alike.items()) for k in range(2))
    text = f"up to {counted(len(cells), 'campaign')} with {passes:,} passes in all"
    text += f", and {counted(trainings, 'training')}" if trainings else ""
    return f"{text}. On one core, the passes of a model like LeNet-5 take {duration(passes / SPEED)}"


def _cost(plan: EvaluationPlan, cell: EvaluationCell) -> tuple[int, int]:
    """The passes of a cell, if none of its campaigns ends early, and its trainings, whose passes are not counted."""
    options = plan.pair(cell.model, cell.perturbation)
    if cell.kind == RETRAINING:
        trainings = len(options.comparison().chosen()) * options.retrain_seeds
        return trainings * options.passes_to_retrain, trainings
    if cell.kind in (RECALL, KILLS):
        return options.passes, 0
    tests = {
        CAMPAIGNS: options.tests or 0,
        DONE: options.done_tests,
        THEORY: options.reference_tests + 3 * options.done_tests,
        VARIANT: options.variant_tests,
        MAPS: options.map_cells * options.seeds,
    }
    technique = choose_technique(cell.technique if cell.kind in (CAMPAIGNS, DONE) else PRESET)
    cost = least_cost(technique, _perturbation(plan, cell.model, cell.perturbation))
    passes = options.seeds + tests[cell.kind] * cost
    return (max(passes, options.passes) if cell.kind == CAMPAIGNS else passes), 0


def _perturbation(plan: EvaluationPlan, model: str, perturbation: str) -> Perturbation:
    with plan.origin(model).in_folder():
        return choose_perturbation(perturbation)
