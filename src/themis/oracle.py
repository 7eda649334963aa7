"""What a fault is: the task's oracle compares a test's output with its seed's."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from themis.errors import DataError, ModelError, UsageError, nearest

NOT_FINITE = -1
"""The outcome of a test whose output has a NaN or an infinity: no class has this number."""


class Verdict(NamedTuple):
    """What an oracle says of a batch of tests; each `[tests]`.

    `outcome` is the answer given. `margin` is how far the answer is from breaking, in the output's own unit: negative
    where it has broken.
    """

    is_fault: Tensor
    outcome: Tensor
    margin: Tensor


class Oracle(Protocol):
    """A task's rule for what a fault is."""

    def check(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        """Refuse outputs and labels that do not fit; which seeds can be tested, bool `[seeds]`."""

    def reference(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        """The answer each seed should keep, `[seeds]`; what an attack tries to change."""

    def compare(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None) -> Verdict: ...


class Changed:
    """Classification: a fault is an answer that differs from the seed's own (the paper's definition)."""

    def check(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        _check_scores(clean_outputs)
        return torch.ones(len(clean_outputs), dtype=torch.bool, device=clean_outputs.device)

    def reference(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        return clean_outputs.argmax(1)

    def compare(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None) -> Verdict:
        return _compare(self.reference(clean_outputs, labels), outputs)


class Wrong:
    """Classification: a fault is an answer that differs from the label. Seeds answered wrongly at once are left out."""

    def check(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        _check_scores(clean_outputs)
        n_classes = clean_outputs.shape[1]
        if labels is None:
            raise DataError("oracle 'wrong' needs labels, got none: give (inputs, labels), or use oracle='changed'")
        outside = (labels < 0) | (labels >= n_classes)
        if outside.any():
            raise DataError(
                f"labels must lie in 0..{n_classes - 1} since the model gives {n_classes} scores, "
                f"got {int(labels[outside][0])}: check the label column, or the model's number of classes"
            )
        is_right = clean_outputs.argmax(1) == labels
        if not is_right.any():
            raise DataError(
                f"the model must answer some clean inputs rightly, got 0 of {len(labels)}: check the preprocessing, "
                "the order of the labels and the weights, or use oracle='changed'"
            )
        return is_right

    def reference(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        assert labels is not None  # `check` has refused data without labels
        return labels

    def compare(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None) -> Verdict:
        return _compare(self.reference(clean_outputs, labels), outputs)


ORACLES: dict[str, type[Changed] | type[Wrong]] = {"changed": Changed, "wrong": Wrong}


def choose_oracle(oracle: str | Oracle, has_labels: bool) -> Oracle:
    """The oracle by name; `auto` is `wrong` where there are labels and `changed` where there are none."""
    if not isinstance(oracle, str):
        return oracle
    name = oracle if oracle != "auto" else ("wrong" if has_labels else "changed")
    if name not in ORACLES:
        raise UsageError(f"oracle must be a known name, got {oracle!r}: {nearest(oracle, ['auto', *ORACLES])}")
    return ORACLES[name]()


def are_probabilities(outputs: Tensor) -> bool:
    """Whether outputs `[inputs, classes]` are probabilities already, not scores; asked of many inputs at once."""
    is_inside = bool(((outputs >= 0) & (outputs <= 1)).all())
    return is_inside and bool(((outputs.float().sum(1) - 1).abs() < 1e-3).all())


def confidence(outputs: Tensor, is_probability: bool = False) -> Tensor:
    """The probability of each answer `[tests]`: softmax of scores; probabilities are taken as they are."""
    outputs = outputs.float()
    return (outputs if is_probability else outputs.softmax(1)).amax(1)


def _compare(reference: Tensor, outputs: Tensor) -> Verdict:
    is_finite = outputs.isfinite().all(1)
    outcome = torch.where(is_finite, outputs.argmax(1), NOT_FINITE)
    of_reference = outputs.gather(1, reference[:, None]).squeeze(1)
    rivals = outputs.scatter(1, reference[:, None], -torch.inf)
    margin = torch.where(is_finite, (of_reference - rivals.amax(1)).float(), -torch.inf)
    return Verdict(outcome != reference, outcome, margin)


def _check_scores(clean_outputs: Tensor) -> None:
    if clean_outputs.ndim != 2 or clean_outputs.shape[1] < 2:
        raise ModelError(
            f"a classifier must give scores [inputs, classes] with 2 classes or more, got {list(clean_outputs.shape)}: "
            "pass output=... to Target to pick the scores out of what the model returns"
        )
