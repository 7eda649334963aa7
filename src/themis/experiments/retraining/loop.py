"""The loop: campaign and retraining in turn until the fault rate on judge seeds stops falling; each round is a run."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from themis.campaign.api import resume, run
from themis.errors import UsageError
from themis.experiments.retraining.material import Material
from themis.experiments.retraining.retrained import Model
from themis.experiments.retraining.source import Source
from themis.perturb import choose_perturbation
from themis.runs.faults import Faults
from themis.runs.store.schema import DATABASE
from themis.target.ledger import allow_trained_seeds


def campaign(source: Source, model: Model, number: int, out: Path | None) -> Faults:
    """A campaign on the search seeds of a retrained model, as the run's was but with tests of its own; its faults."""
    origin = source.origin
    if origin is not None and model.weights is not None:
        origin = replace(origin, weights=os.path.abspath(model.weights))
    how: dict[str, Any] = {"origin": origin}
    if source.settings.criterion is not None and origin is not None:
        how["train"] = origin.read_train()
    if origin is not None and origin.rivals:
        how["rivals"] = origin.read_rivals()
    with allow_trained_seeds():
        words = _in_words(source)
        if out is not None and (out / DATABASE).is_file():
            given = source.perturbation if words is None else None
            result = resume(out, model.target, source.data, perturbation=given, **how)
        else:
            options = {each.name: getattr(source.settings, each.name) for each in fields(source.settings)}
            options["random_seed"] += number
            if words is None:  # its reach is set already
                options["magnitude"] = None
            result = run(model.target, source.data, words or source.perturbation, out=out, **how, **options)
    if result.stop_reason == "user":
        raise KeyboardInterrupt
    return result.faults


def _in_words(source: Source) -> str | None:
    """The run's perturbation as another process can read it; None if it lives in memory."""
    mine = source.perturbation
    try:
        with nullcontext() if source.origin is None else source.origin.in_folder():
            found = choose_perturbation(mine.name, source.settings.magnitude)
    except UsageError:
        return None
    return mine.name if (found.theta, found.code) == (mine.theta, mine.code) else None


def together(one: Material, other: Material) -> Material:
    """What two campaigns on the same seeds found."""
    return replace(
        one,
        disturbed=torch.cat([one.disturbed, other.disturbed]),
        disturbed_labels=torch.cat([one.disturbed_labels, other.disturbed_labels]),
        seed=torch.cat([one.seed, other.seed]),
    )
