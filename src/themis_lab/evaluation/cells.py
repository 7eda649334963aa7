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
from themis_lab.comparison.cells import CellRunner, count_by_seed, describe_campaign, run_to_the_end, split_seeds
from themis_lab.comparison.plan import GRID, CampaignCell, list_grids
from themis_lab.contest.api import contest_run
from themis_lab.contest.cells import OWN_POLICY, NoFaultsError
from themis_lab.contest.plan import THEMIS
from themis_lab.evaluation.plan import VARIANTS, EvaluationCell, EvaluationPlan, Kind, PairOptions
from themis_lab.evaluation.theory import BUDGET_ALONE, check_theory, first_covered
from themis_lab.evaluation.truth import GroundTruth
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
CHOOSERS = {own: technique for technique, own in RETRAINED.items()}


@dataclass
class ModelAtWork:
    """A model with all its seeds, and the runner that searches it, with the criteria that were fitted to it."""

    seeds: Seeds
    runner: CellRunner
    truths: dict[tuple[int, int], GroundTruth] = field(default_factory=dict)
    """By the number of mutants and of the seeds that they are filtered by."""


class CellWorker:
    """Runs cells of all kinds; the last model is kept, with its fitted criteria."""

    def __init__(self, plan: EvaluationPlan, folder: Path | None = None) -> None:
        """folder: the folder of the evaluation, where a cell keeps each of several trainings; None keeps none."""
        self.plan, self.folder = plan, folder
        self._loaded: dict[tuple[Any, ...], ModelAtWork] = {}

    def run(self, cell: EvaluationCell) -> Record:
        """Run a cell; the result is plain data."""
        options = self.plan.pair(cell.model, cell.perturbation)
        with self.plan.origin(cell.model).in_folder():
            perturbation = choose_perturbation(cell.perturbation)
        loaded = self._load(cell.model, options, perturbation)
        loaded.runner.perturbation = perturbation
        loaded.runner.plan = options.comparison(random_seed=self.plan.random_seed)
        measure: Callable[[EvaluationCell, PairOptions, ModelAtWork], Record] = {
            Kind.RATES: self._measure_rates,
            Kind.CAMPAIGNS: self._run_campaign,
            Kind.DONE: self._run_until_done,
            Kind.THEORY: self._check_theory,
            Kind.VARIANT: self._run_variant,
            Kind.RETRAINING: self._retrain,
        }.get(cell.kind, self._find_truth)
        return {**_identity(cell), **measure(cell, options, loaded)}

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
            self._loaded[key] = ModelAtWork(seeds, runner)
        return self._loaded[key]

    def _measure_rates(self, cell: EvaluationCell, options: PairOptions, loaded: ModelAtWork) -> Record:
        """The grids of magnitudes and the error rates; a grid that cannot be chosen is left out, with the reason."""
        runner = loaded.runner
        parts = split_seeds(loaded.seeds, options.seeds, options.judge_seeds, options.grid_seeds)
        setup = ComparisonSetup(runner.target, parts, runner.perturbation, None, runner.plan, None, (), None)
        grids, note = list_grids(runner.plan, runner.perturbation), ""
        try:
            measured = setup.measure_rates(grids, UNMEASURED, Listener())[1]
        except DataError as error:
            kept = tuple(grid for grid in grids if grid.name != GRID)
            if len(kept) == len(grids):
                raise
            note = str(error)
            measured = setup.measure_rates(kept, UNMEASURED, Listener())[1]
        return {**measured, "grid_refused": note, "device": str(runner.target.device)}

    def _run_campaign(self, cell: EvaluationCell, options: PairOptions, loaded: ModelAtWork) -> Record:
        """One campaign, with its state at both budgets."""
        cost = least_cost(choose_technique(cell.technique), loaded.runner.perturbation)
        by_passes = max(1, -(-(options.passes - len(loaded.runner.seeds)) // cost))
        limits = {"max_tests": max(options.tests or 1, by_passes), "max_passes": None, **BUDGET_ALONE}
        result, fitting = loaded.runner.search(cell.in_comparison, **limits)
        n_tests = {"passes": count_tests(result, options.passes)}
        if options.tests is not None:
            n_tests["tests"] = options.tests
        at = {budget: describe_prefix(cell.in_comparison, result, n) | fitting for budget, n in n_tests.items()}
        return {"at": at, **_describe_cost(result)}

    def _run_until_done(self, cell: EvaluationCell, options: PairOptions, loaded: ModelAtWork) -> Record:
        """One campaign until its technique is done: by coverage, on a plateau, or not at all.

        Policies of Themis stop by its default rule; the paper's preset and criteria stop at their coverage alone.
        """
        limits: dict[str, Any] = {"max_tests": options.done_tests, "plateau": options.plateau}
        if choose_technique(cell.technique).criterion is not None:
            limits["recall"] = None
        result, fitting = loaded.runner.search(cell.in_comparison, **limits)
        found = describe_prefix(cell.in_comparison, result, result.rounds[-1].tests) | fitting
        del found["by_seed"]
        return {**found, **_describe_cost(result)}

    def _check_theory(self, cell: EvaluationCell, options: PairOptions, loaded: ModelAtWork) -> Record:
        target, perturbation = loaded.runner.target, loaded.runner.perturbation

        def search(seeds: Seeds, *, shift: int = 0, **changes: Any) -> Run:
            options_of_run = {"round_size": options.round_size, "magnitude": cell.magnitude, **changes}
            random_seed = self.plan.random_seed + cell.campaign + shift
            return run_to_the_end(target, seeds, perturbation, random_seed=random_seed, **options_of_run)

        return check_theory(
            search,
            loaded.runner.seeds,
            done_tests=options.done_tests,
            reference_tests=options.reference_tests,
            seed_sets=options.seed_sets,
        )

    def _retrain(self, cell: EvaluationCell, options: PairOptions, loaded: ModelAtWork) -> Record:
        """What retraining on the inputs chosen by each technique regains; the recipe keeps the clean score.

        Finished trainings are kept, so that an interrupted cell resumes with the next one. Without faults there is
        nothing to train on; the reason is recorded then, since the same search would find none again.
        """
        target = loaded.runner.target
        search = run_to_the_end(
            target,
            loaded.seeds,
            loaded.runner.perturbation,
            magnitude=cell.magnitude,
            random_seed=self.plan.random_seed,
            **{"max_seeds": options.retrain_inputs, "split": SPLIT, "max_tests": options.round_size, **BUDGET_ALONE},
        )
        names = [RETRAINED.get(technique.name, technique.name) for technique in loaded.runner.plan.chosen()]
        try:
            contested = contest_run(
                search,
                list(dict.fromkeys(names)),
                target=target,
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
            return {"standings": [], "untrained": reason}
        standings = [asdict(standing) for standing in contested.standings]
        return {"inputs": contested.inputs, "before": contested.before, "standings": standings}

    def _find_truth(self, cell: EvaluationCell, options: PairOptions, loaded: ModelAtWork) -> Record:
        """Where a mutant fails, what a technique finds there, or which mutants its tests kill."""
        key = (options.mutants, options.judge_seeds)
        if key not in loaded.truths:
            judges = split_seeds(loaded.seeds, options.seeds, options.judge_seeds, options.grid_seeds).judge
            loaded.truths[key] = GroundTruth.of(loaded.runner, judges, options.mutants)
        truth = loaded.truths[key]
        if cell.kind == Kind.KILLS:
            return truth.kill(cell.in_comparison, options.passes)
        mutant = truth.plant(cell.campaign, options.planted)
        if cell.kind == Kind.MAPS:
            return truth.map_failures(mutant, cell.magnitude, options.map_cells)
        return truth.search(mutant, cell.in_comparison, options.passes, options.map_cells)

    def _run_variant(self, cell: EvaluationCell, options: PairOptions, loaded: ModelAtWork) -> Record:
        changes = dict(VARIANTS[cell.technique])
        target, neurons = loaded.runner.target, changes.pop("neurons", None)
        if neurons is not None and isinstance(target, Target):
            target = replace(target, neurons=neurons)
        result = run_to_the_end(
            target,
            loaded.runner.seeds,
            loaded.runner.perturbation,
            magnitude=cell.magnitude,
            random_seed=self.plan.random_seed + cell.campaign,
            **{"preset": "paper", "max_tests": options.variant_tests, **changes},
        )
        first, last = result.rounds[0], result.rounds[-1]
        return {
            "neurons": result.start.n_neurons,
            "rounds": len(result.rounds),
            "first_coverage": first.coverage.sampled,
            "first_coverage_all": first.coverage.all,
            "first_tests": first.tests,
            "coverage": last.coverage.sampled,
            "coverage_all": last.coverage.all,
            "tests": last.tests,
            "tests_to_coverage": first_covered(result),
            "distinct_faults": last.distinct_faults,
            **_describe_cost(result),
        }


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
        "mean_sensitivity": None if means is None else float(np.mean(means, dtype=np.float64)),
        "fault_rate": None if result.fault_rate is None else result.fault_rate.value,
    }


def name_machine(device: str) -> str | None:
    """A short hash of the machine, whose host name may not be unique, and its device, on which times depend.

    A process at low priority has none, since its times depend on the other processes above all.
    """
    if hasattr(os, "getpriority") and os.getpriority(os.PRIO_PROCESS, 0) > 0:
        return None
    boot = BOOT_ID.read_text() if BOOT_ID.exists() else ""
    parts = (platform.node(), boot, os.cpu_count(), describe_environment(torch.device(device)))
    return hash_text(json.dumps(parts))[:8]


def failed_evaluation(cell: EvaluationCell, reason: str) -> Record:
    """The stored record of a failed cell."""
    return {**_identity(cell), "error": reason}


def make_worker(plan: EvaluationPlan, folder: Path | None) -> Callable[[EvaluationCell], Record]:
    """The function that runs cells, for another process."""
    return CellWorker(plan, folder).run


def count_tests(result: Run, passes: int) -> int:
    """The number of tests that a campaign had run after `passes`, if all tests of a round cost the same."""
    tests, spent = _spending(result)
    return int(np.interp(passes, spent, tests) + 1e-9)


def count_passes(result: Run, n_tests: int) -> int:
    """The passes that a campaign had spent after its first tests."""
    return round(float(np.interp(n_tests, *_spending(result))))


def _spending(result: Run) -> tuple[list[float], list[float]]:
    """Tests and passes at the start and after each round; at the start, clean seeds have been run."""
    tests, passes = ([getattr(round, name) for round in result.rounds] for name in ("tests", "passes"))
    clean = float(result.start.n_seeds)
    if len(tests) > 1:  # checks of the model cost passes as well
        clean = max(clean, passes[0] - tests[0] * (passes[1] - passes[0]) / (tests[1] - tests[0]))
    return [0.0, *tests], [clean, *passes]


def describe_prefix(cell: CampaignCell, result: Run, n_tests: int) -> dict[str, Any]:
    """The first tests of a campaign, in the form of a whole one; coverage is that of the last round within them."""
    rounds = [round for round in result.rounds if round.tests <= n_tests] or result.rounds[:1]
    columns = result.faults.columns if len(result.faults) else {}
    is_within = columns["id"] < n_tests if columns else np.zeros(0, dtype=bool)
    by_seed = count_by_seed({name: values[is_within] for name, values in columns.items()} if is_within.any() else {})
    return describe_campaign(cell, replace(result, rounds=rounds)) | {
        "tests": n_tests,
        "passes": count_passes(result, n_tests),
        "faults": sum(by_seed["faults"]),
        "distinct_faults": sum(by_seed["distinct"]),
        "failing_seeds": len(by_seed["seed_id"]),
        "by_seed": by_seed,
    }
