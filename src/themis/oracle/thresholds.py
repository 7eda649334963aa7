"""Decisions by a threshold: `threshold`, one per input, and `multilabel`, one for each of several labels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from themis.errors import DataError, ModelError
from themis.oracle.classes import MIN_PROBABILITY
from themis.oracle.constant import BesideConstant, agreement_of_numbers, class_baseline
from themis.oracle.oracle import (
    KEPT_ANSWER,
    Oracle,
    Verdict,
    check_one_number,
    check_some_correct,
    mark_not_finite,
    read_number,
)
from themis.text import percent

NOT_JUDGED = -1
"""Reference of a label that the clean answer has wrong."""


@dataclass(frozen=True)
class _Thresholded(Oracle):
    threshold: float | None = None
    """None until `settle`: 0.5 if all clean outputs lie in 0..1, which makes them probabilities, else 0 for logits."""

    def settle(self, clean_outputs: Tensor, labels: Tensor | None) -> Oracle:
        is_probability = bool(((clean_outputs >= 0) & (clean_outputs <= 1)).all())
        default = 0.5 if is_probability else 0.0
        threshold = default if self.threshold is None else self.threshold
        return replace(self, threshold=threshold, is_probability=is_probability)

    def _level(self) -> float:
        assert self.threshold is not None  # set by `settle`
        return self.threshold

    def _describe_level(self) -> str:
        return f"{'probability' if self.is_probability else 'score'} {self._level():g}"


@dataclass(frozen=True)
class Threshold(_Thresholded):
    """A fault is a decision (a score of at least the threshold) that flips; outputs are `[inputs]` or `[inputs, 1]`.

    The threshold has the unit of the output. With labels, seeds that are decided wrongly are left out.
    """

    @staticmethod
    def parse(text: str) -> Threshold:
        return Threshold(read_number(text, "threshold", "threshold:0.5") if text else None)

    def spec(self) -> str:
        return "threshold" if self.threshold is None else f"threshold:{self.threshold!r}"

    def describe(self) -> str:
        return f"a decision that flips at {self._describe_level()}"

    def check(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        decision = self.reference(clean_outputs, labels)
        if labels is None:
            return torch.ones_like(decision, dtype=torch.bool)
        if labels.numel() != len(clean_outputs) or not are_bits(labels):
            raise DataError(
                f"labels of binary decisions must be 0 or 1, one per seed: {len(clean_outputs)} inputs, got "
                f"{_describe_labels(labels)}: correct them, or leave them out to compare with the clean decision"
            )
        return check_some_correct(decision == labels.reshape(-1), "or leave the labels out")

    def reference(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        return (check_one_number(clean_outputs, "binary decisions") >= self._level()).long()

    def compare(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None) -> Verdict:
        reference, level = self.reference(clean_outputs, labels), self._level()
        score = outputs.reshape(-1)
        decision = (score >= level).long()
        margin = torch.where(reference == 1, score - level, level - score)
        return mark_not_finite(Verdict(decision != reference, decision, margin, score), outputs)

    def loss(self, outputs: Tensor, reference: Tensor) -> Tensor:
        return _bit_loss(outputs.reshape(-1), reference, self._level(), self.is_probability)

    def confidence(self, outputs: Tensor) -> Tensor:
        score, level = outputs.reshape(-1).float(), self._level()
        yes = score if self.is_probability else (score - level).sigmoid()
        return torch.where(score < level, 1 - yes, yes)

    def grade(self, clean_outputs: Tensor, labels: Tensor) -> dict[str, float]:
        is_correct = self.reference(clean_outputs, labels) == labels.reshape(-1)
        return {"accuracy": float(is_correct.double().mean())}

    def baseline(self, clean_outputs: Tensor, labels: Tensor) -> BesideConstant | None:
        return class_baseline(self.answers(clean_outputs)[:, None], labels.reshape(-1).long())


@dataclass(frozen=True)
class Multilabel(_Thresholded):
    """A fault is a change in the set of labels, each decided by the threshold; outputs are `[inputs, labels]`.

    With the true labels `[seeds, labels]`, only those that the clean answer has right can be faults. The outcome is the
    label that flipped furthest, so that each label that a seed can lose or gain makes a distinct fault.
    """

    @staticmethod
    def parse(text: str) -> Multilabel:
        return Multilabel(read_number(text, "multilabel", "multilabel:0.5") if text else None)

    def spec(self) -> str:
        return "multilabel" if self.threshold is None else f"multilabel:{self.threshold!r}"

    def describe(self) -> str:
        return f"a label gained or lost at {self._describe_level()}"

    def check(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        if clean_outputs.ndim != 2:
            raise ModelError(
                f"oracle 'multilabel' needs scores [inputs, labels], got {list(clean_outputs.shape)}: pass output=... "
                "to Target to pick the scores from the model's result, or name another task with oracle=..."
            )
        if labels is not None and (
            _by_score(labels, clean_outputs).shape != clean_outputs.shape or not are_bits(labels)
        ):
            raise DataError(
                f"labels must be 0 or 1 for each of the {clean_outputs.shape[1]} scores, {list(clean_outputs.shape)}, "
                f"got {_describe_labels(labels)}: correct them, or leave them out to compare with the clean answer"
            )
        is_judged = (self.reference(clean_outputs, labels) != NOT_JUDGED).any(1)
        return check_some_correct(is_judged, "or leave the labels out")

    def reference(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        """Return 0 or 1 for each label, and -1 for a label that the clean answer has wrong."""
        decision = (clean_outputs >= self._level()).long()
        if labels is None:
            return decision
        return torch.where(decision == _by_score(labels, clean_outputs), decision, NOT_JUDGED)

    def compare(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None) -> Verdict:
        reference, level = self.reference(clean_outputs, labels), self._level()
        by_label = torch.where(reference == 1, outputs - level, level - outputs)
        by_label = torch.where(reference == NOT_JUDGED, torch.inf, by_label)
        has_flipped = ((outputs >= level).long() != reference) & (reference != NOT_JUDGED)
        is_fault = has_flipped.any(1)
        furthest = torch.where(has_flipped, by_label, torch.inf).argmin(1)
        outcome = torch.where(is_fault, furthest, KEPT_ANSWER)
        return mark_not_finite(Verdict(is_fault, outcome, by_label.amin(1)), outputs)

    def loss(self, outputs: Tensor, reference: Tensor) -> Tensor:
        loss = _bit_loss(outputs, reference, self._level(), self.is_probability)
        return torch.where(reference == NOT_JUDGED, 0.0, loss).mean(1)

    def grade(self, clean_outputs: Tensor, labels: Tensor) -> dict[str, float]:
        is_correct = self.reference(clean_outputs, None) == _by_score(labels, clean_outputs)
        return {"accuracy": float(is_correct.double().mean())}

    def describe_left_out(self, has_labels: bool) -> str:
        return "the model has all of their labels wrong"

    def baseline(self, clean_outputs: Tensor, labels: Tensor) -> BesideConstant | None:
        answers, given = self.answers(clean_outputs), _by_score(labels, clean_outputs).long()
        own, constant = ((rows == given).double().mean(1) for rows in (answers, given.median(0).values))
        shares = " against ".join(percent(float(part.mean())) for part in (own, constant))
        text = f"always giving each label its commonest value: {shares} correct"
        return BesideConstant(own, constant, agreement_of_numbers(answers.double(), given.double()), text)


def _by_score(labels: Tensor, outputs: Tensor) -> Tensor:
    """Labels in the shape of `outputs [inputs, labels]`; those of a single label may be `[inputs]`."""
    return labels[:, None] if labels.ndim == 1 and outputs.shape[1:] == (1,) else labels


def are_bits(labels: Tensor) -> bool:
    """Return whether all labels are 0 or 1."""
    return bool(((labels == 0) | (labels == 1)).all())


def _bit_loss(score: Tensor, reference: Tensor, level: float, is_probability: bool) -> Tensor:
    """Return the binary cross-entropy of decisions, element by element."""
    if is_probability:
        chance = torch.where(reference == 1, score.float(), 1 - score.float())
        return -chance.clamp_min(MIN_PROBABILITY).log()
    return F.binary_cross_entropy_with_logits(score.float() - level, reference.float(), reduction="none")


def _describe_labels(labels: Tensor) -> str:
    return f"shape {list(labels.shape)} with values {float(labels.min()):g} to {float(labels.max()):g}"
