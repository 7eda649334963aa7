"""Call a function of the user's that is given as `module:factory(width=32)`."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from themis.errors import DataError, ModelError, UsageError, closest, first_line, nearest
from themis.user_code import StandardLibraryError, describe_location, import_named

MOST_SHOWN = 200
"""Characters of a name that a message repeats."""


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


def _shortened(text: str) -> str:
    return repr(text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}...")


def _refuse_path(path: Path, function: str, rule: str) -> None:
    """Refuse the path of a module instead of its name."""
    is_elsewhere = path.parent != Path()
    if is_elsewhere or (path.suffix == ".py" and os.path.isfile(path)):
        place = f", in the folder {path.parent}" * is_elsewhere
        raise UsageError(f"{rule}: write {path.stem}:{function or 'FUNCTION'}{place}")


def call_factory(spec: str, flag: str, others: Iterable[str] = ()) -> Any:
    """Return the result of `module:factory` or `module:factory(arguments)`; `flag` is the option it was given to.

    others: what may stand before the colon instead of a module, such as `images`.
    """
    shown = _shortened(spec)
    name, _, rest = spec.partition(":")
    _refuse_path(Path(name), rest, f"--{flag} must be module:factory, got {shown}")
    attribute, args, kwargs = read_call(rest, flag)
    if not attribute:
        raise UsageError(f"--{flag} must be module:factory, got {shown}: write for instance {name or 'mine'}:make_net")
    failure = ModelError if flag == "model" else DataError
    try:
        factory = import_named(name, [attribute], f"--{flag} {shown}")
    except StandardLibraryError:
        raise
    except ModuleNotFoundError as error:
        meant = closest(name, others) if error.name == name else None
        remedy = "modules are looked up in the environment and then in the working directory"
        if meant is not None:
            remedy = f"did you mean {meant}:{rest}?"
        raise UsageError(f"--{flag} {shown}: {error}; {remedy}") from error
    except AttributeError as error:
        module = sys.modules.get(name)
        known = [key for key in vars(module) if not key.startswith("_")] if module else []
        raise UsageError(f"--{flag} {shown}: {error}: {nearest(attribute, known)}{describe_location(name)}") from error
    except (Exception, SystemExit) as error:  # the user's module may raise anything when it is imported
        raise failure(f"--{flag} {shown}: importing it raised {type(error).__name__}: {first_line(error)}") from error
    import torch

    if isinstance(factory, torch.nn.Module) or not callable(factory):
        if args or kwargs:
            raise UsageError(f"--{flag} {shown}: {attribute} is a {type(factory).__name__} and takes no arguments")
        return factory
    try:
        return factory(*args, **kwargs)
    except (Exception, SystemExit) as error:
        raise failure(f"--{flag} {shown} raised {type(error).__name__}: {first_line(error)}") from error
