"""Decisions by a threshold: `threshold`, one per input, and `multilabel`, one for each of several labels."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from themis.errors import DataError
from themis.oracle.classes import MIN_PROBABILITY
from themis.oracle.oracle import (
    KEPT_ANSWER,
    BaselineScores,
    Oracle,
    Verdict,
    agreement_of_numbers,
    class_baseline,
    have_shape,
    read_number,
    wrong_outputs,
)
from themis.text import percent

NOT_JUDGED = -1
"""The reference of a label that the clean answer has wrong."""


@dataclass(frozen=True)
class _Thresholded(Oracle):
    name: ClassVar[str]
    threshold: float | None = None
    """By default set by `settle`: 0.5 if all clean outputs lie in 0..1 and are probabilities, else 0 for logits."""

    @classmethod
    def parse(cls, text: str) -> Self:
        return cls(read_number(text, cls.name, f"{cls.name}:0.5") if text else None)

    def spec(self) -> str:
        return self.name if self.threshold is None else f"{self.name}:{self.threshold!r}"

    def settle(self, clean_outputs: Tensor, labels: Tensor | None) -> Oracle:
        is_probability = bool(((clean_outputs >= 0) & (clean_outputs <= 1)).all())
        default = 0.5 if is_probability else 0.0
        threshold = default if self.threshold is None else self.threshold
        return replace(self, threshold=threshold, is_probability=is_probability)

    def grade(self, clean_outputs: Tensor, labels: Tensor) -> dict[str, float]:
        is_correct = (clean_outputs >= self._level()) == labels.reshape(clean_outputs.shape)
        return {"accuracy": float(is_correct.double().mean())}

    def _level(self) -> float:
        assert self.threshold is not None  # set by `settle`
        return self.threshold

    def _describe_level(self) -> str:
        return f"{'probability' if self.is_probability else 'score'} {self._level():g}"


@dataclass(frozen=True)
class Threshold(_Thresholded):
    """A fault is a decision (a score of at least the threshold) that flips; outputs are `[inputs]` or `[inputs, 1]`.

    The threshold has the unit of the output. With labels, seeds with a wrong clean decision are left out.
    """

    name: ClassVar[str] = "threshold"

    def describe(self) -> str:
        return f"a decision that flips at {self._describe_level()}"

    def check(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        if clean_outputs.ndim > 2 or clean_outputs.numel() != len(clean_outputs):
            raise wrong_outputs("decisions must be one number per input, [inputs] or [inputs, 1]", clean_outputs)
        if labels is None:
            return super().check(clean_outputs, labels)
        if labels.numel() != len(clean_outputs) or not are_bits(labels):
            raise DataError(
                f"labels of binary decisions must be 0 or 1, one per seed: {len(clean_outputs)} inputs, got "
                f"{_describe_labels(labels)}: correct them, or leave them out to compare with the clean decision"
            )
        is_correct = self.reference(clean_outputs, labels) == labels.reshape(-1)
        return self.check_some_correct(is_correct)

    def reference(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        return (clean_outputs.reshape(-1) >= self._level()).long()

    def compare(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None) -> Verdict:
        reference, level = self.reference(clean_outputs, labels), self._level()
        score = outputs.reshape(-1)
        decision = (score >= level).long()
        margin = torch.where(reference == 1, score - level, level - score)
        return Verdict(decision != reference, decision, margin, score).mark_not_finite(outputs)

    def loss(self, outputs: Tensor, reference: Tensor) -> Tensor:
        return _bit_loss(outputs.reshape(-1), reference, self._level(), self.is_probability)

    def confidence(self, outputs: Tensor) -> Tensor:
        score, level = outputs.reshape(-1).float(), self._level()
        yes = score if self.is_probability else (score - level).sigmoid()
        return torch.where(score < level, 1 - yes, yes)

    def baseline(self, clean_outputs: Tensor, labels: Tensor) -> BaselineScores | None:
        return class_baseline(self.answers(clean_outputs), labels.reshape(-1).long())


@dataclass(frozen=True)
class Multilabel(_Thresholded):
    """A fault is a change in the set of labels, each decided by the threshold; outputs are `[inputs, labels]`.

    With true labels `[seeds, labels]`, only labels that the clean answer has right can be faults. The outcome is the
    label that flipped furthest, so that each label that a seed can lose or gain is a distinct fault.
    """

    name: ClassVar[str] = "multilabel"

    def describe(self) -> str:
        return f"a label gained or lost at {self._describe_level()}"

    def check(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        if clean_outputs.ndim != 2:
            raise wrong_outputs("oracle 'multilabel' needs scores [inputs, labels]", clean_outputs)
        if labels is not None and not (have_shape(labels, clean_outputs) and are_bits(labels)):
            raise DataError(
                f"labels must be 0 or 1 for each of the {clean_outputs.shape[1]} scores, {list(clean_outputs.shape)}, "
                f"got {_describe_labels(labels)}: correct them, or leave them out to compare with the clean answer"
            )
        is_judged = (self.reference(clean_outputs, labels) != NOT_JUDGED).any(1)
        return self.check_some_correct(is_judged)

    def reference(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        """Return 0 or 1 for each label, and -1 for a label that the clean answer has wrong."""
        decision = (clean_outputs >= self._level()).long()
        if labels is None:
            return decision
        return torch.where(decision == labels.reshape(clean_outputs.shape), decision, NOT_JUDGED)

    def compare(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None) -> Verdict:
        reference, level = self.reference(clean_outputs, labels), self._level()
        by_label = torch.where(reference == 1, outputs - level, level - outputs)
        by_label = torch.where(reference == NOT_JUDGED, torch.inf, by_label)
        has_flipped = ((outputs >= level).long() != reference) & (reference != NOT_JUDGED)
        is_fault = has_flipped.any(1)
        furthest = torch.where(has_flipped, by_label, torch.inf).argmin(1)
        outcome = torch.where(is_fault, furthest, KEPT_ANSWER)
        return Verdict(is_fault, outcome, by_label.amin(1)).mark_not_finite(outputs)

    def loss(self, outputs: Tensor, reference: Tensor) -> Tensor:
        loss = _bit_loss(outputs, reference, self._level(), self.is_probability)
        return torch.where(reference == NOT_JUDGED, 0.0, loss).mean(1)

    def describe_left_out(self, has_labels: bool) -> str:
        return "the model has all of their labels wrong"

    def baseline(self, clean_outputs: Tensor, labels: Tensor) -> BaselineScores | None:
        answers, given = self.answers(clean_outputs), labels.reshape(clean_outputs.shape).long()
        own, constant = ((rows == given).double().mean(1) for rows in (answers, given.median(0).values))
        shares = " against ".join(percent(float(part.mean())) for part in (own, constant))
        text = f"always giving each label its commonest value: {shares} correct"
        return BaselineScores(own, constant, agreement_of_numbers(answers.double(), given.double()), text)


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
