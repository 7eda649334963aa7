"""Grades of answers by their labels, and the losses that training minimises, by task."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from themis.data.seeds import Seeds
from themis.errors import DataError, ModelError, UsageError
from themis.measure.calculator import Calculator
from themis.measure.sweep import clean_outputs
from themis.oracle import (
    Changed,
    Compare,
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
from themis.oracle.boxes import PADDING
from themis.oracle.classes import MIN_PROBABILITY
from themis.oracle.oracle import are_finite
from themis.oracle.segmentation import VOID_LABEL
from themis.perturb import Perturbation
from themis.target.detections import Detections
from themis.target.fingerprint import hash_text
from themis.target.target import AnyTarget, Target, explain_errors

CHUNK = 256
"""Inputs that are disturbed, or passed to the model, at a time, unless their chunk was recorded."""
Loss = Callable[[Tensor, Tensor], Tensor]
"""A function of outputs and labels that returns a number, or one number per test."""
TEMPERATURE = 3.0
"""Class scores are divided by this before they are compared, so that unlikely classes count."""


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


def expected_grades(oracle: Oracle, outputs: Tensor, labels: Tensor) -> Tensor:
    """Grades that vary less by chance, float64 `[tests]`: many answers become slightly better or worse, and few flip.

    Classes: how likely the answer is correct by the model's own scores, which one factor calibrates on the labels.
    Numbers and decisions: how close they are to the label, from 1 down to 0.
    """
    if not isinstance(oracle, Changed | Wrong):
        return (-losses(oracle, outputs, labels)).exp().double().nan_to_num(0).cpu()
    from scipy.optimize import minimize_scalar

    are_known = are_finite(outputs)
    scores = _scores(oracle, outputs)[are_known].double()
    doubt = 1 / (len(scores) + 2)  # Platt's: a few correct answers in a row do not make a model certain

    def loss(logarithm: float) -> float:
        return float(F.cross_entropy(scores * math.exp(logarithm), labels[are_known].long(), label_smoothing=doubt))

    expected = are_known.double()  # an output that is not finite is wrong
    if len(scores):
        factor = math.exp(minimize_scalar(loss, bounds=(-5.0, 5.0), method="bounded").x)
        expected[are_known] = (scores * factor).softmax(1).amax(1)
    return expected.cpu()


def _scores(oracle: Oracle, outputs: Tensor) -> Tensor:
    """Class scores, or the logarithms of probabilities."""
    return outputs.float().clamp_min(MIN_PROBABILITY).log() if oracle.is_probability else outputs.float()


def errors(oracle: Oracle, outputs: Tensor, labels: Tensor) -> Tensor | None:
    """The absolute error of each answer, float64 `[tests]`, for tasks whose answer is a number; otherwise None."""
    if not isinstance(oracle, Regression):
        return None
    gaps = outputs.double() - labels.reshape(outputs.shape).double()
    return gaps.abs().reshape(len(gaps), -1).mean(1)


def settled_oracle(target: AnyTarget, pool: Seeds) -> Oracle:
    """The oracle of a target, settled on its clean outputs of the pool unless it already is."""
    oracle = choose_oracle(target.oracle)
    is_open = getattr(oracle, "tolerance", 0) is None or getattr(oracle, "threshold", 0) is None
    if not (isinstance(target.oracle, str) or oracle.spec() == "auto" or is_open):
        return oracle
    with target.opened(), torch.no_grad():
        labels = None if pool.labels is None else pool.labels.to(target.device)
        return oracle.settle(clean_outputs(target, pool, CHUNK), labels)


def calculator(target: Target, seeds: Seeds, perturbation: Perturbation) -> Calculator:
    """A calculator for tests of all seeds, including those answered incorrectly. The target must be open."""
    if seeds.labels is None:
        raise DataError("judge seeds must have labels, got none: give (inputs, labels)")
    bench = Calculator.trace(target, seeds, perturbation, choose_oracle(target.oracle))
    with torch.no_grad():
        clean = clean_outputs(target, seeds, bench.chunk)
    bench.take_clean(clean, settles=True)
    bench.take_clean(clean, by_label(bench.clean.oracle))
    return bench


def losses(oracle: Oracle, outputs: Tensor, labels: Tensor) -> Tensor:
    """The loss of each output, `[tests]`; the oracle must be settled.

    Class scores: cross-entropy, for probabilities that of their logarithm. Segmentation maps: its mean over pixels.
    Decisions: binary cross-entropy. Numbers: squared inside the tolerance and absolute outside, in units of it.
    """
    if isinstance(oracle, Changed | Wrong):
        return oracle.loss(outputs, labels.long())
    if isinstance(oracle, Regression):
        gaps = oracle.in_tolerances(outputs, labels)
        return F.smooth_l1_loss(gaps, torch.zeros_like(gaps), reduction="none").mean(1)
    return oracle.loss(outputs, reference(oracle, outputs, labels))


def reference(oracle: Oracle, outputs: Tensor, labels: Tensor) -> Tensor:
    """The correct answers, in the form that the oracle's loss expects."""
    return oracle.reference(ideal(oracle, outputs, labels), labels)


def ideal(oracle: Oracle, outputs: Tensor, labels: Tensor) -> Tensor:
    """The outputs of a perfect model, shaped like `outputs`, for oracles that compare with a clean answer."""
    if isinstance(oracle, Regression):
        return labels.reshape(outputs.shape).to(outputs.dtype)
    if isinstance(oracle, Threshold | Multilabel):
        level = oracle.threshold
        assert level is not None
        return (labels.reshape(outputs.shape) * 2 - 1).to(outputs.dtype) / 4 + level
    if isinstance(oracle, KeyPoints):
        places = labels[..., :2].nan_to_num(0).to(outputs.dtype)  # where the label is unknown, no place counts
        return torch.cat([places, torch.zeros_like(outputs[..., 2:])], -1)
    classes = labels.long()
    if isinstance(oracle, Segmentation) and outputs.shape[1] <= VOID_LABEL:
        classes = torch.where(labels == VOID_LABEL, 0, classes)  # any class: these pixels do not count
    classes = classes.clamp(min=0)  # neither do those that show nothing of the picture
    return F.one_hot(classes, outputs.shape[1]).movedim(-1, 1).to(outputs.dtype)


def distances(oracle: Oracle, outputs: Tensor, old: Tensor) -> Tensor:
    """How far each output is from that of an older model, `[tests]`.

    Class scores: the Kullback-Leibler divergence at `TEMPERATURE`, times its square, which keeps the size of gradients.
    Numbers: the loss, as if the old answer were the label.
    """
    if isinstance(oracle, Regression):
        return losses(oracle, outputs, old)
    assert isinstance(oracle, Changed | Wrong)  # otherwise old answers do not count
    logs = [(_scores(oracle, each) / TEMPERATURE).log_softmax(1) for each in (outputs, old)]
    return F.kl_div(logs[0], logs[1], reduction="none", log_target=True).sum(1) * TEMPERATURE**2


def choose_loss(oracle: Oracle, custom: Loss | None, module: nn.Module) -> Loss | None:
    """The user's loss, or that of the task; None for a detector, which returns its own in training mode."""
    if custom is not None:
        return custom
    if isinstance(oracle, Compare):
        raise UsageError(
            f"retraining needs a loss, but oracle {oracle.spec()!r} has none: pass loss=function(outputs, "
            "labels), or name the task with oracle=..."
        )
    if not isinstance(oracle, Detection):
        return lambda outputs, labels: losses(oracle, outputs, labels)
    if len(inspect.signature(module.forward).parameters) < 2:
        raise UsageError(
            "retraining needs the loss that a detector was trained with, but this one takes no targets, for which "
            "those of torchvision return it in training mode: pass loss=function(outputs, labels), with the detections "
            "[tests, n, 6] and the objects [tests, n, 5]"
        )
    return None


def own_loss(target: Target, inputs: Tensor, labels: Tensor) -> Tensor:
    """The sum of the losses that a detector returns in training mode, given targets as in torchvision.

    labels: the objects `[inputs, n, 5]`; crowds are left out, and so are boxes without extent.
    """
    pictures = target.prepare(inputs)
    first_class = target.output.first_class if isinstance(target.output, Detections) else 0
    targets = []
    for picture, rows in zip(pictures, labels, strict=True):
        rows = rows[(rows[:, 4] > PADDING) & (rows[:, 2] > rows[:, 0]) & (rows[:, 3] > rows[:, 1])]
        high, wide = (own / raw for own, raw in zip(picture.shape[-2:], inputs.shape[2:], strict=True))
        boxes = rows[:, :4] * rows.new_tensor([wide, high, wide, high])
        targets.append({"boxes": boxes, "labels": rows[:, 4].long() + first_class})
    with explain_errors(inputs, target.bounds, target.module):
        result = target.module(pictures, targets)
    if not isinstance(result, Mapping) or not all(isinstance(loss, Tensor) for loss in result.values()):
        raise ModelError(
            f"a detector must return a dict of losses in training mode, as those of torchvision do, got "
            f"{type(result).__name__}: pass loss=function(outputs, labels)"
        )
    return torch.stack([loss.float().sum() for loss in result.values()]).sum()


def picture_kind(oracle: Oracle, seeds: Seeds) -> str:
    """What each picture shows: one "class", or one "number", such as the angle to steer at; empty for other tasks."""
    if len(seeds.shape) != 4:
        return ""
    return "class" if isinstance(oracle, Changed | Wrong) else "number" if isinstance(oracle, Regression) else ""


def name_loss(loss: Loss) -> str:
    """Identifies a user's loss: its name and, if it has any, a hash of its code."""
    code = getattr(loss, "__code__", None)
    name = getattr(loss, "__qualname__", type(loss).__qualname__)
    return name if code is None else f"{name} {hash_text(repr((code.co_code, code.co_names)))[:12]}"
