"""Errors a user can act on: each message states the rule, the value that broke it and the remedy."""

from __future__ import annotations

from collections.abc import Iterable


class ThemisError(Exception):
    """Anything Themis refuses or cannot go on with; catch this one to catch them all."""


class UsageError(ThemisError, ValueError):
    """An argument breaks its rule."""


class DataError(ThemisError, ValueError):
    """The data does not fit: empty, outside the bounds, labels that do not match the outputs."""


class ModelError(ThemisError, RuntimeError):
    """The model failed: it raised, gave values that are not finite, or an output Themis cannot read."""


class StoreError(ThemisError, OSError):
    """A run folder cannot be written or read."""


class MissingExtraError(ThemisError, ImportError):
    """An optional package is needed for what was asked."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A remedy for an unknown name: the closest known one, then all of them."""
    from difflib import get_close_matches

    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(names)}"
