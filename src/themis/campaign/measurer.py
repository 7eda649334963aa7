"""Where the clean inputs and the tests of a campaign are run: here, or in other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from torch import Tensor

from themis.measure.calculator import Calculator
from themis.measure.fold import Objective
from themis.measure.moments import Accumulator, Moments
from themis.measure.outcome import PlannedTests
from themis.measure.runner import Measurement, TestRunner
from themis.measure.sweep import sweep
from themis.measure.tests import Tests


@dataclass(frozen=True)
class Portion:
    """Tests of a stream that are to be measured."""

    stream: str
    tests: Tests
    into: Accumulator
    """The moments that their sensitivities are added to."""
    choose: Callable[[Tests], tuple[Tests, Objective | None]]
    """Returns the first of some tests, those that share an objective, and that objective."""
    is_next: bool = True
    """Whether it is measured right after the portion before it; else others, not proposed yet, come in between."""

    def by_objective(self) -> list[PlannedTests]:
        """The tests in groups that share an objective."""
        groups, rest = [], self.tests
        while len(rest):
            tests, objective = self.choose(rest)
            groups.append(PlannedTests(tests, self.into, objective))
            rest = rest[len(tests) :]
        return groups


Upcoming = Callable[[], Iterator[Portion]]
"""Returns the portions that are measured after the pending one."""


class Measurer(Protocol):
    """Phase 1 of a campaign. Which measurer runs a test never changes its result."""

    def sweep(self) -> Moments:
        """Run every clean input once, see `themis.measure.sweep`."""

    def begin(self, panel: Tensor, scale: Tensor | None) -> None:
        """Prepare for tests, of which the neurons of the panel are watched. scale: the unit of each sensitivity."""

    def measure(self, pending: Portion, upcoming: Upcoming, max_passes: int | None) -> Measurement:
        """Run the first chunk of the pending tests, see `TestRunner.measure`.

        The chunks after it and the upcoming portions may be started ahead: they are what later calls ask for, unless a
        budget runs out. There may be no end to them.
        """

    def pause(self) -> None:
        """Nothing is asked for while the campaign judges; what was to be started ahead can be run meanwhile."""

    def end(self) -> None:
        """Free what only a running campaign needs; the calculator can still run single tests."""


class LocalMeasurer:
    """Runs everything in this process, one chunk after another."""

    def __init__(self, calculator: Calculator) -> None:
        self.calculator = calculator
        self._runner: TestRunner | None = None

    def sweep(self) -> Moments:
        return sweep(self.calculator)

    def begin(self, panel: Tensor, scale: Tensor | None) -> None:
        self._runner = TestRunner(self.calculator, panel)

    def measure(self, pending: Portion, upcoming: Upcoming, max_passes: int | None) -> Measurement:
        runner = self._runner = self._runner or TestRunner(self.calculator)
        if not runner.captures:
            tests, objective = pending.choose(pending.tests)
            return runner.measure(tests, pending.into, objective, max_passes)
        portions = [pending, *(portion for portion in islice(upcoming(), 1) if portion.is_next)]
        first, *ahead = [group for portion in portions for group in portion.by_objective()]
        return runner.measure(first.tests, first.into, first.objective, max_passes, ahead)

    def pause(self) -> None:
        pass

    def end(self) -> None:
        self._runner = None
        self.calculator.release()
