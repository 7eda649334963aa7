"""Perturbations in sequence, or with some of their theta narrowed or held fixed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from themis.compute.rng import Rng
from themis.errors import UsageError, nearest
from themis.oracle.motion import Size, Source
from themis.perturb.context import Context
from themis.perturb.perturbation import Perturbation, Theta, apply_inside

OVER_TIME = "over_time"
"""In specifications, the name of what makes theta change over time, with another perturbation in brackets."""
MOST_THETA = 60
"""Random numbers are drawn by counters with this many parts at most."""
Range = float | tuple[float, float]
"""The value that theta is held at, or the ends of its range."""


def combine(*parts: Perturbation) -> Perturbation:
    """All perturbations in order, with the theta of all; a name that occurs twice is prefixed by its perturbation's."""
    parts = tuple(part for combined in parts for part in combined.parts or (combined,))
    kinds = {part.inputs for part in parts} - {"any"}
    if "clip" in kinds:
        kinds -= {"picture"}  # which also disturbs clips
    channels = {part.channels for part in parts} - {None}
    if len(kinds) > 1 or len(channels) > 1:
        raise UsageError(
            f"{' + '.join(part.name for part in parts)!r} must disturb one kind of input, got "
            f"{' and '.join(sorted(kinds))}: combine perturbations of one kind"
        )
    sizes = [len(part.theta) for part in parts]
    if sum(sizes) > MOST_THETA:
        raise UsageError(f"a combination must have at most {MOST_THETA} theta, got {sum(sizes)}: combine fewer parts")

    def apply(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
        first, highest = 0, context.highest
        for part, size in zip(parts, sizes, strict=True):
            wide = part.reaching(highest[first : first + size])
            inputs = apply_inside(wide, inputs, theta[:, first : first + size], rng, context)
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
        prefix = _identifier(part.name)
        n_prefixes[prefix] += 1
        prefix += f"_{n_prefixes[prefix]}" if n_prefixes[prefix] > 1 else ""
        for theta in part.theta:
            named.append(theta if n_uses[theta.name] == 1 else replace(theta, name=f"{prefix}_{theta.name}"))
    return named


def _identifier(name: str) -> str:
    plain = name.removeprefix(f"{OVER_TIME}(").removesuffix(")").partition("(")[0].rpartition(":")[2]
    return (
        "".join(letter if letter.isalnum() else "_" for letter in plain if letter != " ").lstrip("0123456789") or "part"
    )


def narrowed(perturbation: Perturbation, ranges: Mapping[str, Range]) -> Perturbation:
    """The same perturbation with some theta restricted to a range or held at a value; its name says so."""
    known = [theta.name for theta in perturbation.theta]
    for name in ranges:
        if name not in known:
            raise UsageError(f"theta {name!r} of {perturbation.name!r} must be one it has: {nearest(name, known)}")
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
        low, high = sorted((first.identity, held[0])) if held[0] != first.identity else (first.low, first.high)
        raise UsageError(
            f"{perturbation.name!r} must keep a theta to search, but all are held fixed: give one a range, such as "
            f"{first.name}={_format_range((low, high))}"
        )
    options = ", ".join(f"{name}={_format_range(value)}" for name, value in ranges.items())
    name = f"{perturbation.name}({options})" if ranges else perturbation.name
    is_magnitude = perturbation.theta_is_magnitude and not ranges
    changed = replace(perturbation, name=name, theta=tuple(free), theta_is_magnitude=is_magnitude, parts=())
    if not held:
        return changed
    return replace(changed, apply=_with_held(perturbation, held), moves=_moves_with_held(perturbation, held))


def _format_range(value: Range) -> str:
    return ":".join(map(_format_number, value)) if isinstance(value, tuple) else _format_number(value)


def _format_number(value: float) -> str:
    """The shortest text that is read as the same number."""
    short = f"{value:g}"
    return short if float(short) == value else repr(float(value))


def _with_held(perturbation: Perturbation, held: Mapping[int, float]) -> Callable[..., Tensor]:
    def apply(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
        free = iter(context.highest)
        context.highest = tuple(held[k] if k in held else next(free) for k in range(len(perturbation.theta)))
        return perturbation.apply(inputs, _all_columns(perturbation, theta, held), rng, context)

    apply.__doc__, apply.__module__ = perturbation.apply.__doc__, perturbation.apply.__module__
    apply.__qualname__ = perturbation.apply.__qualname__
    return apply


def _moves_with_held(perturbation: Perturbation, held: Mapping[int, float]) -> Source | Literal[False] | None:
    source = perturbation.moves
    if source is False or source is None:
        return source

    def held_source(x: Tensor, y: Tensor, theta: Tensor, rng: Rng, size: Size) -> tuple[Tensor, Tensor]:
        return source(x, y, _all_columns(perturbation, theta, held), rng, size)

    return held_source


def _all_columns(perturbation: Perturbation, theta: Tensor, held: Mapping[int, float]) -> Tensor:
    """Theta with the columns of the values that are held."""
    free = iter(theta.unbind(1))
    columns = [
        theta.new_full((len(theta),), held[k]) if k in held else next(free) for k in range(len(perturbation.theta))
    ]
    return torch.stack(columns, 1)
