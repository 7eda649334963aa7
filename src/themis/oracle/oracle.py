"""The interface of an oracle, and the checks that several tasks share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from themis.errors import DataError, ModelError, UsageError
from themis.oracle.constant import BesideConstant
from themis.oracle.motion import Motion

NOT_FINITE = -1
"""Outcome of a test whose output contains a NaN or an infinity; no other outcome has this number."""
KEPT_ANSWER = -2
"""Outcome of a test that kept its answer, in tasks whose outcomes say what changed."""


class Verdict(NamedTuple):
    """An oracle's verdict on a batch of tests; each field is `[tests]`.

    `outcome` is the answer, or what changed in it: faults of one seed with different outcomes are distinct. `margin`
    is how far the answer is from being a fault, in the unit of the output, and negative for faults. `value` is the
    answer as a number, in tasks that have one.
    """

    is_fault: Tensor
    outcome: Tensor
    margin: Tensor
    value: Tensor | None = None


@dataclass(frozen=True)
class Oracle(ABC):
    """Decides which tests of a task are faults. A new task implements the abstract methods."""

    is_spatial: ClassVar[bool] = False
    """Whether answers and labels say where something is in the picture, so that they move with it."""

    is_probability: bool = field(default=False, kw_only=True)
    """Whether the outputs are probabilities rather than scores; set by `settle`."""

    @abstractmethod
    def spec(self) -> str:
        """Return the oracle's name on the command line."""

    @abstractmethod
    def describe(self) -> str:
        """Return a noun phrase for what counts as a fault."""

    def settle(self, clean_outputs: Tensor, labels: Tensor | None) -> Oracle:
        """Return the oracle with everything fixed that depends on the clean outputs of all seeds."""
        return self

    @abstractmethod
    def check(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        """Refuse unsuitable outputs and labels, and return which seeds can be tested, bool `[seeds]`."""

    def describe_left_out(self, has_labels: bool) -> str:
        """Return why seeds that `check` leaves out cannot be tested."""
        return "the model misclassifies them"

    def answers(self, clean_outputs: Tensor) -> Tensor:
        """Return what the model answers, `[seeds, ...]`, whatever the labels are."""
        return self.reference(clean_outputs, None)

    def baseline(self, clean_outputs: Tensor, labels: Tensor) -> BesideConstant | None:
        """Return the clean answers beside the best constant answer, in tasks that have one."""
        return None

    @abstractmethod
    def reference(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        """Return the answers that the seeds should keep, `[seeds, ...]`, and that an attack tries to change."""

    @abstractmethod
    def compare(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None) -> Verdict:
        """Return which tests are faults."""

    def verdict(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None, motion: Motion | None) -> Verdict:
        """Return which tests are faults, given how their pictures have moved; every test is compared by it."""
        if motion:
            clean_outputs, labels = self.move(clean_outputs, labels, motion)
        return self.compare(clean_outputs, outputs, labels)

    def move(self, clean_outputs: Tensor, labels: Tensor | None, motion: Motion) -> tuple[Tensor, Tensor | None]:
        """Return clean outputs and labels as `compare` expects them for pictures that have moved; for spatial tasks."""
        raise UsageError(f"an oracle with is_spatial must define move, but {type(self).__name__} does not: add it")

    def move_labels(self, labels: Tensor, motion: Motion) -> Tensor:
        """Return the labels of pictures that have moved, to train on; for spatial tasks."""
        raise UsageError(
            f"an oracle with is_spatial must define move_labels, but {type(self).__name__} does not: add it"
        )

    def loss(self, outputs: Tensor, reference: Tensor) -> Tensor:
        """Return how far outputs are from the reference answers, `[tests]`; attacks maximise it."""
        raise UsageError(
            f"an attack needs a loss to maximise, but oracle {self.spec()!r} has none: define one with "
            "Compare(function, loss_function=...), or choose a perturbation that needs no gradient"
        )

    def confidence(self, outputs: Tensor) -> Tensor:
        """Return the probability of each answer `[tests]`; NaN in tasks without probabilities."""
        return torch.full((len(outputs),), torch.nan, device=outputs.device)

    def grade(self, clean_outputs: Tensor, labels: Tensor) -> dict[str, float]:
        """Return the quality of the clean outputs: `accuracy`, `error` (mean absolute) or `iou` (mean)."""
        return {}


def are_finite(outputs: Tensor) -> Tensor:
    """Return which outputs contain neither a NaN nor an infinity, `[tests]`."""
    rows = outputs.reshape(outputs.shape[0], math.prod(outputs.shape[1:]))
    return (rows - rows == 0).all(1)  # in half the time of isfinite


def are_all_finite(outputs: Tensor) -> bool:
    """Return whether no output contains a NaN or an infinity: if so, the sum has one as well, unless it overflows."""
    if outputs.is_cpu:
        return bool(np.isfinite(outputs.numpy()).all())  # between two passes in half the time of torch
    return math.isfinite(float(outputs.sum())) or bool(are_finite(outputs).all())


def mark_not_finite(verdict: Verdict, outputs: Tensor) -> Verdict:
    """Return the verdict in which every output that is not finite is a fault with the outcome `NOT_FINITE`."""
    is_finite = are_finite(outputs)
    return Verdict(
        verdict.is_fault | ~is_finite,
        torch.where(is_finite, verdict.outcome, NOT_FINITE),
        torch.where(is_finite, verdict.margin.float(), -torch.inf),
        None if verdict.value is None else torch.where(is_finite, verdict.value.float(), torch.nan),
    )


def check_some_correct(is_correct: Tensor, alternative: str, details: str = "") -> Tensor:
    """Refuse a model that answers no clean input correctly; otherwise return `is_correct`."""
    if not bool(is_correct.any()):
        raise DataError(
            f"the model must answer some clean inputs correctly, got 0 of {len(is_correct)}{details}: check the "
            f"preprocessing, the order of the labels and the weights, {alternative}"
        )
    return is_correct


def check_one_number(outputs: Tensor, task: str) -> Tensor:
    """Refuse outputs that are not one number per input; otherwise return them as `[inputs]`."""
    if outputs.ndim > 2 or outputs.numel() != len(outputs):
        raise ModelError(
            f"{task} must have one number per input, [inputs] or [inputs, 1], got {list(outputs.shape)}: pass "
            "output=... to Target to pick it from the model's result, or name another task with oracle=..."
        )
    return outputs.reshape(-1)


def read_number(text: str, name: str, example: str, low: float = -torch.inf, high: float = torch.inf) -> float:
    """Return the number after the colon of an oracle's name, which must lie strictly between `low` and `high`."""
    try:
        number = float(text)
    except ValueError:
        number = torch.nan
    if not low < number < high:
        interval = f" above {low:g}" if high == torch.inf else f" between {low:g} and {high:g}"
        rule = "a number" if low == -torch.inf else f"a number{interval}"
        raise UsageError(f"oracle {name!r} must be followed by {rule}, got {f'{name}:{text}'!r}: write {example}")
    return number
