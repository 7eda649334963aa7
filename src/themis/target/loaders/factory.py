"""Calling a user's function given as `module:factory(width=32)`."""

import ast
import importlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from themis.data.maite import has_maite_metadata
from themis.errors import DataError, MissingExtraError, ModelError, UsageError, closest, first_line
from themis.user_code import WHERE, import_named

MAX_SHOWN_NAME = 200
"""Characters of a name that a message shows."""


class Call(NamedTuple):
    """A name and the literal arguments in parentheses after it."""

    name: str
    args: list[Any]
    kwargs: dict[str, Any]


def read_call(text: str, flag: str) -> Call:
    """Parse `name`, `name(3)` or `name(width=32, act='relu')`; the arguments are literals, nothing is evaluated."""
    name, parenthesis, _ = text.partition("(")
    if not parenthesis:
        return Call(text, [], {})
    try:
        call = ast.parse(f"_{text[len(name) :]}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError
        if any(keyword.arg is None for keyword in call.keywords):
            raise ValueError
        args = [ast.literal_eval(argument) for argument in call.args]
        kwargs = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        return Call(name.strip(), args, kwargs)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise UsageError(
            f"--{flag} {_shortened(text)}: arguments must be literal values, such as {name}(width=32, act='relu'): "
            "numbers, quoted text, lists, True, False or None"
        ) from None


def import_package(name: str, install: str = "") -> Any:
    """Import a module of a package that some models need; install: what to install, if not the package itself."""
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(f"this model needs {package}: pip install {install or package}") from error
    except Exception as error:  # for example, because torchvision does not fit this version of torch
        raise MissingExtraError(
            f"this model needs {package}, which cannot be imported ({type(error).__name__}: {first_line(error)}): "
            "install a version of it that fits your PyTorch"
        ) from error


def _shortened(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN_NAME else f"{text[:MAX_SHOWN_NAME]}...")


def _refuse_path(path: Path, function: str, rule: str) -> None:
    """Refuse a path where the name of a module is expected."""
    is_elsewhere = path.parent != Path()
    if is_elsewhere or (path.suffix == ".py" and os.path.isfile(path)):
        place = f", in the folder {path.parent}" * is_elsewhere
        raise UsageError(f"{rule}: write {path.stem}:{function or 'FUNCTION'}{place}")


def call_factory(spec: str, flag: str, others: Iterable[str] = ()) -> Any:
    """Return the result of `module:factory` or `module:factory(arguments)`; `flag` is the option with this value.

    others: prefixes that are allowed instead of a module, such as `images`, for suggestions.
    """
    shown = _shortened(spec)
    name, _, rest = spec.partition(":")
    _refuse_path(Path(name), rest, f"--{flag} must be module:factory, got {shown}")
    attribute, args, kwargs = read_call(rest, flag)
    if not attribute:
        raise UsageError(f"--{flag} must be module:factory, got {shown}: write for instance {name or 'mine'}:make_net")
    failure = ModelError if flag == "model" else DataError
    meant = closest(name, others)
    remedy = WHERE if meant is None else f"did you mean {meant}:{rest}?"
    factory = import_named(name, [attribute], f"--{flag} {shown}", remedy, failure)
    import torch

    if isinstance(factory, torch.nn.Module) or has_maite_metadata(factory) or not callable(factory):
        if args or kwargs:
            raise UsageError(f"--{flag} {shown}: {attribute} is a {type(factory).__name__} and takes no arguments")
        return factory
    try:
        return factory(*args, **kwargs)
    except (Exception, SystemExit) as error:
        raise failure(f"--{flag} {shown} raised {type(error).__name__}: {first_line(error)}") from error
