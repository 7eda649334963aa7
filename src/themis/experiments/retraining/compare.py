"""Comparing techniques by what a model learns from the inputs they choose: the whole contest, kept as it goes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from themis.data.hashes import seed_hashes
from themis.errors import StoreError, UsageError
from themis.experiments.comparison.plan import Technique
from themis.experiments.retraining.changes import Shift, normal_interval, paired, t_interval
from themis.experiments.retraining.contest import COLUMNS, Case, Contest, Terms, columns_of, unpack
from themis.experiments.retraining.examine import Reading
from themis.experiments.retraining.listener import Listener
from themis.experiments.retraining.recipe import Recipe
from themis.experiments.retraining.techniques import THEMIS
from themis.judge.estimate import Estimate
from themis.runs.environment import describe_environment, threads
from themis.runs.store.files import explained, write_file
from themis.target.fingerprint import hash_text

Make = Callable[[], Case]
"""Makes the case again in another process; it must be picklable, as a function of a module or a `partial` of one."""
Record = dict[str, Any]
CELLS, INPUTS, RESULT, TABLE, FIGURE = "cells", "inputs.json", "contest.json", "contest.md", "contest.png"
FREE = ("techniques", "random_seeds")
"""Of the terms: what says which cells there are, and changes none of them."""


@dataclass(frozen=True)
class Lead:
    """By how much themis is above a rival, paired by random seed and judge seed."""

    over_runs: Estimate | None
    """Student's t over random seeds of the difference of the two scores; None where there is one."""
    over_seeds: Estimate
    """Normal, over judge seeds of each one's difference, a mean over random seeds."""


@dataclass(frozen=True)
class Standing:
    """How a technique came out; means over random seeds."""

    technique: str
    n_runs: int
    errors: tuple[str, ...]
    figures: dict[str, float | None] = field(default_factory=dict)
    """Inputs chosen, faults and seeds among them, distinct faults found, how many trainings left the model as it came,
    and where they were asked for those that a campaign on the judge seeds finds afterwards, and the share of old faults
    mended."""
    shifts: dict[str, Shift] = field(default_factory=dict)
    """clean, disturbed, and for numbers clean_error and disturbed_error: before and after."""
    lead: Lead | None = None
    """Of themis's disturbed score over this technique's; None for themis itself."""
    clean_lead: Lead | None = None


@dataclass(frozen=True)
class Contested:
    """A finished contest."""

    perturbation: str
    terms: Terms
    recipe: Recipe
    inputs: int
    before: Record
    standings: tuple[Standing, ...]
    environment: Record = field(repr=False)
    records: list[Record] = field(repr=False)

    def as_dict(self) -> Record:
        """Plain data; what belongs to single seeds is in the cells alone."""
        plain = {name: value for name, value in asdict(self).items() if name != "records"}
        cells = [{name: value for name, value in each.items() if name != "by_seed"} for each in self.records]
        return {**plain, "cells": cells}


def compare(
    case: Case | None = None,
    terms: Terms | None = None,
    recipe: Recipe | None = None,
    *,
    make: Make | None = None,
    out: str | Path | None = None,
    workers: int = 1,
    listener: Listener | None = None,
) -> Contested:
    """Let techniques choose inputs, train on each choice by the same recipe, and judge on the same seeds.

    make: makes the case in other processes, needed for more than one worker, and here where no case is given. out:
    folder for the results; the same call again takes from it what is done. The recipe's patience is off: an early stop
    would cost some less than others. By default nothing fresh is mixed in, so that the chosen inputs alone count.
    """
    terms, tell = terms or Terms(), listener or Listener()
    recipe = replace(recipe or Recipe(fresh=0.0), patience=None)
    if workers < 1 or (workers > 1 and make is None):
        raise UsageError(f"workers must be 1 without make=..., which makes the case in each, got {workers}")
    if case is None and make is None:
        raise UsageError("a contest needs case=..., or make=..., which makes it")
    case = case or _made(make)
    contest = Contest(case, terms, recipe)
    folder = None if out is None else Path(out)
    with threads(1) if case.target.device.type == "cpu" else nullcontext():
        at = None if folder is None else folder / CELLS / _digest(case, terms, recipe)
        kept_inputs = _read(at, INPUTS)
        terms = replace(terms, inputs=contest.inputs() if kept_inputs is None else kept_inputs["inputs"])
        contest.terms = terms
        if at is not None:
            _write(at / INPUTS, {"inputs": terms.inputs})
        before = contest.before()
        cells = [(each, terms.random_seed + k) for each in terms.chosen() for k in range(terms.random_seeds)]
        done = {cell: kept for cell in cells if (kept := _read(at, _file(cell))) is not None}
        tell.on_steps(len(done), len(cells))
        left = [each for each in cells if each not in done]
        for cell, record in _run(left, contest, make, workers):
            done[cell] = record
            if at is not None and "error" not in record:
                _write(at / _file(cell), record)
            tell.on_step(_say(record), len(done), len(cells))
    records = [done[cell] for cell in cells]
    result = summarise(case.perturbation.name, terms, recipe, before, records, describe_environment(case.target.device))
    if folder is not None:
        from themis.experiments.retraining.standing import draw, markdown

        _write(folder / RESULT, result.as_dict())
        with explained(folder):
            write_file(folder / TABLE, f"{markdown(result)}\n".encode())
            draw(result, folder / FIGURE)
    return result


def summarise(
    perturbation: str, terms: Terms, recipe: Recipe, before: Reading, records: list[Record], environment: Record
) -> Contested:
    """How each technique came out, from the records of its cells."""
    first = {name: unpack(text) for name, text in columns_of(before).items()}
    own = {each["random_seed"]: each for each in records if each["technique"] == THEMIS and "error" not in each}
    standings = []
    for technique in terms.chosen():
        mine = [each for each in records if each["technique"] == technique.name]
        failures = tuple(dict.fromkeys(each["error"] for each in mine if "error" in each))
        mine = [each for each in mine if "error" not in each]
        if not mine:
            standings.append(Standing(technique.name, 0, failures))
            continue
        shifts = {name: paired(first[name], _stacked(mine, name)) for name in COLUMNS if name in first}
        rivals = [each for each in mine if technique.name != THEMIS and each["random_seed"] in own]
        leads = [_lead([own[each["random_seed"]] for each in rivals], rivals, name) for name in COLUMNS[:2][::-1]]
        standings.append(Standing(technique.name, len(mine), failures, _figures(mine), shifts, *leads))
    return Contested(
        perturbation,
        terms,
        recipe,
        terms.inputs or 0,
        before.as_dict(),
        tuple(standings),
        environment,
        records,
    )


def _lead(own: list[Record], rivals: list[Record], name: str) -> Lead | None:
    if not own:
        return None
    gap = _stacked(own, name) - _stacked(rivals, name)
    return Lead(t_interval(gap.mean(1)), normal_interval(gap.mean(0)))


def _stacked(records: list[Record], name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.stack([unpack(each["by_seed"][name]) for each in records])


def _figures(records: list[Record]) -> dict[str, float | None]:
    """Means over random seeds; None where something was not measured."""
    names = ("inputs", "faults_chosen", "seeds_chosen", "faults_found", "seeds_found")
    figures: dict[str, float | None] = {name: float(np.mean([each[name] for each in records])) for name in names}
    figures["untouched"] = float(sum(not each["best_epoch"] for each in records))
    for name in ("distinct_faults", "failing_seeds", "held", "mended"):
        values = [each["reading"][name] for each in records]
        figures[name] = None if None in values else float(np.mean(values))
    return figures


# Cells: here, or in processes of their own

Cell = tuple[Technique, int]


def _run(cells: list[Cell], contest: Contest, make: Make | None, workers: int) -> Iterator[tuple[Cell, Record]]:
    """Cells with their records, in the order in which they are done."""
    if workers == 1 or make is None or len(cells) < 2:
        for cell in cells:
            yield cell, attempt(contest, cell)
        return
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    by_technique: dict[str, list[Cell]] = {}
    for cell in cells:
        by_technique.setdefault(cell[0].name, []).append(cell)
    # The cells of a technique stay together, so that its criterion is fitted once, unless there are workers to spare.
    size = max(1, -(-len(cells) // workers))
    parts = [some[k : k + size] for some in by_technique.values() for k in range(0, len(some), size)]
    how = (make, contest.terms, contest.recipe)
    with ProcessPoolExecutor(min(workers, len(parts)), mp_context=get_context("spawn")) as pool:
        running = {pool.submit(work, how, some): some for some in parts}
        for each in as_completed(running):
            yield from zip(running[each], each.result(), strict=True)


def work(how: tuple[Make, Terms, Recipe], cells: list[Cell]) -> list[Record]:
    """Run cells in another process."""
    torch.set_num_threads(1)
    contest = _contest(how)
    return [attempt(contest, cell) for cell in cells]


@cache
def _held() -> dict[str, Contest]:
    return {}


def _contest(how: tuple[Make, Terms, Recipe]) -> Contest:
    """The process's contest; another one takes its place."""
    held, key = _held(), repr(how)
    if key not in held:
        held.clear()
        held[key] = Contest(_made(how[0]), how[1], how[2])
    return held[key]


def attempt(contest: Contest, cell: Cell) -> Record:
    """A cell's record, or why it has none."""
    try:
        return contest.run(*cell)
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        return {"technique": cell[0].name, "random_seed": cell[1], "error": why}


def _made(make: Make | None) -> Case:
    assert make is not None
    return make()


def _digest(case: Case, terms: Terms, recipe: Recipe) -> str:
    """What tells these cells from others."""
    parts = [hash_text(seed_hashes(each).tobytes().hex()) for each in vars(case.parts).values()]
    theta = [(each.name, each.low, each.high) for each in case.perturbation.theta]
    known = None if case.known is None else len(case.known)
    oracle = case.target.oracle if isinstance(case.target.oracle, str) else case.target.oracle.spec()
    decisive = {name: value for name, value in terms.as_dict().items() if name not in FREE}
    what = (case.target.fingerprint(), oracle, parts, known, case.perturbation.name, theta, decisive, recipe.as_dict())
    return hash_text(json.dumps(what, default=str))[:16]


def _file(cell: Cell) -> str:
    technique, random_seed = cell
    plain = "".join(each if each.isalnum() else "_" for each in technique.name)
    return f"{plain}-{hash_text(technique.name)[:6]}-{random_seed}.json"


def _read(at: Path | None, name: str) -> Record | None:
    """A file that was kept; None if there is none."""
    if at is None or not (at / name).is_file():
        return None
    try:
        record: Record = json.loads((at / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{at / name} cannot be read: {error}; remove it to make it again") from error
    return record


def _write(path: Path, content: Record) -> None:
    """A JSON file, there whole or not at all."""
    with explained(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, f"{json.dumps(content)}\n".encode())


def _say(record: Record) -> str:
    said = f"{record['technique']}, random seed {record['random_seed']}"
    if "error" in record:
        return f"{said} failed: {record['error']}"
    return f"{said}: disturbed score {record['reading']['disturbed']:.3f}"
