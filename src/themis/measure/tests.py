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
    ssim: Floats
    signature: Floats  # [faults, layers]: share of the fault's sensitivity by layer
    inputs: Tensor  # [faults, ...], on the CPU
    outputs: Tensor  # to these, on the CPU


@dataclass(frozen=True)
class Results:
    """What came of some tests, in their order."""

    is_fault: Bools
    outcome: Ints
    margin: Floats
    gradient: Floats | None  # of the objective in theta, [tests, dimensions]
    faults: Details | None = None  # not kept longer than it takes to store them

    def __len__(self) -> int:
        return len(self.is_fault)

    @staticmethod
    def join(parts: Sequence[Results]) -> Results:
        """All results in order, without details."""
        gradients = [each.gradient for each in parts if each.gradient is not None]
        return Results(
            np.concatenate([each.is_fault for each in parts]),
            np.concatenate([each.outcome for each in parts]),
            np.concatenate([each.margin for each in parts]),
            np.concatenate(gradients) if gradients else None,
        )
