"""Perturbations `E(theta)`: their definition, and how they are applied."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial, update_wrapper, wraps
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from themis.compute.rng import Rng
from themis.errors import ModelError, ThemisError, UsageError, nearest
from themis.oracle.motion import Motion, MotionStep, Size, Source
from themis.perturb.context import NO_GRADIENT, Context
from themis.perturb.distribution import Distribution, read_distribution
from themis.target.target import AnyTarget

CPU_BLOCK_VALUES = 1 << 20
"""Values that a CPU disturbs at a time: 4 MiB, so that intermediate results stay in its caches. Results do not depend
on this number."""
INPUT_FORMS = {
    "picture": (3, "pictures [channels, height, width]"),
    "clip": (4, "clips [frames, channels, height, width]"),
    "table": (1, "rows of a table [features]"),
    "signal": (2, "signals [channels, samples]"),
}
"""The number of dimensions and a description of an input, by the value of `Perturbation.inputs`."""
THEMIS_PREFIX = re.compile(r"\bthemis\.(?:[a-z_]+\.)*")
Apply = Callable[[Tensor, Tensor, Rng, Context], Tensor]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Theta:
    """One named, bounded parameter of a perturbation.

    Args:
        name: Letters, digits and underscores.
        low: Lower end of the searched range; in the default range, a person still sees the same thing.
        high: Upper end of the searched range.
        identity: The value that changes nothing, or least.
        unit: The unit, for users.
        limits: The mathematically valid values, which no range may exceed.
        small: A number of pixels and a share of the shorter side. In small pictures, the default range extends to this
            number of pixels, but at most to this share. None if the range is the same for pictures of any size.
        distribution: The distribution of values in operation, such as `"beta(1,8)"`. The uniform stream follows it,
            while the search uses the whole range. By default, all values are equally frequent.
    """

    name: str
    low: float
    high: float
    identity: float = 0.0
    unit: str = ""
    limits: tuple[float, float] = (-math.inf, math.inf)
    small: tuple[float, float] | None = None
    distribution: Distribution | str | None = None

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise UsageError(f"theta must have a name of letters, digits and _, got {self.name!r}")
        numbers = (self.low, self.identity, self.high)
        is_between = self.low <= self.identity <= self.high and self.low < self.high
        if not is_between or not all(map(math.isfinite, numbers)):
            raise UsageError(f"theta {self.name!r} must have finite low <= identity <= high, low < high, got {numbers}")
        for value in (self.low, self.high):
            self.check(value)
        if isinstance(self.distribution, str):
            object.__setattr__(self, "distribution", read_distribution(self.distribution))
        if isinstance(self.distribution, Distribution):
            self.distribution.check(self.low, self.high, self.name)

    def check(self, value: float) -> None:
        """Raise an error if a value is outside the limits."""
        lowest, highest = self.limits
        if not lowest <= value <= highest:
            raise UsageError(
                f"theta {self.name!r} must lie in {lowest:g}..{highest:g}, got {value:g}: lower the magnitude, or "
                "narrow the range"
            )

    def between(self, low: float, high: float) -> Theta:
        """This theta with a different range; its identity becomes the nearest value in the range."""
        return replace(self, low=low, high=high, identity=min(max(self.identity, low), high), small=None)

    def scaled(self, magnitude: float) -> Theta:
        """This theta with its range scaled around its identity."""
        low, high = (self.identity + magnitude * (end - self.identity) for end in (self.low, self.high))
        small = None if self.small is None else (magnitude * self.small[0], magnitude * self.small[1])
        return replace(self, low=low, high=high, small=small)

    def fitted(self, side: int) -> Theta:
        """This theta for pictures whose shorter side has `side` pixels; its unit then includes the range in pixels."""
        high = self.high
        if self.small is not None:
            pixels, share = self.small
            high = min(max(high, min(pixels / side, share)), self.limits[1])
        unit = self.unit
        if "the shorter side" in unit and not self.pixels:
            unit = f"{unit}: {self.low * side:.3g} to {high * side:.3g} px"
        return replace(self, high=high, unit=unit, small=None)

    def as_dict(self) -> dict[str, Any]:
        """The theta as plain data, without `small`, because runs record fitted ranges."""
        values = {name: value for name, value in asdict(self).items() if name not in ("small", "distribution")}
        return values if self.distribution is None else {**values, "distribution": str(self.distribution)}

    @property
    def pixels(self) -> str:
        """The range in pixels, if the unit includes it; otherwise empty."""
        return self.unit.rpartition(": ")[2] if self.unit.endswith(" px") else ""


@dataclass(frozen=True)
class Perturbation:
    """A named map from inputs and theta to disturbed inputs.

    Args:
        name: Its name in specifications and reports.
        theta: Its parameters.
        apply: `(inputs [tests, ...], theta [tests, dimensions], rng, context) -> inputs'`, differentiable in theta; the
            result is clipped to the bounds. The first sentence of its docstring describes the perturbation to users.
        is_random: Whether it draws from `rng`; if not, the same seed and theta always give the same test.
        theta_is_magnitude: Whether `magnitude` is the upper end of its only theta, in the unit of that theta.
        passes: The model passes that it takes per test.
        needs_gradient: Whether it uses the model's gradient, which a `BlackBox` does not have.
        inputs: What it can disturb: `any`; `picture`, `[channels, height, width]`, which `apply` always gets in 0..1;
            `table`, rows of features; `signal`, `[channels, samples]`; `clip`, `[frames, channels, height, width]`. A
            perturbation of pictures also disturbs clips, every frame in the same way.
        channels: The number of channels that a picture must have, if it matters.
        is_smooth: Whether the gradient in theta is exact rather than a guide.
        has_identity: Whether the input is unchanged if every theta is at its identity.
        family: The family in which it is listed.
        parts: The perturbations that it combines; empty once their theta have been changed.
        moves: How it moves the content of a picture, so that label maps, boxes and points can be moved too. `False`:
            everything stays in place. A function `(x, y, theta, rng, size) -> (x, y)`: where the content at a position
            of the disturbed picture comes from, see `themis.oracle.motion.Source`. `None`: unknown, which is refused
            in tasks whose answers are places.
        is_combination: Whether it only applies other perturbations, which handle units and motion themselves.
        flickers: Whether it draws new random numbers for each frame of a clip, as for rain but not for drops on a lens.
        has_queries: Whether its passes are queries of the model whose number can be chosen, as in
            `square(queries=500)`; `apply` then has a parameter `queries`.
    """

    name: str
    theta: tuple[Theta, ...]
    apply: Apply
    is_random: bool = True
    theta_is_magnitude: bool = False
    passes: int = 0
    needs_gradient: bool = False
    inputs: Literal["any", "picture", "table", "signal", "clip"] = "any"
    channels: int | None = None
    is_smooth: bool = True
    has_identity: bool = True
    family: str = "own"
    parts: tuple[Perturbation, ...] = ()
    moves: Source | Literal[False] | None = None
    is_combination: bool = False
    flickers: bool = False
    has_queries: bool = False

    def __post_init__(self) -> None:
        names = [theta.name for theta in self.theta]
        if not names or len(set(names)) < len(names):
            raise UsageError(f"perturbation {self.name!r} must have theta with names of their own, got {names}")
        if self.theta_is_magnitude and len(self.theta) != 1 and self.inputs != "clip":  # over_time doubles theta
            raise UsageError(f"perturbation {self.name!r}: only one theta can be the magnitude, got {len(self.theta)}")

    @property
    def about(self) -> str:
        """A one-sentence description: the first sentence of its function's docstring."""
        return (self.apply.__doc__ or "").strip().split("\n\n")[0].replace("\n    ", " ")

    def at(self, magnitude: float | None) -> Perturbation:
        """This perturbation with its ranges scaled by `magnitude`, which is the new upper end of noise and attacks."""
        if magnitude is None:
            return self
        if not (math.isfinite(magnitude) and magnitude > 0):
            raise UsageError(f"magnitude must be a positive number, got {magnitude}")
        if self.theta_is_magnitude:
            theta = tuple(replace(theta, high=magnitude) for theta in self.theta)
        else:
            theta = tuple(theta.scaled(magnitude) for theta in self.theta)
        return replace(self, theta=theta, parts=())

    def fitted(self, shape: tuple[int, ...]) -> Perturbation:
        """This perturbation with the ranges for inputs `[...]` of this shape, see `Theta.fitted`."""
        if self.inputs not in ("picture", "clip") or len(shape) < 3:
            return self
        theta = tuple(theta.fitted(min(shape[-2:])) for theta in self.theta)
        return replace(self, theta=theta, parts=tuple(part.fitted(shape) for part in self.parts))

    def within(self, ranges: Sequence[tuple[str, float, float]]) -> Perturbation:
        """This perturbation with recorded ranges; unchanged if these have other names than its theta."""
        if [name for name, _, _ in ranges] != [theta.name for theta in self.theta]:
            return self
        pairs = list(zip(self.theta, ranges, strict=True))
        if all((theta.low, theta.high) == (low, high) for theta, (_, low, high) in pairs):
            return replace(self, theta=tuple(replace(theta, small=None) for theta in self.theta))
        return replace(self, theta=tuple(theta.between(low, high) for theta, (_, low, high) in pairs), parts=())

    def check_names(self, names: Iterable[str]) -> None:
        """Raise an error for a name that none of its theta has."""
        known = [theta.name for theta in self.theta]
        for name in names:
            if name not in known:
                raise UsageError(f"theta {name!r} of {self.name!r} must be one it has: {nearest(name, known)}")

    @property
    def code(self) -> str:
        """The qualified name of its function, which distinguishes perturbations of the same name."""
        return f"{self.apply.__module__}.{self.apply.__qualname__}"

    def __add__(self, other: Perturbation) -> Perturbation:
        """Apply both perturbations, one after the other, with the theta of both."""
        return combine(self, other)


def collector(perturbations: list[Perturbation], **common: Any) -> Callable[..., Callable[[Function], Function]]:
    """A decorator factory that takes theta and options, and adds functions as perturbations with `common` options."""

    def declare(*theta: Theta, **options: Any) -> Callable[[Function], Function]:
        def add(apply: Function) -> Function:
            perturbations.append(Perturbation(apply.__name__, theta, apply, **(common | options)))
            return apply

        return add

    return declare


def is_same_code(name: str, other: str) -> bool:
    """Whether two values of `Perturbation.code` name the same function; modules of Themis are ignored."""
    return THEMIS_PREFIX.sub("", name) == THEMIS_PREFIX.sub("", other)


def check_fits(perturbation: Perturbation, shape: tuple[int, ...]) -> None:
    """Raise an error if the perturbation cannot disturb inputs of this shape."""
    kind, got = perturbation.inputs, list(shape)
    if kind == "any":
        return
    n, form = INPUT_FORMS[kind]
    is_clip = len(shape) == 4 and kind in ("picture", "clip")
    if len(shape) != n and not is_clip:
        raise UsageError(
            f"{perturbation.name!r} needs {form}, got inputs {got}: reshape them, or choose another, see themis "
            "perturbations"
        )
    if kind == "table":
        return
    channels = shape[1] if is_clip else shape[0]
    if channels > 4 and (is_clip or shape[-1] <= 4):
        raise UsageError(
            f"{perturbation.name!r} needs {INPUT_FORMS['clip'][1] if is_clip else form}, got {got} with the channels "
            "in another place: permute them, and if the model expects them so, pass --channels last (channels='last'), "
            "or permute them back with preprocess=function"
        )
    if perturbation.channels not in (None, channels):
        raise UsageError(
            f"{perturbation.name!r} needs pictures with {perturbation.channels} channels, got {channels} in {got}: "
            "choose another one, see themis perturbations"
        )


def check_gradient(perturbation: Perturbation, target: AnyTarget) -> None:
    """Raise an error for an attack on a target that has no gradient, before anything runs."""
    if perturbation.needs_gradient and not target.has_gradient:
        raise UsageError(f"perturbation {perturbation.name!r} {NO_GRADIENT}")


def perturb(perturbation: Perturbation, inputs: Tensor, theta: Tensor, noise_seed: Tensor, context: Context) -> Tensor:
    """Disturb inputs at `theta`, and clip them to the bounds."""
    size = max(1, CPU_BLOCK_VALUES * len(inputs) // max(inputs.numel(), 1))
    if context.motion is not None:
        context.motion = Motion()
    if inputs.device.type != "cpu" or perturbation.passes or size >= len(inputs):
        return apply_inside(perturbation, inputs, theta, Rng(noise_seed), context)
    parts, motions = [], []
    for first in range(0, len(inputs), size):
        rows = slice(first, first + size)
        reference = None if context.reference is None else context.reference[rows]
        n_tests = context.counted(first + size) - context.counted(first)
        part = replace(context, reference=reference, passes=0, n_tests=n_tests)
        parts.append(apply_inside(perturbation, inputs[rows], theta[rows], Rng(noise_seed[rows]), part))
        context.passes += part.passes
        motions += [] if part.motion is None else [part.motion]
    if motions:
        context.motion = Motion.joined(motions)
    return torch.cat(parts)


def apply_inside(
    perturbation: Perturbation,
    inputs: Tensor,
    theta: Tensor,
    rng: Rng,
    context: Context,
    highest: tuple[float, ...] = (),
) -> Tensor:
    """The disturbed inputs, in the same unit and type, within the bounds.

    highest: the upper end of the range of each theta; by default that of the perturbation.
    """
    if perturbation.inputs == "picture" and inputs.ndim == 5 and not perturbation.is_combination:
        by_frame = theta[:, None].expand(-1, inputs.shape[1], -1)
        return apply_to_frames(perturbation, inputs, by_frame, rng, context, highest)
    low, high = context.bounds
    is_scaled = perturbation.inputs == "picture" and (low, high) != (0.0, 1.0) and not perturbation.is_combination
    passed = inputs.float() if inputs.dtype in (torch.float16, torch.bfloat16) else inputs
    passed = (passed - low) / context.span if is_scaled else passed
    version = passed._version
    if context.motion is not None and (perturbation.passes or perturbation.needs_gradient):
        context.follow_motion()
    drawn = rng.drawn
    context.highest = highest or tuple(theta.high for theta in perturbation.theta)
    disturbed = _applied(perturbation, passed, theta, rng, context)
    if context.motion is not None and not perturbation.is_combination:
        context.motion = _motion_after(perturbation, context.motion, inputs, theta, rng, drawn)
    if passed._version != version:
        raise ModelError(
            f"perturbation {perturbation.name!r} must not change its inputs in place, but it did: "
            "write inputs + change, not inputs.add_(change)"
        )
    if is_scaled:
        disturbed = disturbed * context.span + low
    shares_memory = disturbed.untyped_storage().data_ptr() == inputs.untyped_storage().data_ptr()
    if disturbed.requires_grad or not disturbed.is_contiguous() or shares_memory:
        return disturbed.clamp(low, high).to(inputs.dtype)
    return disturbed.clamp_(low, high).to(inputs.dtype)  # in place, which saves a copy


def apply_to_frames(
    perturbation: Perturbation,
    clips: Tensor,
    theta: Tensor,
    rng: Rng,
    context: Context,
    highest: tuple[float, ...] = (),
) -> Tensor:
    """Disturb each frame of clips `[tests, frames, channels, height, width]` at its theta `[tests, frames, ...]`."""
    if context.motion is not None and perturbation.moves is not False:
        raise UsageError(
            f"{perturbation.name!r} moves what is in the pictures, and the model's answers are places in them: this is "
            "supported for pictures, not for clips"
        )
    by_frame = rng.by_frame(clips.shape[1], is_new=perturbation.flickers)
    frames = apply_inside(perturbation, clips.flatten(0, 1), theta.flatten(0, 1), by_frame, context, highest)
    rng.drawn = by_frame.drawn
    return frames.view(clips.shape)


def _motion_after(
    perturbation: Perturbation, before: Motion, inputs: Tensor, theta: Tensor, rng: Rng, drawn: int
) -> Motion:
    """The motion after a perturbation; `drawn` random numbers had been drawn before it."""
    source = perturbation.moves
    if source is False:
        return before
    if source is None:
        raise UsageError(
            f"perturbation {perturbation.name!r} must say how it moves what is in the picture, because the model's "
            "answers are places in it: pass moves=False if everything stays where it is, or moves=function, see "
            "docs/own-perturbation.md"
        )
    height, width = inputs.shape[-2:]
    return Motion((*before.steps, MotionStep(source, theta, rng.noise_seed, drawn, (height, width))))


def _applied(perturbation: Perturbation, inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Call the perturbation's function; errors in a user's function are reported as such."""
    try:
        disturbed = perturbation.apply(inputs, theta, rng, context)
    except (ThemisError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if perturbation.apply.__module__.startswith("themis."):
            raise
        raise ModelError(
            f"perturbation {perturbation.name!r} raised {type(error).__name__} on inputs {list(inputs.shape)} with "
            f"theta {list(theta.shape)}: {error}; correct its function {perturbation.code}"
        ) from error
    is_tensor = isinstance(disturbed, Tensor)
    if not is_tensor or not disturbed.is_floating_point() or disturbed.shape != inputs.shape:
        got = f"{disturbed.dtype} {list(disturbed.shape)}" if is_tensor else type(disturbed).__name__
        raise ModelError(
            f"perturbation {perturbation.name!r} must return a floating-point tensor {list(inputs.shape)}, got {got}: "
            "return the disturbed inputs, in the unit of the inputs"
        )
    return disturbed


def column(theta: Tensor, k: int, inputs: Tensor) -> Tensor:
    """Dimension `k` of theta, shaped to multiply `inputs`."""
    return theta[:, k].view(-1, *(1,) * (inputs.ndim - 1))


def columns(theta: Tensor, inputs: Tensor) -> tuple[Tensor, ...]:
    """All dimensions of theta in order, each shaped to multiply `inputs`."""
    return tuple(column(theta, k, inputs) for k in range(theta.shape[1]))


OVER_TIME = "over_time"
"""In specifications, the name that makes theta change over time, followed by another perturbation in brackets."""
MAX_THETA = 60
"""Largest number of theta, because the counters of random numbers have a limited number of parts."""
Range = float | tuple[float, float]
"""The value at which a theta is fixed, or the ends of its range."""


def combine(*parts: Perturbation) -> Perturbation:
    """Apply perturbations in order, with the theta of all; repeated names get the perturbation's name as a prefix."""
    parts = tuple(part for combined in parts for part in combined.parts or (combined,))
    kinds = {part.inputs for part in parts} - {"any"}
    if "clip" in kinds:
        kinds -= {"picture"}  # perturbations of pictures also disturb clips
    channels = {part.channels for part in parts} - {None}
    if len(kinds) > 1 or len(channels) > 1:
        raise UsageError(
            f"{' + '.join(part.name for part in parts)!r} must disturb one kind of input, got "
            f"{' and '.join(sorted(kinds))}: combine perturbations of one kind"
        )
    sizes = [len(part.theta) for part in parts]
    if sum(sizes) > MAX_THETA:
        raise UsageError(f"a combination must have at most {MAX_THETA} theta, got {sum(sizes)}: combine fewer parts")

    def apply(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
        first, highest = 0, context.highest
        for part, size in zip(parts, sizes, strict=True):
            own = slice(first, first + size)
            inputs = apply_inside(part, inputs, theta[:, own], rng, context, highest[own])
            first += size
        return inputs

    apply.__qualname__ = " + ".join(part.code for part in parts)
    apply.__doc__ = "; then: ".join(part.about.rstrip(".") for part in parts) + "."
    return Perturbation(
        " + ".join(part.name for part in parts),
        tuple(_all_theta(parts)),
        apply,
        is_random=any(part.is_random for part in parts),
        passes=sum(part.passes for part in parts),
        needs_gradient=any(part.needs_gradient for part in parts),
        inputs=kinds.pop() if kinds else "any",
        channels=channels.pop() if channels else None,
        is_smooth=all(part.is_smooth for part in parts),
        has_identity=all(part.has_identity for part in parts),
        family="combination",
        parts=parts,
        is_combination=True,
    )


def _all_theta(parts: tuple[Perturbation, ...]) -> list[Theta]:
    n_uses = Counter(theta.name for part in parts for theta in part.theta)
    n_prefixes: Counter[str] = Counter()
    named = []
    for part in parts:
        plain = part.name.removeprefix(f"{OVER_TIME}(").removesuffix(")").partition("(")[0].rpartition(":")[2]
        prefix = re.sub(r"\W", "_", plain.replace(" ", "")).lstrip("0123456789") or "part"
        n_prefixes[prefix] += 1
        prefix += f"_{n_prefixes[prefix]}" if n_prefixes[prefix] > 1 else ""
        for theta in part.theta:
            named.append(theta if n_uses[theta.name] == 1 else replace(theta, name=f"{prefix}_{theta.name}"))
    return named


def narrowed(
    perturbation: Perturbation, ranges: Mapping[str, Range], distributions: Mapping[str, Distribution]
) -> Perturbation:
    """Give theta of a perturbation other ranges, fixed values or distributions, which its name includes."""
    perturbation.check_names((*ranges, *distributions))
    for name in distributions:
        if not isinstance(ranges.get(name, ()), tuple):
            raise UsageError(f"theta {name!r} of {perturbation.name!r} must be held fixed or distributed, got both")
    free, held = [], {}
    for k, theta in enumerate(perturbation.theta):
        range_or_value = ranges.get(theta.name)
        if isinstance(range_or_value, tuple):
            free.append(theta.between(*range_or_value))
        elif range_or_value is None:
            free.append(theta)
        else:
            theta.check(range_or_value)
            held[k] = float(range_or_value)
    if not free:
        first = perturbation.theta[0]
        raise UsageError(
            f"{perturbation.name!r} must keep a theta to search, but all are held fixed: give one a range, such as "
            f"{first.name}={_format_range((first.low, first.high))}"
        )
    texts = {name: f"={_format_range(value)}" for name, value in ranges.items()}
    for theta_name, distribution in distributions.items():
        texts[theta_name] = f"{texts.get(theta_name, '')}~{distribution}"
    free = [replace(theta, distribution=distributions.get(theta.name, theta.distribution)) for theta in free]
    name = f"{perturbation.name}({', '.join(theta_name + text for theta_name, text in texts.items())})"
    base = _holding(perturbation, held) if held else perturbation
    return replace(base, name=name, theta=tuple(free), theta_is_magnitude=False, parts=())


def with_queries(perturbation: Perturbation, queries: Range) -> Perturbation:
    """An attack with this number of queries per test, which its name includes."""
    if isinstance(queries, tuple) or queries != int(queries) or queries < 1:
        raise UsageError(
            f"queries of {perturbation.name!r} must be a whole number of at least 1, got {_format_range(queries)}: "
            "write for instance square(queries=500)"
        )
    n, (name, _, options) = int(queries), perturbation.name.partition("(")
    function: Callable[..., Tensor] = perturbation.apply
    apply = update_wrapper(partial(function, queries=n), function)
    return replace(perturbation, name=f"{name}(queries={n}{', ' + options if options else ')'}", apply=apply, passes=n)


def _format_range(value: Range) -> str:
    """The shortest text that represents exactly these numbers."""
    ends = value if isinstance(value, tuple) else (value,)
    return ":".join(f"{end:g}" if float(f"{end:g}") == end else repr(float(end)) for end in ends)


def _holding(perturbation: Perturbation, held: Mapping[int, float]) -> Perturbation:
    """Fix theta of a perturbation, given by index, at values; its functions then take only the other theta."""
    n, source = len(perturbation.theta), perturbation.moves

    def complete(theta: Tensor) -> Tensor:
        free = iter(theta.unbind(1))
        return torch.stack([theta.new_full((len(theta),), held[k]) if k in held else next(free) for k in range(n)], 1)

    @wraps(perturbation.apply)
    def apply(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
        free = iter(context.highest)
        context.highest = tuple(held[k] if k in held else next(free) for k in range(n))
        return perturbation.apply(inputs, complete(theta), rng, context)

    if not source:
        return replace(perturbation, apply=apply)

    def moves(x: Tensor, y: Tensor, theta: Tensor, rng: Rng, size: Size) -> tuple[Tensor, Tensor]:
        return source(x, y, complete(theta), rng, size)

    return replace(perturbation, apply=apply, moves=moves)


def over_time(perturbation: Perturbation) -> Perturbation:
    """A perturbation of clips with two values of each theta, for the first and the last frame, interpolated linearly.

    By itself, a perturbation of pictures disturbs every frame of a clip with the same theta.
    """
    if perturbation.parts:
        return combine(*map(over_time, perturbation.parts))
    name, size = perturbation.name, len(perturbation.theta)
    asks_model = perturbation.passes or perturbation.needs_gradient
    if perturbation.inputs not in ("any", "picture") or asks_model or perturbation.is_combination:
        raise UsageError(
            f"{OVER_TIME} needs a perturbation that disturbs one picture at a time and whose range is not changed, got "
            f"{name!r}: choose another, see themis perturbations, and call .at() afterwards"
        )

    def apply(clips: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
        share = torch.linspace(0, 1, clips.shape[1], dtype=theta.dtype, device=theta.device)[:, None]
        by_frame = torch.lerp(theta[:, None, :size], theta[:, None, size:], share)
        highest = tuple(map(max, context.highest[:size], context.highest[size:]))
        return apply_to_frames(perturbation, clips, by_frame, rng, context, highest)

    def at(end: str) -> list[Theta]:
        return [
            replace(theta, name=f"{theta.name}_{end}", unit=f"{theta.unit}, in the {end} frame".removeprefix(", "))
            for theta in perturbation.theta
        ]

    apply.__qualname__ = f"{OVER_TIME}({perturbation.code})"
    apply.__doc__ = f"{perturbation.about.rstrip('.')}; it changes steadily from the first frame to the last."
    theta = (*at("first"), *at("last"))
    return replace(perturbation, name=f"{OVER_TIME}({name})", theta=theta, apply=apply, inputs="clip", parts=())
