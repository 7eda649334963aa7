"""What a campaign tests: a target and its seeds, which fit each other and the perturbations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from themis.data.features import Features
from themis.data.groups import read_groups
from themis.data.seeds import Seeds, read_seeds
from themis.measure.similarity import check_similarity
from themis.perturb import Perturbation
from themis.perturb.perturbation import check_fits, check_gradient
from themis.runs.parts import SeedSplit
from themis.runs.source import Origin
from themis.settings import Settings
from themis.target.alignment import align_seeds, align_target
from themis.target.blackbox import as_target
from themis.target.target import AnyTarget


class TestedModel(NamedTuple):
    """A target and its seeds, which fit each other and the perturbations."""

    target: AnyTarget
    seeds: Seeds
    """If the data is split, the search part."""
    split: SeedSplit | None
    origin: Origin | None
    class_names: Sequence[str] | None
    """As given; None if they are those that the data has."""


def read_tested(
    target: AnyTarget | nn.Module,
    data: Any,
    perturbations: Iterable[Perturbation],
    settings: Settings,
    origin: Origin | None,
    features: Features | str | Path | None,
    classes: Sequence[str] | None,
) -> TestedModel:
    """Read the seeds, and refuse what does not fit together before anything runs."""
    target = as_target(target)
    chosen = list(perturbations)
    for perturbation in chosen:
        check_gradient(perturbation, target)
    seeds = describe_columns(align_seeds(target, read_seeds(data, settings.max_seeds)), features)
    target = align_target(target, seeds)
    origin = None if origin is None else origin.resolved(target)
    class_names = origin.classes if classes is None and origin is not None else classes
    seeds = seeds if class_names is None else seeds.with_classes(class_names)
    for perturbation in chosen:
        check_fits(perturbation, seeds.shape[1:])
        if perturbation.inputs == "table":
            seeds.features.check_inside(target.bounds)
    check_similarity(settings.min_ssim, seeds.shape[1:])
    groups = None if settings.split_by is None else read_groups(settings.split_by, seeds)
    split = None if settings.split is None else SeedSplit.of(seeds, settings.split, settings.split_seed, groups)
    return TestedModel(target, seeds if split is None else split.search(seeds), split, origin, class_names)


def describe_columns(seeds: Seeds, features: Features | str | Path | None) -> Seeds:
    """The seeds with what the columns of their table may hold, if that was given."""
    return seeds if features is None else seeds.with_features(features)
