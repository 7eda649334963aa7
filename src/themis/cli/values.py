"""Values as users write them, on the command line and in YAML, read by type."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

from themis.errors import UsageError

NOTHING = ("null", "none")


def convert(name: str, value: Any, kind: Any) -> Any:
    """A value from a flag or a file as `kind`, a type hint; a refusal names the option and the rule."""
    bare, is_optional = _bare(kind)
    if is_optional and (value is None or str(value).lower() in NOTHING):
        return None
    try:
        return KINDS[bare].read(value)
    except (ValueError, KeyError):
        rule = f"{KINDS[bare].rule} or null" if is_optional else KINDS[bare].rule
        raise UsageError(f"{name} must be {rule}, got {value!r}") from None


def placeholder(kind: Any) -> str:
    """What stands for a value of a type in the help."""
    return KINDS[_bare(kind)[0]].placeholder


def write(value: Any) -> str:
    """A value as one would write it on the command line."""
    if isinstance(value, tuple | list):
        return ",".join(map(write, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _bare(kind: Any) -> tuple[Any, bool]:
    """A type hint without None, and whether it had it. What may be anything in Python is text on a command line."""
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    (bare,) = (part for part in parts if part is not NoneType)
    return str if bare is Any else bare, NoneType in parts


def _whole(value: Any) -> int:
    """1e4 is one."""
    try:
        return int(str(value))
    except ValueError:
        number = _number(value)
    if number != int(number):
        raise ValueError
    return int(number)


def _number(value: Any) -> float:
    number = float(str(value))  # by its text: True is no number
    if not math.isfinite(number):
        raise ValueError
    return number


def _text(value: Any) -> str:
    """Numbers too: in YAML a layer's name may be 1."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError
    return str(value)


def _truth(value: Any) -> bool:
    return {"true": True, "false": False}[str(value).lower()]


def _list(read: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    """`a,b`, `[a, b]`, or one value alone."""

    def read_list(value: Any) -> list[Any]:
        if isinstance(value, str):
            value = [each.strip(" '\"") for each in value.strip("[] ").split(",")]
        found = [read(each) for each in (value if isinstance(value, list) else [value])]
        if not found or "" in found:
            raise ValueError
        return found

    return read_list


def _pair(value: Any) -> tuple[float, float]:
    low, high = _list(_number)(value)
    return low, high


class Kind(NamedTuple):
    """A type: what stands for its values in the help, its rule in words, and how it is read (else ValueError)."""

    placeholder: str
    rule: str
    read: Callable[[Any], Any]


KINDS: dict[Any, Kind] = {
    int: Kind("N", "a whole number", _whole),
    float: Kind("X", "a number", _number),
    str: Kind("NAME", "text", _text),
    bool: Kind("", "true or false", _truth),
    list[float]: Kind("X,X,...", "numbers as 0.4,0.5,0.4", _list(_number)),
    list[str]: Kind("NAME,...", "names as conv1,fc*", _list(_text)),
    tuple[float, float]: Kind("LOW,HIGH", "two numbers as 0,255", _pair),
}
