"""What running a chunk leaves, however it was run, and what is recorded of its faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from themis.errors import ModelError
from themis.measure.distance import distances
from themis.measure.fold import Objective, signature
from themis.measure.moments import Accumulator
from themis.measure.tests import Bools, FaultDetails, Floats, Ints, Results, Tests
from themis.oracle import Oracle
from themis.oracle.oracle import KEPT_ANSWER
from themis.perturb import Perturbation


class PlannedTests(NamedTuple):
    """Tests that are measured, now or probably next, the moments they are added to, and their objective."""

    tests: Tests
    into: Accumulator
    objective: Objective | None = None


@dataclass(frozen=True)
class ChunkOutcome:
    """What running the first of some tests leaves: a chunk, or several. A row is a test that the model was given."""

    tests: Tests
    """The tests of the chunks, those that were dropped included."""
    chunk: int
    """Rows of a forward pass, padding included."""
    is_fault: Bools
    outcome: Ints
    margin: Floats
    value: Floats
    gradient: Floats | None
    is_finite: Bools | None
    """Which outputs are finite; None if all are."""
    seed: Tensor
    disturbed: Tensor
    outputs: Tensor
    clean_inputs: Callable[[Tensor], Tensor]
    """Returns the clean inputs of some rows."""
    by_layer: Callable[[], Tensor]
    """Returns each row's summed sensitivity in each layer, `[rows, layers]`."""
    panel: Tensor | None
    """The signed differences of the watched neurons, `[rows, panel]`."""
    commit: Callable[[int], None]
    """Adds the sums of the passes whose outputs are all finite, which are those of so many tests."""
    order: Ints | None = None
    """The position of each row among the tests; None if every test is a row."""

    def results(self) -> Results:
        """One row per test, in the order of the tests; tests that were not run are not faults."""
        order = self.order
        if order is None:
            return Results(self.is_fault, self.outcome, self.margin, self.gradient)
        n = len(self.tests)

        def spread(rows: Any, dropped: float) -> Any:
            full = np.full((n, *rows.shape[1:]), dropped, dtype=rows.dtype)
            full[order] = rows
            return full

        gradient = None if self.gradient is None else spread(self.gradient, 0.0)
        is_dropped = ~spread(np.ones(len(order), dtype=bool), False)
        columns = spread(self.is_fault, False), spread(self.outcome, KEPT_ANSWER), spread(self.margin, np.nan)
        return Results(*columns, gradient, is_dropped=is_dropped)


class Runner(Protocol):
    """Runs tests; which runner does never changes a result, but for rounding."""

    def run(self, planned: PlannedTests, ahead: Sequence[PlannedTests] = ()) -> ChunkOutcome:
        """Run the first of the tests without committing their sums; those `ahead` may be started."""


def describe_faults(
    outcome: ChunkOutcome, oracle: Oracle, bounds: tuple[float, float], perturbation: Perturbation
) -> FaultDetails:
    """What is recorded of the faults of a chunk, of which there is at least one."""
    at = np.flatnonzero(outcome.is_fault)
    rows = torch.from_numpy(at).to(outcome.outputs.device)
    inputs, disturbed, outputs = outcome.clean_inputs(rows), outcome.disturbed[rows], outcome.outputs[rows]
    columns = {"confidence": oracle.confidence(outputs), **distances(inputs, disturbed, bounds)}
    arrays = {name: column.cpu().numpy() for name, column in columns.items()}
    if np.isnan(arrays["distance"]).any():  # seeds are finite, so disturbed inputs are not
        raise ModelError(
            f"perturbation {perturbation.name!r} must return finite inputs, but it returned a NaN: correct "
            f"its function {perturbation.code}"
        )
    # Four decimals: more would say nothing, and such numbers are stored in a third of the time.
    shares = signature(outcome.by_layer()[rows]).cpu().numpy()
    arrays["signature"] = np.rint(shares * np.float32(1e4)) / np.float32(1e4)
    arrays |= {"value": outcome.value[at], "position": at % outcome.chunk}
    return FaultDetails(arrays, disturbed.cpu(), outputs.cpu())


def no_faults(outcome: ChunkOutcome) -> FaultDetails:
    """What is recorded of chunks without a fault; always the same in a campaign."""
    inputs, outputs = (torch.empty_like(rows[:0], device="cpu") for rows in (outcome.disturbed, outcome.outputs))
    return FaultDetails({}, inputs, outputs)
