"""Tables with one seed per row and, optionally, a column of labels, such as CSV files.

Tables of numbers are read block by block. Tables with names or empty cells are read by pandas as a whole.
"""

from __future__ import annotations

import csv
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from themis.data.features import find_label, read_frame
from themis.data.files import Numbers, check_disk, check_memory, data_errors, existing_file
from themis.data.rows import held_bytes
from themis.data.seeds import Seeds, from_arrays
from themis.errors import DataError, UsageError, nearest
from themis.progress import advance

SEPARATORS = (",", ";", "\t")
CELLS_AT_ONCE = 1 << 20
"""Cells that are read at a time."""
MAX_LINE_LENGTH = 1 << 24
"""Largest number of characters per line; even a table with a million columns has shorter lines."""


class NotNumbersError(DataError):
    """A table has names or empty cells."""


Block = tuple[Numbers, list[Any] | Numbers]
"""Features `[rows, columns]` and labels of some rows."""


def csv_seeds(path: Path, *, label: str | None = None, drop: str = "") -> Seeds:
    """A CSV table that starts with a line of column names, separated by commas, semicolons or tabs.

    Features are converted to float32 without scaling. If pandas is installed, columns of names become categories, and
    empty cells missing values. label: the column of labels, by default `label`, `y`, `class` or `target`; `?label=`
    for none. Labels that are names become class numbers, in sorted order. drop: columns to leave out, such as
    `?drop=id,date`.
    """
    path = existing_file(path)
    check_disk(3 * path.stat().st_size, str(path))  # a number takes at least two characters
    with data_errors(path, "a CSV table in UTF-8"), path.open(encoding="utf-8-sig", newline="") as file:
        first_line = file.readline(MAX_LINE_LENGTH)
        separator = max(SEPARATORS, key=first_line.count)
        file.seek(0)
        lines = csv.reader(_lines(file, path), delimiter=separator, strict=True)
        columns = Columns(next(lines, []), path, label, drop)
        try:
            return seeds_of_blocks(columns, _csv_blocks(lines, columns))
        except NotNumbersError as error:
            pandas = pandas_for(error)
        check_memory(4 * path.stat().st_size, str(path))
        for cells in lines:
            _check_width(cells, columns, lines.line_num)
        return coded_seeds(pandas.read_csv(path, sep=separator, encoding="utf-8-sig", low_memory=False), columns)


def pandas_for(error: NotNumbersError) -> Any:
    try:
        import pandas  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise DataError(f"{error}; or install pandas to read it as a category or a missing value") from None
    return pandas


def coded_seeds(frame: Any, columns: Columns) -> Seeds:
    """Seeds from the DataFrame of a table with names or empty cells; refuses text, and a few names among numbers."""
    path = columns.path
    frame.columns = columns.names
    labels = None if columns.label is None else frame[columns.label]
    if labels is not None and bool(labels.isna().any()):
        raise columns.no_label(f"row {int(labels.isna().to_numpy().argmax()) + 1}")
    frame = frame[[columns.names[k] for k in columns.features]]
    for name in frame.columns:
        texts = {text for text in frame[name].dropna().unique().tolist() if isinstance(text, str)}
        odd = sorted(text for text in texts if not _is_number(text))
        if odd and len(odd) <= len(texts) / 10:
            row = int((frame[name] == odd[0]).to_numpy().argmax()) + 1
            raise DataError(
                f"{path}, row {row}: column {name!r} must be a finite number, as in most rows, got {odd[0][:40]!r}: "
                f"fix or drop the row, or drop the column with ?drop={name}"
            )
    with data_errors(path, "a table"):
        values, _, features = read_frame(frame, "")
    return from_arrays(values, labels).with_features(features)


class Columns:
    """The columns of a table: which are features, and which one is the label."""

    def __init__(self, names: Sequence[str], path: Path, label: str | None, drop: str) -> None:
        self.path, self.names = path, [name.strip() for name in names]
        if not any(self.names):
            raise DataError(f"{path} must be a table with a line of column names, but it is empty: check the file")
        if all(map(_is_number, self.names)):
            raise DataError(f"{path} must begin with a line of column names, got the numbers {self.names[:3]}: add it")
        name, n = Counter(self.names).most_common(1)[0]
        if n > 1:
            raise DataError(f"{path} must have distinct column names, got {name!r} {n} times: rename them")
        dropped = [name for name in drop.split(",") if name]
        for name in dropped:
            if name not in self.names:
                raise UsageError(f"the column {name!r} must be in {path}: {nearest(name, self.names)}")
        self.label = find_label(self.names, label, str(path), "choose one with ?label=NAME")
        excluded = {*dropped, self.label}
        self.features = [k for k, name in enumerate(self.names) if name not in excluded]
        if not self.features:
            raise DataError(f"{path} must have a column of features, got {self.names}: check ?label= and ?drop=")

    def no_label(self, place: str) -> DataError:
        """The error about a row without a label."""
        return DataError(f"{self.path}, {place}: a row must have a label, but {self.label!r} is empty: fix or drop it")


def seeds_of_blocks(columns: Columns, blocks: Iterator[Block], n_rows: int = 0) -> Seeds:
    """Seeds from blocks of features and labels; a large table is written to an unnamed temporary file.

    n_rows: the number of all rows, 0 if it is unknown.
    """
    labels: list[list[Any] | Numbers] = []
    parts: list[Numbers] = []
    n, width, max_bytes = 0, len(columns.features), held_bytes()
    with ExitStack() as stack:
        file: IO[bytes] | None = None
        for features, block_labels in blocks:
            labels.append(block_labels)
            parts.append(np.ascontiguousarray(features, np.float32))
            n += len(features)
            advance(n, n_rows, "rows")
            if n * width * 4 > max_bytes:
                file = file or stack.enter_context(tempfile.TemporaryFile())
                file.writelines(part.data for part in parts)
                parts = []
        if n == 0:
            raise DataError(f"{columns.path} must hold at least one row below the column names, got none: check it")
        values = np.concatenate(parts) if file is None else np.memmap(file, np.float32, "r", 0, (n, width))
    seeds = from_arrays(values, None if columns.label is None else _read_labels(labels, columns))
    return seeds.with_feature_names([columns.names[k] for k in columns.features])


def _read_labels(blocks: list[list[Any] | Numbers], columns: Columns) -> Numbers:
    """Labels as whole numbers if all are whole, as floats if all are numbers, otherwise names."""
    if all(isinstance(block, np.ndarray) for block in blocks):
        values = np.concatenate(blocks)
    else:
        labels = [label for block in blocks for label in block]
        is_number = [not isinstance(label, str) or _is_number(label) for label in labels]
        if any(is_number) and not all(is_number):
            row = is_number.index(False)
            raise DataError(
                f"{columns.path}, row {row + 1}: labels must be all numbers or all names, got {labels[row]!r} among "
                "numbers: fix the row"
            )
        values = np.array(labels, np.float64 if all(is_number) else None)
        if all(is_number) and not any("." in str(label) for label in labels) and (values == np.rint(values)).all():
            values = values.astype(np.int64)
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        bad = np.flatnonzero(~np.isfinite(values))
        raise DataError(f"{columns.path}, row {bad[0] + 1}: labels must be finite, got {values[bad[0]]}: fix it")
    return values


# CSV


def _lines(file: IO[str], path: Path) -> Iterator[str]:
    while line := file.readline(MAX_LINE_LENGTH):
        if len(line) == MAX_LINE_LENGTH:
            rule = f"{path} must have lines of under {MAX_LINE_LENGTH:,} characters"
            raise DataError(f"{rule}, got a longer one: check it")
        yield line


def _csv_blocks(lines: Any, columns: Columns) -> Iterator[Block]:
    label = None if columns.label is None else columns.names.index(columns.label)
    rows = ((lines.line_num, cells) for cells in lines if cells)  # some lines are empty
    while block := list(islice(rows, max(1, CELLS_AT_ONCE // len(columns.names)))):
        for line, cells in block:
            _check_width(cells, columns, line)
        values = np.array([_numbers(cells, columns, line) for line, cells in block])
        bad = np.argwhere(~(np.abs(values) <= np.finfo(np.float32).max))
        if len(bad):
            row, column = bad[0].tolist()
            raise _not_a_number(columns, block[row][0], columns.features[column], f"{values[row, column]:g}")
        labels = [] if label is None else [cells[label].strip() for _, cells in block]
        if "" in labels:
            raise columns.no_label(f"line {block[labels.index('')][0]}")
        yield values.astype(np.float32), labels


def _check_width(cells: list[str], columns: Columns, line: int) -> None:
    width = len(columns.names)
    if cells and len(cells) != width:
        raise DataError(f"{columns.path}, line {line}: a row must have {width} cells, got {len(cells)}: fix the row")


def _numbers(cells: list[str], columns: Columns, line: int) -> list[float]:
    try:
        if "_" not in "".join(cells):  # float() reads 1_0 as ten
            return [float(cells[k]) for k in columns.features]
    except ValueError:
        pass
    for k in columns.features:
        if not _is_number(cells[k]):
            raise _not_a_number(columns, line, k, cells[k].strip())
    return [float(cells[k]) for k in columns.features]


def _not_a_number(columns: Columns, line: int, column: int, text: str) -> DataError:
    name = columns.names[column]
    got = f"got {text[:40]!r}" if text else "but the cell is empty"
    is_name = text.isprintable() and not text.replace("_", "").isdecimal() and (text == "nan" or not _is_number(text))
    return (NotNumbersError if is_name else DataError)(
        f"{columns.path}, line {line}: column {name!r} must be a finite number, {got}: fix the row, encode the "
        f"column as numbers, write ?label={name} if it is the label, or drop it with ?drop={name}"
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text
