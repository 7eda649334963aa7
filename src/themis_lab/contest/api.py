"""Contests of techniques: on a run, or on a case in memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from themis.campaign.setup import Executor
from themis.errors import UsageError
from themis.experiments import PLAN, ExperimentFolder, ExperimentPlan, Listener
from themis.retraining.recipe import Recipe
from themis.retraining.source import Given, Source, open_source
from themis.runs.environment import describe_environment, threads
from themis.runs.run import Run
from themis.runs.source import Origin
from themis.runs.trust import Trusted
from themis_integrations.ray.executor import RayExecutor
from themis_lab.contest.cells import Case, Contest, MakeCase, Record, failed_cell, make_runner
from themis_lab.contest.plan import FREE_IN_CONTEST, FRESH_SHARE, ContestCell, ContestPlan
from themis_lab.contest.standings import TABLE_FILE, Contested, draw, markdown, summarise
from themis_lab.executors import (
    CellKind,
    JsonResults,
    choose_cell_executor,
    choose_ray,
    read_result,
    run_cells,
    write_result,
)
from themis_lab.keywords import ContestOptions

CELLS_FOLDER, INPUTS_FILE, CONTEST_FILE, FIGURE_FILE = "cells", "inputs.json", "contest.json", "contest.png"


def contest_run(
    run: Run | str | Path,
    techniques: str | list[str],
    *,
    target: Any = None,
    data: Any = None,
    train: Any = None,
    judge: Any = None,
    origin: Origin | None = None,
    out: str | Path | None = None,
    workers: int = 1,
    listener: Listener | None = None,
    trust: Trusted = False,
    executor: Executor | str | None = None,
    **options: Unpack[ContestOptions],
) -> Contested:
    """Let techniques choose inputs from the search seeds of a run, train on each choice, and judge them alike.

    options: fields of `Recipe` and `ContestPlan`; `passes` defaults to those that the run spent. workers: number of
    processes; more than one need a run folder that can make its model and data again. executor: `RayExecutor` runs the
    trainings in its workers instead. The other arguments are those of `retrain`.
    """
    on_ray = choose_ray(executor, 1)
    of_recipe = {field.name for field in fields(Recipe)}
    recipe = Recipe.of(
        **{"fresh": FRESH_SHARE, **{name: value for name, value in options.items() if name in of_recipe}}
    )
    of_plan = {name: value for name, value in options.items() if name not in of_recipe or name == "random_seed"}
    ContestPlan.of(**of_plan, techniques=techniques)  # raises for invalid options before a model is loaded
    is_in_memory = isinstance(run, Run) or target is not None or data is not None
    if workers > 1 and is_in_memory and on_ray is None:
        raise UsageError(f"workers must be 1 for a model or data in memory, got {workers}: pass a run folder")
    make = None
    if not isinstance(run, Run) and not is_in_memory and (workers > 1 or on_ray is not None):
        make = partial(_make_case, run, judge, origin, train, trust)
    with open_source(run, Given(target, data, judge, origin=origin, train=train, trust=trust)) as source:
        plan = ContestPlan.of(**{"passes": source.passes, **of_plan}, techniques=techniques)
        case = _case(source)
        return run_contest(case, plan, recipe, make=make, out=out, workers=on_ray or workers, listener=listener)


def _case(source: Source) -> Case:
    return Case(source.target, source.parts, source.perturbation, source.ledger, groups=source.groups)


def _make_case(run: str | Path, judge: Any, origin: Origin | None, train: Any, trust: Trusted) -> Case:
    with open_source(run, Given(judge=judge, origin=origin, train=train, trust=trust)) as source:
        return _case(source)


def run_contest(
    case: Case | None = None,
    plan: ContestPlan | None = None,
    recipe: Recipe | None = None,
    *,
    make: MakeCase | None = None,
    out: str | Path | None = None,
    workers: int | RayExecutor = 1,
    listener: Listener | None = None,
) -> Contested:
    """Let techniques choose inputs, train on each choice with the same recipe, and judge on the same seeds.

    make: makes the case in other processes, which more than one worker needs, and here if no case is given. workers:
    number of processes, or workers on Ray, which are sent the case if `make` is not given. out: folder for the results;
    the same call resumes an interrupted contest, and contests with other options can share the folder. Training never
    stops early, which would make some techniques cheaper than others. By default no inputs are disturbed again, so that
    only the chosen inputs count.
    """
    plan = plan or ContestPlan()
    recipe = replace(recipe or Recipe(fresh=FRESH_SHARE), patience=None)
    if isinstance(workers, int) and (workers < 1 or (workers > 1 and make is None)):
        raise UsageError(f"workers must be 1 without make=..., which makes the case in other processes, got {workers}")
    if case is None:
        if make is None:
            raise UsageError("a contest needs case=..., or make=..., which makes it")
        case = make()
    if isinstance(workers, RayExecutor):
        workers.check_device(case.target.device.type)
    digest = case.digest(plan, recipe)
    cells = f"{CELLS_FOLDER}/{digest}"
    environment = describe_environment(case.target.device)
    with (
        closing(ExperimentFolder(out, "contest", f"{cells}/{PLAN}")) as folder,
        threads(1) if case.target.device.type == "cpu" else nullcontext(),
    ):
        record = {
            "plan": plan.as_dict(),
            "recipe": recipe.as_dict(),
            "digest": digest,
            "model_sha256": case.target.fingerprint(),
            "perturbation": case.perturbation.name,
        }
        folder.begin(ExperimentPlan(record, FREE_IN_CONTEST), environment)
        contest = Contest(case, plan, recipe)
        stored = read_result(folder, f"{cells}/{INPUTS_FILE}")
        plan = contest.plan = replace(plan, inputs=contest.inputs() if stored is None else stored["inputs"])
        write_result(folder, f"{cells}/{INPUTS_FILE}", {"inputs": plan.inputs})
        before = contest.before()
        prepare: Callable[[], Callable[[ContestCell], Record]] = lambda: contest.run  # noqa: E731
        if workers != 1:
            prepare = partial(make_runner, make or case, plan, recipe)
        records = run_cells(
            plan.cells(),
            prepare,
            results=JsonResults(folder, cells),
            kind=CellKind(
                "training",
                lambda cell, record: f"{cell}: disturbed score {record['reading']['disturbed']:.3f}",
                failed_cell,
            ),
            executor=choose_cell_executor(workers),
            listener=listener,
        )
        result = summarise(case.perturbation.name, plan, recipe, before, list(records.values()), environment)
        folder.write(CONTEST_FILE, result.as_dict())
        folder.write_bytes(TABLE_FILE, f"{markdown(result)}\n".encode())
        if folder.path is not None:
            draw(result, folder.path / FIGURE_FILE)
    return result
