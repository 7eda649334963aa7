"""Text that is safe where it goes, since names and messages may come from files that others wrote; numbers in words."""

import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

WIDTH = 80
"""Columns of a line that is printed for people."""
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters other than tab and newline, characters that change the direction of text, and lone surrogates."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Characters at the start of a cell that make spreadsheets evaluate it; the last four are full-width forms."""


def printable(text: str) -> str:
    """The text with an escape such as \\x1b for every character that would control the terminal it is printed to."""
    return text if text.isascii() and text.isprintable() else _CONTROL.sub(_escape, text)


def print_text(text: str = "", *, file: IO[str] | None = None, flush: bool = False) -> None:
    """Print text for people. All text but JSON goes through here, so that no name controls the terminal."""
    stream = own_stream(file or sys.stdout)
    safe, encoding = printable(text), getattr(stream, "encoding", None) or "utf-8"
    print(safe.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=flush)


def print_columns(rows: Sequence[Sequence[str]], left: Sequence[bool], indent: str = "") -> None:
    """Print rows of cells in columns that are as wide as their cells; `left` says which are aligned left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, left, strict=True)
        padded = [cell.ljust(width) if is_left else cell.rjust(width) for cell, width, is_left in cells]
        print_text(indent + "  ".join(padded).rstrip())


def print_json(value: Any) -> None:
    """Print plain data as JSON, for programs."""
    print(json.dumps(value, indent=2, default=str), file=own_stream(sys.stdout))


class ForeignStream:
    """What code of others prints while Themis runs: it goes to stderr, and cannot control the terminal there."""

    def __init__(self, own: IO[str], stderr: IO[str]) -> None:
        """own: the stream in whose place it is, for what Themis itself prints."""
        self.own, self._stderr = own, stderr

    def write(self, text: str) -> int:
        self._stderr.write("\r".join(map(printable, text.split("\r"))))  # progress bars return to the start of a line
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def isatty(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stderr, name)


@contextmanager
def foreign_output_on_stderr() -> Iterator[None]:
    """In this block, only Themis prints to stdout, and what code of others prints is free of control characters."""
    before = sys.stdout, sys.stderr
    stdout, stderr = map(own_stream, before)
    sys.stdout, sys.stderr = ForeignStream(stdout, stderr), ForeignStream(stderr, stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def own_stream(stream: IO[str]) -> IO[str]:
    """The stream that Themis itself prints to."""
    return stream.own if isinstance(stream, ForeignStream) else stream


def one_line(text: str) -> str:
    """The text in one line, with single spaces."""
    return " ".join(text.split())


def wrapped(text: str, indent: int = 0) -> str:
    """The text in lines of at most `WIDTH` columns; all lines but the first of each paragraph are indented."""
    lines = [
        textwrap.fill(line, WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    ]
    return "\n".join(lines)


def percent(share: float, digits: int = 1) -> str:
    """A percentage that is printed as 100 or 0 only if it is exactly that."""
    text = f"{100 * share:.{digits}f}%"
    least = 10.0**-digits
    if share < 1 and text == f"{100:.{digits}f}%":
        return f">{100 - least:.{digits}f}%"
    if share > 0 and text == f"{0:.{digits}f}%":
        return f"<{least:.{digits}f}%"
    return text


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun: "1 layer", "2,000 layers"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def memory_size(n_bytes: float) -> str:
    """Such as 1.5 GiB, or 20 MiB."""
    gib = n_bytes / 2**30
    return f"{gib:.2g} GiB" if gib >= 0.1 else f"{1024 * gib:.2g} MiB"


def duration(seconds: float) -> str:
    """How long something takes, such as about 5 min."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


def split_list(text: str) -> list[str]:
    """The parts of a list, separated by commas outside brackets."""
    parts = [part.strip() for part in re.split(r",(?![^(]*\))", text)]
    return [part for part in parts if part]


def csv_cell(value: Any) -> Any:
    """A cell of a CSV file: text that a spreadsheet would take for a formula gets an apostrophe in front of it."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
