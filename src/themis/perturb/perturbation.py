"""`E(theta)`: what a perturbation is, and how it is applied."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from themis.compute.rng import Rng
from themis.errors import ModelError, UsageError
from themis.perturb.context import Context

if TYPE_CHECKING:
    from themis.target.target import AnyTarget

AT_ONCE = 1 << 20
"""Values of the inputs that a CPU disturbs at a time: 4 MiB, so that what is made of them on the way stays in its
caches. No result depends on it."""
Apply = Callable[[Tensor, Tensor, Rng, Context], Tensor]


@dataclass(frozen=True)
class Theta:
    """One named, bounded parameter of a perturbation.

    low, high: the range that is searched; by default one in which a person still sees the same thing. identity: where
    it changes nothing, or least. limits: the values that mean anything, however far the range is widened.
    """

    name: str
    low: float
    high: float
    identity: float = 0.0
    unit: str = ""
    limits: tuple[float, float] = (-math.inf, math.inf)

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise UsageError(f"theta must have a name of letters, digits and _, got {self.name!r}")
        numbers = (self.low, self.identity, self.high)
        if not all(math.isfinite(each) for each in numbers) or not self.low <= self.identity <= self.high:
            raise UsageError(
                f"theta {self.name!r} must have finite low <= identity <= high, got {self.low}, {self.identity}, "
                f"{self.high}"
            )
        if self.low == self.high:
            raise UsageError(f"theta {self.name!r} must have low < high, got {self.low} twice: give it a range")
        for value in (self.low, self.high):
            self.check(value)

    def check(self, value: float) -> None:
        """Refuse a value that means nothing."""
        least, most = self.limits
        if not least <= value <= most:
            raise UsageError(
                f"theta {self.name!r} must lie in {least:g}..{most:g}, got {value:g}: take a smaller magnitude or range"
            )

    def between(self, low: float, high: float) -> Theta:
        """The same over another range; its identity is the nearest value in it."""
        return replace(self, low=low, high=high, identity=min(max(self.identity, low), high))


@dataclass(frozen=True)
class Perturbation:
    """A named map from inputs and theta to disturbed inputs.

    apply: `(inputs [tests, ...], theta [tests, dimensions], rng, context) -> inputs'`, differentiable in theta; its
        result is clipped to the bounds. Its docstring is what the user reads about it.
    is_random: whether it draws from `rng`; where not, the same seed and theta give the same test.
    theta_is_magnitude: `magnitude` is the upper end of its one theta, in its unit.
    passes: what it spends on the model itself, a test. needs_gradient: whether it uses the model's gradient, which a
        `BlackBox` does not have.
    inputs: what it can disturb: `any`; `picture`, `[channels, height, width]`, which `apply` gets in 0..1 whatever the
        bounds are; `table`, rows of features. channels: how many a picture must have, if that matters.
    is_smooth: whether the gradient in theta is the slope of the result, or only a guide.
    has_identity: whether all of theta at its identity leaves the input as it is.
    parts: what it was combined of, as long as its theta is theirs.
    """

    name: str
    theta: tuple[Theta, ...]
    apply: Apply
    is_random: bool = True
    theta_is_magnitude: bool = False
    passes: int = 0
    needs_gradient: bool = False
    inputs: Literal["any", "picture", "table"] = "any"
    channels: int | None = None
    is_smooth: bool = True
    has_identity: bool = True
    family: str = "own"
    parts: tuple[Perturbation, ...] = ()

    def __post_init__(self) -> None:
        if not self.theta:
            raise UsageError(f"perturbation {self.name!r} must have at least one theta, got none")
        names = [each.name for each in self.theta]
        if len(set(names)) < len(names):
            raise UsageError(f"perturbation {self.name!r} must name each theta once, got {', '.join(names)}")
        if self.theta_is_magnitude and len(self.theta) != 1:
            raise UsageError(
                f"perturbation {self.name!r}: only a single theta can be the magnitude, got {len(self.theta)}"
            )

    @property
    def about(self) -> str:
        """What it is, in a sentence: the first of its function's docstring."""
        return (self.apply.__doc__ or "").strip().split("\n\n")[0].replace("\n    ", " ")

    def at(self, magnitude: float | None) -> Perturbation:
        """The same with its reach set: by default 1 is the default range and 0 the identity."""
        if magnitude is None:
            return self
        if not (math.isfinite(magnitude) and magnitude > 0):
            raise UsageError(f"magnitude must be a positive number, got {magnitude}")
        if self.theta_is_magnitude:
            return replace(self, theta=(replace(self.theta[0], high=magnitude),), parts=())

        def scaled(t: Theta) -> Theta:
            return replace(t, low=_scaled(t, t.low, magnitude), high=_scaled(t, t.high, magnitude))

        return replace(self, theta=tuple(scaled(each) for each in self.theta), parts=())

    @property
    def code(self) -> str:
        """Where its function is written: what tells two of the same name apart."""
        return f"{self.apply.__module__}.{self.apply.__qualname__}"

    def __add__(self, other: Perturbation) -> Perturbation:
        """Both, one after the other; theta is that of both."""
        from themis.perturb.combine import combine

        return combine(self, other)


def _scaled(theta: Theta, end: float, magnitude: float) -> float:
    return theta.identity + magnitude * (end - theta.identity)


def check_fits(perturbation: Perturbation, shape: tuple[int, ...]) -> None:
    """Refuse inputs, one of them of this shape, that the perturbation cannot disturb."""
    name, got = perturbation.name, list(shape)
    if perturbation.inputs == "picture":
        if len(shape) != 3:
            remedy = "for a table there are 'edit' and 'edit_worst'" if len(shape) == 1 else "reshape them"
            raise UsageError(f"{name!r} needs pictures [channels, height, width], got inputs {got}: {remedy}")
        if shape[0] > 4 and shape[2] <= 4:
            raise UsageError(
                f"{name!r} needs pictures [channels, height, width], got {got} with the channels last: permute them"
            )
        if perturbation.channels not in (None, shape[0]):
            raise UsageError(
                f"{name!r} needs pictures with {perturbation.channels} channels, got {shape[0]} in {got}: choose one "
                "that fits them, see themis perturbations"
            )
    elif perturbation.inputs == "table" and len(shape) != 1:
        raise UsageError(
            f"{name!r} needs rows of a table [features], got inputs {got}: it has no meaning for pictures, choose "
            "another, see themis perturbations"
        )


def check_gradient(perturbation: Perturbation, target: AnyTarget) -> None:
    """Refuse an attack on a target that has no gradient, before anything runs."""
    if perturbation.needs_gradient and not target.has_gradient:
        raise UsageError(
            f"perturbation {perturbation.name!r} needs the model's gradient and this target gives none: use a "
            "disturbance of the input alone, as noise"
        )


def perturb(perturbation: Perturbation, inputs: Tensor, theta: Tensor, noise_seed: Tensor, context: Context) -> Tensor:
    """The tests' inputs: `inputs` disturbed at `theta`, clipped to the bounds."""
    size = max(1, AT_ONCE * len(inputs) // max(inputs.numel(), 1))
    if inputs.device.type != "cpu" or perturbation.passes or size >= len(inputs):
        return apply_inside(perturbation, inputs, theta, Rng(noise_seed), context)
    parts = []
    for first in range(0, len(inputs), size):
        rows = slice(first, first + size)
        reference = None if context.reference is None else context.reference[rows]
        part = replace(context, reference=reference, passes=0)
        parts.append(apply_inside(perturbation, inputs[rows], theta[rows], Rng(noise_seed[rows]), part))
        context.passes += part.passes
    return torch.cat(parts)


def apply_inside(perturbation: Perturbation, inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """What a perturbation makes of inputs, in the units and type they came in and inside their bounds."""
    low, high = context.bounds
    is_scaled = perturbation.inputs == "picture" and (low, high) != (0.0, 1.0)
    given = inputs.float() if inputs.dtype in (torch.float16, torch.bfloat16) else inputs
    given = (given - low) / context.span if is_scaled else given
    version = given._version
    disturbed = perturbation.apply(given, theta, rng, context)
    if given._version != version:
        raise ModelError(
            f"perturbation {perturbation.name!r} must leave the inputs it is given as they are, it has changed them in "
            "place: write inputs + change, not inputs.add_(change)"
        )
    if disturbed.shape != inputs.shape:
        raise ModelError(
            f"perturbation {perturbation.name!r} must keep the shape {list(inputs.shape)}, got {list(disturbed.shape)}"
        )
    if is_scaled:
        disturbed = disturbed * context.span + low
    if disturbed.requires_grad or not disturbed.is_contiguous() or _share_memory(disturbed, inputs):
        return disturbed.clamp(low, high).to(inputs.dtype)
    return disturbed.clamp_(low, high).to(inputs.dtype)  # one picture's memory less to fetch


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def column(theta: Tensor, k: int, inputs: Tensor) -> Tensor:
    """Dimension `k` of theta, shaped to multiply `inputs`."""
    return theta[:, k].view(-1, *(1,) * (inputs.ndim - 1))


def columns(theta: Tensor, inputs: Tensor) -> tuple[Tensor, ...]:
    """All dimensions of theta in order, each shaped to multiply `inputs`."""
    return tuple(column(theta, k, inputs) for k in range(theta.shape[1]))
