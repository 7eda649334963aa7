"""Slices of the seeds, and weights of the seeds in operation, from tables with one row per input."""

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from themis.data.seeds import Seeds, class_numbers
from themis.errors import DataError, UsageError, nearest
from themis.reading import read_regular

MAX_DISTINCT_NUMBERS = 12
"""A column of numbers with more distinct values than this is divided into quarters."""
MAX_SLICES = 100
"""Most distinct values of a column of text that defines slices."""
MAX_TABLE_BYTES = 256 << 20
"""Largest size of a CSV file."""
CLASS_COLUMN = "class"
"""The name of the column of labels or, without labels, of clean answers."""


@dataclass(frozen=True)
class SliceColumn:
    """A column that divides the seeds: its values, and the index of each seed's value, or -1."""

    name: str
    values: tuple[str, ...]
    position: NDArray[np.int64]
    """`[seeds]`."""


def class_column(numbers: NDArray[np.int64], names: Sequence[str] | None) -> SliceColumn | None:
    """The column of classes, from each seed's class number; None if it does not divide the seeds."""
    known = np.unique(numbers[numbers >= 0])
    if not 2 <= len(known) <= MAX_SLICES:
        return None
    values = tuple(names[k] if names is not None and k < len(names) else str(k) for k in known.tolist())
    position = np.where(numbers >= 0, np.searchsorted(known, numbers), -1)
    return SliceColumn(CLASS_COLUMN, values, position.clip(max=len(known) - 1))


def slice_columns(
    text: str,
    seed_id: NDArray[np.int64],
    numbers: NDArray[np.int64],
    names: Sequence[str] | None,
    metadata: Mapping[str, list[Any]],
) -> list[SliceColumn]:
    """The columns named in `class,FIELD,FILE:COLUMN,...` for these seeds.

    numbers, names: the class numbers of the seeds, and the names of classes. metadata: fields of the data itself.
    """
    columns = []
    for name in (part.strip() for part in text.split(",")):
        if name == CLASS_COLUMN:
            made = class_column(numbers, names)
        elif name in metadata:
            made = _column(name, _of_seeds(metadata[name], seed_id, name))
        else:
            made = _column(name.rpartition(":")[2], read_column(name, seed_id, "slice_by"))
        if made is None:
            raise UsageError(
                f"slice_by needs columns with 2 to {MAX_SLICES} values, or numbers, but {name} has fewer or more: name "
                "another column"
            )
        columns.append(made)
    if len({column.name for column in columns}) < len(columns):
        raise UsageError(f"slice_by must name each column once, got {text!r}: leave out the others")
    return columns


def metadata_columns(metadata: Mapping[str, list[Any]], seed_id: NDArray[np.int64]) -> list[SliceColumn]:
    """The columns from fields of the data itself, for these seeds."""
    parts = ((name, _of_seeds(column, seed_id, f"metadata {name!r}")) for name, column in metadata.items())
    made = [_column(name, values) for name, values in parts]
    return [column for column in made if column is not None]


def read_column(text: str, seed_id: NDArray[np.int64], option: str) -> list[str]:
    """The value of each seed in the column `FILE:COLUMN`; `option` is the option with this text, for messages."""
    path, _, name = text.rpartition(":")
    if not path:
        raise UsageError(f"{option} must be FILE:COLUMN, or about class, got {text!r}: write scenes.csv:weather")
    table = _read_csv(path, option)
    if name not in table:
        raise DataError(f"{path} must have the column {name!r}: {nearest(name, filter(None, table))}")
    return [value.strip() for value in _of_seeds(table[name], seed_id, path)]


def _of_seeds(column: list[Any], seed_id: NDArray[np.int64], name: str) -> list[Any]:
    """The values of some seeds in a column with one row per input of the data."""
    n = int(seed_id.max(initial=-1)) + 1
    if len(column) < n:
        raise DataError(f"{name} must have a row per input, but has {len(column):,} for at least {n:,}: add the others")
    return [column[k] for k in seed_id.tolist()]


def _read_csv(path: str | Path, option: str) -> dict[str, list[str]]:
    try:
        content = read_regular(path, MAX_TABLE_BYTES).decode("utf-8-sig")
        rows = csv.DictReader(StringIO(content, newline=""), strict=True)
        names = rows.fieldnames or []
        table: dict[str, list[str]] = {name: [] for name in names}
        for row in rows:
            for name in names:
                table[name].append(row[name] or "")
        if not table:
            raise ValueError("it is empty")
    except (OSError, ValueError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f"{option} must name a CSV table with a line of column names, but {path} is not: {reason}; replace it"
        ) from error
    return table


def _column(name: str, values: list[Any]) -> SliceColumn | None:
    """A column of metadata; None if it does not divide the seeds into a few slices."""
    shown = list(map(_shown, values))
    numbers = np.array([_as_number(text) if text else np.nan for text in shown])
    is_known = ~np.isnan(numbers)
    if np.isfinite(numbers[is_known]).all() and len(np.unique(numbers[is_known])) > MAX_DISTINCT_NUMBERS:
        ends = np.quantile(numbers[is_known], (0, 0.25, 0.5, 0.75, 1))
        ranges = tuple(f"{low:.4g} to {high:.4g}" for low, high in pairwise(ends))
        return SliceColumn(name, ranges, np.where(is_known, np.searchsorted(ends[1:4], numbers, side="left"), -1))
    texts = sorted(set(shown) - {""}, key=lambda text: (_as_number(text), text))
    if not 2 <= len(texts) <= MAX_SLICES:
        return None
    index = {text: k for k, text in enumerate(texts)}
    return SliceColumn(name, tuple(texts), np.array([index.get(text, -1) for text in shown], dtype=np.int64))


def _shown(value: Any) -> str:
    return "" if value is None else str(value).strip()


def _as_number(text: str) -> float:
    """The number in a text, or infinity if there is none."""
    try:
        number = float(text)
    except ValueError:
        return float("inf")
    return float("inf") if np.isnan(number) else number


def read_seed_weights(text: str, seeds: Seeds) -> NDArray[np.float64]:
    """The weight of each seed `[seeds]`, from `FILE:COLUMN`, `FILE:COLUMN=VALUE:SHARE,...` or `class=NAME:SHARE,...`.

    Shares are those of inputs in operation; the seeds with one value of the column share its weight equally.
    """
    column, has_shares, shares = text.partition("=")
    values = _classes(seeds) if column == CLASS_COLUMN else read_column(column, seeds.seed_id.numpy(), "seed_weights")
    if not has_shares and column == CLASS_COLUMN:
        raise UsageError("seed_weights by class must have the share of each, got none: write class=cat:0.7,dog:0.3")
    if not has_shares:
        try:
            weights = np.array([float(value) for value in values])
        except ValueError as error:
            raise DataError(f"seed_weights: column {column} must hold numbers, but it does not: {error}") from error
    else:
        weights = _spread(_read_shares(shares), values)
    if not np.isfinite(weights).all() or weights.min(initial=0) < 0 or not weights.any():
        raise DataError(
            f"seed_weights must be 0 or more, not all 0, got {weights.min():g} to {weights.max():g}: correct {column}"
        )
    return weights


def _spread(shares: dict[str, float], values: list[str]) -> NDArray[np.float64]:
    """The share of each value, divided among its seeds; seeds of other values do not occur."""
    counts = Counter(values)
    for value in shares:
        if value not in counts:
            raise UsageError(f"seed_weights: {value!r} must be a value of a seed: {nearest(value, counts)}")
    return np.array([shares.get(value, 0.0) / counts[value] for value in values])


def _read_shares(text: str) -> dict[str, float]:
    try:
        parts = [part.rpartition(":") for part in text.split(",")]
        return {value.strip(): float(share) for value, _, share in parts}
    except ValueError:
        raise UsageError(f"seed_weights needs VALUE:SHARE after the =, got {text!r}: write cat:0.7,dog:0.3") from None


def _classes(seeds: Seeds) -> list[str]:
    numbers = class_numbers(seeds.labels, len(seeds)).tolist()
    if min(numbers, default=-1) < 0:
        raise UsageError("seed_weights by class needs seeds with a class each, but some have none: name a column")
    return [seeds.classes[k] if seeds.classes and k < len(seeds.classes) else str(k) for k in numbers]
