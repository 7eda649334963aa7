"""Where the clean inputs and the tests of a campaign are run: here, or in other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from torch import Tensor

from themis.measure.calculator import Calculator, Measurement, PlannedTests
from themis.measure.fold import Objective
from themis.measure.moments import Accumulator, Moments
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
        """Run every clean input once, see `Calculator.sweep`."""

    def begin(self, panel: Tensor, scale: Tensor | None) -> None:
        """Prepare for tests, of which the neurons of the panel are watched. scale: the unit of each sensitivity."""

    def measure(self, pending: Portion, upcoming: Upcoming, max_passes: int | None) -> Measurement:
        """Run the first chunk of the pending tests, see `Calculator.measure`.

        The chunks after it and the upcoming portions may be started ahead: they are what later calls ask for, unless a
        budget runs out. There may be no end to them.
        """

    def pause(self) -> None:
        """Nothing is asked for while the campaign judges; what was to be started ahead can be run meanwhile."""


class LocalMeasurer:
    """Runs everything in this process, one chunk after another."""

    def __init__(self, calculator: Calculator) -> None:
        self.calculator = calculator

    def sweep(self) -> Moments:
        return self.calculator.sweep()

    def begin(self, panel: Tensor, scale: Tensor | None) -> None:
        self.calculator.watch_panel(panel)

    def measure(self, pending: Portion, upcoming: Upcoming, max_passes: int | None) -> Measurement:
        if not self.calculator.captures:
            tests, objective = pending.choose(pending.tests)
            return self.calculator.measure(tests, pending.into, objective, max_passes)
        portions = [pending, *(portion for portion in islice(upcoming(), 1) if portion.is_next)]
        first, *ahead = [group for portion in portions for group in portion.by_objective()]
        return self.calculator.measure(first.tests, first.into, first.objective, max_passes, ahead)

    def pause(self) -> None:
        pass
