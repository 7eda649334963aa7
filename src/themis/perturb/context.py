"""What a perturbation may use beside the inputs: their bounds, a table's features and, for attacks, the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from themis.errors import UsageError
from themis.oracle.classes import class_loss

if TYPE_CHECKING:
    from themis.data.features import Features
    from themis.target.target import AnyTarget

NO_GRADIENT = "the perturbation needs the model's gradient and this target gives none: use a disturbance of the input "


@dataclass
class Context:
    """Of a batch of tests. `passes` counts what is spent on the model: a forward is 1 a test, a backward 2."""

    bounds: tuple[float, float] = (0.0, 1.0)
    target: AnyTarget | None = None
    reference: Tensor | None = None
    """The answers that the tests should keep, `[tests, ...]`."""
    loss: Callable[[Tensor, Tensor], Tensor] = class_loss
    """Of outputs and reference answers, `[tests]`: the oracle's; it grows as the answer gets worse."""
    margin: Callable[[Tensor], Tensor] | None = None
    """Of outputs, `[tests]`: the oracle's; how far the answer is from being a fault, negative when it is one."""
    features: Features | None = None
    passes: int = 0

    @property
    def span(self) -> float:
        """Width of the input range: the unit of noise and attack radius."""
        return self.bounds[1] - self.bounds[0]

    def forward(self, inputs: Tensor) -> Tensor:
        """The model's scores; 1 pass a test."""
        self.passes += len(inputs)
        return self._target.forward(inputs)

    def climb(self, inputs: Tensor, height: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs, their `height` `[tests]`, and its gradient in the inputs; 3 passes a test."""
        with torch.enable_grad(), _repeatable():
            leaf = inputs.detach().requires_grad_()
            outputs = self._target.forward(leaf)
            heights = height(outputs)
            if not heights.requires_grad:
                raise UsageError(NO_GRADIENT + "alone, as noise")
            (gradient,) = torch.autograd.grad(heights.sum(), leaf)
        self.passes += 3 * len(inputs)
        return outputs.detach(), heights.detach(), gradient.nan_to_num(0.0)  # a model may break down on the way

    def losses(self, outputs: Tensor) -> Tensor:
        """The task's loss of outputs against the reference answers, `[tests]`."""
        assert self.reference is not None
        return self.loss(outputs, self.reference)

    def climb_loss(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `climb`, of the task's loss."""
        return self.climb(inputs, self.losses)

    def loss_gradient(self, inputs: Tensor) -> Tensor:
        """The gradient of the task's loss in the inputs; 3 passes a test."""
        return self.climb_loss(inputs)[2]

    @property
    def _target(self) -> AnyTarget:
        if self.target is None:
            raise UsageError("an attack needs the model it attacks, got none: pass target=...")
        return self.target


@contextmanager
def _repeatable() -> Iterator[None]:
    """With cuDNN's kernels that give the same bits each time: an attack's steps carry a last bit far."""
    was = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = was
