"""Readers of tables: CSV and Parquet files with one seed per row and, optionally, a column of labels.

Tables of numbers are read block by block. Those with names or empty cells are read by pandas, as a whole.
"""

from __future__ import annotations

import csv
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np

from themis.data.features import LABEL_NAMES, number_labels, read_frame
from themis.data.files import Numbers, check_disk, check_memory, data_errors, existing_file, required_path
from themis.data.rows import held_bytes
from themis.data.seeds import Seeds, from_arrays
from themis.errors import NO_TEXT, DataError, MissingExtraError, UsageError, nearest
from themis.progress import advance

SEPARATORS = (",", ";", "\t")
MAX_LINE = 1 << 24
"""Characters per line at most: even a table of a million columns has shorter lines."""
MAX_WORDS = 5
"""Words of a name; text has more."""


class NotNumbersError(DataError):
    """A table has names or empty cells."""


Block = tuple[Numbers, list[Any] | Numbers]
"""Features `[rows, columns]` and labels of some rows."""


def csv_seeds(path: Path | None = None, *, label: str | None = None, drop: str = "") -> Seeds:
    """A CSV table that starts with a line of column names, separated by commas, semicolons or tabs.

    Features are converted to float32 and not scaled; columns of names become categories, and empty cells are missing
    values, if pandas is installed. label: the column of labels, by default `label`, `y`, `class` or `target`;
    `?label=` for none. Labels that are names become class numbers, in the order of the names. drop: columns to leave
    out, such as `?drop=id,date`.
    """
    path = existing_file(required_path(path, "csv"))
    check_disk(3 * path.stat().st_size, str(path))  # a number takes at least two characters
    with data_errors(path, "a CSV table in UTF-8"), path.open(encoding="utf-8-sig", newline="") as file:
        first_line = file.readline(MAX_LINE)
        separator = max(SEPARATORS, key=first_line.count)
        file.seek(0)
        lines = csv.reader(_lines(file, path), delimiter=separator, strict=True)
        columns = Columns(next(lines, []), path, label, drop)
        try:
            return _seeds(path, columns, _csv_blocks(lines, columns))
        except NotNumbersError as error:
            pandas = _pandas(error)
        check_memory(4 * path.stat().st_size, str(path))
        for cells in lines:
            _check_width(cells, columns, lines.line_num)
        return _coded_seeds(pandas.read_csv(path, sep=separator, encoding="utf-8-sig", low_memory=False), columns)


def parquet_seeds(path: Path | None = None, *, label: str | None = None, drop: str = "") -> Seeds:
    """A Parquet table; label and drop as for CSV."""
    path = existing_file(required_path(path, "parquet"))
    try:
        from pyarrow import parquet  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise MissingExtraError('reading Parquet needs pyarrow: pip install "themis-dl[tables]"') from error
    with data_errors(path, "a Parquet table"), parquet.ParquetFile(path) as table:
        columns = Columns(table.schema_arrow.names, path, label, drop)
        check_disk(table.metadata.num_rows * 4 * len(columns.features), str(path))
        check_memory(max(_group_bytes(table.metadata), default=0), f"{path}, a row group")
        try:
            return _seeds(path, columns, _parquet_blocks(table, columns), table.metadata.num_rows)
        except NotNumbersError as error:
            _pandas(error)
        check_memory(2 * sum(_group_bytes(table.metadata)), str(path))
        return _coded_seeds(table.read().to_pandas(), columns)


def _pandas(error: NotNumbersError) -> Any:
    try:
        import pandas  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise DataError(f"{error}; or install pandas to read it as a category or a missing value") from None
    return pandas


def _coded_seeds(frame: Any, columns: Columns) -> Seeds:
    """Seeds from a DataFrame of a table with names or empty cells; refuses text, and single names among numbers."""
    path = columns.path
    frame.columns = columns.names
    labels = None if columns.label is None else frame[columns.label]
    if labels is not None and bool(labels.isna().any()):
        row = int(labels.isna().to_numpy().argmax()) + 1
        raise DataError(
            f"{path}, row {row}: a row must have a label, but {columns.label!r} is empty: fix or drop the row"
        )
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
        if odd and max(len(text.split()) for text in odd) > MAX_WORDS:
            raise DataError(
                f"{path}: column {name!r} must be a number or a name, got {odd[0][:40]!r}: {NO_TEXT}, or drop "
                f"the column with ?drop={name}"
            )
    with data_errors(path, "a table"):
        values, _, features = read_frame(frame, "")
    numbers, classes = (None, None) if labels is None else number_labels(labels)
    return from_arrays(values, numbers).with_classes(classes).with_features(features)


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
        for name in (*dropped, *([label] if label else [])):
            if name not in self.names:
                raise UsageError(f"the column {name!r} must be in {path}: {nearest(name, self.names)}")
        self.label = self._find_label(label)
        excluded = {*dropped, self.label}
        self.features = [k for k, name in enumerate(self.names) if name not in excluded]
        if not self.features:
            raise DataError(f"{path} must have a column of features, got {self.names}: check ?label= and ?drop=")

    def _find_label(self, label: str | None) -> str | None:
        if label is not None:
            return label or None
        candidates = [name for name in self.names if name.lower() in LABEL_NAMES]
        if len(candidates) > 1:
            raise DataError(
                f"{self.path} must have one column of labels, got {candidates}: choose one with ?label={candidates[0]}"
            )
        return candidates[0] if candidates else None


def _seeds(path: Path, columns: Columns, blocks: Iterator[Block], n_rows: int = 0) -> Seeds:
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
            raise DataError(f"{path} must hold at least one row below the column names, got none: check the file")
        values = np.concatenate(parts) if file is None else np.memmap(file, np.float32, "r", 0, (n, width))
    numbers, classes = None, None
    if columns.label is not None and all(isinstance(block, np.ndarray) for block in labels):
        numbers = _numbers_of(np.concatenate(labels), columns)
    elif columns.label is not None:
        numbers, classes = _class_numbers([label for block in labels for label in block], columns)
    return (
        from_arrays(values, numbers)
        .with_classes(classes)
        .with_feature_names([columns.names[k] for k in columns.features])
    )


def _class_numbers(labels: list[Any], columns: Columns) -> tuple[Numbers, list[str] | None]:
    """Labels as class numbers if all are whole, as floats if all are numbers, otherwise numbered by sorted name."""
    is_number = [not isinstance(label, str) or _is_number(label) for label in labels]
    if all(is_number):
        numbers = _numbers_of(np.array([float(label) for label in labels]), columns)
        is_whole = all(isinstance(label, int) or (isinstance(label, str) and "." not in label) for label in labels)
        is_class = is_whole and bool((numbers == np.rint(numbers)).all())
        return numbers.astype(np.int64) if is_class else numbers, None
    if any(is_number):
        row = is_number.index(False)
        raise DataError(
            f"{columns.path}, row {row + 1}: labels must be all numbers or all names, got {labels[row]!r} among "
            "numbers: "
            "fix the row"
        )
    names, numbered = np.unique(np.array(labels), return_inverse=True)
    return numbered, names.tolist()


def _numbers_of(labels: Numbers, columns: Columns) -> Numbers:
    """Labels that are numbers: whole ones as class numbers, others as floats, all of which must be finite."""
    if labels.dtype.kind in "iub":
        return labels.astype(np.int64)
    bad = np.flatnonzero(~np.isfinite(labels))
    if len(bad):
        raise DataError(
            f"{columns.path}, row {bad[0] + 1}: the label must be finite, got {labels[bad[0]]}: fix or drop it"
        )
    return labels.astype(np.float64)


# CSV


def _lines(file: IO[str], path: Path) -> Iterator[str]:
    while line := file.readline(MAX_LINE):
        if len(line) == MAX_LINE:
            raise DataError(
                f"{path} must have lines of under {MAX_LINE:,} characters, got a longer one: check the file"
            )
        yield line


def _csv_blocks(lines: Any, columns: Columns) -> Iterator[Block]:
    width = len(columns.names)
    label = None if columns.label is None else columns.names.index(columns.label)
    size = max(1, (1 << 20) // width)
    features: list[list[float]] = []
    labels: list[str] = []
    line_numbers: list[int] = []
    for cells in lines:
        if not cells:
            continue  # an empty line
        _check_width(cells, columns, lines.line_num)
        features.append(_numbers(cells, columns, lines.line_num))
        line_numbers.append(lines.line_num)
        if label is not None:
            labels.append(cells[label].strip())
            if not labels[-1]:
                raise DataError(
                    f"{columns.path}, line {lines.line_num}: a row must have a label, but {columns.label!r} is empty: "
                    "fix or drop the row"
                )
        if len(features) == size:
            yield _block(features, line_numbers, columns), labels
            features, labels, line_numbers = [], [], []
    if features:
        yield _block(features, line_numbers, columns), labels


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


def _block(features: list[list[float]], line_numbers: list[int], columns: Columns) -> Numbers:
    values = np.array(features)
    bad = np.argwhere(~(np.abs(values) <= np.finfo(np.float32).max))
    if len(bad):
        row, column = bad[0].tolist()
        raise _not_a_number(columns, line_numbers[row], columns.features[column], f"{features[row][column]:g}")
    return values.astype(np.float32)


def _not_a_number(columns: Columns, line: int, column: int, text: str) -> DataError:
    name = columns.names[column]
    if len(text.split()) > 2:
        remedy = NO_TEXT
    elif _is_number(text) or not any(map(str.isalpha, text)):
        remedy = "fix or drop the row"
    else:
        is_label = f"write ?label={name} if it is the label, " if columns.label is None else ""
        remedy = f"{is_label}encode the column as numbers"
    got = f"got {text[:40]!r}" if text else "but the cell is empty"
    is_name = text.isprintable() and not text.replace("_", "").isdecimal() and (text == "nan" or not _is_number(text))
    return (NotNumbersError if is_name else DataError)(
        f"{columns.path}, line {line}: column {name!r} must be a finite number, {got}: "
        f"{remedy}, or drop the column with ?drop={name}"
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


# Parquet


def _parquet_blocks(table: Any, columns: Columns) -> Iterator[Block]:
    from pyarrow import types

    names = [columns.names[k] for k in columns.features]
    fields = table.schema_arrow
    for k in columns.features:
        kind = fields.field(k).type
        if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
            is_name = types.is_string(kind) or types.is_large_string(kind) or types.is_dictionary(kind)
            raise (NotNumbersError if is_name else DataError)(
                f"{columns.path}: column {columns.names[k]!r} must be numbers, but it is {kind}: leave it out with "
                f"?drop={columns.names[k]}"
            )
    requested = [*names, *([columns.label] if columns.label is not None else [])]
    first = 0
    for batch in table.iter_batches(max(1, (1 << 20) // len(requested)), columns=requested):
        for name in requested:
            if batch.column(name).null_count:
                row = first + batch.column(name).is_null().to_pylist().index(True) + 1
                raise (DataError if name == columns.label else NotNumbersError)(
                    f"{columns.path}, row {row}: column {name!r} must have a value, but it is empty: fix or drop the "
                    "row"
                )
        features = np.empty((batch.num_rows, len(names)), np.float32)
        for k, name in enumerate(names):
            with np.errstate(over="ignore"):
                features[:, k] = batch.column(name).to_numpy(zero_copy_only=False)
        bad = np.argwhere(~np.isfinite(features))
        if len(bad):
            row, name = first + int(bad[0][0]) + 1, names[int(bad[0][1])]
            raise NotNumbersError(
                f"{columns.path}, row {row}: column {name!r} must be a finite number, but it is not: fix or drop the "
                "row"
            )
        labels: Any = [] if columns.label is None else batch.column(columns.label)
        if columns.label is not None and (types.is_integer(labels.type) or types.is_floating(labels.type)):
            labels = labels.to_numpy(zero_copy_only=False)
        elif columns.label is not None:
            labels = labels.to_pylist()
        if isinstance(labels, list) and labels and not isinstance(labels[0], str | int | float):
            raise DataError(
                f"{columns.path}: labels must be numbers or names, but {columns.label!r} holds "
                f"{type(labels[0]).__name__}: choose another column with ?label="
            )
        yield features, labels
        first += batch.num_rows


def _group_bytes(metadata: Any) -> Iterator[int]:
    return (metadata.row_group(k).total_byte_size for k in range(metadata.num_row_groups))
