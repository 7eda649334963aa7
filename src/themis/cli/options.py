"""Command-line options: flags and entries of YAML files, generated from the fields of dataclasses.

A command adds its options to a `Parser`. `parse` returns the value of every option, and the names of those that the
user set explicitly. `convert` reads values of flags and of files by the same rules.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Union, get_args, get_origin, get_type_hints

from themis.errors import UsageError, closest
from themis.reading import read_yaml
from themis.runs.store.files import check_free

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Group = argparse._ActionsContainer
"""A parser, or a titled group of its options."""

FORCE_HELP = "replace the file if it exists; pages and pictures that Themis wrote are replaced anyway"
NOT_CONFIG_OPTIONS = ("config", "print_config", "print_suite", "words", "given", "from_config")
"""Attributes of a `CommandLine` that are not options in a configuration file."""

UNBOUNDED = (-math.inf, math.inf)
"""The value of `--bounds auto`."""

METAVARS = {
    **{"model": "MODEL", "trust": "PATH,...", "mce_baseline": "SUITE", "baseline_model": "MODEL", "baseline": "RUN"},
    **dict.fromkeys(("data", "train"), "DATA"),
    **dict.fromkeys(("weights", "features", "metadata", "sheet", "baseline_weights", "junit", "markdown"), "FILE"),
    **dict.fromkeys(("folder", "out"), "FOLDER"),
    **dict.fromkeys(("techniques", "magnitudes", "also", "from"), "NAME,..."),
}
"""Placeholders of options by name, where the placeholder of the type is not specific enough."""


class Option(argparse.Action):
    """A flag whose value is stored as text, which `parse` converts. A list can also be given by repeating the flag."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, kind: Any, **rest: Any) -> None:
        super().__init__(option_strings, dest, **rest)
        self.kind = kind

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest, None) if bare_kind(self.kind)[0] == list[str] else None
        setattr(namespace, self.dest, values if before is None else f"{before},{values}")


class Parser(argparse.ArgumentParser):
    """A parser that raises `UsageError`, rejects abbreviated flags, and accepts -1,1 as a value."""

    def __init__(self, **rest: Any) -> None:
        width = min(100, get_terminal_size().columns) - 1
        form = partial(argparse.RawDescriptionHelpFormatter, max_help_position=26, width=width)
        super().__init__(formatter_class=form, allow_abbrev=False, **rest)
        self._negative_number_matcher = re.compile(r"-\.?\d")
        self.ignored: frozenset[str] = frozenset()
        """Options of other commands, which a configuration file may contain."""
        self._positionals.title = "arguments"

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"argument (\S+): expected .*argument", r"\1 must be followed by a value, got none", message)
        message = re.sub(r"the following arguments are required: (.+)", r"\1 must be given", message)
        raise UsageError(f"{message}: see {self.prog} --help")

    def describe_usage(self) -> None:
        """Shorten the usage line to the arguments; the options are listed below it."""
        forms = {"?": "[{}]", "*": "[{} ...]", "+": "{} ..."}
        positionals = [action for action in self._actions if not action.option_strings]
        words = [forms.get(str(action.nargs), "{}").format(action.metavar) for action in positionals]
        self.usage = " ".join(["%(prog)s", *words, "[options]"])


def add_fields(
    group: Group,
    kind: type[DataclassInstance],
    *,
    only: Collection[str] | None = None,
    shows_default: bool = True,
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Add a flag for every field defined with `themis.options.option`, or only for those in `only`.

    defaults: default values that differ from those of the fields.
    """
    hints = get_type_hints(kind)
    for field in fields(kind):
        if "help" in field.metadata and (only is None or field.name in only):
            name, default = field.name, (defaults or {}).get(field.name, field.default)
            add_option(group, name, hints[name], default, field.metadata["help"], shows_default=shows_default)


def add_option(
    group: Group,
    name: str,
    kind: Any,
    default: Any,
    text: str,
    *,
    shows_default: bool = True,
    metavar: str | None = None,
) -> None:
    """Add a flag with a value, or a switch for a bool that is false by default; `max_tests` becomes `--max-tests`."""
    flag = f"--{name.replace('_', '-')}"
    if kind is bool and default is False:
        group.add_argument(flag, action="store_true", help=text.replace("%", "%%"))
        return
    if shows_default and default not in (None, ""):
        text = f"{text} (default: {format_value(default)})"
    group.add_argument(
        flag,
        action=Option,
        kind=kind,
        default=default,
        metavar=metavar or METAVARS.get(name) or VALUE_KINDS[bare_kind(kind)[0]].placeholder,
        help=text.replace("%", "%%"),
    )


def add_config(group: Group) -> None:
    """Add `--config` and `--print-config`."""
    text = "read options from a YAML file, such as max_tests: 5000; flags override it"
    group.add_argument("--config", metavar="FILE", help=text)
    text = "print the options as YAML for --config, and exit"
    group.add_argument("--print-config", action="store_true", help=text)


def check_file(flag: str, path: Path, endings: Sequence[str], *, replaces: bool) -> None:
    """Refuse an output file that cannot be written, before the work on its content begins."""
    if path.suffix.lower() not in endings:
        raise UsageError(f"{flag} must end in {', '.join(endings[:-1])} or {endings[-1]}, got {path}: rename it")
    check_free(path, replaces=replaces)


class CommandLine(argparse.Namespace):
    """The values of all options, from the command line, its configuration file and the defaults."""

    given: dict[str, Any]
    """The options that the user has given, by a flag or in the file."""
    from_config: set[str]
    """The names of the options that the file sets and no flag overrides."""
    words: list[str]

    @property
    def is_silent(self) -> bool:
        """Whether only errors or JSON should be printed."""
        return bool(getattr(self, "quiet", False) or getattr(self, "json", False))


def parse(parser: Parser, words: Sequence[str]) -> CommandLine:
    """Parse a command line and its configuration file."""
    actions = {action.dest: action for action in parser._actions if action.default != argparse.SUPPRESS}
    flags, rest = parser.parse_known_intermixed_args(words, argparse.Namespace(**dict.fromkeys(actions)))
    for word in rest:
        if word.startswith("-") and not parser._negative_number_matcher.match(word):
            flag = word.partition("=")[0]
            remedy = _closest(flag, parser._option_string_actions, f"see {parser.prog} --help")
            raise UsageError(f"unknown option {flag}: {remedy}")
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}: options start with --, and lists are written as a,b")
    from_flags = {name: value for name, value in vars(flags).items() if value is not None}
    from_file = read_config(from_flags["config"], actions, parser.ignored) if "config" in from_flags else {}
    for name, value in from_flags.items():
        action = actions[name]
        from_flags[name] = convert(name, value, action.kind) if isinstance(action, Option) else value
    given = {**from_file, **from_flags}
    values = {name: action.default for name, action in actions.items()} | given
    return CommandLine(**values, given=given, from_config=from_file.keys() - from_flags.keys())


def fields_of(kind: type[DataclassInstance], given: Mapping[str, Any]) -> dict[str, Any]:
    """The given options that are fields of a dataclass."""
    return {field.name: given[field.name] for field in fields(kind) if field.name in given}


def read_config(path: str, actions: dict[str, argparse.Action], ignored: Collection[str] = ()) -> dict[str, Any]:
    """Read the options in a YAML file by name, leaving out `ignored` ones."""
    content = read_config_file(path)
    known = [name for name in actions if name not in NOT_CONFIG_OPTIONS]
    values = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known and name in ignored:
            continue
        if name not in known:
            raise UsageError(f"unknown option {key!r} in {path}: {_closest(name, known, 'see --help')}")
        try:
            action = actions[name]  # of an option, of a flag without a value, or of an argument
            kind = action.kind if isinstance(action, Option) else bool if action.nargs == 0 else str | None
            values[name] = convert(name, value, kind)
        except UsageError as error:
            raise UsageError(f"in {path}: {error}") from None
    return values


def as_yaml(values: dict[str, Any]) -> str:
    """Format options as YAML that `read_config` reads back."""
    plain = {
        name: format_value(value) if value == UNBOUNDED else list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if name not in NOT_CONFIG_OPTIONS
    }
    import yaml

    return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)).rstrip()


def _closest(name: str, known: Collection[str], otherwise: str) -> str:
    """Suggest the option that contains the name as a word, such as max-passes for passes, or is spelt similarly."""
    by_name = {option.lstrip("-"): option for option in known}
    bare = name.lstrip("-")
    alike = [other for other in by_name if bare in other.replace("_", "-").split("-")]
    close = alike[0] if len(alike) == 1 else closest(bare, by_name)
    return otherwise if close is None else f"did you mean {by_name[close]}?"


def read_config_file(path: str) -> dict[Any, Any]:
    """The names and values in a YAML file."""
    content = read_yaml(path, "the config file")
    if not isinstance(content, dict | None):
        raise UsageError(f"{path} must hold names and values, such as max_tests: 5000, got a {type(content).__name__}")
    return content or {}


NULLS = ("null", "none")


def convert(name: str, value: Any, kind: Any) -> Any:
    """Convert a value from a flag or a file to `kind`, a type hint; errors name the option and the rule."""
    bare, is_optional = bare_kind(kind)
    if is_optional and (value is None or str(value).lower() in NULLS):
        return None
    try:
        return VALUE_KINDS[bare].read(value)
    except (ValueError, KeyError):
        rule = f"{VALUE_KINDS[bare].rule} or null" if is_optional else VALUE_KINDS[bare].rule
        raise UsageError(f"{name} must be {rule}, got {value!r}{_as_share(value)}") from None


def _as_share(text: Any) -> str:
    """A remedy for a value that is a percentage; otherwise empty."""
    percentage = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", str(text))
    return f": write {float(percentage[1]) / 100:g} for {percentage[0]}" if percentage else ""


def format_value(value: Any) -> str:
    """Format a value as a user would write it on the command line."""
    if value == UNBOUNDED:
        return "auto"
    if isinstance(value, tuple | list):
        return ",".join(map(format_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def bare_kind(kind: Any) -> tuple[Any, bool]:
    """A type hint without None, and whether None was part of it. `Any` is read as text on the command line."""
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    (bare,) = (part for part in parts if part is not NoneType)
    return str if bare is Any else bare, NoneType in parts


def _integer(value: Any) -> int:
    """Read an integer, which may be written as 1e4."""
    try:
        return int(str(value))
    except ValueError:
        if not (number := _number(value)).is_integer():
            raise
        return int(number)


def _number(value: Any) -> float:
    number = float(str(value))  # via str, so that True is not accepted as a number
    if not math.isfinite(number):
        raise ValueError
    return number


def _text(value: Any) -> str:
    """Read text; numbers are accepted too, because in YAML the layer name 1 is a number."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError
    return str(value)


def _list(read: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    """Read `a,b`, `[a, b]` or a single value; a comma in brackets, as in `pgd(steps=2,size=1)`, does not count."""

    def read_list(value: Any) -> list[Any]:
        if isinstance(value, str):
            value = [part.strip(" '\"") for part in re.split(r",(?![^(]*\))", value.strip("[] "))]
        items = [read(item) for item in (value if isinstance(value, list) else [value])]
        if not items or "" in items:
            raise ValueError
        return items

    return read_list


def _pair(value: Any) -> tuple[float, float]:
    if value == "auto":
        return UNBOUNDED
    low, high = _list(_number)(value)
    return low, high


class Kind(NamedTuple):
    """How values of a type are shown in the help, described in errors, and read."""

    placeholder: str
    rule: str
    read: Callable[[Any], Any]
    """Raises ValueError or KeyError for a value of another kind."""


_BOOLS = {"true": True, "false": False}
VALUE_KINDS: dict[Any, Kind] = {
    int: Kind("N", "a whole number", _integer),
    float: Kind("X", "a number", _number),
    str: Kind("NAME", "text", _text),
    bool: Kind("", "true or false", lambda value: _BOOLS[str(value).lower()]),
    list[float]: Kind("X,X,...", "numbers such as 0.4,0.5,0.4", _list(_number)),
    list[int]: Kind("N,N,...", "whole numbers such as 2,0,1", _list(_integer)),
    list[str]: Kind("NAME,...", "names such as conv1,fc*", _list(_text)),
    tuple[float, float]: Kind("LOW,HIGH", "two numbers such as 0,255", _pair),
}
