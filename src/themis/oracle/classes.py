"""Classification: `changed`, `wrong`, `topK`, and `against` a reference.

Outputs are scores or probabilities `[inputs, classes]`. Outputs of `against` are `[inputs, 2 * classes]`: the scores of
the model, followed by those of its reference.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from themis.compute.native import library_for, verdict
from themis.errors import DataError, ModelError
from themis.oracle.oracle import NOT_FINITE, BaselineScores, Oracle, Verdict, are_finite, class_baseline, wrong_outputs

MIN_PROBABILITY = 1e-12
"""Lower bound of probabilities in a loss."""
PROBABILITY_SLACK = 1e-2
"""Largest difference from 1 of the sum of a row of probabilities with few bits."""
IGNORED_PIXEL = -1
"""The reference of a pixel that does not count."""


def class_loss(outputs: Tensor, reference: Tensor, is_probability: bool = False) -> Tensor:
    """Return the cross-entropy of the classes `reference`, `[tests]`; for maps of classes, the mean over pixels."""
    outputs = outputs.float()
    log = outputs.clamp_min(MIN_PROBABILITY).log() if is_probability else outputs.log_softmax(1)
    loss = F.nll_loss(log, reference, reduction="none", ignore_index=IGNORED_PIXEL)
    return loss if loss.ndim == 1 else loss.flatten(1).mean(1)


@dataclass(frozen=True)
class _Classifier(Oracle):
    def settle(self, clean_outputs: Tensor, labels: Tensor | None) -> Oracle:
        if clean_outputs.ndim != 2 or clean_outputs.shape[1] < 2:
            rule = "a classifier must return scores [inputs, classes] with 2 classes or more"
            raise wrong_outputs(rule, clean_outputs)
        return replace(self, is_probability=are_probabilities(clean_outputs))

    def reference(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        return clean_outputs.argmax(1) if labels is None else labels.long()

    def compare(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None) -> Verdict:
        reference = self.reference(clean_outputs, labels)
        native = None if outputs.requires_grad else library_for(outputs)
        if native is not None:
            return Verdict(*verdict(native, outputs.contiguous(), reference.contiguous()))
        is_finite = are_finite(outputs)
        outcome = torch.where(is_finite, outputs.argmax(1), NOT_FINITE)
        of_reference = outputs.gather(1, reference[:, None]).squeeze(1)
        rivals = outputs.scatter(1, reference[:, None], -torch.inf)
        margin = torch.where(is_finite, (of_reference - rivals.amax(1)).float(), -torch.inf)
        return Verdict(outcome != reference, outcome, margin)

    def loss(self, outputs: Tensor, reference: Tensor) -> Tensor:
        return class_loss(outputs, reference, self.is_probability)

    def confidence(self, outputs: Tensor) -> Tensor:
        return confidence(outputs, self.is_probability)

    def answers(self, clean_outputs: Tensor) -> Tensor:
        return clean_outputs.argmax(1)

    def grade(self, clean_outputs: Tensor, labels: Tensor) -> dict[str, float]:
        return {"accuracy": float((clean_outputs.argmax(1) == labels).double().mean())}

    def baseline(self, clean_outputs: Tensor, labels: Tensor) -> BaselineScores | None:
        return class_baseline(self.answers(clean_outputs), labels.long())


def is_classifier(oracle: Oracle) -> bool:
    """Return whether the answers are classes with a confidence."""
    return isinstance(oracle, _Classifier)


@dataclass(frozen=True)
class Changed(_Classifier):
    """A fault is an answer that differs from the seed's own (the paper's definition)."""

    task: ClassVar[str] = "changed"
    fault: ClassVar[str] = "an answer that differs from the clean one"

    def check(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        if labels is not None:
            check_classes(labels, len(clean_outputs))
        return super().check(clean_outputs, labels)

    def reference(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        return clean_outputs.argmax(1)


@dataclass(frozen=True)
class Wrong(_Classifier):
    """A fault is an answer that differs from the label. Seeds with a wrong clean answer are left out."""

    task: ClassVar[str] = "wrong"
    fault: ClassVar[str] = "an answer that differs from the label"

    def check(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        if labels is None:
            raise DataError("oracle 'wrong' needs labels, got none: pass (inputs, labels), or use oracle='changed'")
        check_classes(labels, len(clean_outputs), clean_outputs.shape[1])
        details = f", with {clean_outputs.shape[1]} outputs for labels from {int(labels.min())} to {int(labels.max())}"
        return self.check_some_correct(clean_outputs.argmax(1) == labels, "or use oracle='changed'", details)


@dataclass(frozen=True)
class Top(_Classifier):
    """A fault is a label, or without labels a clean answer, that is no longer among the k highest scores.

    The outcome is the new top answer. Among equal scores, the class with the lower number comes first, as in argmax.
    """

    k: int = 5

    def spec(self) -> str:
        return f"top{self.k}"

    def describe(self) -> str:
        return f"a label, or without labels a clean answer, that is not among the {self.k} highest scores"

    def check(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        n_classes = clean_outputs.shape[1]
        if self.k >= n_classes:
            raise ModelError(
                f"oracle {self.spec()!r} must leave a class out, but the model has {n_classes} scores: use "
                f"oracle='top{n_classes - 1}' or fewer, or check that the output holds the scores"
            )
        if labels is None:
            return super().check(clean_outputs, labels)
        check_classes(labels, len(clean_outputs), n_classes)
        is_inside = _rank(clean_outputs, labels.long()) < self.k
        return self.check_some_correct(is_inside)

    def compare(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None) -> Verdict:
        reference = self.reference(clean_outputs, labels)
        rivals = outputs.scatter(1, reference[:, None], -torch.inf).topk(self.k, 1).values[:, -1]
        margin = outputs.gather(1, reference[:, None]).squeeze(1) - rivals
        is_fault = _rank(outputs, reference) >= self.k
        return Verdict(is_fault, outputs.argmax(1), margin).mark_not_finite(outputs)

    def grade(self, clean_outputs: Tensor, labels: Tensor) -> dict[str, float]:
        return {"accuracy": float((_rank(clean_outputs, labels.long()) < self.k).double().mean())}

    def answers(self, clean_outputs: Tensor) -> Tensor:
        return clean_outputs.topk(self.k, 1).indices.sort(1).values


@dataclass(frozen=True)
class Disagreement(Oracle):
    """A fault is a test that the model and its reference answer differently.

    Seeds whose clean inputs they answer differently are left out. The outcome is the answer of the model, the value is
    the answer of its reference.
    """

    task: ClassVar[str] = "against"
    fault: ClassVar[str] = "an answer that differs from the reference's"

    def describe_left_out(self, has_labels: bool) -> str:
        return "the model and its reference disagree on them"

    def settle(self, clean_outputs: Tensor, labels: Tensor | None) -> Oracle:
        return replace(self, is_probability=are_probabilities(halves(clean_outputs)[0]))

    def check(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        if labels is not None:
            check_classes(labels, len(clean_outputs))
        own, other = halves(clean_outputs)
        usable = own.argmax(1) == other.argmax(1)
        if not bool(usable.any()):
            raise ModelError(
                f"the model and its reference must agree on some clean inputs, got 0 of {len(usable)}: check that both "
                "number the classes alike and get the preprocessing that they need"
            )
        return usable

    def reference(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        return halves(clean_outputs)[0].argmax(1)

    def compare(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None) -> Verdict:
        own, other = halves(outputs)
        is_finite, is_other_finite = are_finite(own), are_finite(other)
        answer, expected = own.argmax(1), other.argmax(1)
        is_fault = (answer != expected) | ~is_finite | ~is_other_finite
        is_fault &= is_finite | is_other_finite  # if neither is finite, they agree
        outcome = torch.where(is_finite, answer, NOT_FINITE)
        margin = torch.where(is_finite & is_other_finite, _margin(own, other, answer, expected), -torch.inf)
        margin = torch.where(is_fault, margin, margin.clamp(min=0))
        return Verdict(is_fault, outcome, margin, torch.where(is_other_finite, expected.float(), torch.nan))

    def loss(self, outputs: Tensor, reference: Tensor) -> Tensor:
        own, other = halves(outputs)
        loss_of_other = class_loss(other, reference, are_probabilities(other.detach()))
        return class_loss(own, reference, self.is_probability) - loss_of_other

    def confidence(self, outputs: Tensor) -> Tensor:
        return confidence(halves(outputs)[0], self.is_probability)

    def grade(self, clean_outputs: Tensor, labels: Tensor) -> dict[str, float]:
        return {"accuracy": float((halves(clean_outputs)[0].argmax(1) == labels).double().mean())}


def halves(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Split outputs into the scores of the model and those of its reference."""
    own, other = outputs.chunk(2, 1)
    return own, other


def _margin(own: Tensor, other: Tensor, answer: Tensor, expected: Tensor) -> Tensor:
    """How far two models are from disagreeing, negative if they do; logits and probabilities are made comparable.

    Each model prefers its answer to another answer by a gap. If they agree, the smaller gap counts. If they disagree,
    the gaps are between the two answers, and the smaller one counts with a negative sign.
    """
    rival = torch.where(answer == expected, -1, expected)  # -1: any other class
    gaps = []
    for scores, own_answer, other_answer in (
        (own, answer, rival),
        (other, expected, torch.where(rival < 0, -1, answer)),
    ):
        logits = _as_logits(scores)
        best = logits.gather(1, own_answer[:, None]).squeeze(1)
        runner_up = logits.scatter(1, own_answer[:, None], -torch.inf).amax(1)
        named = logits.gather(1, other_answer.clamp(min=0)[:, None]).squeeze(1)
        gaps.append(best - torch.where(other_answer < 0, runner_up, named))
    least = torch.minimum(*gaps)
    return torch.where(answer == expected, least, -least)


def _as_logits(scores: Tensor) -> Tensor:
    """Turn probabilities into their logarithms and leave other scores unchanged; decided for each row separately."""
    is_probability = (scores >= 0).all(1) & (scores <= 1).all(1) & ((scores.sum(1) - 1).abs() < PROBABILITY_SLACK)
    return torch.where(is_probability[:, None], scores.clamp_min(MIN_PROBABILITY).log(), scores)


def are_probabilities(outputs: Tensor) -> bool:
    """Return whether outputs `[inputs, classes, ...]` are probabilities, not scores; more inputs are more reliable."""
    is_inside = bool(((outputs >= 0) & (outputs <= 1)).all())
    return is_inside and bool(((outputs.float().sum(1) - 1).abs() < 1e-3).all())


def confidence(outputs: Tensor, is_probability: bool = False) -> Tensor:
    """Return the probability of each answer `[tests]`; scores are converted by a softmax."""
    outputs = outputs.float()
    return (outputs if is_probability else outputs.softmax(1)).amax(1)


def check_classes(labels: Tensor, n_seeds: int, n_classes: int | None = None) -> None:
    """Refuse labels that are not one class number per seed, below `n_classes` if it is given."""
    is_whole = not labels.is_floating_point() or bool((labels == labels.round()).all())
    if labels.shape != (n_seeds,) or not is_whole:
        got = f"{float(labels[labels != labels.round()][0]):g}" if not is_whole else f"shape {list(labels.shape)}"
        raise DataError(
            f"labels must be class numbers, one for each of {n_seeds} inputs, got {got}: pass whole numbers, not "
            "one-hot rows, or for a regression, as many numbers per seed as the model has outputs"
        )
    if n_classes is not None:
        outside = (labels < 0) | (labels >= n_classes)
        if bool(outside.any()):
            raise DataError(
                f"labels must lie in 0..{n_classes - 1} since the model has {n_classes} scores, got "
                f"{int(labels[outside][0])}: subtract 1 if they count from 1, or check the label column and the "
                "model's number of classes"
            )


def _rank(outputs: Tensor, reference: Tensor) -> Tensor:
    """Return how many classes rank before the reference, `[tests]`."""
    score = outputs.gather(1, reference[:, None])
    is_earlier = torch.arange(outputs.shape[1], device=outputs.device) < reference[:, None]
    return ((outputs > score) | ((outputs == score) & is_earlier)).sum(1)
