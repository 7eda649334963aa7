"""Phase 1: runs tests, as a CUDA graph or operation by operation, folds their sensitivities, describes their faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from themis.compute.native import library_for
from themis.measure.calculator import Calculator
from themis.measure.captured import CapturedChunk, CaptureError, ChunkSteps
from themis.measure.eager import EagerRunner
from themis.measure.fold import NeuronSelection, Objective, WatchedNeurons
from themis.measure.kernels_cuda import can_fold
from themis.measure.moments import Accumulator
from themis.measure.outcome import ChunkOutcome, PlannedTests, Runner, describe_faults, no_faults
from themis.measure.tests import FaultDetails, Results, Tests
from themis.target.target import Target

PanelDifferences = tuple[Tensor, Tensor]
"""The panel's signed differences `[tests, panel]` and the seeds `[tests]` of the tests that were folded."""


@dataclass(frozen=True)
class Measurement:
    """What `TestRunner.measure` returns: the results of the first tests it was given, of a chunk or of several."""

    results: Results
    faults: FaultDetails
    panel: PanelDifferences | None
    passes: int
    """Passes that the tests took."""
    chunk: int
    """Tests per forward pass from now on."""
    pass_size: int
    """Rows of the forward pass that the tests were run in, padding included."""
    wide_chunk: int | None = None
    """See `Graphs`."""

    def __len__(self) -> int:
        return len(self.results)


class CapturedRunner:
    """Runs chunks as a CUDA graph, and those that cannot be captured operation by operation."""

    def __init__(self, eager: EagerRunner) -> None:
        self.eager, self.calculator, self.observer = eager, eager.calculator, eager.observer
        self.captures = True
        """Whether chunks can be captured, as far as is known."""

    def run(self, planned: PlannedTests, ahead: Sequence[PlannedTests] = ()) -> ChunkOutcome:
        """Run the first chunks of the tests, and start the next ones before the results are recorded.

        An observer sees one chunk at a time, before the next one overwrites what it has read.
        """
        calculator, graphs = self.calculator, self.calculator.graphs
        tests, into, objective = planned
        captured = self._graph(objective, len(tests)) if into.count else None
        if captured is None:
            return self.eager.run(planned)
        first = graphs.first(captured, tests)
        following = tests[len(first) :]
        launch = graphs.launch(captured, first, into, objective)
        if self.observer is None:
            next_ones = [PlannedTests(following, into, objective)] if len(following) else []
            for each in (*next_ones, *ahead):
                graphs.start(self._graph(each.objective, len(each.tests)), *each)
        columns, seed = captured.columns(launch), captured.seeds(launch)
        if self.observer is not None:
            self.observer.begin(captured.chunk, calculator.device, calculator.dtype)
            self.observer.end(len(first), captured.kept(launch, "outputs"), seed)
        is_fault, outcome, margin, value, is_finite = columns[:, :5].T
        n_models = 1 if objective is None else 3
        calculator.passes += len(first) * (n_models + calculator.own_passes)
        return ChunkOutcome(
            first,
            captured.chunk,
            is_fault > 0,
            outcome.astype(np.int64),
            margin.astype(np.float32),
            value.astype(np.float32),
            None if objective is None else columns[:, 5:].astype(np.float32),
            is_finite > 0,
            seed,
            captured.kept(launch, "disturbed"),
            captured.kept(launch, "outputs"),
            lambda rows: calculator.inputs[seed[rows]],
            lambda: captured.kept(launch, "by_layer"),
            None if self.eager.panel is None else captured.kept(launch, "panel"),
            partial(captured.take_sums, launch, into),
        )

    def _graph(self, objective: Objective | None, n_tests: int) -> CapturedChunk | None:
        """The graph that runs the first of so many tests with this objective; None if there can be none."""
        calculator = self.calculator
        if not self.captures or not (objective is None or (calculator.has_gradient and objective.is_plain)):
            return None
        return calculator.graphs.choose(n_tests, calculator.chunk, self._capture, ascends=objective is not None)

    def _capture(self, rows: int, ascends: bool) -> CapturedChunk | None:
        """A graph of a pass of so many rows."""
        calculator, clean, observer = self.calculator, self.calculator.clean, self.observer
        inputs, is_float = calculator.inputs, calculator.dtype == torch.float32
        is_plain = calculator.limits.min_ssim is None and not clean.kept.is_short and calculator.seeds.others is None
        is_plain = is_plain and (observer is None or observer.can_be_captured) and is_float
        is_plain = is_plain and isinstance(calculator.target, Target) and can_fold(calculator.device)
        if not is_plain or not isinstance(inputs, Tensor):
            self.captures = False
            return None
        before = calculator.passes
        if observer is not None:  # graphs of all sizes write to the same memory, which must not move
            observer.begin(calculator.chunk, calculator.device, calculator.dtype)
        steps = ChunkSteps(
            calculator.layers,
            {layer.name: clean.kept.all(layer.name) for layer in calculator.layers},
            {} if self.eager.panel is None else self.eager.panel.selection.within,
            lambda rows, theta, noise_seed: calculator.disturb(rows, theta, noise_seed, len(rows)),
            partial(calculator.run_model, observer=observer),
            clean.compare,
            calculator.device,
            len(calculator.perturbation.theta),
            inputs[:1].nbytes + clean.outputs[:1].nbytes,
            observer is not None,
        )
        try:
            return CapturedChunk(steps, rows, ascends=ascends, overwritten=calculator.graphs.overwritten)
        except CaptureError:
            return None
        finally:
            calculator.passes = before


class TestRunner:
    """Measures tests of a calculator that knows the clean outputs.

    panel: neurons (ascending) whose signed differences every measurement has. are_kept: whether this process has swept
    the clean inputs.
    """

    __test__ = False  # not a pytest class

    def __init__(self, calculator: Calculator, panel: Tensor | None = None, *, are_kept: bool = True) -> None:
        self.calculator = calculator
        watched = None if panel is None else _watch(calculator, panel, are_kept)
        eager = EagerRunner(calculator, watched)
        self.runner: Runner = CapturedRunner(eager) if calculator.device.type == "cuda" else eager
        self._again = EagerRunner(calculator, watched, is_observed=False)
        """Runs tests that the observer has seen."""
        self._no_faults: FaultDetails | None = None

    @property
    def captures(self) -> bool:
        """Whether chunks are captured as a CUDA graph if they can be."""
        return isinstance(self.runner, CapturedRunner) and self.runner.captures

    def measure(
        self,
        tests: Tests,
        into: Accumulator,
        objective: Objective | None = None,
        max_passes: int | None = None,
        ahead: Sequence[PlannedTests] = (),
    ) -> Measurement:
        """Run the first chunk of `tests`, fold its sensitivities into `into`, and return the results.

        With an `objective` each test also gets its gradient in theta. If an error is raised, nothing was folded. If
        memory runs out, the chunk is halved for good. `max_passes` limits the passes spent on folding the other tests
        of a chunk in which some outputs are not finite. On a GPU, several chunks may be run without waiting for the
        host in between, and the tests `ahead` are started at the same time.
        """
        calculator, observer = self.calculator, self.calculator.observer
        before = calculator.passes
        limit = None if max_passes is None else before + max_passes
        planned = PlannedTests(tests, into, objective)

        def attempt() -> tuple[ChunkOutcome, FaultDetails, PanelDifferences | None]:
            outcome = self.runner.run(planned, ahead)
            with torch.no_grad():
                faults = self._describe(outcome)
                return outcome, faults, self._fold(outcome, into, limit)

        outcome, faults, panel = calculator.memory.attempt(attempt)
        results = outcome.results()
        if observer is not None:
            results = replace(results, raised=observer.take(results.was_run))
        passes, wide_chunk = calculator.passes - before, calculator.graphs.wide_chunk
        return Measurement(results, faults, panel, passes, calculator.chunk, outcome.chunk, wide_chunk)

    def _describe(self, outcome: ChunkOutcome) -> FaultDetails:
        calculator = self.calculator
        if np.count_nonzero(outcome.is_fault):
            oracle, bounds = calculator.clean.oracle, calculator.target.bounds
            return describe_faults(outcome, oracle, bounds, calculator.perturbation)
        if self._no_faults is None:
            self._no_faults = no_faults(outcome)
        return self._no_faults

    def _fold(self, outcome: ChunkOutcome, into: Accumulator, limit: int | None) -> PanelDifferences | None:
        """Commit the sums of passes whose outputs are all finite; of the others, fold the finite tests again.

        A model that breaks down on an input is a fault, not a sensitivity.
        """
        differences, seed, is_finite = outcome.panel, outcome.seed, outcome.is_finite
        if is_finite is None:
            if len(seed):
                outcome.commit(len(seed))
            return None if differences is None else (differences, seed)
        starts = np.arange(0, len(is_finite), outcome.chunk)
        counts = np.logical_and.reduceat(is_finite, starts)
        is_counted = np.repeat(counts, outcome.chunk)[: len(is_finite)]
        if counts.any():
            outcome.commit(int(is_counted.sum()))
        panels = []
        if differences is not None and counts.any():
            if not counts.all():
                kept = torch.from_numpy(np.flatnonzero(is_counted)).to(differences.device)
                differences, seed = differences[kept], seed[kept]
            panels.append((differences, seed))
        tests = outcome.tests if outcome.order is None else outcome.tests[outcome.order]
        for start in starts[~counts].tolist():
            part = slice(start, start + outcome.chunk)
            finite = tests[part][is_finite[part]]
            for first in range(0, len(finite), self.calculator.chunk):
                panel = self._fold_again(finite[first : first + self.calculator.chunk], into, limit)
                panels += [] if panel is None else [panel]
        if len(panels) < 2:
            return panels[0] if panels else None
        return torch.cat([differences for differences, _ in panels]), torch.cat([seed for _, seed in panels])

    def _fold_again(self, tests: Tests, into: Accumulator, limit: int | None) -> PanelDifferences | None:
        """Fold tests of one chunk, as far as passes are left."""
        calculator = self.calculator
        affordable = None if limit is None else max(0, limit - calculator.passes) // calculator.cost(False)
        tests = tests[:affordable]
        if not len(tests):
            return None
        return self._fold(self._again.run(PlannedTests(tests, into)), into, limit)


def _watch(calculator: Calculator, neurons: Tensor, are_kept: bool) -> WatchedNeurons:
    selection, kept = NeuronSelection.of(neurons.to(calculator.device), calculator.layers), calculator.clean.kept
    is_compiled = library_for(kept.all(calculator.layers[0].name)) is not None  # then folding needs no copy of them
    if not are_kept or is_compiled or kept.n_kept < len(calculator.inputs):
        return WatchedNeurons(selection)
    return WatchedNeurons(
        selection, {name: kept.columns(name, positions) for name, positions in selection.within.items()}
    )
