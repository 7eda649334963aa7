"""Tables of results, for terminals of at most 100 columns and as Markdown, and the format of numbers in them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from themis.text import one_line, own_stream, printable

if TYPE_CHECKING:
    from rich.console import Console

TABLE_WIDTH = 100
"""Width of tables in a terminal, at most."""
NO_VALUE = "-"
"""Stands for a missing value."""
NUMBER_STARTS = frozenset("0123456789+-<>")
"""First characters of numbers in a table."""
MAX_CELL_LENGTH = 40
"""Columns with longer cells are aligned left even if they are numbers."""


@dataclass(frozen=True)
class Table:
    """A title, columns, rows of text, and notes below them."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: list[str]
    optional: tuple[str, ...] = ()
    """Columns that may be omitted in a narrow terminal, in this order."""
    file: str = "table.md"
    """The file with the complete table."""

    def markdown(self) -> str:
        rules = tuple("---:" if is_right else "---" for is_right in self.is_right())
        lines = [self.columns, rules, *self.rows] if self.columns else []
        table = "\n".join(f"| {' | '.join(map(_as_markdown, line))} |" for line in lines)
        notes = map(_as_markdown, self.notes)
        return "\n\n".join([f"### {_as_markdown(self.title)}", *([table] if table else []), *notes])

    def is_right(self) -> list[bool]:
        """Which columns are aligned right: columns of numbers other than the first, without long cells."""
        columns = list(zip(*self.rows, strict=True)) or [()] * len(self.columns)
        return [
            index > 0
            and max(map(len, cells), default=0) <= MAX_CELL_LENGTH
            and (not any(cells) or any(cell[:1] in NUMBER_STARTS for cell in cells))
            for index, cells in enumerate(columns)
        ]

    def within(self, width: int) -> Table:
        """This table, without as many optional columns as necessary to fit into this width."""
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
    """Text on one line that cannot end a cell or start a tag."""
    return printable(one_line(text)).replace("|", "\\|").replace("<", "&lt;")


def table_console(*, is_silent: bool = False) -> Console:
    """A console of at most 100 columns, and of exactly 100 if the output is not a terminal; `is_silent`: no output."""
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
