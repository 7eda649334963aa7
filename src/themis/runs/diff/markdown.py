"""Text as Markdown: what users named is shown as it is, never interpreted as markup."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from themis.text import one_line, printable

_SPECIAL = re.compile(r"([\\`*_\[\]<>#|~&])")


def escape(text: str) -> str:
    """Text that renders as it is written, on one line."""
    return _SPECIAL.sub(r"\\\1", printable(one_line(str(text))))


def code(text: str) -> str:
    """Text in a code span; a bar in it would end the cell of a table."""
    plain = printable(one_line(str(text)))
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", plain)), default=0))
    space = " " if plain.startswith("`") or plain.endswith("`") else ""
    return f"{ticks}{space}{plain}{space}{ticks}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [
        f"| {' | '.join(map(escape, head))} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(map(escape, row))} |" for row in rows),
    ]
