"""Perturbations one after the other, and with some of their theta held fixed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from themis.compute.rng import Rng
from themis.errors import UsageError, nearest
from themis.perturb.context import Context
from themis.perturb.perturbation import Perturbation, Theta, apply_inside

Range = float | tuple[float, float]
"""What theta is held at, or the ends of its range."""


def combine(*parts: Perturbation) -> Perturbation:
    """All of them in order. Theta is that of all; a name that two of them have gets its perturbation's in front."""
    parts = tuple(part for each in parts for part in each.parts or (each,))
    kinds = {each.inputs for each in parts} - {"any"}
    channels = {each.channels for each in parts} - {None}
    if len(kinds) > 1 or len(channels) > 1:
        raise UsageError(
            f"{' + '.join(each.name for each in parts)!r} must disturb one kind of input, got "
            f"{' and '.join(sorted(kinds))}: combine those of one kind"
        )
    sizes = [len(each.theta) for each in parts]

    def apply(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
        first = 0
        for part, size in zip(parts, sizes, strict=True):
            inputs = apply_inside(part, inputs, theta[:, first : first + size], rng, context)
            first += size
        return inputs

    apply.__qualname__ = " + ".join(each.code for each in parts)
    apply.__doc__ = "; then: ".join(each.about.rstrip(".") for each in parts) + "."
    return Perturbation(
        " + ".join(each.name for each in parts),
        tuple(_theta(parts)),
        apply,
        is_random=any(each.is_random for each in parts),
        passes=sum(each.passes for each in parts),
        needs_gradient=any(each.needs_gradient for each in parts),
        inputs=kinds.pop() if kinds else "any",
        channels=channels.pop() if channels else None,
        is_smooth=all(each.is_smooth for each in parts),
        has_identity=all(each.has_identity for each in parts),
        family="combination",
        parts=parts,
    )


def _theta(parts: tuple[Perturbation, ...]) -> list[Theta]:
    times = Counter(each.name for part in parts for each in part.theta)
    found: Counter[str] = Counter()
    named = []
    for part in parts:
        front = _identifier(part.name)
        found[front] += 1
        front += f"_{found[front]}" if found[front] > 1 else ""
        for each in part.theta:
            named.append(each if times[each.name] == 1 else replace(each, name=f"{front}_{each.name}"))
    return named


def _identifier(name: str) -> str:
    plain = name.partition("(")[0].rpartition(":")[2]
    return "".join(each if each.isalnum() else "_" for each in plain if each != " ").lstrip("0123456789") or "part"


def narrowed(perturbation: Perturbation, ranges: Mapping[str, Range]) -> Perturbation:
    """The same with some of theta over another range, or held at a value; its name says so."""
    known = [each.name for each in perturbation.theta]
    for name in ranges:
        if name not in known:
            raise UsageError(f"theta {name!r} of {perturbation.name!r} must be one it has: {nearest(name, known)}")
    theta, held = [], {}
    for k, each in enumerate(perturbation.theta):
        to = ranges.get(each.name)
        if isinstance(to, tuple):
            theta.append(each.between(*to))
        elif to is None:
            theta.append(each)
        else:
            each.check(to)
            held[k] = float(to)
    if not theta:
        raise UsageError(f"{perturbation.name!r} must keep a theta to search, all are held fixed: give one a range")
    words = ", ".join(f"{name}={_word(value)}" for name, value in ranges.items())
    name = f"{perturbation.name}({words})" if ranges else perturbation.name
    is_magnitude = perturbation.theta_is_magnitude and not ranges
    changed = replace(perturbation, name=name, theta=tuple(theta), theta_is_magnitude=is_magnitude, parts=())
    return replace(changed, apply=_held(perturbation, held)) if held else changed


def _word(value: Range) -> str:
    return ":".join(map(_number, value)) if isinstance(value, tuple) else _number(value)


def _number(value: float) -> str:
    """As short as it can be and still be read as the same number."""
    short = f"{value:g}"
    return short if float(short) == value else repr(float(value))


def _held(perturbation: Perturbation, held: Mapping[int, float]) -> Callable[..., Tensor]:
    def apply(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
        free = iter(theta.unbind(1))
        whole = [
            theta.new_full((len(theta),), held[k]) if k in held else next(free) for k in range(len(perturbation.theta))
        ]
        return perturbation.apply(inputs, torch.stack(whole, 1), rng, context)

    apply.__doc__, apply.__module__ = perturbation.apply.__doc__, perturbation.apply.__module__
    apply.__qualname__ = perturbation.apply.__qualname__
    return apply
