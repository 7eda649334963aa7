"""Options: flags and a YAML file with the same names, made from the fields of dataclasses.

A command adds its options to a `Parser`; `parse` gives every value, and which of them were said.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NoReturn, get_type_hints

from themis.cli.values import convert, placeholder, write
from themis.errors import MissingExtraError, UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Group = argparse._ActionsContainer
"""A parser, or a titled group of its options."""

NOT_IN_A_FILE = ("config", "print_config")
METAVARS = {
    "model": "MODEL",
    "weights": "FILE",
    "trust": "FILE,...",
    "data": "DATA",
    "features": "FILE",
    "folder": "FOLDER",
    "out": "FOLDER",
}


class Option(argparse.Action):
    """A flag kept as it was written: one rule, `convert`, reads the values of flags and of files."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, kind: Any, is_needed: bool, **rest: Any) -> None:
        super().__init__(option_strings, dest, **rest)
        self.kind, self.is_needed = kind, is_needed

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """A parser that raises `UsageError`, takes no abbreviations, and -1,1 as a value."""

    def __init__(self, **rest: Any) -> None:
        super().__init__(formatter_class=_Help, allow_abbrev=False, **rest)
        self._negative_number_matcher = re.compile(r"-\.?\d")
        self._positionals.title = "arguments"

    def error(self, message: str) -> NoReturn:
        lacking = re.fullmatch(r"argument (\S+): expected .*argument", message)
        needed = re.fullmatch(r"the following arguments are required: (.+)", message)
        if lacking:
            raise UsageError(f"{lacking[1]} must be followed by a value, got none: see {self.prog} --help")
        if needed:
            raise UsageError(f"{needed[1]} must be given: see {self.prog} --help")
        raise UsageError(f"{message}: see {self.prog} --help")

    def describe_usage(self) -> None:
        """A usage line with what must be given; the options are listed below it."""
        needed = [f"{a.option_strings[0]} {a.metavar}" for a in self._actions if getattr(a, "is_needed", False)]
        places = [_place(a) for a in self._actions if not a.option_strings]
        self.usage = " ".join(["%(prog)s", *places, *needed, "[options]"])


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        from shutil import get_terminal_size

        super().__init__(prog, max_help_position=26, width=min(100, get_terminal_size().columns) - 1)


def add_fields(
    group: Group,
    kind: type[DataclassInstance],
    *,
    only: Collection[str] | None = None,
    needed: Collection[str] = (),
    shows_default: bool = True,
) -> None:
    """A flag for each field made with `settings.option`, or for `only` some; `needed` ones must be given."""
    hints = get_type_hints(kind)
    for each in fields(kind):
        if only is None or each.name in only:
            is_needed, text = each.name in needed, each.metadata["help"]
            how = {"is_needed": is_needed, "shows_default": shows_default}
            add_option(group, each.name, hints[each.name], each.default, text, **how)


def add_option(
    group: Group,
    name: str,
    kind: Any,
    default: Any,
    text: str,
    *,
    is_needed: bool = False,
    shows_default: bool = True,
) -> None:
    """A flag with a value: `max_tests` is `--max-tests`."""
    if shows_default and default not in (None, ""):
        text = f"{text} (default: {write(default)})"
    group.add_argument(
        f"--{name.replace('_', '-')}",
        action=Option,
        kind=kind,
        is_needed=is_needed,
        default=default,
        metavar=METAVARS.get(name) or placeholder(kind),
        help=text.replace("%", "%%"),
    )


def add_config(group: Group) -> None:
    """`--config` and `--print-config`."""
    group.add_argument("--config", metavar="FILE", help="YAML file with options, as max_tests: 5000; flags override it")
    group.add_argument("--print-config", action="store_true", help="print the options as YAML for --config, and end")


def parse(parser: Parser, words: Sequence[str]) -> tuple[argparse.Namespace, set[str]]:
    """Every option's value, and the names of those that were said, by a flag or in the file."""
    _refuse_unknown_flags(parser, words)
    actions = {action.dest: action for action in parser._actions if action.default != argparse.SUPPRESS}
    flags, rest = parser.parse_known_intermixed_args(words, argparse.Namespace(**dict.fromkeys(actions)))
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}: options start with --, a list is written as a,b")
    said = {name: value for name, value in vars(flags).items() if value is not None}
    from_file = read_config(said["config"], actions) if "config" in said else {}
    values = {}
    for name, action in actions.items():
        if name in said:
            value = said[name]
            values[name] = convert(name, value, action.kind) if isinstance(action, Option) else value
        else:
            values[name] = from_file.get(name, action.default)
    for name, action in actions.items():
        if getattr(action, "is_needed", False) and not values[name] and not values.get("print_config"):
            raise UsageError(f"{action.option_strings[0]} must be given: {str(action.help).replace('%%', '%')}")
    return argparse.Namespace(**values), {*said, *from_file}


def chosen(arguments: argparse.Namespace, kind: type[DataclassInstance], said: Collection[str]) -> dict[str, Any]:
    """Those fields of a dataclass that were said, with their values."""
    return {each.name: getattr(arguments, each.name) for each in fields(kind) if each.name in said}


def read_config(path: str, actions: dict[str, argparse.Action]) -> dict[str, Any]:
    """The options in a YAML file, by name."""
    found = _load_yaml(path)
    known = [name for name in actions if name not in NOT_IN_A_FILE]
    values = {}
    for key, value in found.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise UsageError(f"unknown option {key!r} in {path}: {_closest(name, known, 'see --help')}")
        action = actions[name]
        kind = action.kind if isinstance(action, Option) else bool if action.nargs == 0 else str
        try:
            values[name] = convert(name, value, kind)
        except UsageError as error:
            raise UsageError(f"in {path}: {error}") from None
    return values


def as_yaml(values: dict[str, Any]) -> str:
    """Options as YAML that `read_config` reads back."""
    plain = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if name not in NOT_IN_A_FILE
    }
    return str(_yaml().safe_dump(plain, sort_keys=False, allow_unicode=True)).rstrip()


def _refuse_unknown_flags(parser: Parser, words: Sequence[str]) -> None:
    known = parser._option_string_actions
    for word in words:
        if word == "--":
            return
        flag = word.partition("=")[0]
        is_value = not flag.startswith("-") or flag == "-" or parser._negative_number_matcher.match(flag)
        if not is_value and flag not in known:
            raise UsageError(f"unknown option {flag}: {_closest(flag, known, f'see {parser.prog} --help')}")


def _closest(name: str, known: Collection[str], otherwise: str) -> str:
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else otherwise


def _load_yaml(path: str) -> dict[Any, Any]:
    yaml = _yaml()
    try:
        with open(path, encoding="utf-8") as file:
            found = yaml.safe_load(file)
    except FileNotFoundError:
        raise UsageError(f"the config file must exist, {path} does not: check the path") from None
    except OSError as error:
        raise UsageError(f"the config file must be one that can be read, {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = f"line {mark.line + 1}: {problem}" if mark and problem else " ".join(str(error).split())
        raise UsageError(f"{path} must be YAML, {where}") from error
    if not isinstance(found, dict | None):
        raise UsageError(f"{path} must hold names and values, as max_tests: 5000, got a {type(found).__name__}")
    return found or {}


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise MissingExtraError("configuration files need PyYAML: pip install PyYAML") from error
    return yaml


def _place(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} ..."}.get(str(action.nargs), name)
