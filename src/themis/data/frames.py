"""Seeds from a pandas or polars DataFrame: its columns are features, and one of them may be the label."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from themis.data.features import Features
from themis.data.files import Numbers
from themis.errors import DataError, UsageError, nearest

LIBRARIES = ("pandas", "polars")
LABEL_NAMES = ("label", "y", "class", "target")
"""Columns that are labels unless the user names another one, in capital or small letters."""
BOOLEANS = ("bool", "boolean", "Boolean")
LISTING = ("category", "Categorical", "Enum")
"""Types of columns of categories, in pandas and polars."""
MAX_CATEGORIES = 1000
"""Distinct names that a column may have; text has more."""


def is_frame(data: Any) -> bool:
    """Whether an object is a DataFrame of pandas or polars; neither library is imported to tell."""
    return _is_of(data, "DataFrame", "LazyFrame")


def is_series(data: Any) -> bool:
    """Whether an object is a column of a DataFrame."""
    return _is_of(data, "Series", "Index")


class Column(NamedTuple):
    """A column of a DataFrame, and how the inputs code it."""

    name: str
    type: str
    values: tuple[Any, ...] | None = None
    """The values that the codes of a category stand for; None is a missing one."""
    categories: tuple[Any, ...] | None = None
    """All values that the type of the column allows, if it lists them."""
    is_ordered: bool = False
    missing: int | None = None
    """The feature that is 1 where a number is missing."""
    has_none: bool = False
    """Whether a missing value is None rather than NaN."""


@dataclass(frozen=True)
class Coding:
    """How inputs `[rows, features]` become rows of the user's DataFrame, which has names, missing values or booleans.

    A category is the number of its value. A number that may be missing has a binary feature of its own.
    """

    library: str
    columns: tuple[Column, ...]

    @property
    def odd_column(self) -> Column | None:
        """The first column that is not of numbers alone."""
        odd = (column for column in self.columns if column.values is not None or column.missing is not None)
        return next(odd, None)

    def frame(self, inputs: Numbers) -> Any:
        """Rows as a DataFrame."""
        library: Any = importlib.import_module(self.library)
        series = _pandas_series if self.library == "pandas" else _polars_series
        return library.DataFrame(
            {column.name: series(library, column, inputs, k) for k, column in enumerate(self.columns)}
        )

    def as_dict(self) -> dict[str, Any]:
        """What a run records."""
        return {"library": self.library, "columns": [column._asdict() for column in self.columns]}

    @staticmethod
    def recorded(record: dict[str, Any]) -> Coding:
        """The coding that a run recorded."""

        def column(fields: dict[str, Any]) -> Column:
            values: Any = {name: tuple(each) if isinstance(each, list) else each for name, each in fields.items()}
            return Column(**values)

        return Coding(record["library"], tuple(map(column, record["columns"])))


def read_frame(frame: Any, label: str | None = None) -> tuple[Numbers, Any, Features]:
    """The features `[rows, features]` of a DataFrame, the values of its label column or None, and their description.

    label: the column of labels, by default `label`, `y`, `class` or `target`; "" for none. The range of a feature is
    that of its column; boolean columns are binary, integer columns are integers, floating-point columns are numbers,
    and others are categories. Missing numbers are the median, and a binary feature tells that they are missing.
    """
    if type(frame).__name__ == "LazyFrame":
        raise DataError("the data must be a DataFrame, got a LazyFrame: call collect() first")
    names = [str(name) for name in frame.columns]
    if len(set(names)) < len(names):
        raise DataError(f"a DataFrame must have distinct column names, got {names[:10]}: rename them")
    if label and label not in names:
        raise UsageError(f"the label column {label!r} must be in the DataFrame: {nearest(label, names)}")
    if label is None:
        found = [name for name in names if name.lower() in LABEL_NAMES]
        if len(found) > 1:
            raise DataError(
                f"a DataFrame must have one label column, got {found}: pass (frame, {found[0]!r}) to choose"
            )
        label = found[0] if found else None
    columns = dict(zip(names, frame.columns, strict=True))
    labels = np.asarray(frame[columns.pop(label)]) if label else None
    if not columns or not len(frame):
        raise DataError(f"a DataFrame must have rows and a column of features, got {list(frame.shape)}")
    arrays, read = [], []
    gaps: list[tuple[str, Numbers]] = []
    for name, column in columns.items():
        numbers, known, is_missing = _read_column(frame[column], name)
        if is_missing is not None:
            known = known._replace(missing=len(columns) + len(gaps))
            gaps.append((f"{name} is missing", is_missing))
        arrays.append(numbers)
        read.append(known)
    with np.errstate(over="ignore"):
        values = np.stack([array.astype(np.float32) for array in (*arrays, *(gap for _, gap in gaps))], 1)
    _refuse_infinite(values, list(columns))
    features = _described(values, [*columns, *(name for name, _ in gaps)], arrays, read)
    is_coded = any(known.values is not None or known.missing is not None or known.type in BOOLEANS for known in read)
    coding = Coding(_library(frame), tuple(read)) if is_coded else None
    return values, labels, replace(features, coding=coding)


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


def _library(data: Any) -> str:
    return type(data).__module__.partition(".")[0]


def _read_column(series: Any, name: str) -> tuple[Numbers, Column, Numbers | None]:
    """The numbers or codes of a column, what they stand for, and which numbers are missing, or None if none is."""
    kind = _kind(series.dtype)
    if kind is None:
        raise DataError(
            f"column {name!r} of the DataFrame must be numbers, booleans or names, got {series.dtype}: encode it as "
            "numbers, or drop it"
        )
    is_missing = np.asarray(series.isna() if _library(series) == "pandas" else series.is_null())
    column = Column(name, str(series.dtype).partition("(")[0])
    objects = None
    if kind == "O":
        objects = series.to_list()
        present = [value for value, is_gap in zip(objects, is_missing, strict=True) if not is_gap]
        column = column._replace(has_none=any(value is None for value in objects))
        is_numeric = all(
            isinstance(value, int | float | np.number) and not isinstance(value, bool) for value in present
        )
        if column.type in LISTING or not is_numeric or not present:
            return *_categories(series, column, objects, present, is_missing), None
    array = np.asarray(series)
    if array.dtype.kind not in "biuf":  # nullable columns are objects
        known = series.to_list() if objects is None else objects
        array = np.array([0.0 if gap else float(value) for value, gap in zip(known, is_missing, strict=True)])
    is_gap = is_missing | np.isnan(array) if array.dtype.kind == "f" else is_missing
    if not is_gap.any():
        return array, column, None
    median = 0.0 if is_gap.all() else float(np.median(array[~is_gap]))
    filled = np.where(is_gap, median if kind == "f" else np.floor(median), array)
    return filled.astype(np.float64), column._replace(has_none=bool(is_missing.any())), is_gap


def _kind(dtype: Any) -> str | None:
    """`b`, `i`, `u` or `f` for numbers, `O` for what may be names, and None for other types, such as times."""
    name = str(dtype).partition("(")[0]
    if not hasattr(dtype, "is_numeric"):  # of pandas
        kind = "O" if name in LISTING else getattr(dtype, "kind", "O")
        return kind if kind in "biufO" else None
    if name in BOOLEANS:
        return "b"
    if dtype.is_float() or dtype.is_decimal():
        return "f"
    return "i" if dtype.is_integer() else "O" if name in ("String", *LISTING) else None


def _categories(
    series: Any, column: Column, objects: list[Any], present: list[Any], is_missing: Numbers
) -> tuple[Numbers, Column]:
    """The codes of a column of names, in sorted order or that of its type, and what they stand for."""
    plain = [value.item() if isinstance(value, np.generic) else value for value in present]
    wrong = next((value for value in plain if not isinstance(value, str | bool | int | float)), None)
    if wrong is not None:
        raise DataError(
            f"column {column.name!r} of the DataFrame must be numbers, booleans or names, got {type(wrong).__name__}: "
            "encode it as numbers, or drop it"
        )
    listed = _listed(series)
    distinct = {(type(value).__name__, value) for value in plain}
    if len(distinct) > MAX_CATEGORIES:
        raise DataError(
            f"column {column.name!r} of the DataFrame must have at most {MAX_CATEGORIES:,} distinct names, got "
            f"{len(distinct):,}: drop it if it is text or a number of the row"
        )
    order = {value: k for k, value in enumerate(listed or ())}
    values = [value for _, value in sorted(distinct, key=lambda pair: (order.get(pair[1], 0), *pair))]
    codes = {(type(value), value): float(k) for k, value in enumerate(values)}
    pairs = zip(objects, is_missing, strict=True)
    known = [value.item() if isinstance(value, np.generic) else value for value, gap in pairs if not gap]
    numbers = np.full(len(objects), float(len(values)))
    numbers[~is_missing] = [codes[type(value), value] for value in known]
    if is_missing.any():
        values.append(None)
    is_ordered = bool(getattr(series.dtype, "ordered", False))
    return numbers, column._replace(values=tuple(values), categories=listed, is_ordered=is_ordered)


def _listed(series: Any) -> tuple[Any, ...] | None:
    """All values that the type of a column lists."""
    is_listed = str(series.dtype).startswith(("category", "Enum"))
    return tuple(series.dtype.categories.to_list()) if is_listed else None


def _codes(column: Column, inputs: Numbers, k: int) -> list[Any]:
    """The values of a category in some rows."""
    assert column.values is not None
    places = np.rint(inputs[:, k]).clip(0, len(column.values) - 1).astype(np.int64)
    return [column.values[place] for place in places]


def _pandas_series(pandas: Any, column: Column, inputs: Numbers, k: int) -> Any:
    if column.values is not None:
        values = _codes(column, inputs, k)
        if column.type == "category":
            return pandas.Categorical(values, categories=list(column.categories or ()), ordered=column.is_ordered)
        if column.type == "object" and not column.has_none:
            values = [np.nan if value is None else value for value in values]
        return pandas.Series(values, dtype=column.type)
    numbers = inputs[:, k].astype(np.float64)
    is_whole = "int" in column.type.lower() or column.type in BOOLEANS
    numbers = np.rint(numbers) if is_whole else numbers
    if column.missing is not None:
        numbers[inputs[:, column.missing] > 0.5] = np.nan
    return pandas.Series(numbers).astype(column.type)


def _polars_series(polars: Any, column: Column, inputs: Numbers, k: int) -> Any:
    kind = getattr(polars, column.type)
    if column.values is not None:
        kind = polars.Enum(list(column.categories or ())) if column.type == "Enum" else kind
        return polars.Series(column.name, _codes(column, inputs, k), dtype=kind)
    numbers = inputs[:, k].astype(np.float64)
    is_whole = "Int" in column.type or column.type in BOOLEANS
    values = (np.rint(numbers).astype(np.int64) if is_whole else numbers).tolist()
    if column.missing is not None:
        gap = None if column.has_none else np.nan
        values = [
            gap if is_gap else value for value, is_gap in zip(values, inputs[:, column.missing] > 0.5, strict=True)
        ]
    return polars.Series(column.name, values, dtype=kind, strict=False)


def _refuse_infinite(values: Numbers, names: Sequence[str]) -> None:
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        row, column = bad[0].tolist()
        raise DataError(
            f"column {names[column]!r} of the DataFrame must hold finite numbers, but row {row} has an infinity: fix "
            "or drop it"
        )


def _described(values: Numbers, names: Sequence[str], arrays: Sequence[Numbers], columns: Sequence[Column]) -> Features:
    """Features by the type of their columns; 0 and 1 are binary in every type."""
    features = Features.of(values, names)
    rules: list[tuple[str, dict[str, Any]]] = []
    same = {"low": None, "high": None, "change": None}
    for name, array, column, kind in zip(names, arrays, columns, features.kind, strict=False):
        if column.values is not None:
            rules.append((name, {**same, "kind": "category", "low": 0, "high": len(column.values) - 1}))
        elif kind == "integer" and array.dtype.kind == "f" and "nt" not in column.type:
            rules.append((name, {**same, "kind": "number"}))
    return features.with_rules(rules) if rules else features
