"""Reading what may be damaged or hostile: regular files of limited size, JSON and YAML, and plain data of a known form.

Most functions raise OSError or ValueError with a short reason; their callers add which file it is and what to do.
"""

import errno
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

from themis.errors import StoreError, UsageError

MAX_YAML, MAX_RECORD = 1 << 20, 16 << 20
"""Bytes of a YAML file, and of a JSON file in a folder that Themis wrote."""
MAX_FEATURES = 16 << 20
"""Bytes of a file that describes the features of a table."""
LARGEST = sys.float_info.max
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
        if not value.isascii() and re.search("[\ud800-\udfff]", value):
            raise ValueError("it has a text that is not valid Unicode")
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_plain(str(name))
            _check_plain(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_plain(item, depth + 1)


def read_yaml(path: str | Path, what: str) -> Any:
    """Plain data from a YAML file of limited size that the user names; raises UsageError. what: such as the suite."""
    try:
        return parse_yaml(read_regular(path, MAX_YAML).decode("utf-8-sig"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{what} must be a file with valid YAML, but {path} is not: {reason}") from error


def parse_yaml(text: str) -> Any:
    """Plain data from YAML without aliases, which make a short file endless, and without names that are given twice."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                mark = self.peek_event().start_mark
                raise yaml.composer.ComposerError(None, None, "aliases are not allowed", mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names: set[tuple[str, str]] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    name = key.tag, key.value
                    if name in names:  # the last one would win without a word
                        problem = f"{key.value} is given twice"
                        raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                    names.add(name)
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


# The form of plain data

Form = Callable[[Any, str], None]
"""Checks a value, and raises ValueError with the given place, the rule and the value if it has another form."""


def check_form(value: Any, form: Form, place: str = "its content") -> Any:
    """The value, if it has this form; raises ValueError if not."""
    form(value, place)
    return value


def read_json(path: Path, form: Form, problem: str, *, max_bytes: int = MAX_RECORD, has_nan: bool = False) -> Any:
    """Plain data of a form from a JSON file; None if there is no such file.

    problem: what the error says of the file if it cannot be read, with `{}` for the reason.
    """
    try:
        return check_form(parse_json(read_regular(path, max_bytes), has_nan=has_nan), form)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StoreError(f"{path} {problem.format(reason)}") from error


def _form(is_kept: Callable[[Any], bool], rule: str) -> Form:
    """A form from its rule, as a function and in words."""

    def check(value: Any, place: str) -> None:
        if not is_kept(value):
            raise _wrong(value, place, rule)

    return check


def whole(low: int | None = 0, high: int = 2**63 - 1) -> Form:
    """A whole number."""
    limits = f" from {low:,}" if low is not None else ""
    limits += f" to {high:,}" if high != 2**63 - 1 else ""
    lowest = -(2**63) if low is None else low
    return _form(lambda value: _is_number(value, int) and lowest <= value <= high, f"a whole number{limits}")


def number(low: float = -LARGEST, high: float = LARGEST) -> Form:
    """A finite number."""
    limits = f" from {low:g}" if low != -LARGEST else ""
    limits += f" to {high:g}" if high != LARGEST else ""
    return _form(lambda value: _is_number(value, int | float) and low <= value <= high, f"a finite number{limits}")


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def text(max_length: int = 10_000, pattern: str = "", rule: str = "") -> Form:
    """Text, which matches the whole pattern if there is one; `rule` says in words what the pattern matches."""
    return all_of(
        _form(lambda value: isinstance(value, str), "text"),
        _form(lambda value: len(value) <= max_length, f"text of at most {max_length:,} characters"),
        _form(lambda value: not pattern or re.fullmatch(pattern, value) is not None, rule),
    )


flag = _form(lambda value: isinstance(value, bool), "true or false")
"""True or false."""
anything = _form(lambda value: True, "")
"""Any plain data."""


def one_of(*values: str) -> Form:
    """One of these names."""
    return _form(lambda value: isinstance(value, str) and value in values, f"one of {', '.join(values)}")


def optional(form: Form) -> Form:
    """None, or this form."""
    return either(_form(lambda value: value is None, ""), form)


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


_object = _form(lambda value: isinstance(value, dict), "an object with names and values")


def record(required: Mapping[str, Form], others: Mapping[str, Form] | None = None, *, is_closed: bool = False) -> Form:
    """An object with these names; it may have `others`, and unless it is closed more, which are not checked."""
    known = {**required, **(others or {})}

    def check(value: Any, place: str) -> None:
        _object(value, place)
        for name in required:
            if name not in value:
                raise ValueError(f"{place} must have {name!r}, which is missing")
        for name, form in known.items():
            if name in value:
                form(value[name], f"{place}.{name}")
        if is_closed and (unknown := value.keys() - known.keys()):
            raise ValueError(f"{place} must not have {_shortened(min(unknown))}, which this version does not know")

    return check


def values_of(form: Form) -> Form:
    """An object with any names, and values of this form."""

    def check(value: Any, place: str) -> None:
        _object(value, place)
        for name, item in value.items():
            form(item, f"{place}.{name}")

    return check


def _wrong(value: Any, place: str, rule: str) -> ValueError:
    shown = "an object" if isinstance(value, dict) else _shortened(value)
    if isinstance(value, list):
        shown = f"a list of {len(value):,}"
    return ValueError(f"{place} must be {rule}, got {shown}")


def _shortened(value: Any) -> str:
    try:
        shown = repr(value)
    except ValueError:  # a whole number with thousands of digits
        return "a number that is too large"
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
