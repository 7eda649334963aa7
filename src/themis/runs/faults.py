"""Faults: tests whose answer broke, each with all it takes to run it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from themis.errors import MissingExtraError, UsageError
from themis.runs.store.schema import KINDS


@dataclass(frozen=True)
class Replay:
    """A fault run again: its input, what the model said this time, and whether that is what was recorded."""

    clean_inputs: Tensor
    inputs: Tensor
    outputs: Tensor
    answer: int
    value: float | None
    confidence: float
    is_fault: bool
    is_same: bool
    """Whether the answer is the recorded one, with outputs within 1e-5 (not kept: confidence, or else margin)."""
    input_gap: float | None = None
    """Largest difference of the input from the kept one; 0 is equal to the bit, None not kept."""
    output_gap: float | None = None
    """The same of the output."""
    changes: list[str] = field(default_factory=list)
    """What is no longer as it was: weights, data, versions, device, threads."""
    bounds: tuple[float, float] | None = None
    """The smallest and the largest value that an input may have."""


@dataclass(frozen=True)
class Fault:
    """A test whose answer broke. `(seed_id, perturbation, theta, noise_seed)` reproduce its input."""

    id: int
    """Number of the test in its campaign."""
    seed_id: int
    perturbation: str
    theta: dict[str, float]
    noise_seed: int
    round: int
    stream: str
    kind: str
    label: int | None
    """None where the data has none, or one that is no class number."""
    clean_answer: int | None
    """None in tasks whose outcomes say what changed."""
    answer: int
    """The wrong outcome; -1 where the output was not finite."""
    clean_value: float | None
    value: float | None
    """The answer as a number: of a regression, a binary score, a mean IoU. None in other tasks, or not finite."""
    confidence: float
    """NaN in tasks that have none, and where the output was not finite."""
    margin: float
    distance: float
    """L2, from the seed."""
    linf: float
    """The largest change of any value."""
    ssim: float | None
    signature: dict[str, float] = field(repr=False)
    """Share of the test's sensitivity by layer."""
    position: int = field(repr=False)
    """Row of the test in its forward pass: with the chunk's shape it makes outputs the same to the bit."""
    chunk: int = field(repr=False)
    """Rows of that forward pass."""
    raised: bool = field(default=False, repr=False)
    """Whether the test raised the campaign's criterion."""
    _replay: Callable[[Fault], Replay] | None = field(default=None, repr=False, compare=False)

    def replay(self) -> Replay:
        """Run the test again."""
        if self._replay is None:
            raise UsageError("this fault has lost its campaign: replay it from run.faults[...]")
        return self._replay(self)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {each.name: getattr(self, each.name) for each in fields(self) if not each.name.startswith("_")}

    def _repr_html_(self) -> str:
        from themis.runs.display.notebook import show_fault

        return show_fault(self)


Column = NDArray[Any]


class Faults(Sequence[Fault]):
    """A campaign's faults in the order they were found; kept as columns, made into `Fault` objects when asked for."""

    def __init__(
        self,
        perturbation: str,
        theta: tuple[str, ...],
        layers: tuple[str, ...],
        replay: Callable[[Fault], Replay] | None,
    ) -> None:
        self.perturbation, self.theta, self.layers, self._replay = perturbation, theta, layers, replay
        self._batches: list[dict[str, Column]] = []
        self._joined: dict[str, Column] | None = None
        self._n = 0

    def add(self, **columns: Column) -> None:
        """Add faults, a column a field."""
        self._batches.append(columns)
        self._joined = None
        self._n += len(columns["id"])

    @property
    def columns(self) -> dict[str, Column]:
        """All faults by column."""
        if self._joined is None:
            names = self._batches[0] if self._batches else ()
            self._joined = {name: np.concatenate([batch[name] for batch in self._batches]) for name in names}
            self._batches = [self._joined] if self._batches else []
        return self._joined

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[Fault]:
        return (self[k] for k in range(self._n))

    @overload
    def __getitem__(self, k: int) -> Fault: ...
    @overload
    def __getitem__(self, k: slice) -> list[Fault]: ...
    def __getitem__(self, k: int | slice) -> Fault | list[Fault]:
        if isinstance(k, slice):
            return [self[each] for each in range(*k.indices(self._n))]
        if not -self._n <= k < self._n:
            raise IndexError(f"fault {k} of {self._n}")
        return self._fault({name: column[k] for name, column in self.columns.items()})

    def by_id(self, id: int) -> Fault:
        """The fault of a test's number."""
        at = np.flatnonzero(self.columns["id"] == id) if self._n else np.zeros(0, dtype=np.int64)
        if not len(at):
            raise UsageError(f"id must be one of the {self._n:,} faults', got {id}: see to_pandas()")
        return self[int(at[0])]

    def latest(self) -> list[Fault]:
        """The faults added last."""
        batch = self._batches[-1] if self._batches else {"id": ()}
        return [self._fault({name: column[k] for name, column in batch.items()}) for k in range(len(batch["id"]))]

    def _fault(self, values: dict[str, Any]) -> Fault:
        theta, signature = values.pop("theta"), values.pop("signature")
        plain = {name: value.item() for name, value in values.items()}
        for name in ("label", "clean_answer"):
            plain[name] = None if plain[name] < 0 else plain[name]
        for name in ("clean_value", "value", "ssim"):
            plain[name] = None if np.isnan(plain[name]) else plain[name]
        return Fault(
            perturbation=self.perturbation,
            theta=dict(zip(self.theta, map(float, theta), strict=True)),
            signature=dict(zip(self.layers, map(float, signature), strict=True)),
            _replay=self._replay,
            **plain,
        )

    def selected(self) -> list[tuple[int, int]]:
        """Seed and wrong outcome of each fault whose test raised the campaign's criterion."""
        columns = self.columns
        if not columns:
            return []
        at = columns["raised"]
        return list(zip(columns["seed_id"][at].tolist(), columns["answer"][at].tolist(), strict=True))

    def distinct(self) -> list[Fault]:
        """One fault for each seed and wrong outcome: the one that needed the smallest change."""
        if not self._n:
            return []
        best: dict[tuple[int, int], int] = {}
        columns = self.columns
        for k in np.argsort(columns["distance"], kind="stable").tolist():
            best.setdefault((int(columns["seed_id"][k]), int(columns["answer"][k])), k)
        return [self[k] for k in sorted(best.values())]

    def most_telling(self, n: int) -> list[Fault]:
        """Up to n faults to look at first: smallest change, surest wrong answer, each seed once, classes mixed.

        Sorted by distance over confidence within each clean answer, then taken from the clean answers in turn.
        """
        groups: dict[int | None, list[Fault]] = {}
        seen: set[int] = set()
        for fault in sorted(self.distinct(), key=_telling):
            if fault.seed_id not in seen:
                seen.add(fault.seed_id)
                groups.setdefault(fault.clean_answer, []).append(fault)
        turns = sorted(
            ((turn, fault) for group in groups.values() for turn, fault in enumerate(group)),
            key=lambda each: (each[0], _telling(each[1])),
        )
        return [fault for _, fault in turns[:n]]

    def to_pandas(self) -> Any:
        """All faults as a DataFrame, a row each: typed columns, `theta_NAME` by dimension, `layer_NAME` by layer.

        The columns are named as in the run's database and its exports; what is not known is missing.
        """
        try:
            pd: Any = import_module("pandas")
        except ImportError as error:
            raise MissingExtraError('a DataFrame needs pandas: pip install "themis-dl[notebook]"') from error
        columns: dict[str, Any] = {}
        for name, kind in KINDS.items():
            column = self.columns[name] if self._n else np.zeros(0, kind.lower())
            if kind == "Int64":
                columns[name] = pd.array(column, dtype=kind)
                columns[name][column < 0] = pd.NA
            else:
                columns[name] = pd.Categorical(column) if kind == "str" else column.astype(kind)
        for prefix, names, field_name in (("theta", self.theta, "theta"), ("layer", self.layers, "signature")):
            values = self.columns[field_name] if self._n else np.zeros((0, len(names)), "float32")
            columns |= {f"{prefix}_{name}": values[:, k] for k, name in enumerate(names)}
        frame = pd.DataFrame(columns)
        frame.insert(2, "perturbation", pd.Categorical([self.perturbation] * self._n, [self.perturbation]))
        return frame

    def _repr_html_(self) -> str:
        from themis.runs.display.notebook import show_faults

        return show_faults(self)


def telling(distance: Column, confidence: Column) -> NDArray[np.float64]:
    """Small where a small change made the model sure of a wrong answer; an output that is not finite is a sure one."""
    sure = np.where(np.isfinite(confidence), confidence, 1.0).astype(np.float64)
    score: NDArray[np.float64] = distance / np.maximum(sure, 1e-6)
    return score


def _telling(fault: Fault) -> float:
    return float(telling(np.array(fault.distance), np.array(fault.confidence)))
