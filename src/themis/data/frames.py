"""Seeds from a pandas or polars DataFrame: its columns are features, and one of them may be the label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from themis.data.features import Features
from themis.data.rows import Numbers
from themis.errors import DataError, UsageError, nearest

LIBRARIES = ("pandas", "polars")
LABEL_NAMES = ("label", "y", "class", "target")
"""Columns that are labels unless the user names another one, in capital or small letters."""


def is_frame(data: Any) -> bool:
    """Whether an object is a DataFrame of pandas or polars; neither library is imported to tell."""
    return _is_of(data, "DataFrame", "LazyFrame")


def is_series(data: Any) -> bool:
    """Whether an object is a column of a DataFrame."""
    return _is_of(data, "Series", "Index")


def read_frame(frame: Any, label: str | None = None) -> tuple[Numbers, Any, Features]:
    """The features `[rows, features]` of a DataFrame, the values of its label column or None, and their description.

    label: the column of labels, by default `label`, `y`, `class` or `target`. The range of a feature is that of its
    column; boolean columns are binary, integer columns are integers, and floating-point columns are numbers.
    """
    if type(frame).__name__ == "LazyFrame":
        raise DataError("the data must be a DataFrame, got a LazyFrame: call collect() first")
    names = [str(name) for name in frame.columns]
    if len(set(names)) < len(names):
        raise DataError(f"a DataFrame must have distinct column names, got {names[:10]}: rename them")
    if label is not None and label not in names:
        raise UsageError(f"the label column {label!r} must be in the DataFrame: {nearest(label, names)}")
    if label is None:
        found = [name for name in names if name.lower() in LABEL_NAMES]
        if len(found) > 1:
            raise DataError(
                f"a DataFrame must have one label column, got {found}: pass (frame, {found[0]!r}) to choose"
            )
        label = found[0] if found else None
    columns = dict(zip(names, frame.columns, strict=True))
    labels = None if label is None else np.asarray(frame[columns.pop(label)])
    if not columns or not len(frame):
        raise DataError(f"a DataFrame must have rows and a column of features, got {list(frame.shape)}")
    arrays = [_numbers(np.asarray(frame[column]), name) for name, column in columns.items()]
    values = np.stack([array.astype(np.float32) for array in arrays], 1)
    _refuse_missing(values, list(columns))
    return values, labels, _described(values, list(columns), [array.dtype.kind == "f" for array in arrays])


def number_labels(labels: Any) -> tuple[Numbers, list[str] | None]:
    """Labels as numbers, and the names of the classes if they are names, which are numbered in sorted order."""
    array = np.asarray(labels)
    if array.dtype.kind in "biuf":
        return array.astype(np.int64) if array.dtype.kind == "b" else array, None
    values = array.tolist()
    if all(isinstance(value, str) for value in values):
        names, numbers = np.unique(np.array(values), return_inverse=True)
        return numbers, [str(name) for name in names]
    try:
        return array.astype(np.float64), None
    except (TypeError, ValueError):
        odd = next(value for value in values if not isinstance(value, str))
        raise DataError(f"labels must be all numbers or all names, got {odd!r} among names: fix the rows") from None


def _is_of(data: Any, *names: str) -> bool:
    kind = type(data)
    return kind.__name__ in names and kind.__module__.partition(".")[0] in LIBRARIES


def _numbers(array: Numbers, name: str) -> Numbers:
    if array.dtype.kind in "biuf":
        return array
    try:
        return array.astype(np.float64)  # nullable columns are objects
    except (TypeError, ValueError):
        raise DataError(
            f"column {name!r} of the DataFrame must be numbers, got {array.dtype} such as {array[0]!r}: encode it as "
            "numbers, or drop it"
        ) from None


def _refuse_missing(values: Numbers, names: Sequence[str]) -> None:
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        row, column = bad[0].tolist()
        raise DataError(
            f"column {names[column]!r} of the DataFrame must hold finite numbers, but row {row} has none: fill or drop "
            "it"
        )


def _described(values: Numbers, names: Sequence[str], is_float: Sequence[bool]) -> Features:
    """Features by the type of their columns; 0 and 1 are binary in every type."""
    features = Features.of(values, names)
    floats = [
        name for name, flag, kind in zip(names, is_float, features.kind, strict=True) if flag and kind == "integer"
    ]
    rules = [(name, {"kind": "number", "low": None, "high": None, "change": None}) for name in floats]
    return features.with_rules(rules) if rules else features
