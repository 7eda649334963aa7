"""Rounds of retraining and campaign, until the fault rate on judge seeds stops falling; each campaign is a run."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from themis.campaign.api import resume, run
from themis.errors import UsageError
from themis.perturb import choose_perturbation
from themis.retraining.changes import normal_interval
from themis.retraining.material import Material, of_faults
from themis.retraining.result import Stage, TrainedModel
from themis.retraining.source import Source
from themis.retraining.steps import Retraining
from themis.runs.faults import Faults
from themis.runs.store.schema import DATABASE
from themis.target.ledger import allow_trained_seeds
from themis.text import percent


def run_rounds(retraining: Retraining) -> tuple[list[Stage], int, str]:
    """All rounds, the index of the one that is kept, and why they ended."""
    source, plan = retraining.source, retraining.plan
    material = _first_material(source, plan.limit)
    original = retraining.examine_original()
    target, ledger, before = source.target, source.ledger, original[source.name]
    stages: list[Stage] = []
    for number in range(1, plan.rounds + 1):
        stage = retraining.run_round(number, target, ledger, material, original)
        if plan.rounds == 1:
            return [stage], 0, ""
        after = stage.outcomes[0].after[stage.chosen]
        fall = normal_interval(after.disturbed - before.disturbed)
        rate_before, rate_after = (percent(1 - reading.disturbed_score, 2) for reading in (before, after))
        rates = f"{rate_before} before round {number}, {rate_after} after it"
        stage, faults = _follow_up(retraining, stage)
        stages.append(stage)
        retraining.listener.on_note(f"round {number}: fault rate on judge seeds {rates}")
        if fall is None or fall.low <= 0:
            has_risen = after.disturbed_score > before.disturbed_score
            kept = number - 1 if has_risen or number == 1 else number - 2
            return stages, kept, f"Stopped because the fault rate on judge seeds stopped falling: {rates}."
        if not len(faults):
            return stages, number - 1, f"Stopped because the campaign of round {number} found no fault to learn from."
        if number < plan.rounds:
            model = stage.model
            material = join_material(material, _next_material(source, model, faults, material, plan.limit))
            target, ledger, before = model.target, model.ledger, after
    stop = f"Stopped because all {plan.rounds} rounds are done; the fault rate was still falling."
    return stages, len(stages) - 1, stop


def _first_material(source: Source, limit: int | None) -> Material:
    """The faults of the runs, as inputs to learn from; of several runs, some may have none."""
    with_faults = [run for run in source.all if len(run.faults)] or [source]
    materials = [
        of_faults(
            run.faults,
            source.parts.search,
            run.perturbation,
            source.target,
            limit=limit,
            clean=source.parts.train,
            oracle=source.oracle,
            run=run.folder,
        )
        for run in with_faults
    ]
    return reduce(join_material, materials)


def _next_material(source: Source, model: TrainedModel, faults: Faults, first: Material, limit: int | None) -> Material:
    """The faults of a later campaign, with the labels of the first round."""
    return of_faults(
        faults,
        first.pool,
        source.perturbation,
        model.target,
        limit=limit,
        clean=first.clean,
        oracle=source.oracle,
    )


def join_material(first: Material, second: Material) -> Material:
    """The material of two campaigns on the same seeds."""
    return replace(
        first,
        disturbed=torch.cat([first.disturbed, second.disturbed]),
        disturbed_labels=torch.cat([first.disturbed_labels, second.disturbed_labels]),
        seed=torch.cat([first.seed, second.seed]),
    )


def _follow_up(retraining: Retraining, stage: Stage) -> tuple[Stage, Faults]:
    """The campaign that follows a round, in its own run folder."""
    out = retraining.folder.within(f"round-{stage.number}")
    retraining.listener.on_note(f"round {stage.number}: running a campaign on the retrained model")
    faults = run_campaign(retraining.source, stage.model, stage.number, out)
    campaign = {
        "folder": None if out is None else str(out),
        "faults": len(faults),
        "distinct_faults": len(faults.distinct()),
    }
    return replace(stage, campaign=campaign), faults


def run_campaign(source: Source, model: TrainedModel, number: int, out: Path | None) -> Faults:
    """The faults of a campaign like the run's on a retrained model and the search seeds, with other random tests."""
    origin = source.origin
    if origin is not None and model.weights is not None:
        origin = replace(origin, weights=os.path.abspath(model.weights))
    inputs: dict[str, Any] = {"origin": origin}
    if source.settings.criterion is not None and origin is not None:
        inputs["train"] = origin.read_train()
    if origin is not None and origin.rivals:
        inputs["rivals"] = origin.read_rivals()
    with allow_trained_seeds():
        name = _perturbation_name(source)
        if out is not None and (out / DATABASE).is_file():
            perturbation = source.perturbation if name is None else None
            result = resume(out, model.target, source.data, perturbation=perturbation, **inputs)
        else:
            options = {field.name: getattr(source.settings, field.name) for field in fields(source.settings)}
            options["random_seed"] += number
            if name is None:  # the range of its theta already has the magnitude
                options["magnitude"] = None
            result = run(model.target, source.data, name or source.perturbation, out=out, **inputs, **options)
    if result.stop_reason == "user":
        raise KeyboardInterrupt
    return result.faults


def _perturbation_name(source: Source) -> str | None:
    """The name from which another process can make the run's perturbation; None if there is none."""
    own = source.perturbation
    try:
        permission = None if source.origin is None else source.origin.permission
        imports = permission is None or permission.is_granted
        with nullcontext() if source.origin is None else source.origin.in_folder():
            named = choose_perturbation(own.name, source.settings.magnitude, imports=imports)
    except UsageError:
        return None
    return own.name if (named.theta, named.code) == (own.theta, own.code) else None
