"""Features: the valid values of a table's columns, and how they may change."""

from __future__ import annotations

import csv
import hashlib
import importlib
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from themis.data.files import Numbers, data_errors, existing_file
from themis.data.rows import Rows, blocks
from themis.errors import DataError, UsageError, nearest
from themis.reading import MAX_FEATURES, read_regular

Kind = Literal["binary", "integer", "number", "category"]
Change = Literal["any", "raise", "lower", "fixed"]
FEATURE_KINDS, FEATURE_CHANGES = get_args(Kind), get_args(Change)
FEATURE_COLUMNS = ("name", "kind", "low", "high", "change")
VALUE_TOLERANCE = 1e-6
"""Largest distance of an input from the place of a valid value on its axis."""


class Axes(Protocol):
    """Maps a table's raw values to inputs and back; both methods keep the type and the device of their argument."""

    def place(self, raw: Tensor) -> Tensor: ...

    def value(self, places: Tensor) -> Tensor: ...


class FeatureLimits(NamedTuple):
    """Features as tensors `[features]`: ranges of raw values, and flags."""

    low: Tensor
    high: Tensor
    is_number: Tensor
    is_binary: Tensor
    may_rise: Tensor
    may_fall: Tensor
    is_category: Tensor


@dataclass(frozen=True, eq=False)
class Features:
    """The valid values of each column of a table, and how they may change.

    Args:
        names: Names of the columns.
        kind: For each column, `binary` (0 or 1), `integer` (a whole number), `number` (any number) or `category` (a
            whole number that stands for a name, without an order).
        low: Lowest valid value of each column, `[features]`.
        high: Highest valid value of each column, `[features]`.
        change: For each column, `any`, `raise` or `lower` (never in the other direction) or `fixed`.
        axes: How raw values map to inputs, if they are not used directly; kind and range refer to raw values.
        coding: How to convert rows to those of a DataFrame, if it has names, missing values or booleans.
    """

    names: tuple[str, ...]
    kind: tuple[str, ...]
    low: Tensor
    high: Tensor
    change: tuple[str, ...]
    axes: Axes | None = None
    coding: Coding | None = None

    def __post_init__(self) -> None:
        low, high = (torch.as_tensor(end, dtype=torch.float32) for end in (self.low, self.high))
        sizes = {len(self.names), len(self.kind), len(self.change), *low.shape, *high.shape}
        if len(sizes) != 1:
            raise UsageError(f"every feature must have a name, kind, low, high and change, got {sorted(sizes)} of them")
        for column, words, known in (("kind", self.kind, FEATURE_KINDS), ("change", self.change, FEATURE_CHANGES)):
            for name, word in zip(self.names, words, strict=True):
                if word not in known:
                    raise UsageError(f"{name!r} needs a known {column}, got {word!r}: {nearest(str(word), known)}")
        for name, kind, change in zip(self.names, self.kind, self.change, strict=True):
            if kind == "category" and change in ("raise", "lower"):
                raise UsageError(f"feature {name!r} is a category without an order, got change={change}: any or fixed")
        is_number, is_binary = self._flags[:2]
        low, high = torch.where(is_number, low, low.ceil()), torch.where(is_number, high, high.floor())
        self._check_range(~(low.isfinite() & high.isfinite() & (low <= high)), low, high, "finite low <= high")
        self._check_range(is_binary & ((low < 0) | (high > 1)), low, high, "a range within 0..1")
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)

    def _check_range(self, is_bad: Tensor, low: Tensor, high: Tensor, rule: str) -> None:
        if bool(is_bad.any()):
            k = int(is_bad.nonzero()[0])
            raise UsageError(
                f"feature {self.names[k]!r} must have {rule}, got {float(low[k]):g} and {float(high[k]):g} for "
                f"{self.kind[k]} values: change its range or its kind"
            )

    def __len__(self) -> int:
        return len(self.names)

    @staticmethod
    def of(inputs: Any, names: Sequence[str] | None = None) -> Features:
        """Infer features from rows `[rows, features]`: 0 and 1 are binary, whole numbers integer, others numbers.

        The range is that of the rows, or 0..1 for binary features. Columns with a single value are fixed, all others
        may change. The features of a DataFrame follow the types of its columns.
        """
        if is_frame(inputs):
            return read_frame(inputs)[2]
        shape = tuple(inputs.shape)
        if len(shape) != 2 or 0 in shape:
            raise DataError(f"features must be those of a table [rows, features], got inputs {list(shape)}: reshape it")
        low, high = torch.full((shape[1],), math.inf), torch.full((shape[1],), -math.inf)
        is_whole = torch.ones(shape[1], dtype=torch.bool)
        names = tuple(map(str, range(shape[1]) if names is None else names))
        for start, block in blocks(inputs):
            bad = (~block.isfinite()).nonzero()
            if len(bad):
                raise DataError(
                    f"a table must hold finite numbers, but row {start + int(bad[0, 0])} has a NaN or an infinity in "
                    f"column {names[int(bad[0, 1])]!r}: fix or drop the row"
                )
            low, high = torch.minimum(low, block.amin(0)), torch.maximum(high, block.amax(0))
            is_whole &= (block == block.round()).all(0)
        is_binary, is_fixed = is_whole & (low >= 0) & (high <= 1), low == high
        return Features(
            names,
            tuple("binary" if b else "integer" if w else "number" for b, w in zip(is_binary, is_whole, strict=True)),
            torch.where(is_binary, 0, low),
            torch.where(is_binary, 1, high),
            tuple("fixed" if fixed else "any" for fixed in is_fixed),
        )

    def set(
        self,
        name: str,
        *,
        kind: Kind | None = None,
        low: float | None = None,
        high: float | None = None,
        change: Change | None = None,
    ) -> Features:
        """The same features, with changes to those with this name or matching it as a glob pattern."""
        return self.with_rules([(name, {"kind": kind, "low": low, "high": high, "change": change})])

    def with_rules(self, rules: Iterable[tuple[str, dict[str, Any]]]) -> Features:
        """The same features, with rules `(name or glob, values by column)` applied in order; None keeps a value.

        Ranges are checked at the end.
        """
        kinds, lows, highs, changes = list(self.kind), self.low.tolist(), self.high.tolist(), list(self.change)
        for pattern, values in rules:
            given = {name: value for name, value in values.items() if value is not None}
            for k in self.find(pattern):
                if given.get("kind") == "binary":
                    lows[k], highs[k] = 0.0, 1.0
                elif "kind" in given and kinds[k] == "binary":  # by an earlier rule
                    lows[k], highs[k] = float(self.low[k]), float(self.high[k])
                kinds[k], changes[k] = given.get("kind", kinds[k]), given.get("change", changes[k])
                lows[k], highs[k] = given.get("low", lows[k]), given.get("high", highs[k])
        low, high = torch.tensor(lows), torch.tensor(highs)
        return replace(self, kind=tuple(kinds), low=low, high=high, change=tuple(changes))

    def find(self, pattern: str) -> list[int]:
        """The columns named `pattern` or, if there is none, those that match it as a glob pattern."""
        columns = [k for k, name in enumerate(self.names) if name == pattern]
        columns = columns or [k for k, name in enumerate(self.names) if fnmatchcase(name, pattern)]
        if not columns:
            raise UsageError(f"{pattern!r} must match a feature of the table: {nearest(pattern, self.names)}")
        return columns

    @cached_property
    def sha256(self) -> str:
        """Hash of everything but the axes."""
        words = "\n".join(map("\t".join, zip(self.names, self.kind, self.change, strict=True)))
        ranges = torch.stack([self.low, self.high]).numpy().tobytes()
        coding = b"" if self.coding is None else repr(self.coding).encode()
        return hashlib.sha256(words.encode() + ranges + coding).hexdigest()

    def place(self, raw: Tensor) -> Tensor:
        """Convert raw values `[..., features]` to inputs."""
        return raw if self.axes is None else self.axes.place(raw)

    def value(self, places: Tensor) -> Tensor:
        """Convert inputs to raw values."""
        return places if self.axes is None else self.axes.value(places)

    def limits(self, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> FeatureLimits:
        """The features as tensors."""
        return FeatureLimits(self.low.to(device, dtype), self.high.to(device, dtype), *self._flags.to(device))

    @cached_property
    def _flags(self) -> Tensor:
        """`is_number, is_binary, may_rise, may_fall, is_category`, `[5, features]`."""
        return torch.tensor(
            [
                [kind == "number" for kind in self.kind],
                [kind == "binary" for kind in self.kind],
                [change in ("any", "raise") for change in self.change],
                [change in ("any", "lower") for change in self.change],
                [kind == "category" for kind in self.kind],
            ]
        )

    def check(self, inputs: Tensor | Rows, seed_id: Tensor) -> None:
        """Raise an error if a row is not valid, up to rounding if there are axes."""
        if tuple(inputs.shape[1:]) != (len(self),):
            raise DataError(
                f"features must describe every column of the table, which has the shape {list(inputs.shape[1:])}, got "
                f"{len(self)} features: describe all columns, or none"
            )
        limits, tolerance = self.limits(dtype=torch.float64), 0.0 if self.axes is None else VALUE_TOLERANCE
        for start, block in blocks(inputs):
            places = block.double()
            raw = self.value(places)
            valid = torch.where(limits.is_number, raw, raw.round()).clamp(limits.low, limits.high)
            is_bad = ~((self.place(valid) - places).abs() <= tolerance)
            if bool(is_bad.any()):
                row, k = is_bad.nonzero()[0].tolist()
                form = "a number" if self.kind[k] == "number" else "a whole number"
                raise DataError(
                    f"feature {self.names[k]!r} must be {form} in {float(self.low[k]):g}..{float(self.high[k]):g}, but "
                    f"seed {int(seed_id[start + row])} has {float(raw[row, k]):g}: fix the row, or the description of "
                    "the feature"
                )

    def check_inside(self, bounds: tuple[float, float]) -> None:
        """Raise an error if no feature may change, or if one may leave the bounds of the inputs."""
        limits = self.limits(dtype=torch.float64)
        ends = torch.stack([self.place(limits.low), self.place(limits.high)])
        is_free = (limits.may_rise | limits.may_fall) & (limits.low < limits.high)
        if not bool(is_free.any()):
            raise DataError("a feature of the table must be free to change, but none is: allow one, as in change=any")
        slack = VALUE_TOLERANCE * max(1.0, *map(abs, bounds))
        is_outside = is_free & ((ends < bounds[0] - slack) | (ends > bounds[1] + slack)).any(0)
        if bool(is_outside.any()):
            k = int(is_outside.nonzero()[0])
            raise DataError(
                f"feature {self.names[k]!r} must stay in the input's bounds ({bounds[0]:g}, {bounds[1]:g}), but it "
                f"ranges from {float(ends[0, k]):g} to {float(ends[1, k]):g}: pass wider bounds, --bounds auto, or a "
                "smaller range"
            )


def read_features(path: str | Path, known: Features) -> Features:
    """Features from a CSV table `name,kind,low,high,change`; missing or empty values are taken from `known`.

    A name may be a glob pattern such as `perm_*`; later lines override earlier ones.
    """
    path = existing_file(Path(path))
    with data_errors(path, "a CSV table in UTF-8"):
        content = read_regular(path, MAX_FEATURES).decode("utf-8-sig")
        lines = csv.reader(io.StringIO(content, newline=""), strict=True)
        header = [column.strip() for column in next(lines, [])]
        if "name" not in header or len(set(header)) < len(header) or not set(header) <= set(FEATURE_COLUMNS):
            raise DataError(
                f"{path} must have a column 'name', and no others than {', '.join(FEATURE_COLUMNS[1:])}, each once, "
                f"got {header}: fix its first line"
            )
        rules = [_rule_of(cells, header, f"{path}, line {lines.line_num}") for cells in lines if any(cells)]
    try:
        return known.with_rules(rules)
    except UsageError as error:
        raise DataError(f"{path}: {error}") from None


def _rule_of(cells: list[str], header: list[str], where: str) -> tuple[str, dict[str, Any]]:
    values: dict[str, Any] = {name: cell.strip() or None for name, cell in zip(header, cells, strict=False)}
    name = values.pop("name", None)
    if len(cells) != len(header) or name is None:
        raise DataError(f"{where}: a row must have {len(header)} cells and name a feature, got {cells}: fix the row")
    try:
        return name, values | {end: float(values[end]) for end in ("low", "high") if values.get(end)}
    except ValueError as error:
        raise DataError(f"{where}: the ends of a range must be numbers, but {error}: fix them") from None


FRAME_LIBRARIES = ("pandas", "polars")
LABEL_NAMES = ("label", "y", "class", "target")
"""Columns that hold labels unless the user names another one, in upper or lower case."""
BOOLEAN_TYPES = ("bool", "boolean", "Boolean")
CATEGORY_TYPES = ("category", "Categorical", "Enum")
"""Types of categorical columns in pandas and polars."""
MAX_CATEGORIES = 1000
"""Most distinct names in a column; a column of text has more."""


def is_frame(data: Any) -> bool:
    """Whether an object is a DataFrame of pandas or polars, without importing either library."""
    return _library(data) in FRAME_LIBRARIES and type(data).__name__ in ("DataFrame", "LazyFrame")


def are_names(labels: Any) -> bool:
    """Whether labels may be names: a list of texts, a column of a DataFrame, or an array of text or objects."""
    if isinstance(labels, list | tuple):
        return len(labels) > 0 and isinstance(labels[0], str)
    is_column = _library(labels) in FRAME_LIBRARIES and type(labels).__name__ in ("Series", "Index")
    return is_column or (isinstance(labels, np.ndarray) and labels.ndim == 1 and labels.dtype.kind in "OUS")


class CodedColumn(NamedTuple):
    """A column of a DataFrame, and how the inputs encode it."""

    name: str
    type: str
    values: tuple[Any, ...] | None = None
    """The value of each code of a category; None for a missing value."""
    categories: tuple[Any, ...] | None = None
    """All values that the type of the column lists, if it does."""
    is_ordered: bool = False
    missing: int | None = None
    """The index of the feature that is 1 where a number is missing."""
    has_none: bool = False
    """Whether a missing value is None rather than NaN."""


@dataclass(frozen=True)
class Coding:
    """Converts inputs `[rows, features]` to rows of the user's DataFrame, with names, missing values and booleans.

    A category is encoded as a number. A number that may be missing has an additional binary feature.
    """

    library: str
    columns: tuple[CodedColumn, ...]

    @property
    def odd_column(self) -> CodedColumn | None:
        """The first column that does not consist of numbers only."""
        odd = (column for column in self.columns if column.values is not None or column.missing is not None)
        return next(odd, None)

    def frame(self, inputs: Numbers) -> Any:
        """Convert inputs to a DataFrame."""
        library: Any = importlib.import_module(self.library)
        series = _pandas_series if self.library == "pandas" else _polars_series
        return library.DataFrame(
            {column.name: series(library, column, inputs, k) for k, column in enumerate(self.columns)}
        )

    def as_dict(self) -> dict[str, Any]:
        """The coding as a run records it."""
        return {"library": self.library, "columns": [column._asdict() for column in self.columns]}

    @staticmethod
    def recorded(record: dict[str, Any]) -> Coding:
        """The coding that a run recorded."""
        columns: Any = (
            {name: tuple(each) if isinstance(each, list) else each for name, each in column.items()}
            for column in record["columns"]
        )
        return Coding(record["library"], tuple(CodedColumn(**column) for column in columns))


def read_frame(frame: Any, label: str | None = None) -> tuple[Numbers, Any, Features]:
    """The values `[rows, features]` of a DataFrame, those of its label column or None, and the features.

    label: the column of labels, by default `label`, `y`, `class` or `target`; "" for none. The range of a feature is
    that of its column; boolean columns are binary, integer columns integers, floating-point columns numbers, and others
    categories. Missing numbers are replaced by the median, and a binary feature marks them.
    """
    if type(frame).__name__ == "LazyFrame":
        raise DataError("the data must be a DataFrame, got a LazyFrame: call collect() first")
    names = [str(name) for name in frame.columns]
    if len(set(names)) < len(names):
        raise DataError(f"a DataFrame must have distinct column names, got {names[:10]}: rename them")
    label = find_label(names, label, "a DataFrame", "pass (frame, NAME) to choose")
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
    features = Features.of(values, [*columns, *(name for name, _ in gaps)])  # 0 and 1 are binary in every type
    rules: list[tuple[str, dict[str, Any]]] = []
    for array, column, kind in zip(arrays, read, features.kind, strict=False):
        if column.values is not None:
            rules.append((column.name, {"kind": "category", "low": 0, "high": len(column.values) - 1}))
        elif kind == "integer" and array.dtype.kind == "f" and "nt" not in column.type:
            rules.append((column.name, {"kind": "number"}))
    is_coded = any(each.values is not None or each.missing is not None or each.type in BOOLEAN_TYPES for each in read)
    coding = Coding(_library(frame), tuple(read)) if is_coded else None
    return values, labels, replace(features.with_rules(rules), coding=coding)


def find_label(names: Sequence[str], label: str | None, subject: str, remedy: str) -> str | None:
    """The column of labels: `label`, none for "", or by default the one with a name in `LABEL_NAMES`."""
    if label is not None:
        if label and label not in names:
            raise UsageError(f"the label column {label!r} must be in {subject}: {nearest(label, names)}")
        return label or None
    found = [name for name in names if name.lower() in LABEL_NAMES]
    if len(found) > 1:
        raise DataError(f"{subject} must have one column of labels, got {found}: {remedy}")
    return found[0] if found else None


def number_labels(labels: Any) -> tuple[Numbers, list[str] | None]:
    """Labels as numbers; if they are names, they are numbered in sorted order, and the names are returned too."""
    array = np.asarray(labels, object if isinstance(labels, list | tuple) else None)  # so that 3 does not become "3"
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


def _library(data: Any) -> str:
    return type(data).__module__.partition(".")[0]


def _read_column(series: Any, name: str) -> tuple[Numbers, CodedColumn, Numbers | None]:
    """The numbers or codes of a column, its description, and which numbers are missing, or None if none is."""
    kind = _kind(series.dtype)
    if kind is None:
        raise DataError(f"column {name!r} must be numbers, booleans or names, got {series.dtype}: encode or drop it")
    is_missing = np.asarray(series.isna() if _library(series) == "pandas" else series.is_null())
    column = CodedColumn(name, str(series.dtype).partition("(")[0])
    array = np.asarray(series)
    if kind == "O" or array.dtype.kind not in "biuf":  # nullable columns are objects
        objects = [value.item() if isinstance(value, np.generic) else value for value in series.to_list()]
        present = [value for value, is_gap in zip(objects, is_missing, strict=True) if not is_gap]
        is_numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in present)
        if kind == "O":
            column = column._replace(has_none=any(value is None for value in objects))
            if column.type in CATEGORY_TYPES or not is_numeric or not present:
                return *_categories(series, column, present, is_missing), None
        array = np.zeros(len(objects))
        array[~is_missing] = [float(value) for value in present]
    is_gap = is_missing | np.isnan(array) if array.dtype.kind == "f" else is_missing
    if not is_gap.any():
        return array, column, None
    median = 0.0 if is_gap.all() else float(np.median(array[~is_gap]))
    filled = np.where(is_gap, median if kind == "f" else np.floor(median), array)
    return filled.astype(np.float64), column._replace(has_none=bool(is_missing.any())), is_gap


def _kind(dtype: Any) -> str | None:
    """`b`, `i`, `u` or `f` for numbers, `O` for types that may hold names, and None for others, such as times."""
    name = str(dtype).partition("(")[0]
    if not hasattr(dtype, "is_numeric"):  # of pandas
        kind = "O" if name in CATEGORY_TYPES else getattr(dtype, "kind", "O")
        return kind if kind in "biufO" else None
    if name in BOOLEAN_TYPES:
        return "b"
    if dtype.is_float() or dtype.is_decimal():
        return "f"
    return "i" if dtype.is_integer() else "O" if name in ("String", *CATEGORY_TYPES) else None


def _categories(
    series: Any, column: CodedColumn, present: list[Any], is_missing: Numbers
) -> tuple[Numbers, CodedColumn]:
    """The codes of a column of names, numbered in sorted order or that of the column's type, and its description."""
    wrong = next((value for value in present if not isinstance(value, str | bool | int | float)), None)
    if wrong is not None:
        raise DataError(
            f"column {column.name!r} of the DataFrame must be numbers, booleans or names, got {type(wrong).__name__}: "
            "encode it as numbers, or drop it"
        )
    is_listed = str(series.dtype).startswith(("category", "Enum"))
    listed = tuple(series.dtype.categories.to_list()) if is_listed else None
    distinct = {(type(value).__name__, value) for value in present}
    if len(distinct) > MAX_CATEGORIES:
        raise DataError(
            f"column {column.name!r} of the DataFrame must have at most {MAX_CATEGORIES:,} distinct names, got "
            f"{len(distinct):,}: drop it if it is text or a number of the row"
        )
    order = {value: k for k, value in enumerate(listed or ())}
    values = [value for _, value in sorted(distinct, key=lambda pair: (order.get(pair[1], 0), *pair))]
    codes = {(type(value), value): float(k) for k, value in enumerate(values)}
    numbers = np.full(len(is_missing), float(len(values)))
    numbers[~is_missing] = [codes[type(value), value] for value in present]
    if is_missing.any():
        values.append(None)
    is_ordered = bool(getattr(series.dtype, "ordered", False))
    return numbers, column._replace(values=tuple(values), categories=listed, is_ordered=is_ordered)


def _column_values(column: CodedColumn, inputs: Numbers, k: int) -> list[Any]:
    """The values of a column in some rows."""
    if column.values is not None:
        places = np.rint(inputs[:, k]).clip(0, len(column.values) - 1).astype(np.int64)
        return [column.values[place] for place in places]
    numbers = inputs[:, k].astype(np.float64)
    is_whole = "int" in column.type.lower() or column.type in BOOLEAN_TYPES
    values: list[Any] = (np.rint(numbers).astype(np.int64) if is_whole else numbers).tolist()
    if column.missing is None:
        return values
    is_missing, gap = inputs[:, column.missing] > 0.5, None if column.has_none else np.nan
    return [gap if is_gap else value for value, is_gap in zip(values, is_missing, strict=True)]


def _pandas_series(pandas: Any, column: CodedColumn, inputs: Numbers, k: int) -> Any:
    values = _column_values(column, inputs, k)
    if column.values is None:
        return pandas.Series(values).astype(column.type)
    if column.type == "category":
        return pandas.Categorical(values, categories=list(column.categories or ()), ordered=column.is_ordered)
    if column.type == "object" and not column.has_none:
        values = [np.nan if value is None else value for value in values]
    return pandas.Series(values, dtype=column.type)


def _polars_series(polars: Any, column: CodedColumn, inputs: Numbers, k: int) -> Any:
    kind = getattr(polars, column.type)
    if column.type == "Enum":
        kind = polars.Enum(list(column.categories or ()))
    return polars.Series(column.name, _column_values(column, inputs, k), dtype=kind, strict=column.values is not None)
