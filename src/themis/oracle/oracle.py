"""What an oracle is: a task's rule for what a fault is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from themis.errors import UsageError

NOT_FINITE = -1
"""The outcome of a test whose output has a NaN or an infinity: no other has this number."""
KEPT = -2
"""The outcome of a test that kept its answer, in tasks whose outcomes say what changed."""


class Verdict(NamedTuple):
    """What an oracle says of a batch of tests; each `[tests]`.

    `outcome` is the answer given, or what changed: one seed's faults with different outcomes are distinct. `margin` is
    how far the answer is from breaking, in the output's own unit: negative where it has broken. `value` is the answer
    as a number, in tasks that have one.
    """

    is_fault: Tensor
    outcome: Tensor
    margin: Tensor
    value: Tensor | None = None


@dataclass(frozen=True)
class Oracle(ABC):
    """A task's rule for what a fault is. A new task needs `check`, `reference`, `compare` and its words."""

    is_probability: bool = field(default=False, kw_only=True)
    """Whether the outputs are probabilities, not scores; `settle` finds out."""

    @abstractmethod
    def spec(self) -> str:
        """The oracle as it is named on the command line."""

    @abstractmethod
    def describe(self) -> str:
        """What a fault is, as a noun."""

    def settle(self, clean_outputs: Tensor, labels: Tensor | None) -> Oracle:
        """The oracle with everything fixed that depends on the clean outputs of all seeds."""
        return self

    @abstractmethod
    def check(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        """Refuse outputs and labels that do not fit; which seeds can be tested, bool `[seeds]`."""

    @abstractmethod
    def reference(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        """The answer each seed should keep, `[seeds, ...]`; what an attack tries to change."""

    @abstractmethod
    def compare(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None) -> Verdict:
        """Which tests are faults."""

    def loss(self, outputs: Tensor, reference: Tensor) -> Tensor:
        """How far outputs are from the reference answers, `[tests]`: what an attack climbs."""
        raise UsageError(
            f"an attack needs a loss to climb, oracle {self.spec()!r} has none: give it one, as "
            "Compare(function, loss_function=...), or choose a perturbation that needs no gradient"
        )

    def confidence(self, outputs: Tensor) -> Tensor:
        """The probability of each answer `[tests]`; NaN in tasks that have none."""
        return torch.full((len(outputs),), torch.nan, device=outputs.device)

    def grade(self, clean_outputs: Tensor, labels: Tensor) -> dict[str, float]:
        """How good the clean outputs are: `accuracy`, `error` (mean absolute) or `iou` (mean)."""
        return {}


def are_finite(outputs: Tensor) -> Tensor:
    """Which outputs have neither a NaN nor an infinity, `[tests]`."""
    return outputs.reshape(len(outputs), -1).isfinite().all(1)


def mark_not_finite(verdict: Verdict, outputs: Tensor) -> Verdict:
    """The verdict with every output that is not finite made a fault of its own kind."""
    is_finite = are_finite(outputs)
    return Verdict(
        verdict.is_fault | ~is_finite,
        torch.where(is_finite, verdict.outcome, NOT_FINITE),
        torch.where(is_finite, verdict.margin.float(), -torch.inf),
        None if verdict.value is None else torch.where(is_finite, verdict.value.float(), torch.nan),
    )


def read_number(text: str, name: str, example: str, low: float = -torch.inf, high: float = torch.inf) -> float:
    """The number after the colon of an oracle's name; it must lie between the two, excluded."""
    try:
        number = float(text)
    except ValueError:
        number = torch.nan
    if not low < number < high:
        between = f" over {low:g}" if high == torch.inf else f" between {low:g} and {high:g}"
        rule = "a number" if low == -torch.inf else f"a number{between}"
        raise UsageError(f"oracle {name!r} must be followed by {rule}, got {f'{name}:{text}'!r}: write {example}")
    return number


def refuse_argument(text: str, name: str) -> None:
    """Refuse something after the colon where the oracle takes nothing."""
    if text:
        raise UsageError(f"oracle {name!r} must be followed by nothing, got {f'{name}:{text}'!r}: write {name}")
