"""The faults of a campaign, as columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from themis.errors import UsageError, needs_extra
from themis.runs.fault import PLAIN_COLUMNS, Fault

if TYPE_CHECKING:
    from themis.runs.replay import RunHandle

Array = NDArray[Any]


class Faults(Sequence[Fault]):
    """A campaign's faults as columns, in the order in which they were found; the handle gives access to the model."""

    def __init__(
        self,
        perturbation: str,
        theta: tuple[str, ...],
        layers: tuple[str, ...],
        handle: RunHandle | None,
        task: str = "",
        classes: Sequence[str] | None = None,
    ) -> None:
        """task, classes: the name of the oracle and those of the classes, which describe outcomes in words."""
        self.perturbation, self.theta, self.layers, self.handle = perturbation, theta, layers, handle
        self.task, self.classes = task, classes
        none: dict[str, Array] = {column.name: np.zeros(0, column.dtype) for column in PLAIN_COLUMNS}
        matrices = {"theta": len(theta), "signature": len(layers)}
        self._batches = [none | {name: np.zeros((0, width), np.float32) for name, width in matrices.items()}]
        self._n = 0

    def add(self, **columns: Array) -> None:
        """Add faults, one column per field."""
        self._batches.append(columns)
        self._n += len(columns["id"])

    @property
    def columns(self) -> dict[str, Array]:
        """All faults by column."""
        if len(self._batches) > 1:
            names = self._batches[-1]
            self._batches = [{name: np.concatenate([batch[name] for batch in self._batches]) for name in names}]
        return self._batches[0]

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
        rows = np.flatnonzero(self.columns["id"] == id)
        if not len(rows):
            raise UsageError(f"id must be the number of one of the {self._n:,} faults, got {id}: see to_pandas()")
        return self[int(rows[0])]

    def latest(self) -> list[Fault]:
        """The faults added by the last call of `add`."""
        batch = self._batches[-1]
        return [self._fault({name: column[k] for name, column in batch.items()}) for k in range(len(batch["id"]))]

    def _fault(self, values: dict[str, Any]) -> Fault:
        theta, signature = values.pop("theta"), values.pop("signature")
        plain = {name: value.item() for name, value in values.items()}
        for column in PLAIN_COLUMNS:
            if column.is_optional and column.is_missing(plain[column.name]):
                plain[column.name] = None
        return Fault(
            perturbation=self.perturbation,
            theta=dict(zip(self.theta, map(float, theta), strict=True)),
            signature=dict(zip(self.layers, map(float, signature), strict=True)),
            _task=self.task,
            _classes=self.classes,
            _handle=self.handle,
            **plain,
        )

    def distinct(self) -> list[Fault]:
        """One fault per seed and wrong outcome: the one with the smallest change."""
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
        with needs_extra("notebook", "a DataFrame needs pandas"):
            pd: Any = import_module("pandas")
        columns: dict[str, Any] = {}
        for column in PLAIN_COLUMNS:
            name, values = column.name, self.columns[column.name]
            if column.type == "int" and column.missing is not None:
                columns[name] = pd.array(values, dtype="Int64")
                columns[name][values < 0] = pd.NA
            else:
                columns[name] = pd.Categorical(values) if column.type == "str" else values.astype(column.dtype)
        for prefix, names, field_name in (("theta", self.theta, "theta"), ("layer", self.layers, "signature")):
            values = self.columns[field_name]
            columns |= {f"{prefix}_{name}": values[:, k] for k, name in enumerate(names)}
        frame = pd.DataFrame(columns)
        frame.insert(2, "perturbation", pd.Categorical([self.perturbation] * self._n, [self.perturbation]))
        return frame

    def __repr__(self) -> str:
        return f"<Faults: {self._n:,} under {self.perturbation}>"

    def _repr_html_(self) -> str:
        from themis.runs.display.fault import show_faults

        return show_faults(self)


def telling(distance: Array, confidence: Array) -> NDArray[np.float64]:
    """How telling faults are: lower for a smaller change and a more confident wrong answer.

    Outputs that are not finite count as fully confident.
    """
    certainty = np.where(np.isfinite(confidence), confidence, 1.0).astype(np.float64)
    return np.asarray(distance / np.maximum(certainty, 1e-6))


def telling_score(fault: Fault) -> float:
    """How telling one fault is; the lower the better."""
    return float(telling(np.array(fault.distance), np.array(fault.confidence)))
