"""One chunk of tests, run operation by operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from themis.measure.calculator import Calculator
from themis.measure.chunk import attack_size, columns_of, unpadded
from themis.measure.clean import Located
from themis.measure.fold import ChunkFold, LayeredObjective, ObjectiveMeter, WatchedNeurons, by_backward, by_differences
from themis.measure.inputs import place_others
from themis.measure.moments import Accumulator
from themis.measure.outcome import ChunkOutcome, PlannedTests
from themis.measure.similarity import similar_first
from themis.measure.tests import Tests
from themis.oracle import Motion
from themis.oracle.oracle import are_all_finite, are_finite
from themis.target.activations import Layer


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

    def __init__(self, calculator: Calculator, panel: WatchedNeurons | None, *, is_observed: bool = True) -> None:
        self.calculator, self.panel = calculator, panel
        self.observer = calculator.observer if is_observed else None
        self._every_row = torch.arange(calculator.chunk, device=calculator.device)

    def run(self, planned: PlannedTests, ahead: Sequence[PlannedTests] = ()) -> ChunkOutcome:
        """Disturb, forward and fold one chunk, then compare its outputs.

        With an objective each test also gets its gradient in theta: by one backward pass, or by two forward passes per
        dimension if there is no backward pass.
        """
        calculator = self.calculator
        objective = None if planned.objective is None else planned.objective.by_layer(calculator.layers)
        backward = objective if calculator.has_gradient else None
        with torch.set_grad_enabled(backward is not None):
            chunk = self._disturb(planned.tests[: calculator.chunk], backward is not None)
            if chunk.n_run == 0:
                nothing = calculator.clean.outputs[:0]
                return self._outcome(chunk, planned, nothing, None if objective is None else chunk.theta[:0], None)
            fold, outputs, gradient = self._forward(chunk, planned.into, backward)
        if objective is not None and backward is None:
            gradient = self._gradient_by_differences(chunk, objective, fold.locate)
        with torch.no_grad():
            outputs = unpadded(outputs.detach(), chunk.n_run).float()
            if self.observer is not None:
                self.observer.end(chunk.n_run, outputs, unpadded(chunk.rows, chunk.n_run))
            return self._outcome(chunk, planned, outputs, gradient, fold)

    def _disturb(self, tests: Tests, needs_gradient: bool) -> _DisturbedChunk:
        """The tests' inputs; those that are too dissimilar from their seed are moved to the end and not run."""
        calculator, n, min_ssim = self.calculator, len(tests), self.calculator.limits.min_ssim
        block = 1
        if calculator.perturbation.passes:
            block = attack_size(calculator.chunk, calculator.layers, calculator.device)
        size = calculator.memory.pass_size(n, block)
        rows, theta, noise_seed = columns_of(tests, size, calculator.device)
        leaf = theta.requires_grad_(needs_gradient)
        inputs, disturbed, motion = calculator.disturb(rows, theta, noise_seed, n)
        order = unpadded(self._every_row, rows.shape[0])
        chunk = _DisturbedChunk(tests, rows, theta, noise_seed, inputs, disturbed, motion, order, n, leaf)
        if min_ssim is None:
            return chunk
        order, n_similar = similar_first(inputs, disturbed, n, calculator.target.bounds, min_ssim)
        if n_similar in (0, n):
            return replace(chunk, n_run=n_similar, order=order)
        return replace(
            chunk,
            rows=rows[order],
            theta=theta[order],
            noise_seed=noise_seed[order],
            inputs=inputs[order],
            disturbed=disturbed[order],
            motion=motion and motion[order],
            order=order,
            n_run=n_similar,
        )

    def _forward(
        self, chunk: _DisturbedChunk, into: Accumulator, objective: LayeredObjective | None
    ) -> tuple[ChunkFold, Tensor, Tensor | None]:
        """One forward pass that folds every layer; with an objective, one backward pass for its gradient in theta."""
        calculator, n, of_margin = self.calculator, chunk.n_run, None
        locate = calculator.locate_clean(chunk.rows, n)
        if objective is not None and (kinds := objective.objective.of_margin(chunk.tests)).any():
            of_margin = torch.from_numpy(kinds).to(calculator.device)[chunk.order[:n]]
            objective = replace(objective, climbing=(~of_margin).nonzero().squeeze(1))
        fold = ChunkFold(locate, calculator.memory.buffers, n, into, self.panel, objective)
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

    def _gradient_by_differences(
        self, chunk: _DisturbedChunk, objective: LayeredObjective, locate: Callable[[Layer], Located]
    ) -> Tensor:
        """The gradient in theta by finite differences with the same noise."""
        calculator = self.calculator

        def value_at(theta: Tensor) -> Tensor:
            meter = ObjectiveMeter(locate, chunk.n_run, objective)
            with torch.no_grad():
                _, disturbed, _ = calculator.disturb(chunk.rows, theta, chunk.noise_seed, chunk.n_run)
                calculator.forward(disturbed, meter.on_activation)
            calculator.passes += chunk.n_run
            return meter.objective_value

        return by_differences(chunk.theta, calculator.perturbation.theta, chunk.n_run, value_at)

    def _outcome(
        self,
        chunk: _DisturbedChunk,
        planned: PlannedTests,
        outputs: Tensor,
        gradient: Tensor | None,
        fold: ChunkFold | None,
    ) -> ChunkOutcome:
        """What the first `n_run` rows leave; `fold` is None if there are none."""
        n, rows = chunk.n_run, unpadded(chunk.rows, chunk.n_run)
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
