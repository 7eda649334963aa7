"""Classification: `changed`, `wrong` and `topK`. Outputs are scores or probabilities `[inputs, classes]`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from themis.compute.native import library_for, verdict
from themis.errors import DataError, ModelError
from themis.oracle.constant import BesideConstant, class_baseline
from themis.oracle.oracle import NOT_FINITE, Oracle, Verdict, are_finite, check_some_correct, mark_not_finite

MIN_PROBABILITY = 1e-12
"""Lower bound of probabilities in a loss."""
IGNORED_PIXEL = -1
"""Reference of a pixel that does not count."""


def class_loss(outputs: Tensor, reference: Tensor, is_probability: bool = False) -> Tensor:
    """Return the cross-entropy of the classes `reference`, `[tests]`; for maps of classes, its mean over the pixels."""
    outputs = outputs.float()
    log = outputs.clamp_min(MIN_PROBABILITY).log() if is_probability else outputs.log_softmax(1)
    loss = F.nll_loss(log, reference, reduction="none", ignore_index=IGNORED_PIXEL)
    return loss if loss.ndim == 1 else loss.flatten(1).mean(1)


@dataclass(frozen=True)
class _Classifier(Oracle):
    def settle(self, clean_outputs: Tensor, labels: Tensor | None) -> Oracle:
        check_scores(clean_outputs)
        return replace(self, is_probability=are_probabilities(clean_outputs))

    def loss(self, outputs: Tensor, reference: Tensor) -> Tensor:
        return class_loss(outputs, reference, self.is_probability)

    def confidence(self, outputs: Tensor) -> Tensor:
        return confidence(outputs, self.is_probability)

    def answers(self, clean_outputs: Tensor) -> Tensor:
        return clean_outputs.argmax(1)

    def grade(self, clean_outputs: Tensor, labels: Tensor) -> dict[str, float]:
        return {"accuracy": float((clean_outputs.argmax(1) == labels).double().mean())}

    def baseline(self, clean_outputs: Tensor, labels: Tensor) -> BesideConstant | None:
        return class_baseline(clean_outputs.argmax(1, keepdim=True), labels.long())


@dataclass(frozen=True)
class Changed(_Classifier):
    """A fault is an answer that differs from the seed's own (the paper's definition)."""

    def spec(self) -> str:
        return "changed"

    def describe(self) -> str:
        return "an answer that differs from the clean one"

    def check(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        check_scores(clean_outputs)
        if labels is not None:
            check_classes(labels, len(clean_outputs))
        return torch.ones(len(clean_outputs), dtype=torch.bool, device=clean_outputs.device)

    def reference(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        return clean_outputs.argmax(1)

    def compare(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None) -> Verdict:
        return _compare(self.reference(clean_outputs, labels), outputs)


@dataclass(frozen=True)
class Wrong(_Classifier):
    """A fault is an answer that differs from the label. Seeds with a wrong clean answer are left out."""

    def spec(self) -> str:
        return "wrong"

    def describe(self) -> str:
        return "an answer that differs from the label"

    def check(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        check_scores(clean_outputs)
        if labels is None:
            raise DataError("oracle 'wrong' needs labels, got none: pass (inputs, labels), or use oracle='changed'")
        check_classes(labels, len(clean_outputs), clean_outputs.shape[1])
        details = f", with {clean_outputs.shape[1]} outputs for labels from {int(labels.min())} to {int(labels.max())}"
        return check_some_correct(clean_outputs.argmax(1) == labels, "or use oracle='changed'", details)

    def reference(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        assert labels is not None  # `check` refuses data without labels
        return labels.long()

    def compare(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None) -> Verdict:
        return _compare(self.reference(clean_outputs, labels), outputs)


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
        check_scores(clean_outputs)
        n_classes = clean_outputs.shape[1]
        if self.k >= n_classes:
            raise ModelError(
                f"oracle {self.spec()!r} must leave a class out, but the model has {n_classes} scores: use "
                f"oracle='top{n_classes - 1}' or fewer, or check that the output holds the scores"
            )
        if labels is None:
            return torch.ones(len(clean_outputs), dtype=torch.bool, device=clean_outputs.device)
        check_classes(labels, len(clean_outputs), n_classes)
        is_inside = _rank(clean_outputs, labels.long()) < self.k
        return check_some_correct(is_inside, "or leave the labels out")

    def reference(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        return clean_outputs.argmax(1) if labels is None else labels.long()

    def compare(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None) -> Verdict:
        reference = self.reference(clean_outputs, labels)
        rivals = outputs.scatter(1, reference[:, None], -torch.inf).topk(self.k, 1).values[:, -1]
        margin = outputs.gather(1, reference[:, None]).squeeze(1) - rivals
        is_fault = _rank(outputs, reference) >= self.k
        return mark_not_finite(Verdict(is_fault, outputs.argmax(1), margin), outputs)

    def grade(self, clean_outputs: Tensor, labels: Tensor) -> dict[str, float]:
        return {"accuracy": float((_rank(clean_outputs, labels.long()) < self.k).double().mean())}

    def answers(self, clean_outputs: Tensor) -> Tensor:
        return clean_outputs.topk(self.k, 1).indices.sort(1).values

    def baseline(self, clean_outputs: Tensor, labels: Tensor) -> BesideConstant | None:
        return class_baseline(self.answers(clean_outputs), labels.long())


def are_probabilities(outputs: Tensor) -> bool:
    """Return whether outputs `[inputs, classes, ...]` are probabilities, not scores; pass many inputs at once."""
    is_inside = bool(((outputs >= 0) & (outputs <= 1)).all())
    return is_inside and bool(((outputs.float().sum(1) - 1).abs() < 1e-3).all())


def confidence(outputs: Tensor, is_probability: bool = False) -> Tensor:
    """Return the probability of each answer `[tests]`; scores are passed through a softmax."""
    outputs = outputs.float()
    return (outputs if is_probability else outputs.softmax(1)).amax(1)


def check_classes(labels: Tensor, n_seeds: int, n_classes: int | None = None) -> None:
    """Refuse labels other than one class number per seed, below `n_classes` if that is given."""
    if labels.shape != (n_seeds,):
        remedy = "pass class numbers, not one-hot rows"
        if labels.ndim == 2 and not bool(((labels == 0) | (labels == 1)).all()):
            remedy = "pass class numbers or, for a regression, as many numbers per seed as the model has outputs"
        raise DataError(
            f"labels must be one per seed: {n_seeds} inputs, got labels of shape {list(labels.shape)}: {remedy}"
        )
    if labels.is_floating_point() and not bool((labels == labels.round()).all()):
        raise DataError(
            f"labels must be class numbers, got {labels[labels != labels.round()][0].item():g}: pass whole numbers, or "
            "name the task with oracle=..."
        )
    if n_classes is not None:
        outside = (labels < 0) | (labels >= n_classes)
        if bool(outside.any()):
            raise DataError(
                f"labels must lie in 0..{n_classes - 1} since the model has {n_classes} scores, "
                f"got {int(labels[outside][0])}: {_class_remedy(labels, n_classes)}"
            )


def _class_remedy(labels: Tensor, n_classes: int) -> str:
    """What to do about labels outside 0..n_classes - 1."""
    if int(labels.min()) == 1 and int(labels.max()) == n_classes:
        return "they count from 1, so subtract 1"
    return "check the label column, or the model's number of classes"


def check_scores(clean_outputs: Tensor) -> None:
    """Refuse outputs that are not the scores of a classifier."""
    if clean_outputs.ndim != 2 or clean_outputs.shape[1] < 2:
        raise ModelError(
            f"a classifier must return scores [inputs, classes] with 2 classes or more, got "
            f"{list(clean_outputs.shape)}: pass output=... to Target to pick the scores from the model's result, or "
            "name its task with oracle=..."
        )


def _compare(reference: Tensor, outputs: Tensor) -> Verdict:
    native = None if outputs.requires_grad else library_for(outputs)
    if native is not None:
        return Verdict(*verdict(native, outputs.contiguous(), reference.contiguous()))
    is_finite = are_finite(outputs)
    outcome = torch.where(is_finite, outputs.argmax(1), NOT_FINITE)
    of_reference = outputs.gather(1, reference[:, None]).squeeze(1)
    rivals = outputs.scatter(1, reference[:, None], -torch.inf)
    margin = torch.where(is_finite, (of_reference - rivals.amax(1)).float(), -torch.inf)
    return Verdict(outcome != reference, outcome, margin)


def _rank(outputs: Tensor, reference: Tensor) -> Tensor:
    """Return how many classes rank before the reference, `[tests]`."""
    score = outputs.gather(1, reference[:, None])
    is_earlier = torch.arange(outputs.shape[1], device=outputs.device) < reference[:, None]
    return ((outputs > score) | ((outputs == score) & is_earlier)).sum(1)
