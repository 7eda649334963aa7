"""Specifications of perturbations: `rain`, `rain(angle=-10:10, length=0.2) + fog`, `over_time(rotate)`, `mine:BAND`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from themis.errors import DataError, UsageError, nearest
from themis.perturb.clips import over_time
from themis.perturb.perturbation import OVER_TIME, Perturbation, Range, combine, narrowed

PART = re.compile(r"([^()]+)(?:\((.*)\))?", re.DOTALL)


def read_perturbation(text: str, known: Mapping[str, Perturbation], *, imports: bool = True) -> Perturbation:
    """Read names joined by `+`, each optionally with ranges (`LOW:HIGH`) or fixed values of its theta in brackets.

    A name with a colon, `module:perturbation`, is one of the user's own; it is refused if nothing may be imported.
    `over_time` has a specification in brackets.
    """
    parts = [_read_part(name, ranges, known, imports=imports) for name, ranges in _read_names(text)]
    return parts[0] if len(parts) == 1 else combine(*parts)


def own_perturbations(text: str) -> list[str]:
    """The names in a specification that are of the user's own, for which modules have to be imported."""
    try:
        names = _read_names(text)
    except UsageError:  # it cannot be read, so nothing would be imported
        return []
    own = []
    for name, inside in names:
        own += own_perturbations(inside) if name == OVER_TIME and inside else [name] if ":" in name else []
    return own


def _read_names(text: str) -> list[tuple[str, str | None]]:
    """Each name with the text in brackets after it."""
    names = []
    for part in map(str.strip, _split(text, "+")):
        match = PART.fullmatch(part)
        if match is None:
            raise UsageError(
                f"perturbation must be names joined by +, each optionally with theta in brackets, got {part!r}: write "
                "for instance rain(angle=-10:10) + fog"
            )
        names.append((match[1].strip(), match[2]))
    return names


def _read_part(name: str, ranges: str | None, known: Mapping[str, Perturbation], *, imports: bool) -> Perturbation:
    if name == OVER_TIME:
        if ranges is None or not ranges.strip():
            raise UsageError(f"{OVER_TIME} must have a perturbation in brackets, got none: write {OVER_TIME}(rotate)")
        return over_time(read_perturbation(ranges, known, imports=imports))
    if ":" in name and not imports:
        raise UsageError(f"perturbation must be a known name, got {name!r}: nothing is imported here")
    chosen = _load_own(name) if ":" in name else known.get(name)
    if chosen is None:
        hint = nearest(name, known).partition("known:")[0]
        raise UsageError(
            f"perturbation must be a known name or module:name, got {name!r}: {hint}themis perturbations lists them"
        )
    if ranges is None or not ranges.strip():
        return chosen
    return narrowed(chosen, dict(_read_range(part, name) for part in _split(ranges, ",")))


def _load_own(name: str) -> Perturbation:
    from themis.target.loaders.factory import call_factory

    try:
        loaded = call_factory(name, "perturb")
    except DataError as error:
        raise UsageError(
            f"--perturb {name!r} must be a themis.Perturbation, or a function that returns one: {error}"
        ) from error
    if not isinstance(loaded, Perturbation):
        raise UsageError(f"--perturb {name!r} must be a themis.Perturbation, got {type(loaded).__name__}")
    return replace(loaded, name=name, parts=())


def _read_range(text: str, name: str) -> tuple[str, Range]:
    theta, _, value = text.partition("=")
    try:
        ends = [float(end) for end in value.split(":")]
    except ValueError:
        ends = []
    if len(ends) not in (1, 2) or not all(map(math.isfinite, ends)) or ends[0] > ends[-1]:
        raise UsageError(
            f"theta of {name!r} must be NAME=LOW:HIGH, or NAME=VALUE to hold it fixed, got {text.strip()!r}"
        )
    return theta.strip(), ends[0] if len(ends) == 1 else (ends[0], ends[1])


def _split(text: str, separator: str) -> list[str]:
    """`text` split at each `separator` outside of brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
