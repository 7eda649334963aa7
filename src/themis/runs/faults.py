"""Faults: tests that the model failed, each with everything needed to run it again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from themis.errors import MissingExtraError, UsageError
from themis.runs.outcomes import NUMBER_TASKS, gives_answers, name_outcome, name_point

if TYPE_CHECKING:
    from torch import Tensor

    from themis.data.seeds import Seeds
    from themis.measure.calculator import Calculator

Column = NDArray[Any]
COLUMN_TYPES = {
    "id": "int64",
    "seed_id": "int64",
    "noise_seed": "int64",
    "round": "int64",
    "stream": "str",
    "kind": "str",
    "label": "Int64",
    "clean_answer": "Int64",
    "answer": "int64",
    "clean_value": "float32",
    "value": "float32",
    "confidence": "float32",
    "margin": "float32",
    "distance": "float32",
    "linf": "float32",
    "ssim": "float32",
    "position": "int64",
    "chunk": "int64",
    "raised": "bool",
}
"""Type of each column of a fault except theta and signature; Int64 columns may have missing values."""


@dataclass(frozen=True)
class Replay:
    """A fault run again: its input, what the model answered this time, and whether that matches the record."""

    clean_inputs: Tensor = field(repr=False)
    inputs: Tensor = field(repr=False)
    outputs: Tensor = field(repr=False)
    answer: int
    value: float | None
    confidence: float
    is_fault: bool
    is_same: bool
    """Whether the answer is the recorded one, with outputs within 1e-5 (if not stored: confidence, or else margin)."""
    input_gap: float | None = None
    """Largest difference between the input and the stored one; 0 if equal to the bit, None if not stored."""
    output_gap: float | None = None
    """The same for the output."""
    changes: list[str] = field(default_factory=list)
    """What has changed since the run: weights, data, versions, device, threads."""
    bounds: tuple[float, float] | None = None
    """The smallest and the largest value that an input may have."""
    boxes: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    """A detector's answers to the clean and to the disturbed input, `[n, 6]` each."""


@dataclass(frozen=True)
class FaultInputs:
    """The clean and the disturbed input of a fault, to be shown, and the bounds of an input if they are known."""

    clean_inputs: Tensor
    inputs: Tensor
    bounds: tuple[float, float] | None = None
    boxes: tuple[Tensor, Tensor] | None = None


class RunHandle(Protocol):
    """Gives access to the model and the seeds of a run, so that its tests can be run again.

    A run of this process has a `LiveRun`; a run folder has a `Replayer`, or a `StoredRun` that opens it when needed.
    """

    @property
    def seeds(self) -> Seeds:
        """The seeds that were tested."""

    @property
    def random_seed(self) -> int:
        """The random seed of the campaign."""

    @property
    def passes(self) -> int:
        """Passes that its calculator had already spent on the campaign."""

    def opened(
        self, seed_id: NDArray[np.int64] | None = None, chunk: int | None = None
    ) -> AbstractContextManager[Calculator]:
        """A calculator that knows the clean outputs of at least these seeds (by default all); its target is open.

        chunk: tests per forward pass, by default as recorded.
        """

    def swept(self, seed_id: NDArray[np.int64]) -> Calculator:
        """A calculator that has swept at least these seeds."""

    def replay(self, fault: Fault, /) -> Replay:
        """Run a fault again."""

    def show(self, fault: Fault, /) -> FaultInputs | None:
        """The inputs of a fault without running anything that a run folder names; None if they were not stored."""


@dataclass(frozen=True)
class Fault:
    """A test that the model failed. `(seed_id, perturbation, theta, noise_seed)` reproduce its input."""

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
    """None if the data has no labels, or if the label is not a class number."""
    clean_answer: int | None
    """None in tasks whose outcomes say what changed."""
    answer: int
    """The wrong outcome; -1 if the output was not finite."""
    clean_value: float | None
    value: float | None
    """The answer as a number: a regression value, a binary score, a mean IoU. None in other tasks, or if not finite."""
    confidence: float
    """NaN in tasks without confidence, and if the output was not finite."""
    margin: float
    distance: float
    """L2 distance from the seed."""
    linf: float
    """The largest change of any value."""
    ssim: float | None
    signature: dict[str, float] = field(repr=False)
    """Share of the test's sensitivity by layer."""
    position: int = field(repr=False)
    """Row of the test in its forward pass: at this row of a chunk of the same shape, outputs are equal to the bit."""
    chunk: int = field(repr=False)
    """Rows of that forward pass."""
    raised: bool = field(default=False, repr=False)
    """Whether the test raised the campaign's criterion."""
    _task: str = field(default="", repr=False, compare=False)
    _classes: Sequence[str] | None = field(default=None, repr=False, compare=False)
    _handle: RunHandle | None = field(default=None, repr=False, compare=False)

    def replay(self) -> Replay:
        """Run the test again."""
        if self._handle is None:
            raise UsageError(
                "a fault must belong to a run to be replayed, but this one does not: take it from run.faults"
            )
        return self._handle.replay(self)

    def shown(self) -> FaultInputs | None:
        """The inputs of the test; those of a run folder only if they were stored, because showing runs nothing."""
        return None if self._handle is None else self._handle.show(self)

    @property
    def outcome(self) -> str | None:
        """What happened, in words, in tasks whose outcomes are not answers, such as `dog lost`; otherwise None."""
        if self._task == "keypoints" and self.answer >= 0 and self.value is not None:
            return f"{name_point(self.answer, self._classes)} off by {self.value:.3g} pixels"
        if not self._task or gives_answers(self._task) or self.answer < 0:
            return None
        return name_outcome(self._task, self.answer, self._classes)

    @property
    def is_number(self) -> bool:
        """Whether the answers are numbers, `clean_value` and `value`, as in a regression."""
        return self._task in NUMBER_TASKS and self.clean_value is not None and self.value is not None

    def as_dict(self) -> dict[str, Any]:
        """The fault as plain data."""
        names = [column.name for column in fields(self)]
        return {name: getattr(self, name) for name in names if not name.startswith("_")}

    def _repr_html_(self) -> str:
        from themis.runs.display.notebook import show_fault

        return show_fault(self)


class Faults(Sequence[Fault]):
    """A campaign's faults in the order they were found; stored as columns, and built as `Fault` objects on demand.

    handle: gives access to the model and the seeds, if faults are to be replayed.
    """

    def __init__(
        self,
        perturbation: str,
        theta: tuple[str, ...],
        layers: tuple[str, ...],
        handle: RunHandle | None,
        task: str = "",
        classes: Sequence[str] | None = None,
    ) -> None:
        """task, classes: the name of the oracle and those of the classes, to say in words what happened."""
        self.perturbation, self.theta, self.layers, self.handle = perturbation, theta, layers, handle
        self.task, self.classes = task, classes
        self._batches: list[dict[str, Column]] = []
        self._joined: dict[str, Column] | None = None
        self._n = 0

    def add(self, **columns: Column) -> None:
        """Add faults, one column per field."""
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
            return [self[row] for row in range(*k.indices(self._n))]
        if not -self._n <= k < self._n:
            raise IndexError(f"fault {k} of {self._n}")
        return self._fault({name: column[k] for name, column in self.columns.items()})

    def by_id(self, id: int) -> Fault:
        """The fault with this test number."""
        rows = np.flatnonzero(self.columns["id"] == id) if self._n else np.zeros(0, dtype=np.int64)
        if not len(rows):
            raise UsageError(f"id must be that of one of the {self._n:,} faults, got {id}: see to_pandas()")
        return self[int(rows[0])]

    def latest(self) -> list[Fault]:
        """The faults of the last call of `add`."""
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
            _task=self.task,
            _classes=self.classes,
            _handle=self.handle,
            **plain,
        )

    def selected(self) -> list[tuple[int, int]]:
        """Seed and wrong outcome of each fault whose test raised the campaign's criterion."""
        columns = self.columns
        if not columns:
            return []
        raised = columns["raised"]
        return list(zip(columns["seed_id"][raised].tolist(), columns["answer"][raised].tolist(), strict=True))

    def distinct(self) -> list[Fault]:
        """One fault per seed and wrong outcome: the one with the smallest change."""
        if not self._n:
            return []
        best: dict[tuple[int, int], int] = {}
        columns = self.columns
        for k in np.argsort(columns["distance"], kind="stable").tolist():
            best.setdefault((int(columns["seed_id"][k]), int(columns["answer"][k])), k)
        return [self[k] for k in sorted(best.values())]

    def most_telling(self, n: int) -> list[Fault]:
        """Up to n faults to look at first: small changes, confident wrong answers, one per seed, classes mixed.

        Faults are sorted by distance over confidence within each clean answer, then taken from the clean answers in
        turn.
        """
        groups: dict[int | None, list[Fault]] = {}
        seeds: set[int] = set()
        for fault in sorted(self.distinct(), key=telling_score):
            if fault.seed_id not in seeds:
                seeds.add(fault.seed_id)
                groups.setdefault(fault.clean_answer, []).append(fault)
        turns = [(turn, fault) for group in groups.values() for turn, fault in enumerate(group)]
        turns.sort(key=lambda entry: (entry[0], telling_score(entry[1])))
        return [fault for _, fault in turns[:n]]

    def to_pandas(self) -> Any:
        """All faults as a DataFrame, one row per fault: typed columns, `theta_NAME` and `layer_NAME` included.

        The columns are named as in the run's database and its exports; unknown values are missing.
        """
        try:
            pd: Any = import_module("pandas")
        except ImportError as error:
            raise MissingExtraError('a DataFrame needs pandas: pip install "themis-dl[notebook]"') from error
        columns: dict[str, Any] = {}
        for name, dtype in COLUMN_TYPES.items():
            column = self.columns[name] if self._n else np.zeros(0, dtype.lower())
            if dtype == "Int64":
                columns[name] = pd.array(column, dtype=dtype)
                columns[name][column < 0] = pd.NA
            else:
                columns[name] = pd.Categorical(column) if dtype == "str" else column.astype(dtype)
        for prefix, names, field_name in (("theta", self.theta, "theta"), ("layer", self.layers, "signature")):
            values = self.columns[field_name] if self._n else np.zeros((0, len(names)), "float32")
            columns |= {f"{prefix}_{name}": values[:, k] for k, name in enumerate(names)}
        frame = pd.DataFrame(columns)
        frame.insert(2, "perturbation", pd.Categorical([self.perturbation] * self._n, [self.perturbation]))
        return frame

    def __repr__(self) -> str:
        return f"<Faults: {self._n:,} under {self.perturbation}>"

    def _repr_html_(self) -> str:
        from themis.runs.display.notebook import show_faults

        return show_faults(self)


def telling(distance: Column, confidence: Column) -> NDArray[np.float64]:
    """Low if a small change made the model confident of a wrong answer; non-finite outputs count as fully confident."""
    certainty = np.where(np.isfinite(confidence), confidence, 1.0).astype(np.float64)
    score: NDArray[np.float64] = distance / np.maximum(certainty, 1e-6)
    return score


def telling_score(fault: Fault) -> float:
    """The same for one fault."""
    return float(telling(np.array(fault.distance), np.array(fault.confidence)))
