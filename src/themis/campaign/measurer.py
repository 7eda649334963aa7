"""Where the clean inputs and the tests of a campaign are run: here, or in other processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from themis.measure.calculator import Calculator, Measurement
from themis.measure.fold import Objective
from themis.measure.moments import Accumulator, Moments
from themis.measure.tests import Tests

Choose = Callable[[Tests], tuple[Tests, Objective | None]]
"""Returns the first of some tests, those that share an objective, and that objective."""


class Measurer(Protocol):
    """Phase 1 of a campaign. Which measurer runs a test never changes its result."""

    def sweep(self) -> Moments:
        """Run every clean input once, see `Calculator.sweep`."""

    def begin(self, panel: Tensor, scale: Tensor | None) -> None:
        """Prepare for tests, of which the neurons of the panel are watched. scale: the unit of each sensitivity."""

    def measure(
        self, pending: Tests, choose: Choose, stream: str, into: Accumulator, max_passes: int | None
    ) -> Measurement:
        """Run the first chunk of the pending tests of a stream, see `Calculator.measure`.

        The chunks after it may be started ahead: they are what the next calls ask for, unless a budget runs out.
        """


class LocalMeasurer:
    """Runs everything in this process, one chunk after another."""

    def __init__(self, calculator: Calculator) -> None:
        self.calculator = calculator

    def sweep(self) -> Moments:
        return self.calculator.sweep()

    def begin(self, panel: Tensor, scale: Tensor | None) -> None:
        self.calculator.watch_panel(panel)

    def measure(
        self, pending: Tests, choose: Choose, stream: str, into: Accumulator, max_passes: int | None
    ) -> Measurement:
        tests, objective = choose(pending)
        rest, ahead = pending[len(tests) :], []
        while self.calculator.captures and len(rest):
            ahead.append(choose(rest))
            rest = rest[len(ahead[-1][0]) :]
        return self.calculator.measure(tests, into, objective, max_passes, ahead)
