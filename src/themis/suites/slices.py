"""Slices: the fault rate by class and by columns of metadata."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from themis.errors import DataError, UsageError
from themis.judge.estimate import Estimate
from themis.reading import open_regular

MOST_VALUES = 12
"""Numbers with more distinct values than this are divided into quarters."""
MOST_NAMES = 100
"""Distinct values of a column of text, beyond which it says nothing about slices."""
LEAST_TESTS = 20
"""Tests that a slice must have to be listed among the worst."""
MAX_BYTES = 1 << 28
CLASS = "class"
"""The column of the labels, or without labels of the clean answers."""
Z2 = 1.959963984540054**2


@dataclass(frozen=True)
class SliceColumn:
    """A column that divides the seeds: its values, and which of them each seed has, -1 for none."""

    name: str
    values: tuple[str, ...]
    position: NDArray[np.int64]
    """`[seeds]`."""

    def counts(self, tests: NDArray[np.int64], faults: NDArray[np.int64]) -> list[list[int]]:
        """Tests and faults of each value, from those of each seed."""
        totals = np.stack([self._sums(tests), self._sums(faults)], 1)
        return [[int(count) for count in row] for row in totals]

    def independent_tests(self, tests: NDArray[np.int64], faults: NDArray[np.int64]) -> list[int]:
        """As many independent tests as would say as much about each value, from the counts of each seed.

        Tests of one seed are alike: the variance of a share is that of the seeds' own counts. Where all tests agree,
        each seed counts once.
        """
        n_tests, n_seeds = self._sums(tests), self._sums((tests > 0).astype(np.int64))
        rate = self._sums(faults) / np.maximum(n_tests, 1)
        gaps = faults - rate[self.position] * tests
        variance = self._sums(gaps**2) * n_seeds / np.maximum(n_seeds - 1, 1)
        agree = (variance == 0) | (n_seeds < 2)
        independent = np.where(agree, n_seeds, rate * (1 - rate) * n_tests**2 / np.where(agree, 1.0, variance))
        return [int(n) for n in np.clip(independent, np.minimum(n_seeds, 1), n_tests).round()]

    def _sums(self, column: NDArray[Any]) -> NDArray[np.float64]:
        """The sum over the seeds of each value."""
        is_known = self.position >= 0
        return np.bincount(self.position[is_known], column[is_known], minlength=len(self.values)).astype(np.float64)


def share(faults: int, tests: int, independent: int | None = None) -> Estimate:
    """A share with its 95% Wilson interval, for as many independent tests; by default, all tests are independent."""
    value, z2 = faults / tests, Z2 / (tests if independent is None else max(independent, 1))
    centre = (value + z2 / 2) / (1 + z2)
    half = float(np.sqrt(z2 * (value * (1 - value) + z2 / 4))) / (1 + z2)
    return Estimate(value, max(0.0, min(value, centre - half)), min(1.0, max(value, centre + half)))


def class_column(numbers: NDArray[np.int64], names: Sequence[str] | None) -> SliceColumn | None:
    """The classes of seeds, from their numbers; None if they have none."""
    known = np.unique(numbers[numbers >= 0])
    if not 2 <= len(known) <= MOST_NAMES:
        return None
    values = tuple(names[k] if names is not None and k < len(names) else str(k) for k in known.tolist())
    position = np.where(numbers >= 0, np.searchsorted(known, numbers), -1)
    return SliceColumn(CLASS, values, position.clip(max=len(known) - 1))


def metadata_columns(metadata: Any, seed_id: NDArray[np.int64]) -> list[SliceColumn]:
    """The columns of metadata for these seeds: a CSV file, or a dict of columns, with one row per input of the data."""
    if metadata is None:
        return []
    if isinstance(metadata, str | Path):
        metadata = _read_csv(Path(metadata))
    if not isinstance(metadata, Mapping):
        raise UsageError(
            f"metadata must be a CSV file or a dict of columns, got {type(metadata).__name__}: write "
            'metadata={"camera": [...]}'
        )
    columns = []
    for name, values in metadata.items():
        column = [None if value is None else value for value in list(values)]
        if len(column) <= int(seed_id.max()):
            raise DataError(
                f"metadata must have one row per input, but column {name!r} has {len(column):,} rows and the data has "
                f"at least {int(seed_id.max()) + 1:,}: add the missing rows"
            )
        made = _column(str(name), [column[k] for k in seed_id.tolist()])
        if made is not None:
            columns.append(made)
    return columns


def _read_csv(path: Path) -> dict[str, list[str]]:
    try:
        with open_regular(path) as binary, TextIOWrapper(binary, "utf-8-sig", newline="") as file:
            if os.fstat(binary.fileno()).st_size > MAX_BYTES:
                limit = f"{MAX_BYTES >> 20} MiB"
                raise DataError(f"metadata must be smaller than {limit}, but {path} is larger: drop columns")
            rows = csv.DictReader(file, strict=True)
            names = rows.fieldnames or []
            table: dict[str, list[str]] = {name: [] for name in names}
            for row in rows:
                for name in names:
                    table[name].append(row[name] or "")
    except FileNotFoundError:
        raise DataError(f"metadata must be an existing CSV file, but {path} does not exist: check the path") from None
    except DataError:
        raise
    except (OSError, ValueError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f"metadata must be a CSV table with a line of column names, but {path} is not: {reason}; replace the file"
        ) from error
    if not table:
        raise DataError(f"metadata must have a line of column names, but {path} is empty")
    return table


def _column(name: str, values: list[Any]) -> SliceColumn | None:
    """A column of metadata; None if it does not divide the seeds into a few slices."""
    missing = [value is None or str(value).strip() == "" for value in values]
    numbers = _numbers([value for value, is_missing in zip(values, missing, strict=True) if not is_missing])
    texts: list[str]
    if numbers is not None and len(np.unique(numbers)) > MOST_VALUES:
        quarters = np.quantile(numbers, (0.25, 0.5, 0.75))
        ends = [numbers.min(), *quarters, numbers.max()]
        texts = [f"{ends[k]:.4g} to {ends[k + 1]:.4g}" for k in range(4)]
        known = iter(np.searchsorted(quarters, numbers, side="left").tolist())
        position = np.array([-1 if is_missing else next(known) for is_missing in missing], dtype=np.int64)
        return SliceColumn(name, tuple(texts), position)
    shown = ["" if is_missing else str(value).strip() for value, is_missing in zip(values, missing, strict=True)]
    texts = sorted({text for text in shown if text}, key=lambda text: (_as_number(text), text))
    if not 2 <= len(texts) <= MOST_NAMES:
        return None
    index = {text: k for k, text in enumerate(texts)}
    return SliceColumn(name, tuple(texts), np.array([index.get(text, -1) for text in shown], dtype=np.int64))


def _numbers(values: list[Any]) -> NDArray[np.float64] | None:
    try:
        numbers = np.array([float(value) for value in values])
    except (TypeError, ValueError):
        return None
    return numbers if len(numbers) and np.isfinite(numbers).all() else None


def _as_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("inf")
