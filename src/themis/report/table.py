"""Tables of results: for a terminal at most 100 columns wide, and as Markdown; and numbers as they appear in them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from themis.text import one_line, own_stream, printable

if TYPE_CHECKING:
    from rich.console import Console

TABLE_WIDTH = 100
"""Columns of a terminal that tables use, at most."""
NONE = "-"
"""Stands for a value that does not exist."""
NUMERIC = frozenset("0123456789+-<>")
"""How numbers begin in a table."""
MAX_CELL = 40
"""Characters of a cell; longer ones are aligned left."""


@dataclass(frozen=True)
class Table:
    """A title, columns, rows of text, and notes below them."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: list[str]
    optional: tuple[str, ...] = ()
    """Columns that a narrow terminal omits, the first one first."""
    file: str = "table.md"
    """Where the complete table is written."""

    def markdown(self) -> str:
        rules = tuple("---:" if is_right else "---" for is_right in self.is_right())
        lines = [self.columns, rules, *self.rows] if self.columns else []
        table = "\n".join(f"| {' | '.join(map(_as_markdown, line))} |" for line in lines)
        notes = map(_as_markdown, self.notes)
        return "\n\n".join([f"### {_as_markdown(self.title)}", *([table] if table else []), *notes])

    def is_right(self) -> list[bool]:
        """Which columns are aligned right: those of numbers, unless they are long lists or sentences."""
        columns = list(zip(*self.rows, strict=True)) or [()] * len(self.columns)
        return [
            index > 0
            and max(map(len, cells), default=0) <= MAX_CELL
            and (not any(cells) or any(cell[:1] in NUMERIC for cell in cells))
            for index, cells in enumerate(columns)
        ]

    def within(self, width: int) -> Table:
        """The same table without as many of its optional columns as it takes to fit."""
        left, columns, rows = list(self.optional), self.columns, self.rows
        while left and sum(max(map(len, column)) + 2 for column in zip(columns, *rows, strict=True)) > width:
            index = columns.index(left.pop(0))
            columns, *rows = [line[:index] + line[index + 1 :] for line in (columns, *rows)]
        omitted = self.optional[: len(self.optional) - len(left)]
        notes = list(self.notes)
        if omitted:
            notes.append(f"Omitted at this width, but in {self.file}: {'; '.join(omitted)}.")
        return Table(self.title, columns, rows, notes, tuple(left), self.file)

    def show(self, console: Console) -> None:
        """Print the table and its notes."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable

        table = self.within(console.width)
        console.print(printable(table.title), style="bold", highlight=False, markup=False)
        if table.columns:
            drawn = RichTable(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
            for name, is_right in zip(table.columns, table.is_right(), strict=True):
                drawn.add_column(printable(name), justify="right" if is_right else "left", overflow="fold")
            for row in table.rows:
                drawn.add_row(*map(printable, row))
            console.print(drawn, markup=False)
        for note in table.notes:
            console.print(printable(note), highlight=False, markup=False)


def _as_markdown(text: str) -> str:
    """Text on one line that neither ends a cell nor starts a tag."""
    return printable(one_line(text)).replace("|", "\\|").replace("<", "&lt;")


def table_console(*, is_silent: bool = False) -> Console:
    """A console of at most 100 columns; exactly 100 if the output is not a terminal. A silent one prints nothing."""
    from rich.console import Console

    console = Console(file=own_stream(sys.stdout), quiet=is_silent)
    console.width = min(console.width, TABLE_WIDTH) if console.is_terminal else TABLE_WIDTH
    return console


def format_count(value: float) -> str:
    """A count, or a mean of counts."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.1f}"


def format_number(value: float, digits: int = 3, *, signed: bool = False) -> str:
    """A rounded number; zero has no sign."""
    text = f"{value:{'+' if signed else ''}.{digits}f}"
    return text if float(text) else text.lstrip("+-")
