"""Perturbations in words: `rain`, `rain(angle=-10:10, length=0.2) + fog`, `mine:STRIPES`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from themis.errors import UsageError, nearest
from themis.perturb.combine import Range, combine, narrowed
from themis.perturb.perturbation import Perturbation

PART = re.compile(r"([^()]+)(?:\((.*)\))?", re.DOTALL)


def read_perturbation(text: str, known: Mapping[str, Perturbation]) -> Perturbation:
    """Names joined by `+`; after each, in brackets, ranges of its theta (`LOW:HIGH`) or values it is held at.

    A name with a colon is `module:perturbation` of the user's own.
    """
    parts = [_read_part(each.strip(), known) for each in _split(text, "+")]
    return parts[0] if len(parts) == 1 else combine(*parts)


def _read_part(text: str, known: Mapping[str, Perturbation]) -> Perturbation:
    match = PART.fullmatch(text)
    if match is None:
        raise UsageError(
            f"perturbation must be names joined by +, each with its theta in brackets if need be, got {text!r}: write "
            "for instance rain(angle=-10:10) + fog"
        )
    name, ranges = match[1].strip(), match[2]
    chosen = _own(name) if ":" in name else known.get(name)
    if chosen is None:
        raise UsageError(f"perturbation must be a known name or module:name, got {name!r}: {nearest(name, known)}")
    if ranges is None:
        return chosen
    return narrowed(chosen, dict(_read_range(each, name) for each in _split(ranges, ",")))


def _own(name: str) -> Perturbation:
    from themis.models.factory import call_factory

    made = call_factory(name, "perturb")
    if not isinstance(made, Perturbation):
        raise UsageError(f"--perturb {name!r} must be a themis.Perturbation, got {type(made).__name__}")
    return replace(made, name=name)


def _read_range(text: str, name: str) -> tuple[str, Range]:
    theta, _, value = text.partition("=")
    low, colon, high = value.partition(":")
    try:
        return theta.strip(), (float(low), float(high)) if colon else float(low)
    except ValueError:
        raise UsageError(
            f"theta of {name!r} must be NAME=LOW:HIGH, or NAME=VALUE to hold it fixed, got {text.strip()!r}"
        ) from None


def _split(text: str, at: str) -> list[str]:
    """`text` cut at each `at` that stands in no bracket."""
    parts, depth = [""], 0
    for each in text:
        depth += (each == "(") - (each == ")")
        if each == at and depth == 0:
            parts.append("")
        else:
            parts[-1] += each
    return parts
