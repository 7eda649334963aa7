"""`module:factory(width=32)`: what a function of the user's makes."""

from __future__ import annotations

import ast
import importlib
import sys
from typing import Any, NamedTuple

from themis.errors import DataError, ModelError, UsageError, nearest


class Call(NamedTuple):
    """A name and the literal arguments written after it in brackets."""

    name: str
    args: list[Any]
    kwargs: dict[str, Any]


def read_call(text: str, what: str) -> Call:
    """`name`, `name(3)` or `name(width=32, act='relu')`; values are literals, nothing is evaluated."""
    name, bracket, _ = text.partition("(")
    if not bracket:
        return Call(text, [], {})
    try:
        call = ast.parse(f"_{text[len(name) :]}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError
        if any(each.arg is None for each in call.keywords):
            raise ValueError
        args = [ast.literal_eval(each) for each in call.args]
        return Call(name.strip(), args, {str(each.arg): ast.literal_eval(each.value) for each in call.keywords})
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise UsageError(
            f"--{what} {text!r}: what stands in brackets must be literal values, as {name}(width=32, act='relu'): "
            "numbers, quoted text, lists, True, False or None"
        ) from None


def call_factory(spec: str, what: str) -> Any:
    """What `module:factory` or `module:factory(arguments)` makes; `what` is the option it was given to."""
    name, _, rest = spec.partition(":")
    attribute, args, kwargs = read_call(rest, what)
    if not attribute:
        raise UsageError(f"--{what} must be module:factory, got {spec!r}: write for instance mymodels:make_net")
    failure = ModelError if what == "model" else DataError
    try:
        made = getattr(importlib.import_module(name), attribute)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--{what} {spec!r}: {error}; modules are looked up in the working directory and the environment"
        ) from error
    except AttributeError as error:
        module = sys.modules.get(name)
        known = [each for each in vars(module) if not each.startswith("_")] if module else []
        raise UsageError(f"--{what} {spec!r}: {error}: {nearest(attribute, known)}") from error
    except (Exception, SystemExit) as error:  # whatever the user's module does when it is imported
        raise failure(f"--{what} {spec!r}: importing it raised {type(error).__name__}: {first_line(error)}") from error
    import torch

    if isinstance(made, torch.nn.Module) or not callable(made):
        if args or kwargs:
            raise UsageError(f"--{what} {spec!r}: {attribute} takes no arguments, it is a {type(made).__name__}")
        return made
    try:
        return made(*args, **kwargs)
    except (Exception, SystemExit) as error:
        raise failure(f"--{what} {spec!r} raised {type(error).__name__}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
