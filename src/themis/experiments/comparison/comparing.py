"""The comparison itself: split the seeds, fix the grid, measure error rates, run every cell, sum up."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from themis.data.seeds import Seeds, read_seeds
from themis.errors import UsageError
from themis.experiments.comparison.cells import Bench
from themis.experiments.comparison.figures import draw
from themis.experiments.comparison.folder import RATES, Folder
from themis.experiments.comparison.grid import HIGHEST, Grid, fix_grid, largest_magnitude, usual_magnitude
from themis.experiments.comparison.plan import DIFFERENTIAL, GRID, Cell, Plan
from themis.experiments.comparison.rates import Parts, Rates, split_seeds
from themis.experiments.comparison.summary import GridSummary, summarise
from themis.experiments.comparison.table import markdown
from themis.experiments.comparison.workers import Workshop, run_here, run_in_processes
from themis.perturb import Perturbation, choose_perturbation
from themis.perturb.perturbation import check_fits, check_gradient
from themis.runs.environment import describe_environment, describe_tested, threads
from themis.runs.source import Origin
from themis.target.fingerprint import hash_seeds
from themis.target.target import AnyTarget, as_target

FOR = {"search": 0, "judge": 1 << 41, "grid": 1 << 40}
"""Added to the random seed, so that error rates share no noise with campaigns."""
NOTHING: dict[str, Any] = {"grids": [], "errors": {}, "judge": {}, "seeds": {}}
"""What is known before anything is measured."""
WORKERS_A_GPU = 4


class Listener:
    """Is told how a comparison goes; does nothing by itself."""

    def on_note(self, text: str) -> None:
        """What is being done, or must be said."""

    def on_cells(self, n_done: int, n_cells: int) -> None:
        """Before the first cell; some may be there from an earlier time."""

    def on_cell(self, cell: Cell, record: dict[str, Any], n_done: int, n_cells: int) -> None:
        """A cell has finished, or failed."""


@dataclass(frozen=True)
class Comparison:
    """A finished comparison."""

    plan: Plan
    perturbation: str
    seeds: dict[str, int]
    """Seeds of the search, the judge and, where it was fixed, the grid that the model answers rightly."""
    grids: tuple[GridSummary, ...]
    cells: list[dict[str, Any]] = field(repr=False)
    environment: dict[str, Any] = field(repr=False)

    @property
    def failed(self) -> list[dict[str, Any]]:
        """Cells without a result."""
        return [each for each in self.cells if "error" in each]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as written to `compare.json`; the counts by seed are in the cells' files alone."""
        return {
            "plan": self.plan.as_dict(),
            "perturbation": self.perturbation,
            "criteria": {each.name: each.criterion for each in self.plan.chosen() if each.criterion is not None},
            "seeds": self.seeds,
            "grids": [each.as_dict() for each in self.grids],
            "degenerate_grids": sum(each.degenerate is not None for each in self.grids),
            "failed_cells": len(self.failed),
            "cells": [{name: value for name, value in each.items() if name != "by_seed"} for each in self.cells],
            "environment": self.environment,
        }


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
    **options: Any,
) -> Comparison:
    """Compare techniques on `target` and `data` under `perturbation`; options are the fields of `Plan`.

    train: data that criteria learn from; by default the clean seeds of the search. rivals: other models of the task,
    for deepxplore. out: folder for the results; the same call again goes on where it was stopped, and one with other
    techniques, magnitudes, campaigns or resamples takes from it what it can. workers: processes,
    by default one, this one; more need `origin`, which says how another process makes everything again, and makes here
    what is not given. None is one a core, on a GPU four.
    """
    plan, tell = Plan.of(**options), listener or Listener()
    if workers is not None and (isinstance(workers, bool) or workers < 1):
        raise UsageError(f"workers must be at least 1, or None, got {workers!r}")
    if origin is None and workers != 1:
        raise UsageError(
            f"workers must be 1 for a model that lives in memory, got {workers}: name model and data in origin=..."
        )
    if origin is None and (target is None or data is None):
        raise UsageError("target and data must be given, or origin=..., which makes them")
    with nullcontext() if origin is None else origin.in_folder():
        chosen = choose_perturbation(perturbation)
    grids = plan.grids(chosen)
    rivals, names = tuple(rivals), [each.name for each in plan.chosen()]
    if DIFFERENTIAL in names and not rivals and (origin is None or not origin.rivals):
        raise UsageError(f"{DIFFERENTIAL} sets other models against the target, got none: pass --rivals (rivals=[...])")
    with closing(Folder(out)) as folder, threads(plan.threads):
        made = as_target(origin.target() if target is None and origin is not None else target)
        check_gradient(chosen, made)
        seeds = read_seeds(origin.read() if data is None and origin is not None else data)
        check_fits(chosen, seeds.shape[1:])
        parts = split_seeds(seeds, plan.seeds, plan.judge_seeds, plan.grid_seeds)
        if plan.max_passes <= len(parts.search) + chosen.passes:
            raise UsageError(
                f"max_passes must leave room for tests after one pass for each of {len(parts.search):,} clean seeds, "
                f"got {plan.max_passes:,}: raise it, or take fewer seeds"
            )
        words = perturbation if isinstance(perturbation, str) else None
        case = _Case(made, parts, chosen, words, plan, train, rivals, origin, tell)
        environment, tested = describe_environment(made.device), describe_tested(made, seeds, origin)
        folder.begin(case.record(tested), environment)
        grids, fixed = case.fix(grids, {**NOTHING, **(folder.read(RATES) or {})})
        folder.write(RATES, fixed)
        errors = {float(name): np.asarray(each, dtype=np.float64) for name, each in fixed["errors"].items()}
        for grid in grids:
            if grid.note:
                tell.on_note(f"{grid.name}: {grid.note}")
        records = case.run(plan.cells(grids), folder, _workers(workers, made))
        result = Comparison(
            plan,
            chosen.name,
            fixed["seeds"],
            tuple(summarise(grid, errors, plan, records) for grid in grids),
            list(records.values()),
            {**environment, **tested},
        )
        folder.write("compare.json", result.as_dict())
        folder.write_bytes("table.md", f"{markdown(result)}\n".encode())
        if folder.path is not None:
            draw(result, folder.path)
    return result


@dataclass(frozen=True)
class _Case:
    """What techniques are compared on."""

    target: AnyTarget
    parts: Parts
    perturbation: Perturbation
    words: str | None
    """The perturbation as another process can read it."""
    plan: Plan
    train: Any
    rivals: tuple[AnyTarget | nn.Module, ...]
    origin: Origin | None
    tell: Listener

    def record(self, tested: dict[str, Any]) -> dict[str, Any]:
        """What tells a comparison from others."""
        if self.train is not None:
            learnt: Any = hash_seeds(read_seeds(self.train, self.plan.train_inputs))
        else:
            learnt = None if self.origin is None else self.origin.train or self.origin.zoo
        if self.rivals:
            others: Any = [as_target(each).fingerprint() for each in self.rivals]
        else:
            others = None if self.origin is None else self.origin.rivals
        return {
            "plan": self.plan.as_dict(),
            "perturbation": self.perturbation.name,
            "perturbation_code": self.perturbation.code,
            "theta": [asdict(each) for each in self.perturbation.theta],
            **tested,
            "train": learnt,
            "rivals": others,
        }

    def fix(self, grids: tuple[Grid, ...], before: dict[str, Any]) -> tuple[tuple[Grid, ...], dict[str, Any]]:
        """The grids, the judge seeds' errors at each magnitude, and how many seeds of each part are answered rightly.

        Measured once, before any technique runs: what there is from `before` stays.
        """
        known = {each["name"]: Grid(each["name"], tuple(each["magnitudes"]), each["note"]) for each in before["grids"]}
        errors, counted, judge = dict(before["errors"]), dict(before["seeds"]), dict(before["judge"])
        with self.target.opened():
            if "search" not in counted:
                counted["search"] = len(self._rates("search").usable)
            if any(each.name == GRID for each in grids) and GRID not in known:
                self.tell.on_note("fixing the grid of magnitudes on seeds of its own")
                rates = self._rates("grid")
                counted["grid"] = len(rates.usable)
                limits = usual_magnitude(self.perturbation), largest_magnitude(self.perturbation)
                known[GRID] = fix_grid(rates.rate, *limits, highest=HIGHEST * rates.chance)
            grids = tuple(known[GRID] if each.name == GRID else each for each in grids)
            magnitudes = sorted({each for grid in grids for each in grid.magnitudes})
            if missing := [each for each in magnitudes if repr(each) not in errors]:
                self.tell.on_note("measuring error rates on the judge's seeds")
                rates = self._rates("judge")
                counted["judge"] = len(rates.usable)
                judge = {"seed_id": rates.seed_id.tolist(), "draws": rates.draws}
                errors |= {repr(each): rates.errors(each).tolist() for each in missing}
        known |= {each.name: each for each in grids}
        return grids, {
            "grids": [
                {"name": each.name, "magnitudes": list(each.magnitudes), "note": each.note} for each in known.values()
            ],
            "errors": errors,
            "judge": judge,
            "seeds": {name: counted[name] for name in FOR if name in counted},
        }

    def _rates(self, part: str) -> Rates:
        seeds: Seeds = getattr(self.parts, part)
        return Rates(self.target, seeds, self.perturbation, self.plan.random_seed + FOR[part])

    def run(self, cells: list[Cell], folder: Folder, workers: int) -> dict[Cell, dict[str, Any]]:
        """Every cell's result, in their order: those that are kept, and the others run now."""
        records = folder.done(cells)
        left = [cell for cell in cells if cell not in records]
        self.tell.on_cells(len(records), len(cells))

        def take(cell: Cell, record: dict[str, Any]) -> None:
            folder.keep(cell, record)
            records[cell] = record
            self.tell.on_cell(cell, record, len(records), len(cells))

        if workers > 1 and len(left) > 1:
            workshop = self._workshop()
            self.tell.on_note(f"starting {min(workers, len(left))} workers")
            run_in_processes(left, workshop, workers, take)
        elif left:
            train: Any = self.train
            rivals: Any = self.rivals
            if self.origin is not None:
                train = self.origin.read_train if train is None else train
                rivals = rivals or self.origin.read_rivals
            run_here(left, Bench(self.target, self.parts.search, self.perturbation, self.plan, train, rivals), take)
        return {cell: records[cell] for cell in cells}

    def _workshop(self) -> Workshop:
        if self.origin is None or self.words is None or self.train is not None or self.rivals:
            raise UsageError(
                "with several workers other processes make everything again: name model, data, training data and "
                "rivals in origin=..., and the perturbation in words"
            )
        return Workshop(self.origin, self.words, self.plan)


def _workers(asked: int | None, target: AnyTarget) -> int:
    if asked is not None:
        return asked
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if target.device.type == "cpu" else min(cores, WORKERS_A_GPU)
