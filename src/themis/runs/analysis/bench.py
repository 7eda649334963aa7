"""The bench: runs tests of a finished campaign's seeds in batches, in its process or from its folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from themis.data.rows import Rows
from themis.data.seeds import Seeds
from themis.runs.environment import threads
from themis.errors import DataError, UsageError
from themis.measure.calculator import Calculator
from themis.measure.chunk import padded
from themis.measure.distance import l2, linf, ssim
from themis.measure.inputs import check_bounds
from themis.measure.tests import Bools, Floats, Ints, Tests
from themis.runs.open import Replays
from themis.perturb.table import COUNT
from themis.runs.replay import Replayer, recorded_oracle
from themis.runs.run import Run
from themis.runs.store.reader import Reader

Source = Run | Replayer | Reader | str | Path
"""A finished campaign, or its folder; a `Replayer` where target and data must be given."""


@dataclass(frozen=True)
class Ran:
    """What came of some tests, a column a field; those that are no longer the same picture are no faults."""

    is_fault: Bools
    answer: Ints
    margin: Floats
    distance: Floats
    linf: Floats
    ssim: Floats

    def put(self, at: Ints, other: Ran, rows: Bools) -> None:
        """Write some rows of another over those at `at`."""
        for name, column in vars(other).items():
            getattr(self, name)[at] = column[rows]


class Bench:
    """Tests run at one shape, so that a bisection compares like with like. The target must be open.

    before: passes that the calculator had spent when the bench was made.
    """

    def __init__(self, calculator: Calculator, seeds: Seeds, random_seed: int, before: int = 0) -> None:
        self.calculator, self.seeds, self.random_seed = calculator, seeds, random_seed
        self._before = before
        self.theta = calculator.perturbation.theta
        self.low, self.high, self.identity = (
            np.array([getattr(each, end) for each in self.theta], dtype=np.float32)
            for end in ("low", "high", "identity")
        )
        self.is_whole = np.array([each.unit == COUNT.unit for each in self.theta])  # a table's features are counted

    def rows(self, seed_id: Ints) -> Ints:
        """Where seeds stand among the bench's."""
        known = self.seeds.seed_id.numpy()
        order = np.argsort(known, kind="stable")
        at: Ints = order[np.searchsorted(known, seed_id, sorter=order).clip(max=len(known) - 1)]
        missing = known[at] != seed_id
        if missing.any():
            raise DataError(_lacks(seed_id[missing][0], len(known)))
        return at

    def settled(self, theta: NDArray[Any]) -> Floats:
        """Theta as it is run: in its box, and whole where the perturbation rounds it."""
        rounded = np.where(self.is_whole, np.floor(theta + 0.5), theta)
        return rounded.astype(np.float32).clip(self.low, self.high)

    def shares(self, theta: NDArray[Any]) -> NDArray[np.float64]:
        """How far each dimension is from its identity to the bound on that side, 0 to 1."""
        away = theta.astype(np.float64) - self.identity
        reach = np.where(away >= 0, self.high - self.identity, self.identity - self.low)
        shares: NDArray[np.float64] = np.divide(np.abs(away), reach, out=np.zeros_like(away), where=reach > 0)
        return shares

    def strength(self, theta: NDArray[Any]) -> NDArray[np.float64]:
        """How strong a disturbance is: the share of the range that its furthest dimension goes, 0 to 1."""
        strength: NDArray[np.float64] = self.shares(theta).max(-1)
        return strength

    def run(self, rows: Ints, theta: Floats, noise_seed: Ints, size: int | None = None) -> Ran:
        """Run tests, `size` at a time and in that shape."""
        size = min(size or self.calculator.chunk, self.calculator.chunk)
        kind = np.full(len(rows), "shrink")
        tests = Tests(np.arange(len(rows)), rows, theta, noise_seed, kind)
        parts = [self._run(tests[first : first + size], size) for first in range(0, len(rows), size)]
        return Ran(*(np.concatenate([getattr(part, name) for part in parts]) for name in Ran.__dataclass_fields__))

    def _run(self, tests: Tests, size: int) -> Ran:
        calculator = self.calculator
        disturbed, outputs = calculator.run_chunk(tests, size)
        rows = torch.from_numpy(np.ascontiguousarray(tests.seed)).to(calculator.device)
        inputs = calculator.inputs[rows]
        labels = None if calculator.labels is None else calculator.labels[rows]
        verdict = calculator.oracle.compare(calculator.clean_outputs[rows], outputs, labels)
        alike, is_fault = ssim(inputs, disturbed, calculator.target.bounds), verdict.is_fault
        if calculator.min_ssim is not None:
            is_fault = is_fault & (alike >= calculator.min_ssim)
        far = (l2(inputs, disturbed), linf(inputs, disturbed), alike)
        columns = (is_fault, verdict.outcome, verdict.margin.float(), *far)
        return Ran(*(column.cpu().numpy().copy() for column in columns))

    @property
    def passes(self) -> int:
        """Spent so far, on clean inputs too."""
        return self.calculator.passes - self._before

    @property
    def cost(self) -> int:
        """Passes of a test."""
        return self.calculator.cost(climbs=False)

    def usable(self) -> Ints:
        """Seeds that a campaign tests: those that are answered right as they are."""
        calculator = self.calculator
        usable: Ints = (
            calculator.oracle.check(calculator.clean_outputs, calculator.labels).nonzero()[:, 0].cpu().numpy()
        )
        return usable


@contextmanager
def opened(source: Source, seed_id: Ints | None = None, chunk: int | None = None) -> Iterator[Bench]:
    """A bench for these seeds, by default all; `chunk`: rows of a forward pass, by default as recorded."""
    if isinstance(source, Run) and isinstance(source.faults._replay, Replays):
        with source.faults._replay.replayer() as made, opened(made, seed_id, chunk) as bench:
            yield bench
    elif isinstance(source, Run):
        calculator, seeds = _campaign(source)
        with calculator.target.opened(), torch.no_grad():
            yield Bench(calculator, seeds, source.start.settings.random_seed, calculator.passes)
    elif isinstance(source, Replayer):
        with threads(source.run.record["environment"]["threads"]), source.target.opened(), torch.no_grad():
            yield _from_folder(source, seed_id, chunk)
    elif isinstance(source, Reader):
        with opened(Replayer(source), seed_id, chunk) as bench:
            yield bench
    else:
        with closing(Reader(source)) as run, opened(run, seed_id, chunk) as bench:
            yield bench


def _campaign(run: Run) -> tuple[Calculator, Seeds]:
    """What a campaign of this process ran its tests with."""
    replay = run.faults._replay
    if not isinstance(replay, partial):
        raise UsageError("the run must be one that this process made: pass the folder it was written to")
    return replay.keywords["calculator"], replay.keywords["seeds"]


def _from_folder(made: Replayer, seed_id: Ints | None, chunk: int | None) -> Bench:
    record, seeds = made.run.record, made.seeds
    if "start" not in record:
        raise UsageError(f"the run in {made.run.path} must have begun its tests, it has run none yet: wait for it")
    if seed_id is not None:
        is_wanted = torch.isin(seeds.seed_id, torch.from_numpy(np.unique(seed_id)))
        if not bool(is_wanted.any()):
            raise DataError(
                f"the data must hold the fault's seed {seed_id[0]}, it has {len(seeds)}: give the run's data"
            )
        seeds = seeds[is_wanted.nonzero()[:, 0]].held()
    oracle = recorded_oracle(made.run, made.target.oracle)
    calculator = Calculator(
        made.target,
        seeds,
        made.perturbation,
        oracle,
        chunk=chunk or record["start"]["chunk"],
        clean_bytes=0,
        min_ssim=record["settings"]["min_ssim"],
    )
    clean = _clean_outputs(calculator)
    if oracle.spec() != record["start"]["oracle"]:  # another one than the run's
        calculator.oracle = oracle.settle(clean, calculator.labels)
    calculator.take_clean(clean)
    return Bench(calculator, seeds, record["settings"]["random_seed"])


def _clean_outputs(calculator: Calculator) -> torch.Tensor:
    """The model's outputs to every clean input, in chunks of the recorded shape."""
    n, parts = len(calculator.inputs), []
    for first in range(0, n, calculator.chunk):
        rows = torch.arange(first, min(first + calculator.chunk, n), device=calculator.device)
        inputs = calculator.inputs[padded(rows, calculator.chunk)]
        if isinstance(calculator.seeds.inputs, Rows):  # others were checked at once
            check_bounds(inputs, calculator.target.bounds, calculator.seeds.seed_id[rows.cpu()])
        parts.append(calculator.target.forward(inputs)[: len(rows)].float())
    calculator.passes += n
    return torch.cat(parts)


def _lacks(seed_id: int, n: int) -> str:
    return f"the data must hold the fault's seed {seed_id}, it has {n}: give the run's data"
