"""Numbers, such as a steering angle: `regression`, `euclidean` and `off`; outputs are `[inputs]` or `[inputs, k]`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from themis.errors import DataError, ModelError, UsageError
from themis.oracle.oracle import (
    KEPT_ANSWER,
    BaselineScores,
    Oracle,
    Verdict,
    agreement_of_numbers,
    have_shape,
    read_number,
    wrong_outputs,
)

SMALLER, LARGER = 0, 1
"""Outcomes: the answer became smaller (for steering, left) or larger (right)."""
FIRST_OUTCOME_OF_SEVERAL = 2
"""With several numbers, the outcome of a smaller first number; larger, and the other numbers, follow in pairs."""
MIN_LABEL_SHARE = 0.05
"""The default tolerance is at least this share of the standard deviation of the labels, so that a nearly perfect model
does not fail because of rounding."""
SHARE_WITHOUT_LABELS = 0.1
"""The default tolerance without labels, as a share of the standard deviation of the clean answers: the typical error of
a model that explains 99% of the variance."""
OFF_ERRORS = 3
"""The default tolerance of `off`, in typical errors; a larger normally distributed error is an outlier."""
MAX_TOLERANCES = 64
"""With more outputs, the default is one tolerance for all of them."""
N_LISTED_TOLERANCES = 4
"""Tolerances that a text lists."""


@dataclass(frozen=True)
class Regression(Oracle):
    """A fault is an answer further than a tolerance from the clean one (`regression`) or from the label (`off`).

    With several numbers per input, one of them must be beyond the tolerance; with `euclidean`, the Euclidean distance
    of the answer from the clean one must be. The tolerance is in the unit of the answer, one for all numbers or one for
    each, or in standard deviations of the clean answers (`2sd`). By default, it is the typical error of the model. With
    `off`, seeds whose clean answer is beyond the tolerance are left out.
    """

    tolerance: float | tuple[float, ...] | None = None
    deviations: float | None = None
    compared_with: Literal["clean", "label"] = "clean"
    is_euclidean: bool = False
    basis: str = ""
    """How the tolerance was derived, in words; set by `settle`."""

    @staticmethod
    def parse(text: str, **options: Any) -> Regression:
        oracle = Regression(**options)
        example = f"{oracle.name}:0.1, or {oracle.name}:2sd for standard deviations of the clean answers"
        if not text:
            return oracle
        if text.endswith("sd"):
            return replace(oracle, deviations=read_number(text.removesuffix("sd"), oracle.name, example, 0))
        numbers = [read_number(part, oracle.name, example, 0) for part in text.split(",")]
        if len(numbers) > 1 and oracle.is_euclidean:
            raise UsageError(f"oracle 'euclidean' must have one tolerance, got {text!r}: write {example}")
        return replace(oracle, tolerance=numbers[0] if len(numbers) == 1 else tuple(numbers))

    @property
    def name(self) -> str:
        return "euclidean" if self.is_euclidean else "regression" if self.compared_with == "clean" else "off"

    def spec(self) -> str:
        if self.tolerance is not None:
            return f"{self.name}:{','.join(map(repr, self._tolerances))}"
        return self.name if self.deviations is None else f"{self.name}:{self.deviations:g}sd"

    def describe(self) -> str:
        notes = [*(["by output"] if len(self._tolerances) > 1 else []), *([self.basis] if self.basis else [])]
        size = _show(self._tolerances) + (f" ({'; '.join(notes)})" if notes else "")
        origin = "the clean one" if self.compared_with == "clean" else "the label"
        distance = "at a Euclidean distance of more than" if self.is_euclidean else "further than"
        return f"an answer {distance} {size} from {origin}"

    def settle(self, clean_outputs: Tensor, labels: Tensor | None) -> Oracle:
        answers = _rows(clean_outputs)
        if self.tolerance is not None:
            return self
        spread = answers.double().std(0, unbiased=False)
        if self.deviations is not None:
            basis = f"{self.deviations:g} times the standard deviation of the clean answers"
            return self._with(self.deviations * self._length(spread), basis, answers)
        if labels is None or not have_shape(labels, answers):  # `check` refuses labels that do not fit
            basis = f"{SHARE_WITHOUT_LABELS:.0%} of the standard deviation of the clean answers"
            return self._with(SHARE_WITHOUT_LABELS * self._length(spread), basis, answers)
        given = labels.reshape(answers.shape).double()
        typical = self._length((answers.double() - given).abs()).median(0).values
        least = MIN_LABEL_SHARE * self._length(given.std(0, unbiased=False))
        basis = "the model's median clean error"
        if bool((typical < least).all()):
            basis = f"{MIN_LABEL_SHARE:.0%} of the standard deviation of the labels"
        times = 1 if self.compared_with == "clean" else OFF_ERRORS
        basis = basis if times == 1 else f"{times} times {basis}"
        return self._with(times * torch.maximum(typical, least), f"{basis}, in the unit of the labels", answers)

    def _with(self, tolerances: Tensor, basis: str, answers: Tensor) -> Regression:
        """Return the oracle with tolerances `[numbers]`, or `[1]` if the distance is Euclidean."""
        if not bool((tolerances > 0).all()):
            raise ModelError(
                f"the clean answers must differ for a default tolerance, or one in standard deviations, got "
                f"{len(answers)} equal to {_show(answers[0].tolist())}: pass an absolute tolerance, such as "
                f"oracle='{self.name}:0.1'"
            )
        if len(tolerances) > MAX_TOLERANCES:
            tolerances = tolerances.median()[None]
        if len(tolerances) == 1:
            return replace(self, tolerance=float(tolerances[0]), basis=basis)
        return replace(self, tolerance=tuple(float(f"{x:.6g}") for x in tolerances.tolist()), basis=basis)

    def check(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        answers = _rows(clean_outputs)
        n, k = answers.shape
        if len(self._tolerances) not in (1, k):
            raise UsageError(
                f"oracle {self.spec()!r} must have one tolerance, or one for each of the model's {k} numbers, got "
                f"{len(self._tolerances)}: write {self.name}:0.1"
            )
        if labels is None and self.compared_with == "label":
            raise DataError("oracle 'off' needs labels, got none: pass (inputs, labels), or use oracle='regression'")
        if labels is not None and not have_shape(labels, answers):
            numbers = "one number per seed" if k == 1 else f"{k} numbers per seed"
            raise DataError(f"labels must be {numbers}: {n} inputs, got shape {list(labels.shape)}: fix or drop them")
        if labels is not None and (n_bad := int((~labels.double().isfinite()).reshape(n, -1).any(1).sum())):
            raise DataError(f"labels must be finite, but {n_bad} of {n} are not: drop these seeds, or all labels")
        if self.compared_with == "clean":
            return super().check(clean_outputs, labels)
        is_near = self._excess(clean_outputs, self.reference(clean_outputs, labels))[0] <= 0
        return self.check_some_correct(is_near, "or use oracle='regression'")

    def describe_left_out(self, has_labels: bool) -> str:
        return "their clean answers are too far from the labels"

    def answers(self, clean_outputs: Tensor) -> Tensor:
        return clean_outputs

    def reference(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        """Return the numbers that tests should keep: `[seeds]`, or `[seeds, k]` if there are several."""
        if self.compared_with == "clean":
            return _flat(clean_outputs)
        assert labels is not None  # `check` refuses data without labels
        return _flat(labels.reshape(_rows(clean_outputs).shape).to(clean_outputs.dtype))

    def compare(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None) -> Verdict:
        reference = self.reference(clean_outputs, labels)
        excess, number, gap = self._excess(outputs, reference)
        is_fault = excess > 0
        first = SMALLER if reference.ndim == 1 else FIRST_OUTCOME_OF_SEVERAL
        outcome = torch.where(is_fault, first + 2 * number + (gap > 0).long(), KEPT_ANSWER)
        value = outputs.reshape(-1) if reference.ndim == 1 else None
        return Verdict(is_fault, outcome, -excess, value).mark_not_finite(outputs)

    def _excess(self, outputs: Tensor, reference: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return by how much answers exceed the tolerance, the index of the number furthest off, and its deviation.

        With several tolerances, the excess is in units of the smallest one.
        """
        gaps = self._gaps(outputs, reference)
        number = gaps.abs().argmax(1)
        gap = gaps.gather(1, number[:, None]).squeeze(1)
        size = torch.linalg.vector_norm(gaps, dim=1) if self.is_euclidean else gap.abs()
        return size - min(self._tolerances), number, gap

    def _gaps(self, outputs: Tensor, reference: Tensor) -> Tensor:
        """Return deviations `[tests, numbers]`, scaled so that the smallest tolerance applies to all numbers."""
        gaps = _rows(outputs) - reference.reshape(_rows(outputs).shape)
        if len(self._tolerances) == 1:
            return gaps
        least = min(self._tolerances)  # new_full instead of new_tensor, since a CUDA graph cannot copy from the host
        return gaps / torch.cat([gaps.new_full((1,), tolerance / least) for tolerance in self._tolerances])

    def loss(self, outputs: Tensor, reference: Tensor) -> Tensor:
        """Return the absolute error, whose gradient has the same direction as that of the squared error.

        The squared error is flat where there is no error, so an attack that starts at the clean answer would never
        leave it.
        """
        gaps = self._gaps(outputs.float(), reference)
        return torch.where(gaps >= 0, gaps, -gaps).sum(1)

    def in_tolerances(self, outputs: Tensor, reference: Tensor) -> Tensor:
        """Return deviations in units of the tolerance, `[tests, numbers]`."""
        return self._gaps(outputs.float(), reference.float()) / min(self._tolerances)

    def grade(self, clean_outputs: Tensor, labels: Tensor) -> dict[str, float]:
        gap = clean_outputs.double().reshape(-1) - labels.double().reshape(-1)
        return {"error": float(gap.abs().mean())}

    def baseline(self, clean_outputs: Tensor, labels: Tensor) -> BaselineScores:
        answers = _rows(clean_outputs).double()
        given = labels.reshape(answers.shape).double()
        unit = given.std(0, unbiased=False).clamp_min(torch.finfo(torch.float64).tiny)
        median = given.median(0).values
        own, constant = ((rows - given).abs() for rows in (answers, median))
        agreement = agreement_of_numbers(answers / unit, given / unit)
        errors = f"mean error {float(own.mean()):.3g} against {float(constant.mean()):.3g}"
        text = f"always answering the median label, {_show(median.tolist())}: {errors}"
        return BaselineScores(-(own / unit).mean(1), -(constant / unit).mean(1), agreement, text)

    @property
    def _tolerances(self) -> tuple[float, ...]:
        assert self.tolerance is not None  # set by `settle`
        return self.tolerance if isinstance(self.tolerance, tuple) else (self.tolerance,)

    def _length(self, numbers: Tensor) -> Tensor:
        """Return numbers `[..., k]` unchanged, or with `is_euclidean` their length `[..., 1]`."""
        return torch.linalg.vector_norm(numbers, dim=-1, keepdim=True) if self.is_euclidean else numbers


def _rows(outputs: Tensor) -> Tensor:
    """Refuse outputs that are not numbers `[inputs]` or `[inputs, k]`; otherwise return them as `[inputs, k]`."""
    if outputs.ndim not in (1, 2) or not outputs.numel():
        raise wrong_outputs("the outputs of a regression must be numbers, [inputs] or [inputs, k]", outputs)
    return outputs if outputs.ndim == 2 else outputs[:, None]


def _flat(numbers: Tensor) -> Tensor:
    return numbers.reshape(-1) if numbers.ndim == 1 or numbers.shape[1] == 1 else numbers


def _show(numbers: Sequence[float]) -> str:
    shown = ", ".join(f"{number:.4g}" for number in numbers[:N_LISTED_TOLERANCES])
    return f"{shown}, ..." if len(numbers) > N_LISTED_TOLERANCES else shown
