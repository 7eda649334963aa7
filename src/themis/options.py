"""Options as fields of a dataclass, and the checks that all options share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from themis.errors import UsageError, nearest


def option(default: Any, text: str) -> Any:
    """Return a field with a default and the help text of its flag."""
    return dataclasses.field(default=default, metadata={"help": text})


def check_known(kind: Any, options: Iterable[str]) -> None:
    """Refuse an option that is not a field of `kind`."""
    known = {field.name for field in fields(kind)}
    for name in options:
        if name not in known:
            raise UsageError(f"unknown option {name!r}: {nearest(name, known)}")


def check_numbers(options: Any) -> None:
    """Refuse values of the wrong type: counts must be whole numbers (1e4 is one), other fields numbers.

    None is allowed if the type of the field allows it.
    """
    for field in fields(options):
        value, kind = getattr(options, field.name), str(field.type)
        if not kind.startswith(("int", "float")) or (value is None and kind.endswith("None")):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(f"{field.name} must be a number, got {value!r}")
        if kind.startswith("int"):
            if isinstance(value, float) and not value.is_integer():
                raise UsageError(f"{field.name} must be a whole number, got {value!r}")
            if abs(value) >= 2**63:
                raise UsageError(f"{field.name} must lie in -2**63..2**63 - 1, got {value!r}")
            object.__setattr__(options, field.name, int(value))


def check_count(name: str, value: object, least: int = 1) -> None:
    """Refuse anything but a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} must be a whole number of at least {least}, got {value!r}")


def check_rules(options: Any, rules: dict[str, tuple[bool, str]]) -> None:
    """Refuse the first option that breaks its rule; `rules` holds whether it is kept, and the text after `must`."""
    for name, (is_kept, rule) in rules.items():
        if not is_kept:
            raise UsageError(f"{name} must {rule}, got {getattr(options, name)!r}")
