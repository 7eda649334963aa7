"""Models that break on nothing because they look at nothing: their clean answers are no better than a constant."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from themis.text import percent

if TYPE_CHECKING:
    from themis.oracle.oracle import Oracle

LEAST_SEEDS = 10
"""With fewer seeds, a good model may give all of them the same answer."""
LEAST_OTHERS = 10
"""With fewer labels other than the commonest, even a good model may have all of them wrong."""
SAME_ANSWER_GAP = 1e-6
"""Difference between answers, as a share of the largest, up to which they are the same."""
INFORMATIVE = 1.645
"""Answers agree with the labels more than by chance (p < 0.05) from this many standard deviations on."""
WORSE = 3.09
"""They are worse than a constant answer (p < 0.001) if they lose by more standard errors than this."""


class BesideConstant(NamedTuple):
    """The clean answers beside the best constant answer, by the labels. Scores are `[seeds]`, higher is better."""

    own: Tensor
    constant: Tensor
    agreement: float
    """By how many standard deviations the answers agree better with their own labels than with shuffled ones."""
    text: str
    """The constant answer, and how well both do."""


def find_constant(oracle: Oracle, clean_outputs: Tensor, labels: Tensor | None) -> str | None:
    """Return why a low fault rate would say nothing about a model, in words; None if its clean answers are informative.

    All of them are the same; or, given labels, a constant answer would do as well. On unbalanced data a good model is
    hardly more accurate than the commonest label: it passes if its answers agree with the labels more than by chance,
    unless it is clearly less accurate.
    """
    n = len(clean_outputs)
    if n < LEAST_SEEDS:
        return None
    if _are_same(oracle.answers(clean_outputs)):
        return f"all {n:,} clean answers are the same"
    baseline = None if labels is None else oracle.baseline(clean_outputs, labels)
    if baseline is None:
        return None
    gain = (baseline.own.double() - baseline.constant.double()).nan_to_num(0)
    mean, standard_error = float(gain.mean()), float(gain.std()) / math.sqrt(n)
    is_worse = mean < -WORSE * standard_error
    if not is_worse and (mean > 0 or baseline.agreement > INFORMATIVE):
        return None
    return f"the clean answers are no better than {baseline.text}"


def _are_same(answers: Tensor) -> bool:
    if not answers.numel():
        return True
    spread = (answers.amax(0) - answers.amin(0)).max()
    return bool(spread <= SAME_ANSWER_GAP * answers.abs().max())


def class_baseline(answers: Tensor, labels: Tensor) -> BesideConstant | None:
    """Compare the classes `[seeds, k]` that answers name with always naming the k commonest labels.

    Data with hardly any other label cannot tell a good model from one that always names the commonest.
    """
    n, k = answers.shape
    n_classes = int(torch.maximum(answers.max(), labels.max())) + 1
    counts, named = (classes.flatten().bincount(minlength=n_classes).double() for classes in (labels, answers))
    commonest = counts.topk(k).indices
    own, constant = (answers == labels[:, None]).any(1), torch.isin(labels, commonest)
    if n - int(constant.sum()) < LEAST_OTHERS:
        return None
    # Of the number of correct answers if the labels were shuffled: its mean and its variance.
    by_answer, by_label = counts[answers].sum(1) / n, named[labels] / n
    mean = float(by_answer.sum())
    squares = n * mean - n * float(by_answer.square().sum()) - n * float(by_label.square().sum()) + mean**2
    agreement = _standardised(float(own.sum()) - mean, squares / max(n - 1, 1))
    names = f"class {int(commonest[0])}" if k == 1 else f"the {k} commonest classes"
    shares = " against ".join(percent(float(part.double().mean())) for part in (own, constant))
    return BesideConstant(own, constant, agreement, f"always naming {names}: {shares} correct")


def agreement_of_numbers(answers: Tensor, labels: Tensor) -> float:
    """Return `BesideConstant.agreement` of answers and labels `[seeds, numbers]`, whose columns have one unit."""
    centred = [(column - column.mean(0)).double() for column in (answers, labels)]
    spread = (centred[0].T @ centred[0] * (centred[1].T @ centred[1])).sum()
    return _standardised(float((centred[0] * centred[1]).sum()), float(spread) / max(len(answers) - 1, 1))


def _standardised(difference: float, variance: float) -> float:
    return difference / math.sqrt(variance) if variance > 0 else 0.0
