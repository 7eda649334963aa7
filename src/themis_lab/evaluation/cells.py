"""The cells of an evaluation: how each kind is run, and what is stored of it."""

from __future__ import annotations

import gc
import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from themis.campaign.api import run
from themis.data.seeds import Seeds, read_seeds
from themis.errors import DataError
from themis.experiments import Listener
from themis.perturb import Perturbation, choose_perturbation
from themis.runs.environment import describe_environment
from themis.runs.run import Run
from themis.search import choose_policy
from themis.target.alignment import align_seeds, align_target
from themis.target.blackbox import as_target
from themis.target.fingerprint import hash_text
from themis.target.target import Target
from themis_lab.comparison.api import UNMEASURED, ComparisonSetup
from themis_lab.comparison.cells import CellRunner
from themis_lab.comparison.grid import list_grids
from themis_lab.comparison.plan import GRID, CampaignCell
from themis_lab.comparison.rates import split_seeds
from themis_lab.contest.api import contest_run
from themis_lab.contest.cells import NoFaultsError
from themis_lab.contest.choosing import OWN_POLICY, THEMIS
from themis_lab.evaluation.plan import (
    CAMPAIGNS,
    DONE,
    KILLS,
    MAPS,
    RATES,
    RECALL,
    RETRAINING,
    THEORY,
    EvaluationCell,
    EvaluationPlan,
    PairOptions,
)
from themis_lab.evaluation.prefix import count_tests, describe_prefix
from themis_lab.evaluation.theory import ENDLESS, check_theory
from themis_lab.evaluation.truth import GroundTruth
from themis_lab.evaluation.variants import VARIANTS
from themis_lab.techniques import PRESET, Technique, choose_technique

Record = dict[str, Any]
SPLIT = [0.5, 0.2, 0.3]
"""Shares of the inputs that are searched, trained on, and judged on."""
TRAININGS = "trainings"
"""The folder in which cells keep their trainings."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Where Linux tells machines apart."""
RETRAINED = {PRESET: "paper", OWN_POLICY: THEMIS}
"""What techniques are called where they choose inputs to train on."""


@dataclass
class ModelAtWork:
    """A model with all its seeds, those that techniques use, and the criteria that were fitted to it."""

    target: Any
    seeds: Seeds
    search: Seeds
    runner: CellRunner
    truths: dict[tuple[int, int], GroundTruth] = field(default_factory=dict)
    """By the number of mutants and of the seeds that they are filtered by."""


class CellWorker:
    """Runs cells of all kinds; the last model is kept, with its fitted criteria."""

    def __init__(self, plan: EvaluationPlan, folder: Path | None = None) -> None:
        """folder: that of the evaluation, in which a cell of several trainings keeps each of them; None keeps none."""
        self.plan, self.folder = plan, folder
        self._loaded: dict[tuple[Any, ...], ModelAtWork] = {}

    def run(self, cell: EvaluationCell) -> Record:
        """Run a cell; the result is plain data."""
        options = self.plan.pair(cell.model, cell.perturbation)
        with self.plan.origin(cell.model).in_folder():
            perturbation = choose_perturbation(cell.perturbation)
        loaded = self._load(cell.model, options, perturbation)
        loaded.runner.perturbation = perturbation
        if cell.kind == RATES:
            return self._measure_rates(cell, options, loaded, perturbation)
        if cell.kind == CAMPAIGNS:
            return self._run_campaign(cell, options, loaded)
        if cell.kind == DONE:
            return self._run_until_done(cell, options, loaded)
        if cell.kind == THEORY:
            return self._check_theory(cell, options, loaded, perturbation)
        if cell.kind == RETRAINING:
            return self._retrain(cell, options, loaded, perturbation)
        if cell.kind in (MAPS, RECALL, KILLS):
            return self._find_truth(cell, options, loaded)
        return self._run_variant(cell, options, loaded, perturbation)

    def _load(self, model: str, options: PairOptions, perturbation: Perturbation) -> ModelAtWork:
        """The model of a cell, loaded again only if another one was used last."""
        key = (model, options.device, options.neurons, options.train_inputs, options.seeds)
        if key not in self._loaded:
            self._loaded.clear()
            gc.collect()
            origin = self.plan.origin(model)
            if origin.zoo is not None or options.neurons != "element":
                origin = replace(origin, neurons=options.neurons)
            if options.device is not None:
                origin = replace(origin, device=options.device)
            target = as_target(origin.target())
            seeds = align_seeds(target, read_seeds(origin.read()))
            target = align_target(target, seeds)
            search = split_seeds(seeds, options.seeds, 1, 1).search
            plan = options.comparison(random_seed=self.plan.random_seed)
            runner = CellRunner(target, search, perturbation, plan, origin.read_train, origin.read_rivals)
            self._loaded[key] = ModelAtWork(target, seeds, search, runner)
        return self._loaded[key]

    def _measure_rates(
        self, cell: EvaluationCell, options: PairOptions, loaded: ModelAtWork, perturbation: Perturbation
    ) -> Record:
        """The grids of magnitudes and the error rates; a grid that cannot be chosen is left out, with the reason."""
        plan = options.comparison(random_seed=self.plan.random_seed)
        parts = split_seeds(loaded.seeds, options.seeds, options.judge_seeds, options.grid_seeds)
        setup = ComparisonSetup(loaded.target, parts, perturbation, None, plan, None, (), None)
        grids, note = list_grids(plan, perturbation), ""
        try:
            measured = setup.measure_rates(grids, UNMEASURED, Listener())[1]
        except DataError as error:
            kept = tuple(grid for grid in grids if grid.name != GRID)
            if len(kept) == len(grids):
                raise
            note = str(error)
            measured = setup.measure_rates(kept, UNMEASURED, Listener())[1]
        return {**_identity(cell), **measured, "grid_refused": note, "device": str(loaded.target.device)}

    def _run_campaign(self, cell: EvaluationCell, options: PairOptions, loaded: ModelAtWork) -> Record:
        """One campaign, read off at both budgets."""
        loaded.runner.plan = options.comparison(random_seed=self.plan.random_seed)
        campaign = CampaignCell(cell.technique, cell.magnitude, cell.campaign)
        technique = choose_technique(cell.technique)
        cost = least_cost(technique, loaded.runner.perturbation)
        by_passes = max(1, -(-(options.passes - len(loaded.search)) // cost))
        limits = {
            "max_tests": max(options.tests or 1, by_passes),
            "max_passes": None,
            "plateau": None,
            "coverage": None,
        }
        result, fitting = loaded.runner.search(campaign, **limits)
        at = {"passes": describe_prefix(campaign, result, count_tests(result, options.passes)) | fitting}
        if options.tests is not None:
            at["tests"] = describe_prefix(campaign, result, options.tests) | fitting
        return {**_identity(cell), "at": at, **_describe_cost(result)}

    def _run_until_done(self, cell: EvaluationCell, options: PairOptions, loaded: ModelAtWork) -> Record:
        """One campaign until its technique is done: by coverage, on a plateau, or not at all.

        Policies of Themis stop by its default rule; the paper's preset and criteria stop at their coverage alone.
        """
        loaded.runner.plan = options.comparison(random_seed=self.plan.random_seed)
        campaign = CampaignCell(cell.technique, cell.magnitude, cell.campaign)
        technique = choose_technique(cell.technique)
        limits: dict[str, Any] = {"max_tests": options.done_tests, "plateau": options.plateau}
        if technique.criterion is not None:
            limits["recall"] = None
        result, fitting = loaded.runner.search(campaign, **limits)
        found = describe_prefix(campaign, result, result.rounds[-1].tests) | fitting
        del found["by_seed"]
        return {**_identity(cell), **found, **_describe_cost(result)}

    def _check_theory(
        self, cell: EvaluationCell, options: PairOptions, loaded: ModelAtWork, perturbation: Perturbation
    ) -> Record:
        base = self.plan.random_seed + cell.campaign

        def search(seeds: Seeds, *, shift: int = 0, **changes: Any) -> Run:
            options_of_run = {"round_size": options.round_size, "magnitude": cell.magnitude, **changes}
            return run_to_the_end(loaded.target, seeds, perturbation, random_seed=base + shift, **options_of_run)

        checked = check_theory(
            search,
            loaded.search,
            done_tests=options.done_tests,
            reference_tests=options.reference_tests,
            seed_sets=options.seed_sets,
        )
        return {**_identity(cell), **checked}

    def _retrain(
        self, cell: EvaluationCell, options: PairOptions, loaded: ModelAtWork, perturbation: Perturbation
    ) -> Record:
        """What training on the inputs that each technique chooses regains; the clean score is kept by the recipe.

        Finished trainings are kept, so that an interrupted cell resumes with the next one. Without faults there is
        nothing to train on; the reason is recorded then, since the same search would find none again.
        """
        search = run_to_the_end(
            loaded.target,
            loaded.seeds,
            perturbation,
            magnitude=cell.magnitude,
            random_seed=self.plan.random_seed,
            **{"max_seeds": options.retrain_inputs, "split": SPLIT, "max_tests": options.round_size, **ENDLESS},
        )
        names = [RETRAINED.get(technique.name, technique.name) for technique in options.comparison().chosen()]
        try:
            contested = contest_run(
                search,
                list(dict.fromkeys(names)),
                target=loaded.target,
                data=loaded.seeds,
                out=None if self.folder is None else self.folder / TRAININGS / Path(cell.file).with_suffix(""),
                passes=options.passes_to_retrain,
                random_seeds=options.retrain_seeds,
                epochs=options.epochs,
                random_seed=self.plan.random_seed,
            )
        except NoFaultsError:
            passes = f"{options.passes_to_retrain:,} passes"
            reason = f"{OWN_POLICY}, which decides how many inputs to train on, found no fault within {passes}"
            return {**_identity(cell), "standings": [], "untrained": reason}
        standings = [asdict(standing) for standing in contested.standings]
        return {**_identity(cell), "inputs": contested.inputs, "before": contested.before, "standings": standings}

    def _find_truth(self, cell: EvaluationCell, options: PairOptions, loaded: ModelAtWork) -> Record:
        """Where a mutant fails, what a technique finds of that, or which mutants its tests kill."""
        loaded.runner.plan = options.comparison(random_seed=self.plan.random_seed)
        key = (options.mutants, options.judge_seeds)
        if key not in loaded.truths:
            judges = split_seeds(loaded.seeds, options.seeds, options.judge_seeds, options.grid_seeds).judge
            loaded.truths[key] = GroundTruth.of(loaded.runner, judges, options.mutants)
        truth = loaded.truths[key]
        campaign = CampaignCell(cell.technique, cell.magnitude, cell.campaign)
        if cell.kind == KILLS:
            return {**_identity(cell), **truth.kill(campaign, options.passes)}
        mutant = truth.plant(cell.campaign, options.planted)
        if cell.kind == MAPS:
            return {**_identity(cell), **truth.map_failures(mutant, cell.magnitude, options.map_cells)}
        return {**_identity(cell), **truth.search(mutant, campaign, options.passes, options.map_cells)}

    def _run_variant(
        self, cell: EvaluationCell, options: PairOptions, loaded: ModelAtWork, perturbation: Perturbation
    ) -> Record:
        """The paper's preset with one change."""
        changes = dict(VARIANTS[cell.technique])
        target = loaded.target
        if "neurons" in changes and isinstance(target, Target):
            target = replace(target, neurons=changes["neurons"])
        changes.pop("neurons", None)
        result = run_to_the_end(
            target,
            loaded.search,
            perturbation,
            magnitude=cell.magnitude,
            random_seed=self.plan.random_seed + cell.campaign,
            **{"preset": "paper", "max_tests": options.variant_tests, **changes},
        )
        last = result.rounds[-1]
        covered = next((round.tests for round in result.rounds if round.coverage.sampled >= 1), None)
        return {
            **_identity(cell),
            "neurons": result.start.n_neurons,
            "rounds": len(result.rounds),
            "first_coverage": result.rounds[0].coverage.sampled,
            "first_coverage_all": result.rounds[0].coverage.all,
            "first_tests": result.rounds[0].tests,
            "coverage": last.coverage.sampled,
            "coverage_all": last.coverage.all,
            "tests": last.tests,
            "tests_to_coverage": covered,
            "distinct_faults": last.distinct_faults,
            **_describe_cost(result),
        }


def run_to_the_end(target: Any, seeds: Seeds, perturbation: Perturbation, **options: Any) -> Run:
    """Run a campaign; Ctrl-C ends the evaluation, not only the campaign."""
    result = run(target, seeds, perturbation, **options)
    if result.stop_reason == "user":
        raise KeyboardInterrupt
    return result


def least_cost(technique: Technique, perturbation: Perturbation) -> int:
    """The fewest passes that a test of a technique costs: ascents have a backward pass each."""
    is_ascent = choose_policy(technique.policy).needs_gradient
    return int(1 + perturbation.passes + (2 if is_ascent else 0))


def _identity(cell: EvaluationCell) -> Record:
    return {name: value for name, value in asdict(cell).items() if value != ""}


def _describe_cost(result: Run) -> Record:
    """Seconds by phase, on which device of which machine, and the mean sensitivity of the model."""
    means = result.posterior_means
    seconds = result.seconds
    return {
        "seconds_measure": seconds.measure,
        "seconds_judge": seconds.judge,
        "seconds_search": seconds.search,
        "seconds_total": seconds.total,
        "machine": name_machine(result.start.device),
        "all_tests": result.rounds[-1].tests,
        "all_passes": result.rounds[-1].passes,
        "mean_sensitivity": None if means is None else float(np.mean(means)),
        "fault_rate": None if result.fault_rate is None else result.fault_rate.value,
    }


def name_machine(device: str) -> str | None:
    """A short hash of what times depend on: the machine, which others may share a host name with, and its device.

    A process at low priority has none, since its times depend on the other processes above all.
    """
    if hasattr(os, "getpriority") and os.getpriority(os.PRIO_PROCESS, 0) > 0:
        return None
    boot = BOOT_ID.read_text() if BOOT_ID.exists() else ""
    parts = (platform.node(), boot, os.cpu_count(), describe_environment(torch.device(device)))
    return hash_text(json.dumps(parts))[:8]


def failed_evaluation(cell: EvaluationCell, reason: str) -> Record:
    """What is stored of a cell that failed."""
    return {**_identity(cell), "error": reason}


@dataclass(frozen=True)
class RebuildWorker:
    """Makes a `CellWorker` again in another process."""

    plan: EvaluationPlan
    folder: Path | None = None

    def __call__(self) -> Callable[[EvaluationCell], Record]:
        return CellWorker(self.plan, self.folder).run
