"""What a campaign starts with."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.errors import UsageError
from themis.oracle import choose_oracle
from themis.runs.run import Start
from themis.target.diagnose import warn_of_chance

if TYPE_CHECKING:
    from themis.campaign.loop import Campaign


def describe_start(campaign: Campaign) -> Start:
    """What is known of a campaign after its clean sweep; warns of a model that knows nothing."""
    calculator, oracle = campaign.calculator, campaign.calculator.oracle
    grade = {} if calculator.labels is None else oracle.grade(calculator.clean_outputs, calculator.labels)
    if calculator.clean_outputs.ndim == 2 and oracle.spec() in ("wrong", "changed"):
        warn_of_chance(grade.get("accuracy"), len(campaign.seeds), calculator.clean_outputs.shape[1])
    return Start(
        bounds=campaign.target.bounds,
        perturbation=campaign.perturbation.name,
        theta=campaign.perturbation.theta,
        settings=campaign.settings,
        layers=calculator.layers,
        n_neurons=calculator.n_neurons,
        n_seeds=len(campaign.seeds),
        n_usable=len(campaign.space.seeds),
        clean_accuracy=grade.get("accuracy"),
        clean_error=grade.get("error"),
        clean_iou=grade.get("iou"),
        chunk=calculator.chunk,
        n_kept=calculator.kept.n_kept,
        device=str(calculator.device),
        gives_probabilities=oracle.is_probability,
        oracle=oracle.spec(),
        oracle_asked=choose_oracle(campaign.target.oracle).spec(),
        fault=oracle.describe(),
        tests_before=campaign.tally.tests,
        criterion=None if campaign.guide is None else campaign.guide.describe(),
        classes=_class_names(campaign),
    )


def check_classes(campaign: Campaign) -> None:
    """Refuse names of classes that cannot be those of the model's answers."""
    names, n_answers = campaign.seeds.classes, _n_answers(campaign)
    if names is not None and len(names) != n_answers:
        raise UsageError(_too_few(len(names), n_answers))


def _class_names(campaign: Campaign) -> tuple[str, ...] | None:
    """The data's names of classes, where the model has as many answers; then their numbers are the same, too."""
    names, n_answers = campaign.seeds.classes, _n_answers(campaign)
    if names is None or n_answers == 0 or len(names) == n_answers:
        return names if n_answers else None
    warnings.warn(f"{_too_few(len(names), n_answers)}; numbers are shown", RuntimeWarning, stacklevel=2)
    return None


def _too_few(n_names: int, n_answers: int) -> str:
    if not n_answers:
        return f"classes must be left out where answers are no classes, got {n_names} names"
    return f"classes must be a name for each of the model's {n_answers} answers, got {n_names}: pass classes=..."


def _n_answers(campaign: Campaign) -> int:
    """How many classes the model tells apart; 0 in tasks without classes."""
    outputs, task = campaign.calculator.clean_outputs, campaign.calculator.oracle.spec().partition(":")[0]
    if task in ("wrong", "changed", "top5", "multilabel", "segmentation") and outputs.ndim > 1:
        return outputs.shape[1]
    return 2 if task == "threshold" else 0


def class_numbers(labels: Tensor | None, n: int) -> NDArray[np.int64]:
    """Each seed's label where it is a class number, else -1."""
    if labels is None or labels.ndim != 1:
        return np.full(n, -1)
    is_class = (labels >= 0) & (labels == labels.round())
    return torch.where(is_class, labels, -1).long().numpy()
