"""Several labels an input: `multilabel`, a score each, `[inputs, labels]`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from themis.errors import DataError, ModelError
from themis.oracle.binary import are_bits, bit_loss, choose_threshold, lie_in_unit, say_labels
from themis.oracle.classes import check_some
from themis.oracle.oracle import KEPT, Oracle, Verdict, mark_not_finite, read_number

NOT_JUDGED = -1


@dataclass(frozen=True)
class Multilabel(Oracle):
    """A fault is a set of labels that changed: a label gained or lost, each decided by the threshold as in `Threshold`.

    With the true labels `[seeds, labels]`, only those that the clean answer has right can break. The outcome is the
    label that flipped furthest, so that each label a seed can lose or gain makes a distinct fault.
    """

    threshold: float | None = None

    @staticmethod
    def parse(text: str) -> Multilabel:
        return Multilabel(read_number(text, "multilabel", "multilabel:0.5") if text else None)

    def spec(self) -> str:
        return "multilabel" if self.threshold is None else f"multilabel:{self.threshold!r}"

    def describe(self) -> str:
        kind = "probability" if self.is_probability else "score"
        return f"a label gained or lost at {kind} {self._level():g}"

    def settle(self, clean_outputs: Tensor, labels: Tensor | None) -> Oracle:
        is_probability = lie_in_unit(clean_outputs)
        return replace(self, threshold=choose_threshold(self.threshold, is_probability), is_probability=is_probability)

    def check(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        if clean_outputs.ndim != 2:
            raise ModelError(
                f"several labels need scores [inputs, labels], got {list(clean_outputs.shape)}: pass output=... to "
                "Target to pick the scores out of what the model returns, or name another task with oracle=..."
            )
        if labels is not None and (labels.shape != clean_outputs.shape or not are_bits(labels)):
            raise DataError(
                f"labels must be 0 or 1 for each of the {clean_outputs.shape[1]} scores, {list(clean_outputs.shape)}, "
                f"got {say_labels(labels)}: give them so, or none to compare with the clean answer"
            )
        is_judged = (self.reference(clean_outputs, labels) != NOT_JUDGED).any(1)
        return check_some(is_judged, "or leave the labels out")

    def reference(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        """0 or 1 for each label; -1 for one that the clean answer has wrong."""
        decision = (clean_outputs >= self._level()).long()
        return decision if labels is None else torch.where(decision == labels, decision, NOT_JUDGED)

    def compare(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None) -> Verdict:
        kept, level = self.reference(clean_outputs, labels), self._level()
        by_label = torch.where(kept == 1, outputs - level, level - outputs)
        by_label = torch.where(kept == NOT_JUDGED, torch.inf, by_label)
        has_flipped = ((outputs >= level).long() != kept) & (kept != NOT_JUDGED)
        is_fault = has_flipped.any(1)
        furthest = torch.where(has_flipped, by_label, torch.inf).argmin(1)
        outcome = torch.where(is_fault, furthest, KEPT)
        return mark_not_finite(Verdict(is_fault, outcome, by_label.amin(1)), outputs)

    def loss(self, outputs: Tensor, reference: Tensor) -> Tensor:
        loss = bit_loss(outputs, reference, self._level(), self.is_probability)
        return torch.where(reference == NOT_JUDGED, 0.0, loss).mean(1)

    def grade(self, clean_outputs: Tensor, labels: Tensor) -> dict[str, float]:
        return {"accuracy": float((self.reference(clean_outputs, None) == labels).double().mean())}

    def _level(self) -> float:
        assert self.threshold is not None  # `settle` has set it
        return self.threshold
