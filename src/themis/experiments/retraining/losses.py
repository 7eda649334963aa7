"""What training lowers: how far outputs are from the labels, by the task."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from themis.errors import UsageError
from themis.oracle import Compare, Multilabel, Oracle, Regression, Segmentation, Threshold
from themis.oracle.segmentation import VOID
from themis.target.fingerprint import hash_text

Loss = Callable[[Tensor, Tensor], Tensor]
"""Of outputs and labels: a number, or one a test."""


def losses(oracle: Oracle, outputs: Tensor, labels: Tensor) -> Tensor:
    """How far each output is from its label, `[tests]`; the oracle must be settled.

    Class scores: cross-entropy, of probabilities that of their logarithm; maps of classes: its mean over pixels;
    decisions: binary cross-entropy; numbers: squared inside the tolerance and absolute outside, in units of it.
    """
    if isinstance(oracle, Regression):
        assert oracle.tolerance is not None  # it is settled
        gap = (outputs.reshape(-1).float() - labels.reshape(-1).float()) / oracle.tolerance
        return F.smooth_l1_loss(gap, torch.zeros_like(gap), reduction="none")
    return oracle.loss(outputs, reference(oracle, outputs, labels))


def reference(oracle: Oracle, outputs: Tensor, labels: Tensor) -> Tensor:
    """The answers that labels ask for, as the oracle's loss takes them."""
    return oracle.reference(ideal(oracle, outputs, labels), labels)


def margins(oracle: Oracle, outputs: Tensor, labels: Tensor) -> Tensor:
    """How far each answer is from being wrong by its label, negative where it is, `[tests]`."""
    return oracle.compare(ideal(oracle, outputs, labels), outputs, labels).margin


def ideal(oracle: Oracle, outputs: Tensor, labels: Tensor) -> Tensor:
    """What a model without error would give in the place of `outputs`, for oracles that ask for a clean answer."""
    if isinstance(oracle, Regression):
        return labels.reshape(-1).to(outputs.dtype)
    if isinstance(oracle, Threshold | Multilabel):
        level = oracle.threshold
        assert level is not None
        return (labels.reshape(outputs.shape) * 2 - 1).to(outputs.dtype) / 4 + level
    classes = labels.long()
    if isinstance(oracle, Segmentation) and outputs.shape[1] <= VOID:
        classes = torch.where(labels == VOID, 0, classes)  # where nothing is asked for
    return F.one_hot(classes, outputs.shape[1]).movedim(-1, 1).to(outputs.dtype)


def choose_loss(oracle: Oracle, given: Loss | None) -> Loss:
    """The task's loss, or one of the user's own."""
    if given is not None:
        return given
    if isinstance(oracle, Compare):
        raise UsageError(
            f"retraining needs a loss by the labels, oracle {oracle.spec()!r} has none: pass loss=function(outputs, "
            "labels), or name the task with oracle=..."
        )
    return lambda outputs, labels: losses(oracle, outputs, labels)


def name_loss(loss: Loss) -> str:
    """What tells a loss of the user's own from others: its name, and its code where it has one."""
    code = getattr(loss, "__code__", None)
    name = getattr(loss, "__qualname__", type(loss).__qualname__)
    return name if code is None else f"{name} {hash_text(repr((code.co_code, code.co_names)))[:12]}"
