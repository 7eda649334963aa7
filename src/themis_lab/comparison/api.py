"""`themis_lab.compare`: split the seeds, choose the grid, measure error rates, run every campaign, summarise."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from torch import nn

from themis.campaign.setup import Executor
from themis.data.seeds import Seeds, read_seeds
from themis.errors import UsageError
from themis.experiments import ExperimentFolder, ExperimentPlan, Listener
from themis.perturb import Perturbation, choose_perturbation
from themis.perturb.perturbation import check_fits, check_gradient
from themis.runs.environment import describe_environment, describe_tested, threads
from themis.runs.source import Origin
from themis.target.alignment import align_seeds, align_target
from themis.target.blackbox import as_target
from themis.target.fingerprint import hash_seeds
from themis.target.target import AnyTarget
from themis_integrations.ray.executor import RayExecutor
from themis_lab.comparison.cells import (
    BOX,
    FULL,
    CellRunner,
    ErrorRates,
    SeedParts,
    failed_campaign,
    make_runner,
    split_seeds,
)
from themis_lab.comparison.figures import draw
from themis_lab.comparison.plan import (
    FREE_IN_COMPARISON,
    GRID,
    HIGHEST_RATE,
    CampaignCell,
    ComparisonPlan,
    Grid,
    fix_grid,
    largest_magnitude,
    list_grids,
    usual_magnitude,
)
from themis_lab.comparison.statistics import Array
from themis_lab.comparison.summary import Comparison, Record, markdown, summarise
from themis_lab.executors import (
    CellKind,
    JsonResults,
    choose_cell_executor,
    choose_ray,
    read_result,
    run_cells,
    write_result,
)
from themis_lab.keywords import CompareOptions
from themis_lab.techniques import DIFFERENTIAL

RATES = "rates.json"
SEED_OFFSETS = {"search": 0, "judge": 1 << 41, "grid": 1 << 40}
"""Numbers added to the random seed, so that error rates and campaigns share no noise."""
UNMEASURED: dict[str, Any] = {"grids": [], "errors": {}, "box_errors": {}, "judge": {}, "seeds": {}}
"""The content of `rates.json` before anything is measured."""
ERROR_KEYS = {FULL: "errors", BOX: "box_errors"}
"""The keys of error rates in `rates.json`, by the part of the range where they are measured."""
WORKERS_PER_GPU = 4


def compare(
    target: AnyTarget | nn.Module | None = None,
    data: Any = None,
    perturbation: str | Perturbation = "gaussian",
    *,
    train: Any = None,
    rivals: Iterable[AnyTarget | nn.Module] = (),
    out: str | Path | None = None,
    workers: int | None = 1,
    origin: Origin | None = None,
    listener: Listener | None = None,
    executor: Executor | str | None = None,
    **options: Unpack[CompareOptions],
) -> Comparison:
    """Compare techniques on `target` and `data` under `perturbation`; options are the fields of `ComparisonPlan`.

    Args:
        target: The model under test; by default it is created from `origin`.
        data: The seeds; by default they are read from `origin`.
        perturbation: As for `themis.run`.
        out: Folder for the results; the same call resumes an interrupted comparison, and a call with other techniques,
            magnitudes, campaigns or resamples reuses every finished campaign.
        train: Data that criteria are fitted to; by default the clean search seeds.
        rivals: Other models of the task, for `deepxplore`.
        workers: Number of processes, by default only this one; None means one per core, or four on a GPU.
        origin: How another process can create the target and the data; several workers need it.
        listener: Is notified of the progress.
        executor: `RayExecutor` runs campaigns in its workers instead; a model in memory is sent to them.
    """
    plan, listener = ComparisonPlan.of(**options), listener or Listener()
    if workers is not None and (isinstance(workers, bool) or workers < 1):
        raise UsageError(f"workers must be at least 1, or None, got {workers!r}")
    on_ray = choose_ray(executor, plan.threads)
    if origin is None and workers != 1 and on_ray is None:
        raise UsageError(
            f"workers must be 1 for a model in memory, got {workers}: name the model and the data in origin=..."
        )
    if origin is None and (target is None or data is None):
        raise UsageError("target and data must be given, or origin=..., which makes them")
    with nullcontext() if origin is None else origin.in_folder():
        chosen = choose_perturbation(perturbation)
    grids = list_grids(plan, chosen)
    rivals, names = tuple(rivals), [technique.name for technique in plan.chosen()]
    if DIFFERENTIAL in names and not rivals and (origin is None or not origin.rivals):
        raise UsageError(f"{DIFFERENTIAL} compares the target with other models: pass them as --rivals (rivals=[...])")
    with closing(ExperimentFolder(out, "comparison")) as folder, threads(plan.threads):
        target = as_target(origin.target() if target is None and origin is not None else target)
        check_gradient(chosen, target)
        seeds = align_seeds(target, read_seeds(origin.read() if data is None and origin is not None else data))
        target = align_target(target, seeds)
        check_fits(chosen, seeds.shape[1:])
        parts = split_seeds(seeds, plan.seeds, plan.judge_seeds, plan.grid_seeds)
        if plan.max_passes <= len(parts.search) + chosen.passes:
            raise UsageError(
                f"max_passes must leave room for tests after one pass for each of {len(parts.search):,} clean seeds, "
                f"got {plan.max_passes:,}: raise it, or use fewer seeds"
            )
        spec = perturbation if isinstance(perturbation, str) else None
        setup = ComparisonSetup(target, parts, chosen, spec, plan, train, rivals, origin)
        environment, tested = describe_environment(target.device), describe_tested(target, seeds, origin)
        folder.begin(ExperimentPlan(setup.record(tested), FREE_IN_COMPARISON), environment)
        grids, measured = setup.measure_rates(grids, {**UNMEASURED, **(read_result(folder, RATES) or {})}, listener)
        write_result(folder, RATES, measured)
        for grid in grids:
            if grid.note:
                listener.on_note(f"{grid.name}: {grid.note}")
        records = setup.run(plan.cells(grids), folder, on_ray or _n_workers(workers, target), listener)
        errors, box_errors = read_errors(measured)
        result = Comparison(
            plan,
            chosen.name,
            measured["seeds"],
            tuple(summarise(grid, errors, box_errors, plan, records) for grid in grids),
            list(records.values()),
            {**environment, **tested},
        )
        folder.write("compare.json", result.as_dict())
        folder.write_bytes("table.md", f"{markdown(result)}\n".encode())
        if folder.path is not None:
            draw(result, folder.path)
    return result


def read_grids(measured: dict[str, Any]) -> tuple[Grid, ...]:
    """The grids of magnitudes that were measured."""
    return tuple(Grid(grid["name"], tuple(grid["magnitudes"]), grid["note"]) for grid in measured["grids"])


def read_errors(measured: dict[str, Any]) -> list[dict[float, Array]]:
    """The errors of the judge seeds by magnitude, at full strength and over the box."""
    return [{float(name): np.asarray(rates) for name, rates in measured[key].items()} for key in ERROR_KEYS.values()]


@dataclass(frozen=True)
class ComparisonSetup:
    """What techniques are compared on."""

    target: AnyTarget
    parts: SeedParts
    perturbation: Perturbation
    spec: str | None
    """The name of the perturbation, from which another process can make it."""
    plan: ComparisonPlan
    train: Any
    rivals: tuple[AnyTarget | nn.Module, ...]
    origin: Origin | None

    def record(self, tested: dict[str, Any]) -> dict[str, Any]:
        """What identifies this comparison."""
        if self.train is not None:
            train: Any = hash_seeds(read_seeds(self.train, self.plan.train_inputs))
        else:
            train = None if self.origin is None else self.origin.train or self.origin.zoo
        if self.rivals:
            rivals: Any = [as_target(rival).fingerprint() for rival in self.rivals]
        else:
            rivals = None if self.origin is None else self.origin.rivals
        return {
            "plan": self.plan.as_dict(),
            "perturbation": self.perturbation.name,
            "perturbation_code": self.perturbation.code,
            "theta": [theta.as_dict() for theta in self.perturbation.theta],
            **tested,
            "train": train,
            "rivals": rivals,
        }

    def measure_rates(
        self, grids: tuple[Grid, ...], before: dict[str, Any], listener: Listener
    ) -> tuple[tuple[Grid, ...], dict[str, Any]]:
        """The grids with all magnitudes, and the content of `rates.json`.

        That is the grids, the errors of the judge seeds at each magnitude, at full strength and over the box that
        techniques search, and how many seeds of each part are answered correctly. All of it is measured once, before
        any technique runs: what is in `before` stays.
        """
        known = {grid.name: grid for grid in read_grids(before)}
        errors = {where: dict(before[key]) for where, key in ERROR_KEYS.items()}
        n_correct, judge = dict(before["seeds"]), dict(before["judge"])
        with self.target.opened():
            if "search" not in n_correct:
                n_correct["search"] = len(self._rates("search").usable)
            if any(grid.name == GRID for grid in grids) and GRID not in known:
                listener.on_note("choosing the grid of magnitudes on separate seeds")
                rates = self._rates("grid")
                n_correct["grid"] = len(rates.usable)
                limits = usual_magnitude(self.perturbation), largest_magnitude(self.perturbation)
                known[GRID] = fix_grid(rates.rate, *limits, highest=HIGHEST_RATE * rates.chance)
            grids = tuple(known[GRID] if grid.name == GRID else grid for grid in grids)
            magnitudes = sorted({magnitude for grid in grids for magnitude in grid.magnitudes})
            if missing := [
                (where, magnitude)
                for where, known_errors in errors.items()
                for magnitude in magnitudes
                if repr(magnitude) not in known_errors
            ]:
                listener.on_note("measuring error rates on the judge seeds")
                rates = self._rates("judge")
                n_correct["judge"] = len(rates.usable)
                judge = {"seed_id": rates.seed_id.tolist(), "draws": rates.draws, "box_draws": rates.box_draws}
                for where, magnitude in missing:
                    errors[where][repr(magnitude)] = rates.errors(magnitude, where).tolist()
        known |= {grid.name: grid for grid in grids}
        return grids, {
            "grids": [{**vars(grid), "magnitudes": list(grid.magnitudes)} for grid in known.values()],
            **{key: errors[where] for where, key in ERROR_KEYS.items()},
            "judge": judge,
            "seeds": {part: n_correct[part] for part in SEED_OFFSETS if part in n_correct},
        }

    def _rates(self, part: str) -> ErrorRates:
        seeds: Seeds = getattr(self.parts, part)
        return ErrorRates(self.target, seeds, self.perturbation, self.plan.random_seed + SEED_OFFSETS[part])

    def run(
        self, cells: list[CampaignCell], folder: ExperimentFolder, workers: int | RayExecutor, listener: Listener
    ) -> dict[CampaignCell, Record]:
        """The result of every campaign, in order. workers: the number of processes, or those on Ray."""
        if isinstance(workers, RayExecutor):
            workers.check_device(self.target.device.type)
        is_sent = isinstance(workers, RayExecutor) and self.origin is None
        return run_cells(
            cells,
            self._runner if workers == 1 or is_sent else self._rebuild(),
            results=JsonResults(folder),
            kind=CellKind(
                "campaign",
                lambda cell, record: f"{cell}: {record['distinct_faults']:,} distinct faults",
                failed_campaign,
            ),
            executor=choose_cell_executor(workers, self.plan.threads),
            listener=listener,
        )

    def _runner(self) -> Callable[[CampaignCell], Record]:
        train: Any = self.train
        rivals: Any = self.rivals
        if self.origin is not None:
            train = self.origin.read_train if train is None else train
            rivals = rivals or self.origin.read_rivals
        return CellRunner(self.target, self.parts.search, self.perturbation, self.plan, train, rivals).run

    def _rebuild(self) -> Callable[[], Callable[[CampaignCell], Record]]:
        if self.origin is None or self.spec is None or self.train is not None or self.rivals:
            raise UsageError(
                "with several workers, other processes make everything again: name the model, data, training data and "
                "rivals in origin=..., and pass the perturbation by name"
            )
        return partial(make_runner, self.origin, self.spec, self.plan)


def _n_workers(workers: int | None, target: AnyTarget) -> int:
    if workers is not None:
        return workers
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return n_cores if target.device.type == "cpu" else min(n_cores, WORKERS_PER_GPU)
