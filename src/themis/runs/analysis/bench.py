"""The test bench: runs further tests in batches on the seeds of a finished campaign."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from themis.data.seeds import Seeds
from themis.errors import DataError
from themis.measure.calculator import Calculator
from themis.measure.distance import distances, is_similar
from themis.measure.tests import Floats, Ints, Tests
from themis.perturb.table import COUNT_THETA
from themis.progress import advance, step
from themis.runs.estimates import range_shares
from themis.runs.fault import Fault
from themis.runs.replay import missing_seed
from themis.runs.run import Run

Outcomes = dict[str, NDArray[Any]]
"""The results of tests as columns: `is_fault`, `answer`, `margin`, `is_similar` and the distances from the seed. A test
that is too dissimilar from its seed is not a fault."""


class TestBench:
    """Runs tests in chunks of one shape, so that running a test twice gives the same bits. The target must be open."""

    __test__ = False

    def __init__(self, calculator: Calculator, random_seed: int) -> None:
        self.calculator, self.seeds, self.random_seed = calculator, calculator.seeds, random_seed
        self._passes_before = calculator.passes
        self._n_done = self._n_tests = 0
        self.theta = calculator.perturbation.theta
        self.low, self.high, self.identity = (
            np.array([getattr(theta, end) for theta in self.theta], dtype=np.float32)
            for end in ("low", "high", "identity")
        )
        self.is_whole = np.array([theta.unit == COUNT_THETA.unit for theta in self.theta])  # a number of table features

    @contextmanager
    def step(self, text: str, n_tests: int) -> Iterator[None]:
        """A step of progress that runs at most `n_tests` tests, and shows how many have been run."""
        self._n_done, self._n_tests = 0, n_tests
        with step(text):
            yield

    def rows(self, seed_id: Ints) -> Ints:
        """The rows of seeds with these ids."""
        return rows_of(seed_id, self.seeds)

    def settled(self, theta: NDArray[Any]) -> Floats:
        """Theta as it will be run: within its bounds, and rounded where the perturbation rounds it."""
        rounded = np.where(self.is_whole, np.floor(theta + 0.5), theta)
        return rounded.astype(np.float32).clip(self.low, self.high)

    def shares(self, theta: NDArray[Any]) -> NDArray[np.float64]:
        """The distance of each dimension from its identity, as a share of the range on that side, 0 to 1."""
        return range_shares(theta, self.low, self.high, self.identity)

    def strength(self, theta: NDArray[Any]) -> NDArray[np.float64]:
        """The strength of a disturbance: the largest share over the dimensions, 0 to 1."""
        return np.asarray(self.shares(theta).max(-1))

    def run(self, rows: Ints, theta: Floats, noise_seed: Ints, size: int | None = None) -> Outcomes:
        """Run tests in chunks of `size`."""
        size = min(size or self.calculator.chunk, self.calculator.chunk)
        kind = np.full(len(rows), "shrink")
        tests = Tests(np.arange(len(rows)), rows, theta, noise_seed, kind)
        parts = [self._run(tests[first : first + size], size) for first in range(0, len(rows), size)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _run(self, tests: Tests, size: int) -> Outcomes:
        calculator = self.calculator
        disturbed, outputs, motion = calculator.run_chunk(tests, size)
        rows = torch.from_numpy(np.ascontiguousarray(tests.seed)).to(calculator.device)
        inputs = calculator.inputs[rows]
        verdict = calculator.clean.compare(rows, outputs, motion)
        away = distances(inputs, disturbed, bounds := calculator.target.bounds)
        away["is_similar"] = is_similar(inputs, disturbed, bounds, calculator.limits.least)
        is_fault = verdict.is_fault & away["is_similar"]
        columns = {"is_fault": is_fault, "answer": verdict.outcome, "margin": verdict.margin.float(), **away}
        outcomes = {name: column.cpu().numpy().copy() for name, column in columns.items()}
        self._n_done += len(tests)
        advance(self._n_done, self._n_tests, "tests")
        return outcomes

    @property
    def passes(self) -> int:
        """Passes spent on tests so far."""
        return self.calculator.passes - self._passes_before

    @property
    def cost(self) -> int:
        """Passes that one test takes."""
        return self.calculator.cost(needs_gradient=False)

    def usable(self) -> Ints:
        """Rows of the seeds that the model answers correctly without a disturbance, which a campaign tests."""
        return np.asarray(self.calculator.clean.usable.cpu())


def rows_of(seed_id: Ints, seeds: Seeds) -> Ints:
    """The rows of the seeds with these ids; refuses data that lacks one of them."""
    known = seeds.seed_id.numpy()
    order = np.argsort(known, kind="stable")
    rows: Ints = order[np.searchsorted(known, seed_id, sorter=order).clip(max=len(known) - 1)]
    is_missing = known[rows] != seed_id
    if is_missing.any():
        raise DataError(missing_seed(seed_id[is_missing][0], len(known)))
    return rows


def tests_of(faults: Sequence[Fault], seeds: Seeds) -> Tests:
    """The tests that showed these faults, with the rows of their seeds."""
    id, seed_id, noise_seed = (
        np.array([getattr(fault, name) for fault in faults], dtype=np.int64) for name in ("id", "seed_id", "noise_seed")
    )
    theta = np.array([list(fault.theta.values()) for fault in faults], dtype=np.float32)
    return Tests(id, rows_of(seed_id, seeds), theta, noise_seed, np.array([fault.kind for fault in faults]))


@contextmanager
def open_bench(run: Run, seed_id: Ints | None = None, chunk: int | None = None) -> Iterator[TestBench]:
    """Open a bench for these seeds, by default all; chunk: tests per forward pass, by default as recorded."""
    with run.handle.opened(seed_id, chunk) as calculator:
        yield TestBench(calculator, run.handle.random_seed)
