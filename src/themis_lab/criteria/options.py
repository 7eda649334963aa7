"""The options of criteria, and how they are written: `k=100, variant=mindarmour`."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from inspect import signature
from types import NoneType
from typing import Any, TypedDict, get_args, get_origin, get_type_hints

from themis.errors import UsageError, nearest

COMMA = re.compile(r",(?![^\[]*\])")
"""A comma outside of a list."""


class CriterionOptions(TypedDict, total=False):
    """Options that every criterion has."""

    neurons: str
    layers: Sequence[str] | str | None
    variant: str | None


def parse_options(kind: Any, text: str) -> dict[str, Any]:
    """The options of a class of criteria, converted to their types."""
    options = _read_options(text, kind.name)
    hints = get_type_hints(kind.__init__) | get_type_hints(CriterionOptions)
    known = [parameter for parameter in signature(kind).parameters if parameter not in ("options", "relevance")]
    known += list(CriterionOptions.__annotations__)
    for option, value in options.items():
        if option not in known:
            raise UsageError(f"{kind.name}: unknown option {option!r}: {nearest(option, known)}")
        options[option] = _convert(f"{kind.name}: {option}", value, hints[option])
    return options


def _read_options(text: str, name: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in filter(str.strip, COMMA.split(text)):
        option, equals, value = part.partition("=")
        if not equals or not value.strip():
            raise UsageError(f"{name}: options must be NAME=VALUE, got {part.strip()!r}")
        if option.strip() in options:
            raise UsageError(f"{name}: each option must be given once, got {option.strip()!r} twice")
        options[option.strip()] = _read_value(value.strip())
    return options


def _convert(option: str, value: Any, hint: Any) -> Any:
    """A value converted to the type hint of its option."""
    kinds = get_args(hint) or (hint,)
    if value is None and NoneType in kinds:
        return None
    if int in kinds or float in kinds:
        kind = int if int in kinds else float
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63
        if not is_number or kind(value) != value:
            raise UsageError(f"{option} must be a {'whole ' * (kind is int)}number below 2**63, got {value!r}")
        return kind(value)
    if not isinstance(value, list):
        return str(value)
    if not any(get_origin(kind) is Sequence for kind in kinds):
        raise UsageError(f"{option} must be a word, got a list")
    return value


def _read_value(text: str) -> Any:
    """A literal or the text itself, or a list of them."""
    if (value := _read_literal(text)) == text and text[:1] == "[" and text[-1] == "]":
        return [_read_literal(item.strip()) for item in text[1:-1].split(",") if item.strip()]
    return value


def _read_literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return text
