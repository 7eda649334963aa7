"""One number per input, such as a steering angle: `regression` and `off`; outputs are `[inputs]` or `[inputs, 1]`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from themis.errors import DataError, ModelError
from themis.oracle.oracle import (
    KEPT,
    Oracle,
    Verdict,
    check_one_number,
    check_some_correct,
    mark_not_finite,
    read_number,
)

SMALLER, LARGER = 0, 1
"""Outcomes: the answer became smaller (steering: left) or larger (right)."""
DEVIATIONS = 2.0
"""Default tolerance in standard deviations of the clean answers."""
NAMES = {"clean": "regression", "label": "off"}


@dataclass(frozen=True)
class Regression(Oracle):
    """A fault is an answer further than a tolerance from the clean one (`regression`) or from the label (`off`).

    The tolerance is absolute, or in standard deviations of the clean answers over all seeds (`2sd`). With `off`, seeds
    whose clean answer is already that far from the label are left out.
    """

    tolerance: float | None = None
    deviations: float | None = DEVIATIONS
    compared_with: Literal["clean", "label"] = "clean"

    @staticmethod
    def parse(text: str) -> Regression:
        return _parse(text, "clean")

    @staticmethod
    def parse_off(text: str) -> Regression:
        return _parse(text, "label")

    def spec(self) -> str:
        size = f"{self.deviations:g}sd" if self.tolerance is None else repr(self.tolerance)
        return f"{NAMES[self.compared_with]}:{size}"

    def describe(self) -> str:
        plural = "s" * (self.deviations != 1)
        unit = (
            "" if self.deviations is None else f" ({self.deviations:g} standard deviation{plural} of the clean answers)"
        )
        origin = "the clean one" if self.compared_with == "clean" else "the label"
        return f"an answer further than {self._reach():.4g}{unit} from {origin}"

    def settle(self, clean_outputs: Tensor, labels: Tensor | None) -> Oracle:
        answers = self._answers(clean_outputs)
        if self.tolerance is not None or self.deviations is None:
            return self
        spread = float(answers.double().std(unbiased=False))
        if spread == 0:
            raise ModelError(
                f"the clean answers must differ for a tolerance in standard deviations, got {len(answers)} equal to "
                f"{float(answers[0]):g}: pass an absolute tolerance, such as oracle='{NAMES[self.compared_with]}:0.1'"
            )
        return replace(self, tolerance=self.deviations * spread)

    def check(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        answers = self._answers(clean_outputs)
        if labels is None and self.compared_with == "label":
            raise DataError(
                "oracle 'off' needs labels, got none: pass (inputs, labels), or compare with the clean answers with "
                "oracle='regression'"
            )
        if labels is not None and labels.numel() != len(answers):
            raise DataError(
                f"labels must be one number per seed: {len(answers)} inputs, got shape {list(labels.shape)}: check the "
                "label column, or leave the labels out"
            )
        if labels is not None and (n_bad := int((~labels.double().isfinite()).sum())):
            raise DataError(
                f"labels must be finite, but {n_bad} of {len(answers)} are NaN or infinite: drop these seeds, or leave "
                "the labels out"
            )
        if self.compared_with == "clean":
            return torch.ones_like(answers, dtype=torch.bool)
        is_near = (answers - self.reference(clean_outputs, labels)).abs() <= self._reach()
        return check_some_correct(is_near, "or use oracle='regression'")

    def reference(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        if self.compared_with == "clean":
            return clean_outputs.reshape(-1)
        assert labels is not None  # `check` refuses data without labels
        return labels.reshape(-1).to(clean_outputs.dtype)

    def compare(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None) -> Verdict:
        answers = outputs.reshape(-1)
        gap = answers - self.reference(clean_outputs, labels)
        is_fault = gap.abs() > self._reach()
        outcome = torch.where(is_fault, torch.where(gap > 0, LARGER, SMALLER), KEPT)
        return mark_not_finite(Verdict(is_fault, outcome, self._reach() - gap.abs(), answers), outputs)

    def loss(self, outputs: Tensor, reference: Tensor) -> Tensor:
        """Return the absolute error, whose gradient has the same direction as that of the squared error.

        The squared error is flat where there is no error, so an attack that starts at the clean answer would never
        leave it; the absolute error is not.
        """
        gap = outputs.reshape(-1).float() - reference
        return torch.where(gap >= 0, gap, -gap)

    def grade(self, clean_outputs: Tensor, labels: Tensor) -> dict[str, float]:
        gap = clean_outputs.reshape(-1).double() - labels.reshape(-1).double()
        return {"error": float(gap.abs().mean())}

    def _answers(self, clean_outputs: Tensor) -> Tensor:
        return check_one_number(clean_outputs, "the outputs of a regression")

    def _reach(self) -> float:
        assert self.tolerance is not None  # set by `settle`
        return self.tolerance


def _parse(text: str, compared_with: Literal["clean", "label"]) -> Regression:
    name = NAMES[compared_with]
    example = f"{name}:0.1, or {name}:2sd for standard deviations of the clean answers"
    if text.endswith("sd") or not text:
        number = read_number(text.removesuffix("sd"), name, example, 0) if text else DEVIATIONS
        return Regression(None, number, compared_with)
    return Regression(read_number(text, name, example, 0), None, compared_with)
