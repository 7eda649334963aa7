"""What a perturbation may use besides the inputs: their bounds, a table's features and, for attacks, the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from themis.errors import UsageError
from themis.oracle.classes import class_loss
from themis.oracle.motion import Motion

if TYPE_CHECKING:
    from themis.data.features import Features
    from themis.oracle.oracle import Oracle
    from themis.target.target import AnyTarget

NO_GRADIENT = (
    "needs the model's gradient and this target gives none: use square or square_label, attacks that only ask the "
    "model, or one that disturbs only the input, such as noise"
)


@dataclass
class Context:
    """The context of a batch of tests. `passes` counts model passes per test: 1 for a forward, 2 for a backward."""

    bounds: tuple[float, float] = (0.0, 1.0)
    target: AnyTarget | None = None
    reference: Tensor | None = None
    """The answers that the tests should keep, `[tests, ...]`."""
    loss: Callable[[Tensor, Tensor], Tensor] = class_loss
    """The oracle's loss `[tests]` of outputs and reference answers, which is larger for worse answers."""
    margin: Callable[[Tensor], Tensor] | None = None
    """The oracle's margin `[tests]` of outputs: how far the answer is from being a fault, negative if it is one."""
    features: Features | None = None
    highest: tuple[float, ...] = ()
    """The upper end of the range of each theta, for kernels that must be large enough for all tests of a batch."""
    passes: int = 0
    n_tests: int | None = None
    """The number of tests in a batch that is padded with copies of the last one, which do not count as passes."""
    motion: Motion | None = None
    """How the pictures have moved so far; None if answers are not places, so that motion does not matter."""
    after_motion: Callable[[Motion], tuple[Tensor, Callable[[Tensor], Tensor]]] | None = None
    """The reference answers and the margin for pictures that have moved."""

    @staticmethod
    def of_task(
        target: AnyTarget,
        oracle: Oracle,
        clean_outputs: Tensor,
        labels: Tensor | None,
        features: Features | None = None,
        *,
        reference: Tensor | None = None,
        rows: Tensor | slice = slice(None),
    ) -> Context:
        """The context of tests that an oracle compares with these rows of clean outputs and labels.

        reference: the oracle's reference answers of all rows, if they are known.
        """

        def answers() -> tuple[Tensor, Tensor | None]:
            return clean_outputs[rows], None if labels is None else labels[rows]

        def margin(outputs: Tensor) -> Tensor:
            clean, kept = answers()
            return oracle.compare(clean, outputs, kept).margin

        def after_motion(motion: Motion) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
            clean, kept = answers()
            reference = oracle.moved_reference(clean, kept, motion)
            return reference, lambda outputs: oracle.verdict(clean, outputs, kept, motion).margin

        return Context(
            target.bounds,
            target,
            oracle.reference(*answers()) if reference is None else reference[rows],
            oracle.loss,
            margin,
            features,
            motion=Motion() if oracle.is_spatial else None,
            after_motion=after_motion if oracle.is_spatial else None,
        )

    def follow_motion(self) -> None:
        """Update the reference answers and the margin to how the pictures have moved so far."""
        if self.motion and self.after_motion is not None:
            self.reference, self.margin = self.after_motion(self.motion)

    @property
    def span(self) -> float:
        """The width of the input range, which is the unit of noise and of attack radii."""
        return self.bounds[1] - self.bounds[0]

    def counted(self, n: int) -> int:
        """The number of tests among the first `n` rows of the batch."""
        return n if self.n_tests is None else min(n, self.n_tests)

    def forward(self, inputs: Tensor, n_counted: int | None = None) -> Tensor:
        """The model's scores, for 1 pass per test; n_counted: the number of tests in a batch with only some of them."""
        self.passes += self.counted(len(inputs)) if n_counted is None else n_counted
        return self._target.forward(inputs)

    def climb(self, inputs: Tensor, objective: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The outputs, their `objective` `[tests]`, and its gradient in the inputs; 3 passes per test."""
        with torch.enable_grad(), _repeatable():
            leaf = inputs.detach().requires_grad_()
            outputs = self._target.forward(leaf)
            values = objective(outputs)
            if not values.requires_grad:
                raise UsageError(f"the perturbation {NO_GRADIENT}")
            (gradient,) = torch.autograd.grad(values.sum(), leaf)
        self.passes += 3 * self.counted(len(inputs))
        return outputs.detach(), values.detach(), gradient.nan_to_num(0.0)  # a model may return NaN along the way

    def losses(self, outputs: Tensor) -> Tensor:
        """The task's loss of outputs relative to the reference answers, `[tests]`."""
        assert self.reference is not None
        return self.loss(outputs, self.reference)

    def climb_loss(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Like `climb`, with the task's loss as the objective."""
        return self.climb(inputs, self.losses)

    def loss_gradient(self, inputs: Tensor) -> Tensor:
        """The gradient of the task's loss in the inputs; 3 passes per test."""
        return self.climb_loss(inputs)[2]

    @property
    def has_side_inputs(self) -> bool:
        """Whether the model also gets other inputs, one row per test."""
        side_inputs = getattr(self._target, "side_inputs", None)
        return side_inputs is not None and side_inputs.others is not None

    @property
    def _target(self) -> AnyTarget:
        if self.target is None:
            raise UsageError("an attack needs the model it attacks, got none: pass target=...")
        return self.target


@contextmanager
def _repeatable() -> Iterator[None]:
    """Use deterministic cuDNN kernels, because the steps of an attack amplify differences in the last bit."""
    previous = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = previous
