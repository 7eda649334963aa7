"""Binary decisions: `threshold`, one score an input, `[inputs]` or `[inputs, 1]`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from themis.errors import DataError, ModelError
from themis.oracle.classes import LEAST, check_some
from themis.oracle.oracle import Oracle, Verdict, mark_not_finite, read_number


@dataclass(frozen=True)
class Threshold(Oracle):
    """A fault is a decision (score at or over the threshold) that flips. Labels leave out seeds decided wrongly.

    The threshold is in the output's own unit. None: 0.5 where all clean outputs lie in 0..1, which makes them
    probabilities, else 0, for logits.
    """

    threshold: float | None = None

    @staticmethod
    def parse(text: str) -> Threshold:
        return Threshold(read_number(text, "threshold", "threshold:0.5") if text else None)

    def spec(self) -> str:
        return "threshold" if self.threshold is None else f"threshold:{self.threshold!r}"

    def describe(self) -> str:
        kind = "probability" if self.is_probability else "score"
        return f"a decision that flips at {kind} {_level(self.threshold):g}"

    def settle(self, clean_outputs: Tensor, labels: Tensor | None) -> Oracle:
        is_probability = lie_in_unit(clean_outputs)
        return replace(self, threshold=choose_threshold(self.threshold, is_probability), is_probability=is_probability)

    def check(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        decision = self.reference(clean_outputs, labels)
        if labels is None:
            return torch.ones_like(decision, dtype=torch.bool)
        if labels.numel() != len(clean_outputs) or not are_bits(labels):
            raise DataError(
                f"labels of binary decisions must be 0 or 1, one a seed: {len(clean_outputs)} inputs, got "
                f"{say_labels(labels)}: give them so, or none to compare with the clean decision"
            )
        return check_some(decision == labels.reshape(-1), "or leave the labels out")

    def reference(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        return (one_score(clean_outputs, "binary decisions need") >= _level(self.threshold)).long()

    def compare(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None) -> Verdict:
        kept, level = self.reference(clean_outputs, labels), _level(self.threshold)
        score = outputs.reshape(-1)
        decision = (score >= level).long()
        margin = torch.where(kept == 1, score - level, level - score)
        return mark_not_finite(Verdict(decision != kept, decision, margin, score), outputs)

    def loss(self, outputs: Tensor, reference: Tensor) -> Tensor:
        return bit_loss(outputs.reshape(-1), reference, _level(self.threshold), self.is_probability)

    def confidence(self, outputs: Tensor) -> Tensor:
        score, level = outputs.reshape(-1).float(), _level(self.threshold)
        yes = score if self.is_probability else (score - level).sigmoid()
        return torch.where(score < level, 1 - yes, yes)

    def grade(self, clean_outputs: Tensor, labels: Tensor) -> dict[str, float]:
        is_right = self.reference(clean_outputs, labels) == labels.reshape(-1)
        return {"accuracy": float(is_right.double().mean())}


def bit_loss(score: Tensor, reference: Tensor, level: float, is_probability: bool) -> Tensor:
    """Binary cross-entropy of decisions, element by element."""
    if is_probability:
        chance = torch.where(reference == 1, score.float(), 1 - score.float())
        return -chance.clamp_min(LEAST).log()
    return F.binary_cross_entropy_with_logits(score.float() - level, reference.float(), reduction="none")


def choose_threshold(threshold: float | None, is_probability: bool) -> float:
    """The threshold, or its default: even chances."""
    if threshold is not None:
        return threshold
    return 0.5 if is_probability else 0.0


def lie_in_unit(outputs: Tensor) -> bool:
    """Whether all outputs lie in 0..1."""
    return bool(((outputs >= 0) & (outputs <= 1)).all())


def are_bits(labels: Tensor) -> bool:
    """Whether all labels are 0 or 1."""
    return bool(((labels == 0) | (labels == 1)).all())


def say_labels(labels: Tensor) -> str:
    """What labels are, for an error."""
    return f"shape {list(labels.shape)} with values {float(labels.min()):g} to {float(labels.max()):g}"


def one_score(outputs: Tensor, who: str) -> Tensor:
    """Outputs as `[inputs]`; refuses those that are not one number an input."""
    if outputs.ndim > 2 or outputs.numel() != len(outputs):
        raise ModelError(
            f"{who} one number an input, [inputs] or [inputs, 1], got {list(outputs.shape)}: pass output=... to Target "
            "to pick it out of what the model returns, or name another task with oracle=..."
        )
    return outputs.reshape(-1)


def _level(threshold: float | None) -> float:
    assert threshold is not None  # `settle` has set it
    return threshold
