"""Errors and warnings that a user can act on: a message states the rule, the value that breaks it, and the remedy."""

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

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


@contextmanager
def needs_extra(extra: str, need: str) -> Iterator[None]:
    """In this block, say how to install the extra with an optional package that cannot be imported."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(f'{need}: pip install "themis-dl[{extra}]"') from error


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


def warn(text: str) -> None:
    """Warn at the line of the user that called Themis; on the command line, at a line of the command."""
    place = sys._getframe(1)
    frame: FrameType | None = place
    while frame is not None and not _is_in(frame, "themis.cli"):
        caller = frame.f_back
        is_own = _is_in(frame, "themis", "themis_integrations")
        if caller is not None and is_own and not _is_in(caller, "concurrent.futures"):  # its threads
            place = caller
        frame = caller
    module, registry = place.f_globals.get("__name__"), place.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, RuntimeWarning, place.f_code.co_filename, place.f_lineno, module, registry)


def _is_in(frame: FrameType, *packages: str) -> bool:
    return f"{frame.f_globals.get('__name__')}.".startswith(tuple(f"{package}." for package in packages))
