"""Tests and their results, as arrays with one row per test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Tests:
    """Tests to be run. `seed` is a row of the campaign's seeds, `kind` the kind of proposal that it comes from."""

    __test__ = False  # not a pytest class

    number: Ints
    seed: Ints
    theta: Floats  # [tests, dimensions]; float32, so that the stored number is the number used
    noise_seed: Ints
    kind: NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.seed)

    def equals(self, other: Tests) -> bool:
        """Whether these are the same tests in the same order."""
        return all(np.array_equal(getattr(self, column.name), getattr(other, column.name)) for column in fields(self))

    def __getitem__(self, rows: slice | Ints | Bools) -> Tests:
        return Tests(self.number[rows], self.seed[rows], self.theta[rows], self.noise_seed[rows], self.kind[rows])


@dataclass(frozen=True)
class FaultDetails:
    """What is recorded of the faults among some tests, in the order of the tests."""

    columns: dict[str, NDArray[Any]]  # by name: value, confidence, distances, signature, position; none without faults
    inputs: Tensor  # [faults, ...], on the CPU
    outputs: Tensor  # for these inputs, on the CPU

    def __len__(self) -> int:
        return len(self.inputs)

    def arrays(self) -> dict[str, Any]:
        """All of it by name."""
        return {**self.columns, "inputs": self.inputs, "outputs": self.outputs}


@dataclass(frozen=True)
class Results:
    """The results of some tests, in their order. Dropped tests were not run: their margin is NaN."""

    is_fault: Bools
    outcome: Ints
    margin: Floats
    gradient: Floats | None  # of the objective in theta, [tests, dimensions]; 0 for tests without an objective
    is_dropped: Bools | None = None  # which tests were too dissimilar from their seed; None if none was
    raised: Bools | None = None  # which tests raised the criterion; None without a criterion

    def __len__(self) -> int:
        return len(self.is_fault)

    def __getitem__(self, rows: Bools) -> Results:
        """The results of some of the tests."""
        gradient = None if self.gradient is None else self.gradient[rows]
        dropped, raised = (None if column is None else column[rows] for column in (self.is_dropped, self.raised))
        return Results(self.is_fault[rows], self.outcome[rows], self.margin[rows], gradient, dropped, raised)

    @property
    def was_run(self) -> Bools:
        """Which tests the model was given."""
        return np.ones(len(self), dtype=bool) if self.is_dropped is None else ~self.is_dropped

    @staticmethod
    def join(parts: Sequence[Results]) -> Results:
        """All results in order."""
        if len(parts) == 1:
            return parts[0]
        n_dimensions = next((part.gradient.shape[1] for part in parts if part.gradient is not None), None)
        gradient = None
        if n_dimensions is not None:
            gradient = np.concatenate(
                [
                    np.zeros((len(part), n_dimensions), dtype=np.float32) if part.gradient is None else part.gradient
                    for part in parts
                ]
            )
        raised = [part.raised for part in parts if part.raised is not None]
        has_dropped = any(part.is_dropped is not None for part in parts)
        return Results(
            np.concatenate([part.is_fault for part in parts]),
            np.concatenate([part.outcome for part in parts]),
            np.concatenate([part.margin for part in parts]),
            gradient,
            is_dropped=~np.concatenate([part.was_run for part in parts]) if has_dropped else None,
            raised=np.concatenate(raised) if raised else None,
        )
