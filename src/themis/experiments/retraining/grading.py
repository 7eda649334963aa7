"""How right an answer is by its label: 1 or 0, of several labels the share that is right, of maps the mean IoU."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from themis.data.seeds import Seeds
from themis.errors import DataError
from themis.experiments.retraining.losses import ideal
from themis.measure.calculator import Calculator
from themis.measure.chunk import padded
from themis.oracle import Changed, Multilabel, Oracle, Regression, Segmentation, Threshold, Wrong, choose_oracle
from themis.oracle.oracle import are_finite
from themis.perturb import Perturbation
from themis.target.target import Target


def by_label(oracle: Oracle) -> Oracle:
    """The oracle that holds answers against labels where the given one holds them against clean answers."""
    if isinstance(oracle, Changed):
        return Wrong(is_probability=oracle.is_probability)
    return replace(oracle, compared_with="label") if isinstance(oracle, Regression) else oracle


def grade(oracle: Oracle, outputs: Tensor, labels: Tensor) -> Tensor:
    """How right each answer is, float64 `[tests]` in 0..1; an output that is not finite is wrong."""
    if isinstance(oracle, Threshold):
        right = (oracle.reference(outputs, None) == labels.reshape(-1)).double()
    elif isinstance(oracle, Multilabel):
        right = (oracle.reference(outputs, None) == labels).double().mean(1)
    elif isinstance(oracle, Segmentation):  # the mean IoU with the label map
        overlap = oracle.compare(ideal(oracle, outputs, labels), outputs, labels).value
        assert overlap is not None
        right = overlap.double().nan_to_num(0)
    else:
        right = (~by_label(oracle).compare(outputs, outputs, labels).is_fault).double()
    return right * are_finite(outputs)


def errors(oracle: Oracle, outputs: Tensor, labels: Tensor) -> Tensor | None:
    """How far each answer is from its label, float64 `[tests]`, in tasks whose answer is a number."""
    if not isinstance(oracle, Regression):
        return None
    return (outputs.reshape(-1).double() - labels.reshape(-1).double()).abs()


def settled(target: Target, seeds: Seeds) -> Target:
    """The target with its oracle fixed by these seeds' clean outputs, so that it is one for all models made of it."""
    oracle = choose_oracle(target.oracle)
    outputs = []
    with target.opened(), torch.no_grad():
        for first in range(0, len(seeds), 256):
            rows = torch.arange(first, min(first + 256, len(seeds)))
            outputs.append(target.forward(seeds.take(rows).to(target.device)).float())
    clean = torch.cat(outputs)
    labels = None if seeds.labels is None else seeds.labels.to(clean.device)
    return replace(target, oracle=oracle.settle(clean, labels))


def calculator(target: Target, seeds: Seeds, perturbation: Perturbation) -> Calculator:
    """A calculator that runs single tests of the seeds, those answered wrongly too. The target must be open."""
    if seeds.labels is None:
        raise DataError("seeds must have labels to be judged by, got none: give (inputs, labels)")
    made = Calculator.trace(target, seeds, perturbation, choose_oracle(target.oracle), clean_bytes=0)
    outputs = []
    with torch.no_grad():
        for first in range(0, len(seeds), made.chunk):
            rows = torch.arange(first, min(first + made.chunk, len(seeds)), device=made.device)
            outputs.append(target.forward(made.inputs[padded(rows, made.chunk)])[: len(rows)].float())
    clean = torch.cat(outputs)
    made.oracle = by_label(made.oracle.settle(clean, made.labels))
    made.take_clean(clean)
    return made
