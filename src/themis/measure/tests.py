"""Tests and what came of them, as arrays: one row a test."""

from __future__ import annotations

from collections.abc import Iterator
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

    def chunks(self, size: int) -> Iterator[Tests]:
        """Chunks of fixed size and composition, in order; the last may be smaller."""
        for start in range(0, len(self), size):
            yield self[start : start + size]


@dataclass(frozen=True)
class Details:
    """What is known of the faults among some tests, in their order."""

    confidence: Floats
    distance: Floats  # L2, from the seed
    ssim: Floats
    signature: Floats  # [faults, layers]: share of the fault's sensitivity by layer
    inputs: Tensor  # [faults, ...], on the CPU


@dataclass(frozen=True)
class Results:
    """What came of some tests, in their order."""

    is_fault: Bools
    outcome: Ints
    margin: Floats
    gradient: Floats | None  # of the objective in theta, [tests, dimensions]
    faults: Details

    def __len__(self) -> int:
        return len(self.is_fault)
