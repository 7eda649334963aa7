"""Any other task, with a comparison function of the user's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from themis.errors import ThemisError, UsageError, first_line
from themis.oracle.motion import Motion
from themis.oracle.oracle import KEPT_ANSWER, Oracle, Verdict

Comparison = Callable[[Tensor, Tensor, Tensor | None], Any]
Move = Callable[[Tensor, Tensor | None, Motion], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Compare(Oracle):
    """A fault is whatever a function says it is.

    Seeds whose clean output is a fault when compared with itself are left out.

    Args:
        function: `function(clean_outputs, outputs, labels)` gets one row per test on the model's device and returns
            which tests are faults, bool `[tests]`; or a tuple of these, outcomes (whole numbers from 0; faults of one
            seed with different outcomes are distinct) and margins (how far a test is from being a fault, negative for
            faults; they guide the search).
        loss_function: `loss_function(outputs, clean_outputs)`, `[tests]`, which attacks maximise.
        name: Its name in reports; by default that of the function.
        move_function: For answers that are places in the picture: `move_function(clean_outputs, labels, motion)`
            returns clean outputs and labels for pictures that have moved, with the help of `motion.points`,
            `motion.boxes` and `motion.maps`.
    """

    function: Comparison
    name: str = ""
    loss_function: Callable[[Tensor, Tensor], Tensor] | None = None
    move_function: Move | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise UsageError(
                f"Compare needs a function (clean_outputs, outputs, labels), got {type(self.function).__name__}"
            )
        object.__setattr__(self, "is_spatial", self.move_function is not None)

    def spec(self) -> str:
        return self.name or _name_of(self.function)

    def describe(self) -> str:
        return f"what {self.spec()} says"

    def check(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        usable = ~self.compare(clean_outputs, clean_outputs, labels).is_fault
        if not bool(usable.any()):
            raise UsageError(
                f"oracle {self.spec()!r} must accept some clean outputs, but it calls all {len(usable)} faults: an "
                "output compared with itself should not be a fault"
            )
        return usable

    def describe_left_out(self, has_labels: bool) -> str:
        return f"{self.spec()} calls their clean outputs faults"

    def reference(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        return clean_outputs

    def compare(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None) -> Verdict:
        result = self._call(self.function, clean_outputs, outputs, labels)
        parts = result if isinstance(result, tuple) else (result,)
        try:
            columns = [torch.as_tensor(part, device=outputs.device) for part in parts]
        except (TypeError, ValueError, RuntimeError):
            columns = []
        has_shape = len(columns) in (1, 3) and all(column.shape == (len(outputs),) for column in columns)
        has_form = has_shape and columns[0].dtype == torch.bool
        if not has_form or (len(columns) == 3 and bool((columns[1][columns[0]] < 0).any())):
            got = ", ".join(f"{column.dtype} {list(column.shape)}" for column in columns) or type(result).__name__
            raise UsageError(
                f"oracle {self.spec()!r} must return a bool tensor [{len(outputs)}], or a tuple of that, outcomes of "
                f"at least 0 and margins, got {got}"
            )
        is_fault, *others = columns
        outcome, margin = others or (torch.zeros_like(is_fault, dtype=torch.int64), 1.0 - 2.0 * is_fault)
        outcome = torch.where(is_fault, outcome.long(), KEPT_ANSWER)
        return Verdict(is_fault, outcome, margin).mark_not_finite(outputs)

    def move(self, clean_outputs: Tensor, labels: Tensor | None, motion: Motion) -> tuple[Tensor, Tensor | None]:
        assert self.move_function is not None  # the oracle is spatial
        moved = self._call(self.move_function, clean_outputs, labels, motion)
        if not isinstance(moved, tuple) or len(moved) != 2:
            raise UsageError(
                f"move_function of oracle {self.spec()!r} must return clean outputs and labels, got "
                f"{type(moved).__name__}: return both as a tuple"
            )
        return moved

    def loss(self, outputs: Tensor, reference: Tensor) -> Tensor:
        if self.loss_function is None:
            return super().loss(outputs, reference)
        return self.loss_function(outputs, reference)

    def _call(self, function: Callable[..., Any], clean_outputs: Tensor, *more: Any) -> Any:
        try:
            return function(clean_outputs, *more)
        except ThemisError:
            raise
        except Exception as error:
            raise UsageError(
                f"oracle {self.spec()!r} raised {type(error).__name__} on outputs {list(clean_outputs.shape)}: "
                f"{first_line(error)}"
            ) from error


def _name_of(function: Any) -> str:
    """Return `module:function` if another process can import it, otherwise its bare name."""
    name = str(getattr(function, "__qualname__", type(function).__qualname__))
    return name if "<" in name else f"{getattr(function, '__module__', type(function).__module__)}:{name}"
