"""Mutants of a classifier that are worth testing with, and which of them a set of tests kills."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from themis.data.seeds import read_seeds
from themis.errors import ModelError, UsageError
from themis.options import check_count
from themis.target.alignment import align_seeds, align_target
from themis.target.blackbox import as_target
from themis.target.target import AnyTarget, Target
from themis_lab.zoo.mutation import MUTATIONS, RATIO, choose_mutation, mutate

KEPT_ACCURACY = 0.9
"""A mutant with less than this share of the model's accuracy is trivial: nearly every test kills it; DeepMutation's."""
BATCH = 256


@dataclass(frozen=True)
class Mutant:
    """A mutated copy of a target, how it was made, and its accuracy on the data that it was filtered by."""

    operator: str
    random_seed: int
    target: Target
    accuracy: float


@dataclass(frozen=True)
class MutantSet:
    """The mutants that were kept, and why others were not."""

    kept: tuple[Mutant, ...]
    accuracy: float
    """Of the model itself."""
    trivial: dict[str, int]
    """Mutants by operator that have lost more than a tenth of the accuracy."""
    equivalent: dict[str, int]
    """Mutants by operator whose scores equal those of the model, or of a mutant kept before, on all data."""
    refused: dict[str, str]
    """Operators that the model does not allow, with the reason."""


def make_mutants(
    target: Any,
    data: Any,
    *,
    operators: Iterable[str] = tuple(MUTATIONS),
    per_operator: int = 5,
    ratio: float = RATIO,
    random_seed: int = 0,
) -> MutantSet:
    """Mutate a classifier several times by each operator, and keep the mutants that are neither trivial nor equivalent.

    A mutant is kept if it has at least 90% of the model's accuracy on the data, as in DeepMutation, and if its scores
    differ from those of the model and of the other mutants. target: a `Target` or a model. data: labelled inputs, as
    for `themis.run`, preferably test data.
    """
    check_count("per_operator", per_operator)
    if not 0 < ratio <= 1:
        raise UsageError(f"ratio must lie in (0, 1], got {ratio!r}")
    target = as_target(target)
    if not isinstance(target, Target):
        raise UsageError(f"only a PyTorch model can be mutated, got a {type(target).__name__}")
    seeds = align_seeds(target, read_seeds(data))
    target = align_target(target, seeds)
    if seeds.labels is None:
        raise UsageError("mutants are kept by their accuracy, which needs labels: pass data as (inputs, labels)")
    assert isinstance(target, Target)  # aligning changes its options only
    inputs, labels = seeds.take(torch.arange(len(seeds))), seeds.labels
    scores = run_scores(target, inputs)
    if scores.ndim != 2 or scores.shape[1] < 2:
        raise UsageError(
            f"mutants are kept by their accuracy, which needs one score per class, got {list(scores.shape)}"
        )
    accuracy = _accuracy(scores, labels)
    kept: list[Mutant] = []
    trivial: dict[str, int] = {}
    equivalent: dict[str, int] = {}
    refused: dict[str, str] = {}
    for operator in map(choose_mutation, operators):
        known = [scores]
        for number in range(random_seed, random_seed + per_operator):
            try:
                module = mutate(target.module, operator, ratio=ratio, random_seed=number)
            except (ModelError, UsageError) as error:
                refused[operator] = str(error)
                break
            mutant = replace(target, module=module)
            mutated = run_scores(mutant, inputs)
            if any(torch.equal(mutated, other) for other in known):
                equivalent[operator] = equivalent.get(operator, 0) + 1
            elif _accuracy(mutated, labels) < KEPT_ACCURACY * accuracy:
                trivial[operator] = trivial.get(operator, 0) + 1
            else:
                known.append(mutated)
                kept.append(Mutant(operator, number, mutant, _accuracy(mutated, labels)))
    return MutantSet(tuple(kept), accuracy, trivial, equivalent, refused)


def find_killed(target: AnyTarget, mutants: Sequence[AnyTarget], inputs: Tensor, labels: Tensor) -> Tensor:
    """Which classes each mutant is killed for, bool `[mutants, classes]`; its mean is DeepMutation's mutation score.

    A test kills a mutant for a class if it has this label, the target answers it correctly, and the mutant does not.
    """
    scores = run_scores(target, inputs)
    labels = labels.to(scores.device).long()
    is_correct = scores.argmax(1) == labels
    killed = torch.zeros(len(mutants), scores.shape[1], dtype=torch.bool)
    for number, mutant in enumerate(mutants):
        is_killing = is_correct & (run_scores(mutant, inputs).argmax(1) != labels)
        killed[number, labels[is_killing].cpu()] = True
    return killed


def run_scores(target: AnyTarget, inputs: Tensor) -> Tensor:
    """The scores of a target on inputs, `[inputs, classes]`."""
    with target.opened(), torch.no_grad():
        return torch.cat([target.forward(batch.to(target.device)) for batch in torch.split(inputs, BATCH)])


def _accuracy(scores: Tensor, labels: Tensor) -> float:
    return float((scores.argmax(1) == labels.to(scores.device)).float().mean())
