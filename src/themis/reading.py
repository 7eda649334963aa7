"""Reading what may be damaged or hostile: regular files of limited size, JSON and YAML, and plain data of a known form.

The functions raise OSError or ValueError with a short reason; their callers add which file it is and what to do.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Callable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

from themis.errors import MissingExtraError

MAX_YAML = 1 << 20
"""Bytes of a YAML file."""
MAX_FEATURES = 16 << 20
"""Bytes of a file that describes the features of a table."""
MAX_DEPTH = 40
"""Levels of lists and objects in plain data."""
KINDS = ((stat.S_ISDIR, "folder"), (stat.S_ISFIFO, "pipe"), (stat.S_ISSOCK, "socket"))


def open_regular(path: str | Path) -> BufferedReader:
    """Open a regular file for reading. Anything else, such as a pipe that never ends, is refused without waiting."""
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        mode = os.fstat(file).st_mode
        if not stat.S_ISREG(mode):
            kind = next((name for is_kind, name in KINDS if is_kind(mode)), "device")
            raise OSError(errno.EINVAL, f"it is a {kind}, not a regular file")
        return os.fdopen(file, "rb")
    except BaseException:
        os.close(file)
        raise


def read_regular(path: str | Path, max_bytes: int) -> bytes:
    """The content of a regular file of at most `max_bytes`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(max_bytes + 1) if size <= max_bytes else b""
    if size > max_bytes or len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes")
    return content


def parse_json(text: str | bytes, *, has_nan: bool = False) -> Any:
    """Plain data from JSON. Raises ValueError if it is damaged, too deep, or holds text that cannot be encoded.

    has_nan: whether NaN and Infinity are allowed, which are not JSON.
    """
    try:
        value = json.loads(text, parse_constant=None if has_nan else _refuse_constant)
    except RecursionError as error:
        raise ValueError(f"it has more than {MAX_DEPTH} levels") from error
    _check_plain(value)
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number in JSON")


def _check_plain(value: Any, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"it has more than {MAX_DEPTH} levels")
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_text(str(name))
            _check_plain(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_plain(item, depth + 1)


def _check_text(text: str) -> None:
    if not text.isascii() and re.search("[\ud800-\udfff]", text):
        raise ValueError("it has a text that is not valid Unicode")


def read_yaml(path: str | Path) -> Any:
    """Plain data from a YAML file of limited size."""
    return parse_yaml(read_regular(path, MAX_YAML).decode("utf-8-sig"))


def parse_yaml(text: str) -> Any:
    """Plain data from YAML without aliases, which make a short file endless, and without names that are given twice."""
    yaml = import_yaml()

    class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                mark = self.peek_event().start_mark
                raise yaml.composer.ComposerError(None, None, "aliases are not allowed", mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names: set[tuple[str, str]] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if (key.tag, key.value) in names:  # the last one would win without a word
                        raise yaml.constructor.ConstructorError(
                            None, None, f"{key.value} is given twice", key.start_mark
                        )
                    names.add((key.tag, key.value))
            return super().construct_mapping(node, deep)

    try:
        value = yaml.load(text, Loader)
        _check_plain(value)
    except RecursionError as error:
        raise ValueError(f"it has more than {MAX_DEPTH} levels") from error
    except OverflowError as error:
        raise ValueError("it has a number that is too large") from error
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = f"line {mark.line + 1}: {problem}" if mark and problem else " ".join(str(error).split())
        raise ValueError(where) from error
    return value


def import_yaml() -> Any:
    """The module yaml, which is needed only if there is a YAML file."""
    try:
        import yaml
    except ImportError as error:
        raise MissingExtraError("YAML files need PyYAML: pip install PyYAML") from error
    return yaml


# The form of plain data

Form = Callable[[Any, str], None]
"""Checks a value, and raises ValueError with the given place, the rule and the value if it has another form."""


def check_form(value: Any, form: Form, place: str = "its content") -> Any:
    """The value, if it has this form; raises ValueError if not."""
    form(value, place)
    return value


def whole(low: int | None = 0, high: int = 2**63 - 1) -> Form:
    """A whole number."""
    limits = f" from {low:,}" if low is not None else ""
    limits += f" to {high:,}" if high != 2**63 - 1 else ""
    lowest = -(2**63) if low is None else low

    def check(value: Any, place: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= high:
            raise _wrong(value, place, f"a whole number{limits}")

    return check


def number(low: float = -math.inf, high: float = math.inf) -> Form:
    """A finite number."""
    limits = f" from {low:g}" if math.isfinite(low) else ""
    limits += f" to {high:g}" if math.isfinite(high) else ""

    def check(value: Any, place: str) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(_as_float(value)) or not low <= value <= high:
            raise _wrong(value, place, f"a finite number{limits}")

    return check


def text(max_length: int = 10_000, pattern: str = "", rule: str = "") -> Form:
    """Text, which matches the whole pattern if there is one; `rule` says in words what the pattern matches."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, str):
            raise _wrong(value, place, "text")
        if len(value) > max_length:
            raise _wrong(value, place, f"text of at most {max_length:,} characters")
        if pattern and not re.fullmatch(pattern, value):
            raise _wrong(value, place, rule)

    return check


def flag(value: Any, place: str) -> None:
    """True or false."""
    if not isinstance(value, bool):
        raise _wrong(value, place, "true or false")


def anything(value: Any, place: str) -> None:
    """Any plain data."""


def one_of(*values: str) -> Form:
    """One of these names."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, str) or value not in values:
            raise _wrong(value, place, f"one of {', '.join(values)}")

    return check


def optional(form: Form) -> Form:
    """None, or this form."""

    def check(value: Any, place: str) -> None:
        if value is not None:
            form(value, place)

    return check


def either(*forms: Form) -> Form:
    """One of these forms; the message is that of the last."""

    def check(value: Any, place: str) -> None:
        for form in forms[:-1]:
            try:
                return form(value, place)
            except ValueError:
                pass
        return forms[-1](value, place)

    return check


def all_of(*forms: Form) -> Form:
    """All of these forms at once."""

    def check(value: Any, place: str) -> None:
        for form in forms:
            form(value, place)

    return check


def items(form: Form, length: int | None = None) -> Form:
    """A list, of this length if it is given."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, list) or length not in (None, len(value)):
            raise _wrong(value, place, "a list" if length is None else f"a list of {length:,}")
        for k, item in enumerate(value):
            form(item, f"{place}[{k}]")

    return check


def record(required: Mapping[str, Form], others: Mapping[str, Form] | None = None, *, is_closed: bool = False) -> Form:
    """An object with these names; it may have `others`, and unless it is closed more, which are not checked."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(value, place, "an object with names and values")
        for name, form in required.items():
            if name not in value:
                raise ValueError(f"{place} must have {name!r}, which is missing")
            form(value[name], f"{place}.{name}")
        for name, form in (others or {}).items():
            if name in value:
                form(value[name], f"{place}.{name}")
        unknown = value.keys() - required.keys() - (others or {}).keys() if is_closed else ()
        if unknown:
            raise ValueError(f"{place} must not have {_shortened(min(unknown))}, which this version does not know")

    return check


def values_of(form: Form) -> Form:
    """An object with any names, and values of this form."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(value, place, "an object with names and values")
        for name, item in value.items():
            form(item, f"{place}.{name}")

    return check


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _wrong(value: Any, place: str, rule: str) -> ValueError:
    shown = f"a list of {len(value):,}" if isinstance(value, list) else "an object" if isinstance(value, dict) else ""
    if not shown:
        shown = _shortened(value)
    return ValueError(f"{place} must be {rule}, got {shown}")


def _shortened(value: Any) -> str:
    try:
        shown = repr(value)
    except ValueError:  # a whole number with thousands of digits
        return "a number that is too large"
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
