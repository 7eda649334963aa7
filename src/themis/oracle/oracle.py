"""The interface of an oracle, checks that several tasks share, and a check for models that ignore their inputs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from themis.errors import DataError, ModelError, UsageError
from themis.oracle.motion import Motion
from themis.text import percent

NOT_FINITE = -1
"""The outcome of a test whose output contains a NaN or an infinity."""
KEPT_ANSWER = -2
"""The outcome of a test that kept its answer, in tasks whose outcomes say what changed."""


MIN_SEEDS = 10
"""With fewer seeds, a good model may give all of them the same answer."""
MIN_OTHER_LABELS = 10
"""With fewer labels other than the most common ones, even a good model may have all of them wrong."""
SAME_ANSWER_GAP = 1e-6
"""Largest difference of answers that count as equal, as a share of the largest answer."""
MIN_AGREEMENT = 1.645
"""Standard deviations above which answers agree with the labels more than by chance (p < 0.05)."""
MAX_DEFICIT = 3.09
"""Standard errors beyond which answers are worse than a constant answer (p < 0.001)."""


class Verdict(NamedTuple):
    """An oracle's verdict on a batch of tests; each field is `[tests]`.

    `outcome` is the answer, or what changed in it; faults of one seed with different outcomes are distinct. `margin` is
    the distance of the answer from being a fault, in the unit of the output; it is negative for faults. `value` is the
    answer as a number, in tasks that have one.
    """

    is_fault: Tensor
    outcome: Tensor
    margin: Tensor
    value: Tensor | None = None

    def mark_not_finite(self, outputs: Tensor) -> Verdict:
        """The verdict with every output that is not finite as a fault with the outcome `NOT_FINITE`."""
        is_finite = are_finite(outputs)
        return Verdict(
            self.is_fault | ~is_finite,
            torch.where(is_finite, self.outcome, NOT_FINITE),
            torch.where(is_finite, self.margin.float(), -torch.inf),
            None if self.value is None else torch.where(is_finite, self.value.float(), torch.nan),
        )


class BaselineScores(NamedTuple):
    """Scores `[seeds]` of the clean answers and of the best constant answer, by the labels; higher is better."""

    own: Tensor
    constant: Tensor
    agreement: float
    """Standard deviations by which the answers agree better with their own labels than with shuffled labels."""
    text: str
    """The constant answer and both scores, in words."""


@dataclass(frozen=True)
class Oracle(ABC):
    """Decides which tests of a task are faults. A new task implements the abstract methods."""

    is_spatial: ClassVar[bool] = False
    """Whether answers and labels are places in the picture and move with it."""

    is_probability: bool = field(default=False, kw_only=True)
    """Whether the outputs are probabilities rather than scores; set by `settle`."""

    task: ClassVar[str] = ""
    """The oracle's name on the command line, without a number."""
    fault: ClassVar[str] = ""
    """What counts as a fault, as a noun phrase."""

    def spec(self) -> str:
        """Return the oracle's name on the command line, from which it can be built again."""
        return self.task

    def describe(self) -> str:
        """Return a noun phrase for what counts as a fault."""
        return self.fault

    def settle(self, clean_outputs: Tensor, labels: Tensor | None) -> Oracle:
        """Return the oracle with everything determined that depends on the clean outputs of all seeds."""
        return self

    def check(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        """Refuse unsuitable outputs and labels; return which seeds can be tested, bool `[seeds]`, by default all.

        It is called after `settle`.
        """
        return torch.ones(len(clean_outputs), dtype=torch.bool, device=clean_outputs.device)

    def check_some_correct(
        self, is_correct: Tensor, alternative: str = "or leave the labels out", details: str = ""
    ) -> Tensor:
        """Refuse a model that answers no clean input correctly; otherwise return `is_correct`."""
        if not bool(is_correct.any()):
            raise DataError(
                f"the model must answer some clean inputs correctly, got 0 of {len(is_correct)}{details}: check the "
                f"preprocessing, the order of the labels and the weights, {alternative}"
            )
        return is_correct

    def describe_left_out(self, has_labels: bool) -> str:
        """Return why seeds that `check` leaves out cannot be tested."""
        return "the model misclassifies them"

    def answers(self, clean_outputs: Tensor) -> Tensor:
        """Return the model's answers, `[seeds, ...]`, regardless of the labels."""
        return self.reference(clean_outputs, None)

    def baseline(self, clean_outputs: Tensor, labels: Tensor) -> BaselineScores | None:
        """Compare the clean answers with the best constant answer; None in tasks without one."""
        return None

    @abstractmethod
    def reference(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        """Return the answers that tests should keep and attacks try to change, `[seeds, ...]`."""

    @abstractmethod
    def compare(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None) -> Verdict:
        """Return which tests are faults, for pictures that have not moved."""

    def verdict(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None, motion: Motion | None) -> Verdict:
        """Return which tests are faults, given how their pictures have moved. Campaigns call this method."""
        if motion:
            clean_outputs, labels = self.move(clean_outputs, labels, motion)
        return self.compare(clean_outputs, outputs, labels)

    def moved_reference(self, clean_outputs: Tensor, labels: Tensor | None, motion: Motion) -> Tensor:
        """Return the answers that tests should keep after their pictures have moved; for spatial tasks."""
        return self.reference(*self.move(clean_outputs, labels, motion))

    def move(self, clean_outputs: Tensor, labels: Tensor | None, motion: Motion) -> tuple[Tensor, Tensor | None]:
        """Return clean outputs and labels as `compare` expects them for pictures that have moved; for spatial tasks."""
        raise UsageError(f"an oracle with is_spatial must define move, but {type(self).__name__} does not: add it")

    def move_labels(self, labels: Tensor, motion: Motion) -> Tensor:
        """Return the labels of pictures that have moved, for training; for spatial tasks."""
        raise UsageError(
            f"retraining must move labels without answers, which oracle {self.spec()!r} cannot do: use a perturbation "
            "that moves nothing, or another task"
        )

    def loss(self, outputs: Tensor, reference: Tensor) -> Tensor:
        """Return the distance of outputs from the reference answers, `[tests]`, which attacks maximise."""
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
    """Return whether no output contains a NaN or an infinity; if the sum of all outputs is finite, none does."""
    if outputs.is_cpu:
        return bool(np.isfinite(outputs.numpy()).all())  # between two passes, in half the time of torch
    return math.isfinite(float(outputs.sum())) or bool(are_finite(outputs).all())


def have_shape(labels: Tensor, outputs: Tensor) -> bool:
    """Return whether there is a label for each output `[inputs, k]`; with k = 1, labels may be `[inputs]`."""
    return labels.shape == outputs.shape or (outputs.shape[1] == 1 and labels.numel() == len(outputs))


def wrong_outputs(rule: str, outputs: Tensor) -> ModelError:
    """The error for outputs whose shape does not fit the task."""
    return ModelError(
        f"{rule}, got {list(outputs.shape)}: pass output=... to Target to pick them from the model's result, or name "
        "another task with oracle=..."
    )


def read_number(text: str, name: str, example: str, low: float = -torch.inf, high: float = torch.inf) -> float:
    """Return the number after the colon of an oracle's name, which must lie strictly between `low` and `high`."""
    try:
        number = float(text)
    except ValueError:
        number = torch.nan
    if not low < number < high:
        interval = f" above {low:g}" if high == torch.inf else f" between {low:g} and {high:g}"
        rule = "a number" if low == -torch.inf else f"a number{interval}"
        got = f"{name}{text}" if name.endswith("=") else f"{name}:{text}"
        raise UsageError(f"oracle {name!r} must be followed by {rule}, got {got!r}: write {example}")
    return number


def find_constant(oracle: Oracle, clean_outputs: Tensor, labels: Tensor | None) -> str | None:
    """Return why a low fault rate would mean nothing, in words; None if the clean answers are informative.

    They are not if all of them are equal or if, given labels, a constant answer is as good. On unbalanced data, a good
    model is hardly more accurate than the most common label. It passes if its answers agree with the labels more than
    by chance, unless it is clearly less accurate.
    """
    n = len(clean_outputs)
    if n < MIN_SEEDS:
        return None
    answers = oracle.answers(clean_outputs)
    if not answers.numel() or (answers.amax(0) - answers.amin(0)).max() <= SAME_ANSWER_GAP * answers.abs().max():
        return f"all {n:,} clean answers are the same"
    baseline = None if labels is None else oracle.baseline(clean_outputs, labels)
    if baseline is None:
        return None
    gain = (baseline.own.double() - baseline.constant.double()).nan_to_num(0)
    mean, standard_error = float(gain.mean()), float(gain.std()) / math.sqrt(n)
    is_worse = mean < -MAX_DEFICIT * standard_error
    if not is_worse and (mean > 0 or baseline.agreement > MIN_AGREEMENT):
        return None
    return f"the clean answers are no better than {baseline.text}"


def class_baseline(answers: Tensor, labels: Tensor) -> BaselineScores | None:
    """Compare answers that are classes, `[seeds]` or `[seeds, k]`, with always naming the k most common labels.

    None if there are too few other labels to distinguish a good model from a constant one.
    """
    answers = answers.reshape(len(labels), -1)
    n, k = answers.shape
    n_classes = int(torch.maximum(answers.max(), labels.max())) + 1
    counts, named = (classes.flatten().bincount(minlength=n_classes).double() for classes in (labels, answers))
    commonest = counts.topk(k).indices
    own, constant = (answers == labels[:, None]).any(1), torch.isin(labels, commonest)
    if n - int(constant.sum()) < MIN_OTHER_LABELS:
        return None
    # The mean and the variance of the number of correct answers if the labels were shuffled.
    by_answer, by_label = counts[answers].sum(1) / n, named[labels] / n
    mean = float(by_answer.sum())
    squares = n * mean - n * float(by_answer.square().sum()) - n * float(by_label.square().sum()) + mean**2
    agreement = _standardised(float(own.sum()) - mean, squares / max(n - 1, 1))
    names = f"class {int(commonest[0])}" if k == 1 else f"the {k} commonest classes"
    shares = " against ".join(percent(float(part.double().mean())) for part in (own, constant))
    return BaselineScores(own, constant, agreement, f"always naming {names}: {shares} correct")


def agreement_of_numbers(answers: Tensor, labels: Tensor) -> float:
    """Return `BaselineScores.agreement` of answers and labels `[seeds, numbers]`, whose columns have one unit."""
    centred = [(column - column.mean(0)).double() for column in (answers, labels)]
    spread = (centred[0].T @ centred[0] * (centred[1].T @ centred[1])).sum()
    return _standardised(float((centred[0] * centred[1]).sum()), float(spread) / max(len(answers) - 1, 1))


def _standardised(difference: float, variance: float) -> float:
    return difference / math.sqrt(variance) if variance > 0 else 0.0
