"""Text from files that others wrote cannot control a terminal or a spreadsheet."""

import io
import re
from pathlib import Path

import pytest

from themis.text import csv_cell, print_text, printable

SOURCE = Path(__file__).parents[1] / "src" / "themis"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, é, 猫\n\ttwo lines", "plain text, é, 猫\n\ttwo lines"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("a\rb\x08\x00\x7f\x9b", "a\\x0db\\x08\\x00\\x7f\\x9b"),
        ("\u202eabc\u2066\u200f", "\\u202eabc\\u2066\\u200f"),
        ("\ud800", "\\ud800"),
    ],
)
def test_control_characters_are_shown_as_escapes(text, shown):
    assert printable(text) == shown


def test_text_is_printed_in_any_encoding():
    for encoding, shown in {"utf-8": "猫 \\x1b", "ascii": "\\u732b \\x1b", "latin-1": "\\u732b \\x1b"}.items():
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        print_text("猫 \x1b", file=stream, flush=True)
        assert stream.buffer.getvalue().decode(encoding) == f"{shown}\n"


def test_cells_of_csv_files_are_no_formulas():
    for text in ("=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\rx", "\nx", "\uff1d1"):
        assert csv_cell(text) == f"'{text}"
    for value in ("uniform", "[1, 2]", "", -1, -0.5, None):
        assert csv_cell(value) == value


def test_commands_print_only_safe_text():
    prints = [
        f"{path.relative_to(SOURCE)}: {line.strip()}"
        for path in SOURCE.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"(?<![\w.])print\(", line) and path != SOURCE / "text.py"
    ]
    assert all("json.dumps(" in line for line in prints), prints
