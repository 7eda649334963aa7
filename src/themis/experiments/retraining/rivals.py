"""A contest of techniques on a run: what the model learns from the inputs that each of them chooses."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from themis.errors import UsageError
from themis.experiments.retraining.compare import Contested, compare
from themis.experiments.retraining.contest import Case, Terms
from themis.experiments.retraining.listener import Listener
from themis.experiments.retraining.recipe import Recipe
from themis.experiments.retraining.source import Source, opened
from themis.runs.run import Run
from themis.runs.source import Origin

FRESH = 0.0
"""Share of inputs made anew, by default: the chosen inputs alone count."""


def contest(
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
    **options: Any,
) -> Contested:
    """Let techniques choose as many inputs each from a run's search seeds, train on each choice, judge alike.

    options: fields of `Recipe` and of `Terms`; passes are by default those that the run spent. workers: processes;
    more than one need a run folder that knows how to make its model and data. All else as `retrain` has it.
    """
    of_recipe = {each.name for each in fields(Recipe)}
    recipe = Recipe.of(**{"fresh": FRESH, **{name: value for name, value in options.items() if name in of_recipe}})
    of_terms = {name: value for name, value in options.items() if name not in of_recipe or name == "random_seed"}
    Terms.of(**of_terms, techniques=techniques)  # refuses what breaks a rule before a model is loaded
    if workers > 1 and (isinstance(run, Run) or target is not None or data is not None):
        raise UsageError(f"workers must be 1 for a model or data that live in memory, got {workers}: give a run folder")
    make = None if workers == 1 or isinstance(run, Run) else partial(_make, run, judge, origin, train)
    with opened(run, target, data, judge, None, origin, train) as source:
        terms = Terms.of(**{"passes": source.passes, **of_terms}, techniques=techniques)
        return compare(case_of(source), terms, recipe, make=make, out=out, workers=workers, listener=listener)


def case_of(source: Source) -> Case:
    """What the contest is held on."""
    return Case(source.target, source.parts, source.perturbation, source.ledger)


def _make(run: str | Path, judge: Any, origin: Origin | None, train: Any) -> Case:
    with opened(run, None, None, judge, None, origin, train) as source:
        return case_of(source)
