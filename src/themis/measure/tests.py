"""Tests and what came of them, as arrays: one row a test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Tests:
    """What is to be run. `seed` is a row of the campaign's seeds, `kind` the sort of proposal that made the test."""

    __test__ = False  # not a pytest class

    number: Ints
    seed: Ints
    theta: Floats  # [tests, dimensions]; float32, so that the number stored is the number used
    noise_seed: Ints
    kind: NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.seed)

    def __getitem__(self, rows: slice | Ints | Bools) -> Tests:
        return Tests(*(getattr(self, each.name)[rows] for each in fields(self)))


@dataclass(frozen=True)
class Details:
    """What is known of the faults among some tests, in their order."""

    value: Floats  # the answer as a number; NaN in tasks that have none, as is the confidence
    confidence: Floats
    distance: Floats  # L2, from the seed
    linf: Floats  # the largest change of any value
    ssim: Floats
    signature: Floats  # [faults, layers]: share of the fault's sensitivity by layer
    position: Ints  # row in the forward pass
    inputs: Tensor  # [faults, ...], on the CPU
    outputs: Tensor  # to these, on the CPU


@dataclass(frozen=True)
class Results:
    """What came of some tests, in their order. Of dropped ones nothing did: their margin is NaN."""

    is_fault: Bools
    outcome: Ints
    margin: Floats
    gradient: Floats | None  # of the objective in theta, [tests, dimensions]; 0 for tests that climb nothing
    faults: Details | None = None  # not kept longer than it takes to store them
    is_dropped: Bools | None = None  # which were no longer the same picture; None is none of them
    raised: Bools | None = None  # which raised the criterion; None where there is none

    def __len__(self) -> int:
        return len(self.is_fault)

    def __getitem__(self, rows: Bools) -> Results:
        """Those of some tests, without details."""
        gradient = None if self.gradient is None else self.gradient[rows]
        dropped, raised = (None if each is None else each[rows] for each in (self.is_dropped, self.raised))
        return Results(self.is_fault[rows], self.outcome[rows], self.margin[rows], gradient, None, dropped, raised)

    @property
    def was_run(self) -> Bools:
        """Which tests the model was given."""
        return np.ones(len(self), dtype=bool) if self.is_dropped is None else ~self.is_dropped

    @staticmethod
    def join(parts: Sequence[Results]) -> Results:
        """All results in order, without details."""
        width = next((each.gradient.shape[1] for each in parts if each.gradient is not None), None)
        none = [] if width is None else [np.zeros((len(each), width), dtype=np.float32) for each in parts]
        gradients = [zero if each.gradient is None else each.gradient for each, zero in zip(parts, none, strict=False)]
        raised = [each.raised for each in parts if each.raised is not None]
        drops = any(each.is_dropped is not None for each in parts)
        return Results(
            np.concatenate([each.is_fault for each in parts]),
            np.concatenate([each.outcome for each in parts]),
            np.concatenate([each.margin for each in parts]),
            np.concatenate(gradients) if gradients else None,
            is_dropped=~np.concatenate([each.was_run for each in parts]) if drops else None,
            raised=np.concatenate(raised) if raised else None,
        )
