"""Phase 1: runs chunks of tests, captured or operation by operation, folds sensitivities, and describes faults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from themis.errors import ModelError
from themis.measure.calculator import Calculator, Disturb, Forward, GradedChunk
from themis.measure.captured import N_COLUMNS, CapturedChunk, CaptureError, ChunkSteps, captured_function
from themis.measure.chunk import attack_size, columns_of, pass_size
from themis.measure.clean import place_others
from themis.measure.distance import distances, similar_first
from themis.measure.fold import (
    ChunkFold,
    LayeredObjective,
    NeuronSelection,
    Objective,
    by_backward,
)
from themis.measure.kernels_cuda import can_fold
from themis.measure.moments import Accumulator, Moments
from themis.measure.sweep import sweep
from themis.measure.tests import Bools, FaultDetails, Floats, Ints, Results, Tests
from themis.oracle import Motion
from themis.oracle.classes import is_classifier
from themis.oracle.oracle import KEPT_ANSWER, are_all_finite, are_finite
from themis.target.activations import Layer
from themis.target.target import Target

UNIFORM_KINDS = ("uniform", "redrawn")
"""Kinds of tests of the uniform stream; those of the search may have them too."""


DIFFERENCE = 0.01
"""Step of a finite difference in theta, as a share of its range."""


class PlannedTests(NamedTuple):
    """Tests that are measured, now or probably next, the moments they are added to, and their objective."""

    tests: Tests
    into: Accumulator
    objective: Objective | None = None


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


class Measurer(Protocol):
    """Phase 1 of a campaign. Which measurer runs a test never changes its result."""

    def sweep(self) -> Moments:
        """Run every clean input once, see `themis.measure.sweep`."""

    def begin(self, panel: Tensor, scale: Tensor | None) -> None:
        """Prepare for tests, of which the neurons of the panel are watched. scale: the unit of each sensitivity."""

    def measure(self, pending: Portion, upcoming: Iterable[Portion], max_passes: int | None) -> Measurement:
        """Run the first chunk of the pending tests, see `TestRunner.measure`.

        The chunks after it and the upcoming portions may be started ahead: they are what later calls ask for, unless a
        budget runs out. There may be no end to them.
        """

    def gather(self, upcoming: Iterable[Portion] | None = None) -> None:
        """Complete the moments, which are judged or saved next; upcoming portions may be started meanwhile."""

    def end(self) -> None:
        """Free what only a running campaign needs; the calculator can still run single tests."""

    def with_calculator(self, calculator: Calculator) -> Measurer:
        """Return a measurer for another campaign, whose calculator comes from `Calculator.with_perturbation`."""

    def grade(self, calculator: Calculator, tests: Tests) -> Iterator[GradedChunk]:
        """Answer tests of such a calculator, chunk by chunk, between campaigns; nothing is folded."""


class LocalMeasurer:
    """Runs everything in this process, one chunk after another."""

    def __init__(self, calculator: Calculator) -> None:
        self.calculator = calculator
        self._runner: TestRunner | None = None
        self._disturbing: tuple[Calculator, Disturb] | None = None

    def sweep(self) -> Moments:
        return sweep(self.calculator)

    def begin(self, panel: Tensor, scale: Tensor | None) -> None:
        self._runner = TestRunner(self.calculator, panel)

    def measure(self, pending: Portion, upcoming: Iterable[Portion], max_passes: int | None) -> Measurement:
        runner = self._runner = self._runner or TestRunner(self.calculator)
        if not isinstance(runner.runner, CapturedRunner) or not runner.runner.captures:
            tests, objective = pending.choose(pending.tests)
            return runner.measure(tests, pending.into, objective, max_passes)
        portions = [pending, *(portion for portion in islice(upcoming, 1) if portion.is_next)]
        first, *ahead = [group for portion in portions for group in portion.by_objective()]
        return runner.measure(first.tests, first.into, first.objective, max_passes, ahead)

    def gather(self, upcoming: Iterable[Portion] | None = None) -> None:
        pass

    def end(self) -> None:
        self._runner = None
        self.calculator.release()

    def with_calculator(self, calculator: Calculator) -> LocalMeasurer:
        return type(self)(calculator)

    def grade(self, calculator: Calculator, tests: Tests) -> Iterator[GradedChunk]:
        for first in range(0, len(tests), calculator.chunk):
            yield calculator.grade_chunk(
                tests[first : first + calculator.chunk], self._forward, self._disturb(calculator)
            )

    def _disturb(self, calculator: Calculator) -> Disturb | None:
        """Disturbs the inputs of a chunk as a CUDA graph, if that needs no pass and nothing moves."""
        if calculator.device.type != "cuda" or calculator.graphs.shared is None or calculator.perturbation.passes:
            return None
        if self._disturbing is None or self._disturbing[0] is not calculator:
            chunk, device = calculator.chunk, calculator.device
            number = torch.zeros(chunk, dtype=torch.int64, device=device)
            theta = torch.zeros(chunk, len(calculator.perturbation.theta), device=device)

            def disturb(rows: Tensor, theta: Tensor, noise_seed: Tensor) -> Tensor:
                return calculator.disturb(rows, theta, noise_seed, chunk).disturbed

            self._disturbing = calculator, captured_function(disturb, number, theta, number)
        return self._disturbing[1]

    @cached_property
    def _forward(self) -> Forward:
        """Runs the model on the inputs of a chunk."""
        calculator = self.calculator
        if calculator.seeds.others is not None:
            return calculator.target.forward
        rows = torch.zeros(calculator.chunk, dtype=torch.int64, device=calculator.device)
        return captured_function(calculator.target.forward, calculator.read(rows))


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


class TestRunner:
    """Measures tests of a calculator that knows the clean outputs.

    panel: neurons (ascending) whose signed differences every measurement has.
    """

    __test__ = False  # not a pytest class

    def __init__(self, calculator: Calculator, panel: Tensor | None = None) -> None:
        self.calculator = calculator
        watched = None if panel is None else NeuronSelection.of(panel.to(calculator.device), calculator.layers)
        eager = EagerRunner(calculator, watched)
        self.runner = CapturedRunner(eager) if calculator.device.type == "cuda" else eager
        self._again = EagerRunner(calculator, watched, is_observed=False)
        """Runs tests that the observer has seen."""

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

        def attempt() -> tuple[ChunkOutcome, FaultDetails, Floats | None, PanelDifferences | None]:
            outcome = self.runner.run(planned, ahead)
            with torch.no_grad():
                confidence = _confidence(outcome, calculator)
                return outcome, describe_faults(outcome, calculator), confidence, self._fold(outcome, into, limit)

        outcome, faults, confidence, panel = calculator.memory.attempt(attempt)
        results = outcome.results(confidence)
        if observer is not None:
            results = replace(results, raised=observer.take(results.was_run))
        passes, wide_chunk = calculator.passes - before, calculator.graphs.wide_chunk
        return Measurement(results, faults, panel, passes, calculator.chunk, outcome.chunk, wide_chunk)

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

    def results(self, confidence: Floats | None = None) -> Results:
        """One row per test, in the order of the tests; tests that were not run are not faults.

        confidence: of each row.
        """
        order = self.order
        if order is None:
            return Results(self.is_fault, self.outcome, self.margin, self.gradient, confidence=confidence)
        n = len(self.tests)

        def spread(rows: Any, dropped: float) -> Any:
            full = np.full((n, *rows.shape[1:]), dropped, dtype=rows.dtype)
            full[order] = rows
            return full

        gradient = None if self.gradient is None else spread(self.gradient, 0.0)
        is_dropped = ~spread(np.ones(len(order), dtype=bool), False)
        columns = spread(self.is_fault, False), spread(self.outcome, KEPT_ANSWER), spread(self.margin, np.nan)
        confidence = None if confidence is None else spread(confidence, np.nan)
        return Results(*columns, gradient, is_dropped=is_dropped, confidence=confidence)


def _confidence(outcome: ChunkOutcome, calculator: Calculator) -> Floats | None:
    """How confident a classifier is of its answer to each row, for tests that may be of the uniform stream."""
    oracle = calculator.clean.oracle
    if outcome.tests.kind[0] not in UNIFORM_KINDS or not is_classifier(oracle):
        return None
    confidence: Floats = oracle.confidence(outcome.outputs).cpu().numpy()
    return confidence


def describe_faults(outcome: ChunkOutcome, calculator: Calculator) -> FaultDetails:
    """What is recorded of the faults of a chunk."""
    at = np.flatnonzero(outcome.is_fault)
    if not len(at):
        return FaultDetails({}, outcome.disturbed[:0], outcome.outputs[:0])
    oracle, bounds, perturbation = calculator.clean.oracle, calculator.target.bounds, calculator.perturbation
    rows = torch.from_numpy(at).to(outcome.outputs.device)
    inputs, disturbed, outputs = outcome.clean_inputs(rows), outcome.disturbed[rows], outcome.outputs[rows]
    columns = {"confidence": oracle.confidence(outputs), **distances(inputs, disturbed, bounds)}
    by_layer = outcome.by_layer()[rows].float()
    shares = by_layer / by_layer.sum(1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
    # A single copy from a GPU: the host waits for each.
    table = torch.column_stack([*columns.values(), shares.nan_to_num_(0.0, 0.0, 0.0)]).cpu().numpy()
    parts, arrays = table[:, len(columns) :], dict(zip(columns, table.T, strict=False))
    if np.isnan(arrays["distance"]).any():  # seeds are finite, so disturbed inputs are not
        raise ModelError(
            f"perturbation {perturbation.name!r} must return finite inputs, but it returned a NaN: correct "
            f"its function {perturbation.code}"
        )
    # Four decimals: more would say nothing, and such numbers are stored in a third of the time.
    arrays["signature"] = np.rint(parts * np.float32(1e4)) / np.float32(1e4)
    arrays |= {"value": outcome.value[at], "position": at % outcome.chunk}
    return FaultDetails(arrays, disturbed, outputs)


@dataclass(frozen=True)
class _DisturbedChunk:
    """A chunk of tests and their disturbed inputs. The first `n_run` rows are run, the rest is dropped or padding."""

    tests: Tests
    rows: Tensor
    theta: Tensor
    noise_seed: Tensor
    inputs: Tensor
    disturbed: Tensor
    motion: Motion | None
    order: Tensor
    """The position of each row among the tests before dissimilar ones were moved to the end."""
    n_run: int
    leaf: Tensor
    """Theta in the order of the tests; gradients are taken with respect to it."""


class EagerRunner:
    """Runs the first chunk of some tests."""

    def __init__(self, calculator: Calculator, panel: NeuronSelection | None, *, is_observed: bool = True) -> None:
        self.calculator, self.panel = calculator, panel
        self.observer = calculator.observer if is_observed else None
        self._every_row = torch.arange(calculator.chunk, device=calculator.device)

    def run(self, planned: PlannedTests, ahead: Sequence[PlannedTests] = ()) -> ChunkOutcome:
        """Disturb, forward and fold one chunk, then compare its outputs.

        With an objective each test also gets its gradient in theta: by one backward pass, or by two forward passes per
        dimension if there is no backward pass.
        """
        calculator, objective = self.calculator, None
        if planned.objective is not None:
            selection = NeuronSelection.of(planned.objective.neurons, calculator.layers)
            objective = LayeredObjective(planned.objective, selection)
        backward = objective if calculator.has_gradient else None
        with torch.set_grad_enabled(backward is not None):
            chunk = self._disturb(planned.tests[: calculator.chunk], backward is not None)
            if chunk.n_run == 0:
                nothing = calculator.clean.outputs[:0]
                return self._outcome(chunk, planned, nothing, None if objective is None else chunk.theta[:0], None)
            fold, outputs, gradient = self._forward(chunk, planned.into, backward)
        if objective is not None and backward is None:
            gradient = self._gradient_by_differences(chunk, objective, fold)
        with torch.no_grad():
            outputs = outputs.detach()[: chunk.n_run].float()
            if self.observer is not None:
                self.observer.end(chunk.n_run, outputs, chunk.rows[: chunk.n_run])
            return self._outcome(chunk, planned, outputs, gradient, fold)

    def _disturb(self, tests: Tests, needs_gradient: bool) -> _DisturbedChunk:
        """The tests' inputs; those that are too dissimilar from their seed are moved to the end and not run."""
        calculator, n, least = self.calculator, len(tests), self.calculator.limits.least
        block = 1
        if calculator.perturbation.passes:
            block = attack_size(calculator.chunk, calculator.layers, calculator.device)
        size = pass_size(n, calculator.chunk, calculator.device, block)
        rows, theta, noise_seed = columns_of(tests, size, calculator.device)
        leaf = theta.requires_grad_(needs_gradient)
        inputs, disturbed, motion = calculator.disturb(rows, theta, noise_seed, n)
        order, n_run = self._every_row[: len(rows)], n
        if least:
            order, n_run = similar_first(inputs, disturbed, n, calculator.target.bounds, least)
            if 0 < n_run < n:
                columns = (rows, theta, noise_seed, inputs, disturbed)
                rows, theta, noise_seed, inputs, disturbed = (column[order] for column in columns)
                motion = motion and motion[order]
        return _DisturbedChunk(tests, rows, theta, noise_seed, inputs, disturbed, motion, order, n_run, leaf)

    def _forward(
        self, chunk: _DisturbedChunk, into: Accumulator, objective: LayeredObjective | None
    ) -> tuple[ChunkFold, Tensor, Tensor | None]:
        """One forward pass that folds every layer; with an objective, one backward pass for its gradient in theta."""
        calculator, n, of_margin = self.calculator, chunk.n_run, None
        kept, clean_rows = calculator.clean.kept, chunk.rows
        if not kept.is_complete:
            seeds = chunk.rows.cpu().numpy()
            calculator.keep_clean(seeds[:n])
            seeds[n:] = seeds[n - 1]  # padding, and tests that are not run
            clean_rows = torch.from_numpy(kept.rows(seeds)).to(calculator.device)
        if objective is not None and (kinds := objective.objective.of_margin(chunk.tests)).any():
            of_margin = torch.from_numpy(kinds).to(calculator.device)[chunk.order[:n]]
            objective = replace(objective, climbing=(~of_margin).nonzero().squeeze(1))
        fold = ChunkFold(kept.by_layer, clean_rows, calculator.memory.buffers, n, into, self.panel, objective)
        place_others(calculator.target, calculator.seeds, chunk.rows)
        outputs = calculator.run_model(chunk.disturbed, fold.on_activation, self.observer)
        if objective is None:
            calculator.passes += n
            return fold, outputs, None
        value, output_term = fold.objective_value, objective.objective.output_term
        if of_margin is not None:
            motion = chunk.motion and chunk.motion[:n]
            verdict = calculator.clean.compare(chunk.rows[:n], outputs[:n].float(), motion)
            value = value - verdict.margin[of_margin].sum()
        if output_term is not None:
            value = value + output_term(chunk.disturbed[:n], outputs[:n].float(), chunk.rows[:n])
        gradient = by_backward(value, chunk.leaf)[chunk.order][:n]
        calculator.passes += n * (3 + 3 * objective.objective.n_models)
        return fold, outputs, gradient

    def _gradient_by_differences(self, chunk: _DisturbedChunk, objective: LayeredObjective, fold: ChunkFold) -> Tensor:
        """The gradient in theta by central differences inside its bounds, with the same noise."""
        calculator, n = self.calculator, chunk.n_run

        def value_at(theta: Tensor) -> Tensor:
            values: list[Tensor] = []

            def on_activation(layer: Layer, activations: Tensor) -> None:
                values.append(objective.layer_value(layer, activations[:n], fold.clean[layer.name], fold.rows[:n]))

            with torch.no_grad():
                _, disturbed, _ = calculator.disturb(chunk.rows, theta, chunk.noise_seed, n)
                calculator.forward(disturbed, on_activation)
            calculator.passes += n
            return sum(values[1:], values[0])

        gradient = torch.zeros_like(chunk.theta)
        for k, bounds in enumerate(calculator.perturbation.theta):
            step = DIFFERENCE * (bounds.high - bounds.low)
            ends, values = [], []
            for direction in (-step, step):
                moved = chunk.theta.clone()
                moved[:, k] = (chunk.theta[:, k] + direction).clamp(bounds.low, bounds.high)
                values.append(value_at(moved))
                ends.append(moved[:n, k])
            gradient[:n, k] = (values[1] - values[0]) / (ends[1] - ends[0])
        return gradient[:n]

    def _outcome(
        self,
        chunk: _DisturbedChunk,
        planned: PlannedTests,
        outputs: Tensor,
        gradient: Tensor | None,
        fold: ChunkFold | None,
    ) -> ChunkOutcome:
        """What the first `n_run` rows leave; `fold` is None if there are none."""
        n, rows = chunk.n_run, chunk.rows[: chunk.n_run]
        motion = chunk.motion and chunk.motion[:n] if n else None
        verdict = self.calculator.clean.compare(rows, outputs, motion)
        value = torch.full_like(verdict.margin, torch.nan) if verdict.value is None else verdict.value
        return ChunkOutcome(
            chunk.tests,
            len(chunk.rows),
            verdict.is_fault.cpu().numpy(),
            verdict.outcome.cpu().numpy(),
            verdict.margin.cpu().numpy(),
            value.cpu().numpy(),
            None if gradient is None else gradient.detach().nan_to_num_(0.0).cpu().numpy(),
            None if are_all_finite(outputs) else are_finite(outputs).cpu().numpy(),
            rows,
            chunk.disturbed.detach()[:n],
            outputs,
            lambda at: chunk.inputs[at],
            lambda: outputs.new_zeros(0, 0) if fold is None else fold.sensitivity_by_layer(),
            None if fold is None else fold.panel_differences,
            planned.into.commit,
            None if n == len(chunk.tests) else chunk.order[:n].cpu().numpy(),
        )


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
        kept = calculator.clean.kept
        n_fitting = len(tests) if kept.is_complete else kept.n_fitting(tests.seed)
        captured = self._graph(objective, n_fitting)
        if captured is None:
            return self.eager.run(planned)
        first = graphs.first(captured, tests[:n_fitting])
        if not self._keep_clean(first.seed, graphs.seeds_in_flight()):
            torch.cuda.synchronize(calculator.device)  # then nothing reads the others any more
            calculator.keep_clean(first.seed)
        if not into.count:
            captured.take_shift(first[:1], into)
        following = tests[len(first) :]
        launch = graphs.launch(captured, first, into, objective)
        if self.observer is None:
            next_ones = [PlannedTests(following, into, objective)] if len(following) else []
            for each in (*next_ones, *ahead):
                self._start(each, first.seed)
        columns, seed = captured.columns(launch), captured.seeds(launch)
        if self.observer is not None:
            self.observer.begin(captured.chunk, calculator.device, calculator.dtype)
            self.observer.end(len(first), captured.kept(launch, "outputs"), seed)
        is_fault, outcome, margin, value, is_finite = columns[:, :N_COLUMNS].T
        n_models = 1 if objective is None else 3
        calculator.passes += len(first) * (n_models + calculator.own_passes)
        return ChunkOutcome(
            first,
            captured.chunk,
            is_fault > 0,
            outcome.astype(np.int64),
            margin.astype(np.float32),
            value.astype(np.float32),
            None if objective is None else columns[:, N_COLUMNS:].astype(np.float32),
            is_finite > 0,
            seed,
            captured.kept(launch, "disturbed"),
            captured.kept(launch, "outputs"),
            lambda rows: calculator.inputs[seed[rows]],
            lambda: captured.kept(launch, "by_layer"),
            None if self.eager.panel is None else captured.kept(launch, "panel"),
            partial(captured.take_sums, launch, into),
        )

    def _start(self, planned: PlannedTests, running: Ints) -> None:
        """Start the first of some tests, if there is room for their clean activations beside those that are read.

        running: the seeds of the tests that run already.
        """
        graphs = self.calculator.graphs
        graph = self._graph(planned.objective, len(planned.tests))
        if graph is not None and graphs.can_start(graph, planned.into):
            seeds = graphs.first(graph, planned.tests).seed
            if self._keep_clean(seeds, np.union1d(running, graphs.seeds_in_flight())):
                graphs.start(graph, *planned)

    def _keep_clean(self, seeds: Ints, in_use: Ints) -> bool:
        """Keep the clean activations of some seeds beside those of others; whether there is room for both."""
        kept = self.calculator.clean.kept
        fits = kept.is_complete or len(np.union1d(seeds, in_use)) <= kept.n_kept
        if fits:
            self.calculator.keep_clean(seeds, in_use)
        return fits

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
        is_plain = not calculator.limits.least and calculator.seeds.others is None
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
            clean.kept,
            {} if self.eager.panel is None else self.eager.panel.within,
            lambda rows, theta, noise_seed: calculator.disturb(rows, theta, noise_seed, len(rows)),
            partial(calculator.run_model, observer=observer),
            clean.compare,
            calculator.device,
            len(calculator.perturbation.theta),
            inputs[:1],
            clean.outputs[:1],
            observer is not None,
        )
        try:
            shared, like = calculator.graphs.shared, calculator.graphs.any_captured
            if shared is None or ascends:
                return CapturedChunk(steps, rows, ascends=ascends, like=like)
            if rows not in shared:
                like = next(iter(shared.values()), None)
                shared[rows] = CapturedChunk(steps, rows, like=like, is_shared=True)
            return shared[rows].with_disturbing(steps.disturb, steps.n_dimensions)
        except CaptureError:
            return None
        finally:
            calculator.passes = before
