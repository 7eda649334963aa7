"""Grades of answers by their labels: 1 or 0, or the share of correct labels or points, the mean IoU, the F1 score."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from themis.data.seeds import Seeds
from themis.errors import DataError
from themis.measure.calculator import Calculator
from themis.measure.chunk import padded
from themis.oracle import (
    Changed,
    Detection,
    KeyPoints,
    Multilabel,
    Oracle,
    Regression,
    Segmentation,
    Threshold,
    Wrong,
    choose_oracle,
)
from themis.oracle.oracle import are_finite
from themis.perturb import Perturbation
from themis.retraining.losses import ideal
from themis.target.target import Target


def by_label(oracle: Oracle) -> Oracle:
    """The oracle that checks answers against labels if the given one checks them against clean answers."""
    if isinstance(oracle, Changed):
        return Wrong(is_probability=oracle.is_probability)
    return replace(oracle, compared_with="label") if isinstance(oracle, Regression) else oracle


def grade(oracle: Oracle, outputs: Tensor, labels: Tensor) -> Tensor:
    """The grade of each answer, float64 `[tests]` in 0..1; an output that is not finite is wrong."""
    if isinstance(oracle, Threshold):
        grades = (oracle.reference(outputs, None) == labels.reshape(-1)).double()
    elif isinstance(oracle, Multilabel):
        grades = (oracle.reference(outputs, None) == labels).double().mean(1)
    elif isinstance(oracle, Segmentation):  # the mean IoU with the label map
        overlap = oracle.compare(ideal(oracle, outputs, labels), outputs, labels).value
        assert overlap is not None
        grades = overlap.double().nan_to_num(1)  # nothing can be wrong where no pixel counts
    elif isinstance(oracle, Detection):  # the F1 score of the boxes
        score = oracle.compare(outputs, outputs, labels).value
        assert score is not None
        grades = score.double().nan_to_num(0)
    elif isinstance(oracle, KeyPoints):
        grades = oracle.share_near(outputs, labels)
    else:
        grades = (~by_label(oracle).compare(outputs, outputs, labels).is_fault).double()
    return grades * are_finite(outputs)


def errors(oracle: Oracle, outputs: Tensor, labels: Tensor) -> Tensor | None:
    """The absolute error of each answer, float64 `[tests]`, for tasks whose answer is a number; otherwise None."""
    if not isinstance(oracle, Regression):
        return None
    gaps = outputs.double() - labels.reshape(outputs.shape).double()
    return gaps.abs().reshape(len(gaps), -1).mean(1)


def with_settled_oracle(target: Target, seeds: Seeds) -> Target:
    """The target with its oracle settled on the clean outputs of these seeds: the same one for all retrained models."""
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
    """A calculator for tests of all seeds, including those answered incorrectly. The target must be open."""
    if seeds.labels is None:
        raise DataError("judge seeds must have labels, got none: give (inputs, labels)")
    bench = Calculator.trace(target, seeds, perturbation, choose_oracle(target.oracle), clean_bytes=0)
    outputs = []
    with torch.no_grad():
        for first in range(0, len(seeds), bench.chunk):
            rows = torch.arange(first, min(first + bench.chunk, len(seeds)), device=bench.device)
            outputs.append(target.forward(bench.inputs[padded(rows, bench.chunk)])[: len(rows)].float())
    clean = torch.cat(outputs)
    bench.oracle = by_label(bench.oracle.settle(clean, bench.labels))
    bench.take_clean(clean)
    return bench
