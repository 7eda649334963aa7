"""`E(theta)`: what a perturbation is, and what it is given to work with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from themis.errors import ModelError, UsageError
from themis.oracle.classes import class_loss
from themis.rng import Rng

if TYPE_CHECKING:
    from themis.target import AnyTarget


@dataclass(frozen=True)
class Theta:
    """One named, bounded parameter of a perturbation; at `identity` it changes nothing."""

    name: str
    low: float
    high: float
    identity: float = 0.0
    unit: str = ""

    def __post_init__(self) -> None:
        numbers = (self.low, self.identity, self.high)
        if not all(math.isfinite(each) for each in numbers) or not self.low <= self.identity <= self.high:
            raise UsageError(
                f"theta {self.name!r} must have finite low <= identity <= high, got {self.low}, {self.identity}, "
                f"{self.high}"
            )
        if self.low == self.high:
            raise UsageError(f"theta {self.name!r} must have low < high, got {self.low} twice: give it a range")


NO_GRADIENT = "{} needs the model's gradient and this target gives none: use a disturbance of the input alone, as noise"


@dataclass
class Context:
    """What a perturbation may use beside the inputs: the bounds and, for attacks, the target and the answers to keep.

    `passes` counts what it spends on the model: a forward is 1 a test, a backward 2.
    """

    target: AnyTarget
    reference: Tensor
    passes: int = 0
    loss: Callable[[Tensor, Tensor], Tensor] = class_loss
    """Of outputs and reference answers, `[tests]`: the oracle's."""

    @property
    def bounds(self) -> tuple[float, float]:
        return self.target.bounds

    @property
    def span(self) -> float:
        """Width of the input range: the unit of noise and attack radius."""
        return self.bounds[1] - self.bounds[0]

    def loss_gradient(self, inputs: Tensor) -> Tensor:
        """The gradient of the task's loss against the reference answer, in the inputs; 3 passes a test."""
        with torch.enable_grad():
            leaf = inputs.detach().requires_grad_()
            loss = self.loss(self.target.forward(leaf), self.reference)
            if not loss.requires_grad:
                raise UsageError(NO_GRADIENT.format("the perturbation"))
            (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        self.passes += 3 * len(inputs)
        return gradient


Apply = Callable[[Tensor, Tensor, Rng, Context], Tensor]


@dataclass(frozen=True)
class Perturbation:
    """A named map from inputs and theta to disturbed inputs.

    `apply(inputs [tests, ...], theta [tests, dimensions], rng, context) -> inputs'` must be differentiable in theta;
    `perturb` keeps its result inside the bounds. `is_random` says whether it draws from `rng`: where not, the same
    seed and theta give the same test. `theta_is_magnitude`: `magnitude` is the upper end of its one theta, in its unit.
    """

    name: str
    theta: tuple[Theta, ...]
    apply: Apply
    is_random: bool = True
    theta_is_magnitude: bool = False
    passes: int = 0
    """Passes it spends on the model itself, a test."""
    needs_gradient: bool = False
    """Whether it uses the model's gradient, which a `BlackBox` does not have."""

    def __post_init__(self) -> None:
        if not self.theta:
            raise UsageError(f"perturbation {self.name!r} must have at least one theta, got none")
        if self.theta_is_magnitude and len(self.theta) != 1:
            raise UsageError(
                f"perturbation {self.name!r}: only a single theta can be the magnitude, got {len(self.theta)}"
            )

    def at(self, magnitude: float | None) -> Perturbation:
        """The same with its reach set: by default 1 is the default range and 0 the identity."""
        if magnitude is None:
            return self
        if not (math.isfinite(magnitude) and magnitude > 0):
            raise UsageError(f"magnitude must be a positive number, got {magnitude}")
        if self.theta_is_magnitude:
            return replace(self, theta=(replace(self.theta[0], high=magnitude),))

        def scaled(t: Theta) -> Theta:
            low, high = (t.identity + magnitude * (end - t.identity) for end in (t.low, t.high))
            return replace(t, low=low, high=high)

        return replace(self, theta=tuple(scaled(each) for each in self.theta))


def check_gradient(perturbation: Perturbation, target: AnyTarget) -> None:
    """Refuse an attack on a target that has no gradient, before anything runs."""
    if perturbation.needs_gradient and not target.has_gradient:
        raise UsageError(NO_GRADIENT.format(f"perturbation {perturbation.name!r}"))


def perturb(perturbation: Perturbation, inputs: Tensor, theta: Tensor, noise_seed: Tensor, context: Context) -> Tensor:
    """The tests' inputs: `inputs` disturbed at `theta`, clipped to the bounds."""
    disturbed = perturbation.apply(inputs, theta, Rng(noise_seed), context)
    if disturbed.shape != inputs.shape:
        raise ModelError(
            f"perturbation {perturbation.name!r} must keep the shape {list(inputs.shape)}, got {list(disturbed.shape)}"
        )
    return disturbed.clamp(*context.bounds)


def column(theta: Tensor, k: int, inputs: Tensor) -> Tensor:
    """Dimension `k` of theta, shaped to multiply `inputs`."""
    return theta[:, k].view(-1, *(1,) * (inputs.ndim - 1))
