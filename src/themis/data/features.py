"""Features: what the columns of a table may hold, and how they may change."""

from __future__ import annotations

import csv
import hashlib
import importlib
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from themis.data.files import Numbers, data_errors, existing_file
from themis.data.rows import Rows
from themis.errors import DataError, UsageError, nearest
from themis.reading import MAX_FEATURES, read_regular

Kind = Literal["binary", "integer", "number", "category"]
Change = Literal["any", "raise", "lower", "fixed"]
KINDS, CHANGES = get_args(Kind), get_args(Change)
HEADER = ("name", "kind", "low", "high", "change")
STEP_BYTES = 16 << 20
"""Size of the part of a table that is processed at a time."""
VALUE_TOLERANCE = 1e-6
"""How far an input may be from the place of a valid value on its axis."""
N_LISTED = 50
"""Names that a message lists at most."""


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
    """What each column of a table may hold and how it may change.

    Args:
        names: Names of the columns.
        kind: `binary` (0 or 1), `integer` (a whole number), `number` (any number) or `category` (a whole number that
            stands for a name, without an order), for each column.
        low: Lowest valid value of each column, `[features]`.
        high: Highest valid value of each column, `[features]`.
        change: `any`, `raise` or `lower` (never in the other direction) or `fixed`, for each column.
        axes: How raw values map to inputs, if they are not used directly; kind and range are those of the raw values.
        coding: How rows become those of a DataFrame, if it has names, missing values or booleans.
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
        for column, words, known in (("kind", self.kind, KINDS), ("change", self.change, CHANGES)):
            if wrong := set(words) - set(known):
                word = min(wrong, key=words.index)
                name = self.names[words.index(word)]
                raise UsageError(
                    f"feature {name!r} must have a known {column}, got {word!r}: {nearest(str(word), known)}"
                )
        for name, kind, change in zip(self.names, self.kind, self.change, strict=True):
            if kind == "category" and change in ("raise", "lower"):
                raise UsageError(
                    f"feature {name!r} is a category, which has no order, got change={change}: any or fixed"
                )
        is_number = torch.tensor([kind == "number" for kind in self.kind], dtype=torch.bool)
        low, high = torch.where(is_number, low, low.ceil()), torch.where(is_number, high, high.floor())
        self._check_range(~(low.isfinite() & high.isfinite() & (low <= high)), low, high, "finite low <= high")
        is_binary = torch.tensor([kind == "binary" for kind in self.kind], dtype=torch.bool)
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
        """Features inferred from rows `[rows, features]`: 0 and 1 are binary, whole numbers integer, others numbers.

        The range is that of the rows, 0..1 for binary features. All may change, except for columns with a single value,
        which are fixed. Those of a DataFrame follow the types of its columns.
        """
        if is_frame(inputs):
            return read_frame(inputs)[2]
        shape = tuple(inputs.shape)
        if len(shape) != 2 or 0 in shape:
            raise DataError(f"features must be those of a table [rows, features], got inputs {list(shape)}: reshape it")
        low, high = torch.full((shape[1],), math.inf), torch.full((shape[1],), -math.inf)
        is_whole = torch.ones(shape[1], dtype=torch.bool)
        for _, block in blocks(inputs):
            if not bool(block.isfinite().all()):
                raise DataError(
                    "a table must hold finite numbers, but it has a NaN or an infinity: fix or drop the row"
                )
            low, high = torch.minimum(low, block.amin(0)), torch.maximum(high, block.amax(0))
            is_whole &= (block == block.round()).all(0)
        is_binary, is_fixed = is_whole & (low >= 0) & (high <= 1), low == high
        return Features(
            tuple(map(str, range(shape[1]) if names is None else names)),
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
        """The same features with changes to those that are called `name` or match it as a glob pattern."""
        return self.with_rules([(name, {"kind": kind, "low": low, "high": high, "change": change})])

    def with_rules(self, rules: Iterable[tuple[str, dict[str, Any]]]) -> Features:
        """The same features with rules `(name or glob, values)` applied in order; ranges are checked at the end."""
        kinds, lows, highs, changes = list(self.kind), self.low.tolist(), self.high.tolist(), list(self.change)
        for pattern, values in rules:
            for k in self.find(pattern):
                if values["kind"] is not None:
                    if values["kind"] == "binary":
                        lows[k], highs[k] = 0.0, 1.0
                    elif kinds[k] == "binary":  # an earlier rule made it so
                        lows[k], highs[k] = float(self.low[k]), float(self.high[k])
                    kinds[k] = values["kind"]
                lows[k] = lows[k] if values["low"] is None else values["low"]
                highs[k] = highs[k] if values["high"] is None else values["high"]
                changes[k] = changes[k] if values["change"] is None else values["change"]
        low, high = torch.tensor(lows), torch.tensor(highs)
        return Features(self.names, tuple(kinds), low, high, tuple(changes), self.axes, self.coding)

    def find(self, pattern: str) -> list[int]:
        """The columns that are called `pattern` or, if none is, that match it as a glob pattern."""
        if columns := self._columns.get(pattern):
            return columns
        columns = [k for k, name in enumerate(self.names) if fnmatchcase(name, pattern)]
        if not columns:
            raise UsageError(
                f"a feature that matches {pattern!r} must be in the table: {nearest(pattern, self.names[:N_LISTED])}"
            )
        return columns

    @cached_property
    def _columns(self) -> dict[str, list[int]]:
        columns: dict[str, list[int]] = {}
        for k, name in enumerate(self.names):
            columns.setdefault(name, []).append(k)
        return columns

    @cached_property
    def sha256(self) -> str:
        """Hash of everything but the axes."""
        words = "\n".join(map("\t".join, zip(self.names, self.kind, self.change, strict=True)))
        ranges = torch.stack([self.low, self.high]).numpy().tobytes()
        coding = b"" if self.coding is None else repr(self.coding).encode()
        return hashlib.sha256(words.encode() + ranges + coding).hexdigest()

    def place(self, raw: Tensor) -> Tensor:
        """The inputs at which raw values `[..., features]` lie."""
        return raw if self.axes is None else self.axes.place(raw)

    def value(self, places: Tensor) -> Tensor:
        """The raw values that lie at places in the inputs."""
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
        """Raise an error if a row is not valid; on axes, up to rounding."""
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
                raise DataError(
                    f"feature {self.names[k]!r} must be {self._rule(k)}, but seed {int(seed_id[start + row])} has "
                    f"{float(raw[row, k]):g}: fix the row, or the description of the feature"
                )

    def check_inside(self, bounds: tuple[float, float]) -> None:
        """Raise an error if no feature may change, or if one may leave the bounds of the inputs."""
        limits = self.limits(dtype=torch.float64)
        ends = torch.stack([self.place(limits.low), self.place(limits.high)])
        is_free = (limits.may_rise | limits.may_fall) & (limits.low < limits.high)
        if not bool(is_free.any()):
            raise DataError(
                "a feature of the table must be free to change, but none is: allow one to, for instance with change=any"
            )
        slack = VALUE_TOLERANCE * max(1.0, *map(abs, bounds))
        is_outside = is_free & ((ends < bounds[0] - slack) | (ends > bounds[1] + slack)).any(0)
        if bool(is_outside.any()):
            k = int(is_outside.nonzero()[0])
            raise DataError(
                f"feature {self.names[k]!r} must stay in the input's bounds ({bounds[0]:g}, {bounds[1]:g}), but it "
                "ranges "
                f"from {float(ends[0, k]):g} to {float(ends[1, k]):g}: pass wider bounds, --bounds auto, or a smaller "
                "range"
            )

    def _rule(self, k: int) -> str:
        low, high = float(self.low[k]), float(self.high[k])
        return f"{'a number' if self.kind[k] == 'number' else 'a whole number'} in {low:g}..{high:g}"


def read_features(path: str | Path, known: Features) -> Features:
    """Features from a CSV table `name,kind,low,high,change`; missing or empty values are those of `known`.

    A name may be a glob pattern such as `perm_*`; later lines override earlier ones.
    """
    path = existing_file(Path(path))
    with data_errors(path, "a CSV table in UTF-8"):
        content = read_regular(path, MAX_FEATURES).decode("utf-8-sig")
        lines = csv.reader(io.StringIO(content, newline=""), strict=True)
        header = [column.strip() for column in next(lines, [])]
        for column in header:
            if column not in HEADER:
                raise DataError(f"{path} must have known columns, got {column!r}: {nearest(column, HEADER)}")
        if "name" not in header or len(set(header)) < len(header):
            raise DataError(
                f"{path} must have a column 'name' and no column twice, got {header}: correct its first line"
            )
        rules = [_rule_of(cells, header, f"{path}, line {lines.line_num}", known) for cells in lines if any(cells)]
    try:
        return known.with_rules(rules)
    except UsageError as error:
        raise DataError(f"{path}: {error}") from None


def _rule_of(cells: list[str], header: list[str], where: str, known: Features) -> tuple[str, dict[str, Any]]:
    if len(cells) != len(header):
        raise DataError(f"{where}: a row must have {len(header)} cells, got {len(cells)}: fix the row")
    words = dict.fromkeys(HEADER) | {name: cell.strip() or None for name, cell in zip(header, cells, strict=True)}
    name = words.pop("name")
    if name is None:
        raise DataError(f"{where}: a row must name a feature, got no name: fix the row")
    for column, choices in (("kind", KINDS), ("change", CHANGES)):
        word = words[column]
        if word is not None and word not in choices:
            raise DataError(f"{where}: {column} must be known, got {word!r}: {nearest(word, choices)}")
    try:
        known.find(name)
    except UsageError as error:
        raise DataError(f"{where}: {error}") from None
    return name, {**words, "low": _number(words["low"], where), "high": _number(words["high"], where)}


def _number(text: str | None, where: str) -> float | None:
    try:
        number = None if text is None else float(text)
    except ValueError:
        number = math.nan
    if number is not None and not math.isfinite(number):
        raise DataError(f"{where}: the ends of a range must be finite numbers, got {text!r}: fix it, or leave it empty")
    return number


def blocks(inputs: Any) -> Iterator[tuple[int, Tensor]]:
    """A table's rows as float32 tensors in blocks of about `STEP_BYTES`, each with the index of its first row."""
    n, width = inputs.shape
    step = max(1, STEP_BYTES // (4 * width))
    for start in range(0, n, step):
        part = inputs[start : start + step]
        if not isinstance(part, Tensor):
            with np.errstate(over="ignore"):  # an infinity is refused by the caller
                part = torch.from_numpy(np.array(part, np.float32))
        yield start, part.detach().cpu().float()


class DataDescription:
    """What is known of a data set: the names of its classes, and its features, given or inferred on first use.

    All parts of the data share it, so that a sample has the features of the full set.
    """

    def __init__(
        self,
        inputs: Tensor | Rows,
        names: Sequence[str] | None = None,
        given: Features | None = None,
        classes: tuple[str, ...] | None = None,
    ) -> None:
        self.shape, self.names, self.given, self.classes = tuple(inputs.shape), names, given, classes
        self.inputs = inputs if len(self.shape) == 2 and given is None else None  # must not keep pictures in memory

    @cached_property
    def features(self) -> Features:
        if self.given is not None:
            return self.given
        if self.inputs is None:
            raise DataError(f"features must be those of a table [rows, features], got inputs {list(self.shape)}")
        features, self.inputs = Features.of(self.inputs, self.names), None
        return features


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


class CodedColumn(NamedTuple):
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
    columns: tuple[CodedColumn, ...]

    @property
    def odd_column(self) -> CodedColumn | None:
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

        def column(fields: dict[str, Any]) -> CodedColumn:
            values: Any = {name: tuple(each) if isinstance(each, list) else each for name, each in fields.items()}
            return CodedColumn(**values)

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


def _read_column(series: Any, name: str) -> tuple[Numbers, CodedColumn, Numbers | None]:
    """The numbers or codes of a column, what they stand for, and which numbers are missing, or None if none is."""
    kind = _kind(series.dtype)
    if kind is None:
        raise DataError(
            f"column {name!r} of the DataFrame must be numbers, booleans or names, got {series.dtype}: encode it as "
            "numbers, or drop it"
        )
    is_missing = np.asarray(series.isna() if _library(series) == "pandas" else series.is_null())
    column = CodedColumn(name, str(series.dtype).partition("(")[0])
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
    series: Any, column: CodedColumn, objects: list[Any], present: list[Any], is_missing: Numbers
) -> tuple[Numbers, CodedColumn]:
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


def _codes(column: CodedColumn, inputs: Numbers, k: int) -> list[Any]:
    """The values of a category in some rows."""
    assert column.values is not None
    places = np.rint(inputs[:, k]).clip(0, len(column.values) - 1).astype(np.int64)
    return [column.values[place] for place in places]


def _pandas_series(pandas: Any, column: CodedColumn, inputs: Numbers, k: int) -> Any:
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


def _polars_series(polars: Any, column: CodedColumn, inputs: Numbers, k: int) -> Any:
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


def _described(
    values: Numbers, names: Sequence[str], arrays: Sequence[Numbers], columns: Sequence[CodedColumn]
) -> Features:
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
