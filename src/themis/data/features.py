"""Features: what the columns of a table may hold, and how they may change."""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from themis.data.files import existing, explained
from themis.data.rows import Rows
from themis.errors import DataError, UsageError, nearest

Kind = Literal["binary", "integer", "number"]
Change = Literal["any", "raise", "lower", "fixed"]
KINDS, CHANGES = get_args(Kind), get_args(Change)
HEADER = ("name", "kind", "low", "high", "change")
STEP_BYTES = 16 << 20
"""Of a table that are looked at a time."""
ROUNDING = 1e-6
"""How far a place on an axis may be from that of a valid value."""
N_NAMED = 50
"""Names that a message lists at most."""


class Axes(Protocol):
    """Where a table's raw values lie in the inputs; both keep the type and the device of what they are given."""

    def place(self, raw: Tensor) -> Tensor: ...

    def value(self, places: Tensor) -> Tensor: ...


class Limits(NamedTuple):
    """Features as tensors `[features]`: raw ranges, and what is true of each."""

    low: Tensor
    high: Tensor
    is_number: Tensor
    is_binary: Tensor
    may_rise: Tensor
    may_fall: Tensor


@dataclass(frozen=True, eq=False)
class Features:
    """What each column of a table may hold and how it may change.

    kind: `binary` is 0 or 1, `integer` whole, `number` anything between. low, high `[features]`: the valid range, ends
    included. change: `any`, `raise` and `lower` (never the other way), `fixed`. axes: where raw values lie in the
    inputs, if not as they are; kind and range are those of raw values.
    """

    names: tuple[str, ...]
    kind: tuple[str, ...]
    low: Tensor
    high: Tensor
    change: tuple[str, ...]
    axes: Axes | None = None

    def __post_init__(self) -> None:
        low, high = (torch.as_tensor(each, dtype=torch.float32) for each in (self.low, self.high))
        sizes = {len(self.names), len(self.kind), len(self.change), *low.shape, *high.shape}
        if len(sizes) != 1:
            raise UsageError(f"features must have a name, kind, low, high and change each, got {sorted(sizes)} of them")
        for what, words, known in (("kind", self.kind, KINDS), ("change", self.change, CHANGES)):
            if wrong := set(words) - set(known):
                word = min(wrong, key=words.index)
                name = self.names[words.index(word)]
                raise UsageError(
                    f"feature {name!r} must have a known {what}, got {word!r}: {nearest(str(word), known)}"
                )
        is_number = torch.tensor([each == "number" for each in self.kind], dtype=torch.bool)
        low, high = torch.where(is_number, low, low.ceil()), torch.where(is_number, high, high.floor())
        self._refuse(~(low.isfinite() & high.isfinite() & (low <= high)), low, high, "finite low <= high")
        is_binary = torch.tensor([each == "binary" for each in self.kind], dtype=torch.bool)
        self._refuse(is_binary & ((low < 0) | (high > 1)), low, high, "its range in 0..1, it is binary")
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)

    def _refuse(self, is_bad: Tensor, low: Tensor, high: Tensor, rule: str) -> None:
        if bool(is_bad.any()):
            k = int(is_bad.nonzero()[0])
            raise UsageError(
                f"feature {self.names[k]!r} must have {rule}, got {float(low[k]):g} and {float(high[k]):g} for "
                f"{self.kind[k]} values: mend its range or its kind"
            )

    def __len__(self) -> int:
        return len(self.names)

    @staticmethod
    def of(inputs: Any, names: Sequence[str] | None = None) -> Features:
        """As they are in the rows `[rows, features]`: 0 and 1 are binary, whole numbers integer, others numbers.

        The range is that of the rows, 0..1 for binary ones; all may change, but a column with one value is fixed.
        """
        shape = tuple(inputs.shape)
        if len(shape) != 2 or 0 in shape:
            raise DataError(f"features must be those of a table [rows, features], got inputs {list(shape)}: reshape it")
        low, high = torch.full((shape[1],), math.inf), torch.full((shape[1],), -math.inf)
        is_whole = torch.ones(shape[1], dtype=torch.bool)
        for _, block in blocks(inputs):
            if not bool(block.isfinite().all()):
                raise DataError("a table must be of finite numbers, it has a NaN or an infinity: mend or drop the row")
            low, high = torch.minimum(low, block.amin(0)), torch.maximum(high, block.amax(0))
            is_whole &= (block == block.round()).all(0)
        is_binary, is_fixed = is_whole & (low >= 0) & (high <= 1), low == high
        return Features(
            tuple(map(str, range(shape[1]) if names is None else names)),
            tuple("binary" if b else "integer" if w else "number" for b, w in zip(is_binary, is_whole, strict=True)),
            torch.where(is_binary, 0, low),
            torch.where(is_binary, 1, high),
            tuple("fixed" if each else "any" for each in is_fixed),
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
        """The same with something else said of the features whose name is, or fits the glob, `name`."""
        return self._with([(name, {"kind": kind, "low": low, "high": high, "change": change})])

    def _with(self, lines: Iterable[tuple[str, dict[str, Any]]]) -> Features:
        """The same with `(name or glob, what is said)` in order; ranges are judged when all is said."""
        kinds, lows, highs, changes = list(self.kind), self.low.tolist(), self.high.tolist(), list(self.change)
        for pattern, said in lines:
            for k in self._find(pattern):
                if said["kind"] is not None:
                    if said["kind"] == "binary":
                        lows[k], highs[k] = 0.0, 1.0
                    elif kinds[k] == "binary":  # a line before said so
                        lows[k], highs[k] = float(self.low[k]), float(self.high[k])
                    kinds[k] = said["kind"]
                lows[k] = lows[k] if said["low"] is None else said["low"]
                highs[k] = highs[k] if said["high"] is None else said["high"]
                changes[k] = changes[k] if said["change"] is None else said["change"]
        return Features(self.names, tuple(kinds), torch.tensor(lows), torch.tensor(highs), tuple(changes), self.axes)

    def _find(self, pattern: str) -> list[int]:
        if found := self._numbers.get(pattern):
            return found
        found = [k for k, name in enumerate(self.names) if fnmatchcase(name, pattern)]
        if not found:
            raise UsageError(
                f"a feature named or like {pattern!r} must be in the table: {nearest(pattern, self.names[:N_NAMED])}"
            )
        return found

    @cached_property
    def _numbers(self) -> dict[str, list[int]]:
        numbers: dict[str, list[int]] = {}
        for k, name in enumerate(self.names):
            numbers.setdefault(name, []).append(k)
        return numbers

    @cached_property
    def sha256(self) -> str:
        """Of all that was said of the features, the axes left out."""
        words = "\n".join(map("\t".join, zip(self.names, self.kind, self.change, strict=True)))
        ranges = torch.stack([self.low, self.high]).numpy().tobytes()
        return hashlib.sha256(words.encode() + ranges).hexdigest()

    def place(self, raw: Tensor) -> Tensor:
        """Raw values `[..., features]` where they lie in the inputs."""
        return raw if self.axes is None else self.axes.place(raw)

    def value(self, places: Tensor) -> Tensor:
        """The raw values at places in the inputs."""
        return places if self.axes is None else self.axes.value(places)

    def limits(self, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Limits:
        """The same as tensors."""
        return Limits(self.low.to(device, dtype), self.high.to(device, dtype), *self._flags.to(device))

    @cached_property
    def _flags(self) -> Tensor:
        """`is_number, is_binary, may_rise, may_fall`, `[4, features]`."""
        return torch.tensor(
            [
                [each == "number" for each in self.kind],
                [each == "binary" for each in self.kind],
                [each in ("any", "raise") for each in self.change],
                [each in ("any", "lower") for each in self.change],
            ]
        )

    def check(self, inputs: Tensor | Rows, seed_id: Tensor) -> None:
        """Refuse rows that are not valid; on axes up to rounding."""
        if tuple(inputs.shape[1:]) != (len(self),):
            raise DataError(
                f"features must describe every column of the table, inputs {list(inputs.shape[1:])}, got {len(self)} "
                "features: describe all of them, or none"
            )
        limits, tolerance = self.limits(dtype=torch.float64), 0.0 if self.axes is None else ROUNDING
        for first, block in blocks(inputs):
            places = block.double()
            raw = self.value(places)
            valid = torch.where(limits.is_number, raw, raw.round()).clamp(limits.low, limits.high)
            is_bad = ~((self.place(valid) - places).abs() <= tolerance)
            if bool(is_bad.any()):
                row, k = is_bad.nonzero()[0].tolist()
                raise DataError(
                    f"feature {self.names[k]!r} must be {self._rule(k)}, seed {int(seed_id[first + row])} has "
                    f"{float(raw[row, k]):g}: mend the row, or what is said of the feature"
                )

    def check_inside(self, bounds: tuple[float, float]) -> None:
        """Refuse features none of which may change, or that may change to what lies outside the input's bounds."""
        limits = self.limits(dtype=torch.float64)
        ends = torch.stack([self.place(limits.low), self.place(limits.high)])
        is_free = (limits.may_rise | limits.may_fall) & (limits.low < limits.high)
        if not bool(is_free.any()):
            raise DataError("a feature of the table must be free to change, none is: say which may, as change=any")
        slack = ROUNDING * max(1.0, *map(abs, bounds))
        is_outside = is_free & ((ends < bounds[0] - slack) | (ends > bounds[1] + slack)).any(0)
        if bool(is_outside.any()):
            k = int(is_outside.nonzero()[0])
            raise DataError(
                f"feature {self.names[k]!r} must stay in the input's bounds ({bounds[0]:g}, {bounds[1]:g}), it may be "
                f"{float(ends[0, k]):g} to {float(ends[1, k]):g}: pass bounds that hold all, or a smaller range"
            )

    def _rule(self, k: int) -> str:
        low, high = float(self.low[k]), float(self.high[k])
        return f"{'a number' if self.kind[k] == 'number' else 'a whole number'} in {low:g}..{high:g}"


def read_features(path: str | Path, known: Features) -> Features:
    """Features from a CSV table `name,kind,low,high,change`; what it leaves out or empty is as in `known`.

    A name may be a glob, as `perm_*`; later lines override earlier ones.
    """
    path = existing(Path(path))
    with explained(path, "a CSV table in UTF-8"), path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, strict=True)
        header = [each.strip() for each in next(lines, [])]
        for each in header:
            if each not in HEADER:
                raise DataError(f"{path} must have known columns, got {each!r}: {nearest(each, HEADER)}")
        if "name" not in header or len(set(header)) < len(header):
            raise DataError(f"{path} must have the column name and each column once, got {header}: mend its first line")
        said = [_line(cells, header, f"{path}, line {lines.line_num}", known) for cells in lines if any(cells)]
    try:
        return known._with(said)
    except UsageError as error:
        raise DataError(f"{path}: {error}") from None


def _line(cells: list[str], header: list[str], where: str, known: Features) -> tuple[str, dict[str, Any]]:
    if len(cells) != len(header):
        raise DataError(f"{where}: a row must have {len(header)} cells, got {len(cells)}: mend the row")
    words = dict.fromkeys(HEADER) | {name: cell.strip() or None for name, cell in zip(header, cells, strict=True)}
    name = words.pop("name")
    if name is None:
        raise DataError(f"{where}: a row must name a feature, got none: mend the row")
    for what, choices in (("kind", KINDS), ("change", CHANGES)):
        word = words[what]
        if word is not None and word not in choices:
            raise DataError(f"{where}: {what} must be known, got {word!r}: {nearest(word, choices)}")
    try:
        known._find(name)
    except UsageError as error:
        raise DataError(f"{where}: {error}") from None
    return name, {**words, "low": _number(words["low"], where), "high": _number(words["high"], where)}


def _number(text: str | None, where: str) -> float | None:
    try:
        number = None if text is None else float(text)
    except ValueError:
        number = math.nan
    if number is not None and not math.isfinite(number):
        raise DataError(f"{where}: the range must be of finite numbers, got {text!r}: mend it, or leave it empty")
    return number


def blocks(inputs: Any) -> Iterator[tuple[int, Tensor]]:
    """A table's rows, float32 and in memory, a part at a time, with the number of the first."""
    n, width = inputs.shape
    step = max(1, STEP_BYTES // (4 * width))
    for first in range(0, n, step):
        part = inputs[first : first + step]
        if not isinstance(part, Tensor):
            with np.errstate(over="ignore"):  # an infinity is refused
                part = torch.from_numpy(np.array(part, np.float32))
        yield first, part.detach().cpu().float()


class Described:
    """What is known of a data set: its classes' names, and its features, given or found when first asked for.

    All parts of the data share it, so that a sample has the same features.
    """

    def __init__(
        self,
        inputs: Tensor | Rows,
        names: Sequence[str] | None = None,
        given: Features | None = None,
        classes: tuple[str, ...] | None = None,
    ) -> None:
        self.shape, self.names, self.given, self.classes = tuple(inputs.shape), names, given, classes
        self.inputs = inputs if len(self.shape) == 2 and given is None else None  # pictures are not held on to

    @cached_property
    def features(self) -> Features:
        if self.given is not None:
            return self.given
        if self.inputs is None:
            raise DataError(f"features must be those of a table [rows, features], got inputs {list(self.shape)}")
        found, self.inputs = Features.of(self.inputs, self.names), None
        return found
