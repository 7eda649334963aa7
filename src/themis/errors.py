"""Errors that a user can act on: each message states the rule, the value that breaks it, and the remedy."""

from __future__ import annotations

from collections.abc import Iterable

NO_TEXT = (
    "text is not supported; to test the rest of a language model, give the embeddings of the tokens as inputs [tokens, "
    "features], and a module that takes them"
)
"""What to say when strings or token ids arrive."""


class ThemisError(Exception):
    """Base class of all errors that Themis raises on purpose."""


class UsageError(ThemisError, ValueError):
    """An argument is invalid."""


class DataError(ThemisError, ValueError):
    """The data is invalid: empty, outside the bounds, or with labels that do not match the outputs."""


class ModelError(ThemisError, RuntimeError):
    """The model failed: it raised, returned values that are not finite, or returned an output Themis cannot read."""


class StoreError(ThemisError, OSError):
    """A run folder cannot be written or read."""


class MissingExtraError(ThemisError, ImportError):
    """An optional package is required but not installed."""


N_KNOWN = 50
"""Known names that a message lists at most: a table may have thousands of columns."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a remedy for an unknown name: the closest known name, then the known names."""
    names = sorted(known)
    close = closest(name, names)
    hint = "" if close is None else f"did you mean {close!r}? "
    return f"{hint}known: {', '.join(names[:N_KNOWN])}{', ...' * (len(names) > N_KNOWN)}"


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that an unknown one is probably meant for, if there is one."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, known, n=1)), None)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
