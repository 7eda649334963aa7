"""The Sensitivity Calculator: runs tests and folds `|N_i(I + E(theta)) - N_i(I)|` into moments as they are computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.compute.native import library_for
from themis.compute.rng import host_randomness
from themis.data.rows import Rows
from themis.data.seeds import Seeds
from themis.errors import ModelError
from themis.measure.captured import CapturedChunk, CaptureError, Launch
from themis.measure.chunk import ChunkBuffers, attack_size, chunk_size, padded, pass_size, unpadded
from themis.measure.clean import Activations, CleanActivations, Located
from themis.measure.distance import distances
from themis.measure.fold import ChunkFold, LayeredObjective, NeuronSelection, Objective, ObjectiveMeter, signature
from themis.measure.gradient import by_backward, by_differences
from themis.measure.graphs import Graphs
from themis.measure.inputs import place, place_others, within_bounds
from themis.measure.kernels_cuda import can_fold
from themis.measure.moments import Accumulator, Moments
from themis.measure.similarity import similar_first
from themis.measure.tests import Bools, FaultDetails, Ints, Results, Tests
from themis.oracle import Motion, Oracle
from themis.oracle.oracle import KEPT_ANSWER, Verdict, are_all_finite, are_finite
from themis.perturb import Context, Perturbation, perturb
from themis.progress import advance, step
from themis.target.activations import OUTPUT, Layer, flatten
from themis.target.blackbox import BlackBox, fresh_answers
from themis.target.requests import RequestCounts
from themis.target.target import AnyTarget, Target
from themis.target.traits import is_differentiable

TRACING_PASSES = 5
"""`find_layers` traces one batch of two inputs and one of three."""
SWEEP = "running the model on the clean inputs"
PROBED = 2
"""Tests that `probe_gradient` runs."""
REPEATED = 2
"""Clean inputs of a black box that `check_repeats` runs twice."""
REPEATED_PART = 4
"""On a CPU, it runs this part of the first chunk again, and the whole chunk only if that leaves a doubt."""
SETTLING_PASSES = 3
"""Passes of one shape after which the same kernels are used where memory is short."""
REPEAT_TOLERANCE = 1e-4
"""Difference of two runs, as a share of the largest output, that rounding may cause: GPU kernels can vary."""
ALONE = 2
"""Clean inputs that `batch_dependence` runs alone."""
BATCH_TOLERANCE, ROUGH_BATCH_TOLERANCE = 1e-3, 2e-2
"""Difference between an input alone and in a batch, as a share of the largest output, that rounding may cause; the
second is for models with 16 bits, and for GPUs, whose convolutions round float32 to TF32 with as many. Dynamic
quantisation to int8 causes about 5e-3."""

OnActivation = Callable[[Layer, Tensor], None]
"""Takes a layer and its activations `[inputs, neurons]`."""


class DisturbedInputs(NamedTuple):
    """The inputs of tests, clean and disturbed."""

    clean: Tensor
    disturbed: Tensor
    motion: Motion | None
    """How the disturbed pictures have moved; None if the oracle need not know."""


class ChunkAnswers(NamedTuple):
    """The disturbed inputs of tests, how they have moved, and the model's outputs."""

    inputs: Tensor
    outputs: Tensor
    motion: Motion | None


class PlannedTests(NamedTuple):
    """Tests that will probably be measured next, the moments they are added to, and their objective."""

    tests: Tests
    into: Accumulator
    objective: Objective | None


class Observer(Protocol):
    """Sees every activation that the calculator computes; a campaign's criterion is one."""

    can_be_captured: bool
    """Whether `on_activation` may become part of a CUDA graph; `begin` is then also called when the graph is run."""

    def begin(self, n_inputs: int, device: torch.device, dtype: torch.dtype) -> None:
        """A forward pass is about to start."""

    def on_activation(self, layer: Layer, activation: Tensor) -> None:
        """Take one layer's activation as the model computed it."""

    def keep_clean(self, first: int, n: int, n_seeds: int) -> None:
        """Keep what the last pass showed as the clean activations of the seeds from `first` on."""

    def end(self, n: int, outputs: Tensor, seed: Tensor | None = None) -> object:
        """The pass has ended; its first `n` inputs were tests of the seeds `seed`."""

    def take(self, was_run: Bools) -> Bools:
        """Count the pass that has ended. Returns which of the tests raised the criterion."""


@dataclass(frozen=True)
class Measurement:
    """What `Calculator.measure` returns: the results of the first tests it was given, of a chunk or of several."""

    results: Results
    faults: FaultDetails
    panel: tuple[Tensor, Tensor] | None
    """The panel's signed differences `[tests, panel]` and the seeds `[tests]` of the tests that were folded."""
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


class _Measured(NamedTuple):
    """The parts of a measurement that depend on how the tests were run."""

    results: Results
    faults: FaultDetails
    panel: tuple[Tensor, Tensor] | None
    pass_size: int


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


class Calculator:
    """Phase 1 for one target, its seeds and one perturbation.

    The target must be open. `sweep` must be called before `measure`.
    """

    def __init__(
        self,
        target: AnyTarget,
        seeds: Seeds,
        perturbation: Perturbation,
        oracle: Oracle,
        layers: tuple[Layer, ...],
        *,
        batch_size: int | None = None,
        chunk: int | None = None,
        clean_bytes: int,
        min_ssim: float | None = None,
    ) -> None:
        """`chunk` is the number of tests per forward pass if an earlier campaign has determined it."""
        self.target, self.oracle, self.device = target, oracle, target.device
        self.perturbation = perturbation.fitted(tuple(seeds.shape[1:]))
        self.seeds, self.min_ssim, self.layers, self.clean_bytes = seeds, min_ssim, layers, clean_bytes
        inputs = seeds.inputs
        if isinstance(inputs, Tensor):
            inputs = within_bounds(inputs, target.bounds, seeds.seed_id)
        self.inputs = place(inputs, self.device)
        self.by_name = {layer.name: layer for layer in layers}
        self.n_neurons = layers[-1].stop
        self.dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
        size = chunk or chunk_size(self.n_neurons, self.device, batch_size)
        self._memory = ChunkBuffers(layers, size, self.dtype, self.device)
        self.has_gradient = target.has_gradient
        self._sent_before = RequestCounts()
        if isinstance(target, BlackBox):
            target.requests.campaign_batch = batch_size
            self._sent_before = target.requests.sent
        self.clean_outputs = self.reference = torch.empty(0)
        self.observer: Observer | None = None
        self._panel: NeuronSelection | None = None
        self._panel_clean: Activations | None = None
        self._own_passes = perturbation.passes  # at least; some tasks take more
        self._reruns_clean = False  # whether clean inputs are run again with each test because memory is short
        self.passes = 0
        self.captures = target.device.type == "cuda"
        """Whether chunks are captured as a CUDA graph if they can be."""
        self.graphs = self._no_graphs(None if self.captures and batch_size is None else 0)
        self._without_faults: FaultDetails | None = None
        self._every_row = torch.arange(size, device=self.device)

    @staticmethod
    def trace(
        target: AnyTarget,
        seeds: Seeds,
        perturbation: Perturbation,
        oracle: Oracle,
        *,
        batch_size: int | None = None,
        chunk: int | None = None,
        clean_bytes: int,
        min_ssim: float | None = None,
    ) -> Calculator:
        """A calculator for the layers that tracing the target with the first seed finds."""
        if isinstance(seeds.inputs, Tensor):
            within_bounds(seeds.inputs, target.bounds, seeds.seed_id)
        before = target.requests.sent if isinstance(target, BlackBox) else RequestCounts()
        place_others(target, seeds, torch.zeros(1, dtype=torch.int64))
        with step("running the model on the first inputs"):
            layers = target.find_layers(seeds.inputs[0].to(target.device))
        calculator = Calculator(
            target,
            seeds,
            perturbation,
            oracle,
            layers,
            batch_size=batch_size,
            chunk=chunk,
            clean_bytes=clean_bytes,
            min_ssim=min_ssim,
        )
        calculator.passes += TRACING_PASSES
        calculator._sent_before = before
        return calculator

    def under(self, perturbation: Perturbation) -> Calculator:
        """A calculator for another perturbation with the same clean inputs, outputs and activations, after a sweep.

        It has spent no passes, and neither measures nor releases anything of this one.
        """
        other = copy(self)
        other.perturbation = perturbation.fitted(tuple(self.seeds.shape[1:]))
        other._own_passes, other.passes = perturbation.passes, 0
        other._memory = ChunkBuffers(self.layers, self.chunk, self.dtype, self.device)
        other.has_gradient = self.target.has_gradient
        if isinstance(self.target, BlackBox):
            other._sent_before = self.target.requests.sent
        other.observer = other._panel = other._panel_clean = None
        other.captures, other.graphs = self.target.device.type == "cuda", other._no_graphs(self.graphs.wide_chunk)
        return other

    @property
    def chunk(self) -> int:
        """The number of tests per forward pass."""
        return self._memory.chunk

    def shrink(self, chunk: int) -> None:
        """Take over a smaller chunk from another process that has run out of memory."""
        if chunk < self.chunk:
            self._memory.release()
            self._memory.chunk, self._memory.is_short = chunk, True

    @property
    def own_passes(self) -> int:
        """Passes that the perturbation of a test takes, as far as tests have shown."""
        return self._own_passes

    def expect_passes(self, own_passes: int) -> None:
        """Take over the passes that tests in another process have shown the perturbation to take."""
        self._own_passes = max(self._own_passes, own_passes)

    @property
    def sent(self) -> RequestCounts | None:
        """What a black box was sent by this calculator, and to find its layers; None for other targets."""
        if not isinstance(self.target, BlackBox) or self.target.keeps_padding:
            return None
        return self.target.requests.sent.since(self._sent_before)

    @cached_property
    def labels(self) -> Tensor | None:
        """The seeds' labels; read after the sweep, when those that come with the inputs are known."""
        return None if self.seeds.labels is None else self.seeds.labels.to(self.device)

    # Clean inputs

    def sweep(self) -> Moments:
        """Run every clean input once: set the clean outputs and reference answers, keep the activations that fit.

        Returns the moments of the clean activations themselves.
        """
        before = self.passes
        with step(SWEEP):
            moments, outputs = self._memory.attempt(self._sweep)
        self.passes = before
        return self.take_sweep(moments, outputs)

    def take_sweep(self, moments: Moments, outputs: list[Tensor]) -> Moments:
        """Set what a sweep sets, from the moments and the outputs of every clean input; returns the moments."""
        self.passes += len(self.inputs)
        clean_outputs = torch.cat(outputs).float()
        is_finite = are_finite(clean_outputs)
        if not bool(is_finite.all()):
            broken = self.seeds.seed_id[(~is_finite).cpu()]
            raise ModelError(
                f"the model must give finite outputs on clean inputs, but {len(broken)} of {len(is_finite)} have a NaN "
                f"or an infinity, first seed {int(broken[0])}: check the weights and the preprocessing"
            )
        self.oracle = self.oracle.settle(clean_outputs, self.labels)
        self.usable = self.oracle.check(clean_outputs, self.labels).nonzero().squeeze(1)
        self.take_clean(clean_outputs)
        return moments.checked(self.layers)

    def take_clean(self, outputs: Tensor) -> None:
        """Set the clean outputs, and with them the answers that tests are compared with."""
        self.clean_outputs = outputs.float()
        self.reference = self.oracle.reference(self.clean_outputs, self.labels)

    def _sweep(self) -> tuple[Moments, list[Tensor]]:
        self.allot_clean(self.device)
        moments = self.accumulator()
        outputs = [self._sweep_chunk(first, moments) for first in range(0, len(self.inputs), self.chunk)]
        return moments.moments(), outputs

    def allot_clean(self, device: torch.device, shared: str | None = None) -> None:
        """Make room for clean activations on a device; on `meta`, only how many fit is known.

        shared: the name under which calculators of the same campaign, in several processes of a machine, share them.
        """
        self.kept = CleanActivations(self.layers, len(self.inputs), self.clean_bytes, self.dtype, device, shared)
        self._reruns_clean = self.kept.n_kept < len(self.inputs)

    def sweep_chunk(self, first: int, into: Accumulator) -> Tensor:
        """Run one chunk of clean inputs, from `first` on: fold the activations, keep them, and return the outputs."""
        return self._memory.attempt(lambda: self._sweep_chunk(first, into))

    def _sweep_chunk(self, first: int, moments: Accumulator) -> Tensor:
        rows = torch.arange(first, min(first + self.chunk, len(self.inputs)), device=self.device)
        n = len(rows)
        advance(first, len(self.inputs), "inputs")

        def keep(layer: Layer, activations: Tensor) -> None:
            self.kept.keep(layer.name, first, activations[:n])
            scratch = self._memory.buffers[layer.name][0][:n]
            moments.add_copy(activations[:n], layer.start, layer.stop, scratch)

        outputs = self._clean_pass(rows, keep, self.observer)[:n]
        moments.commit(n)
        if self.observer is not None:
            self.observer.keep_clean(first, n, len(self.inputs))
        return outputs

    def keep_clean(self, rows: Tensor) -> None:
        """Run the clean inputs of the seeds `rows` and keep their activations; the passes count as part of a sweep."""
        before = self.passes
        while len(rows):
            rows = rows[self._memory.attempt(partial(self._keep_clean, rows)) :]
        self.passes = before

    def _keep_clean(self, rows: Tensor) -> int:
        """Keep the clean activations of the first chunk of `rows`; returns how many these are."""
        rows = rows[: self.chunk]

        def keep(layer: Layer, activations: Tensor) -> None:
            self.kept.put(layer.name, rows, activations[: len(rows)])

        self._clean_pass(rows, keep)
        return len(rows)

    def watch_panel(self, neurons: Tensor, *, are_kept: bool = True) -> None:
        """From now on every measurement has the signed differences of these neurons (ascending).

        are_kept: whether this process has swept the clean inputs.
        """
        self._panel = NeuronSelection.of(neurons.to(self.device), self.layers)
        is_compiled = library_for(self.kept.all(self.layers[0].name)) is not None  # then folding needs no copy of them
        if are_kept and not is_compiled and self.kept.n_kept == len(self.inputs):
            self._panel_clean = {
                name: self.kept.columns(name, positions) for name, positions in self._panel.within.items()
            }

    def release(self) -> None:
        """Free what only a running campaign needs; single tests can still be run."""
        self.kept = CleanActivations(self.layers, 0, 0, self.dtype, self.device)
        self._reruns_clean = False
        self._memory.release()
        self._panel_clean = None
        self.graphs.drop()

    # Tests

    def accumulator(self) -> Accumulator:
        """An empty accumulator of the right size, on the right device."""
        return Accumulator(self.n_neurons, self.device, self.dtype)

    def measure(
        self,
        tests: Tests,
        into: Accumulator,
        objective: Objective | None = None,
        max_passes: int | None = None,
        ahead: Sequence[PlannedTests] = (),
    ) -> Measurement:
        """Run the first chunk of `tests`, fold its sensitivities into `into`, and return the results.

        With an `objective` each test also gets its gradient in theta: by one backward pass, or by two forward passes
        per dimension if there is no backward pass. If an error is raised, nothing was folded. If memory runs out, the
        chunk is halved for good. `max_passes` limits the passes spent on folding the other tests of a chunk in which
        some outputs are not finite. On a GPU, several chunks may be run without waiting for the host in between, and
        the tests `ahead` are started at the same time.
        """
        before = self.passes
        limit = None if max_passes is None else before + max_passes

        def attempt() -> _Measured:
            captured = self._graph(objective, len(tests)) if into.count else None
            if captured is not None:
                return self._measure_captured(captured, tests, into, objective, limit, ahead)
            layered = None if objective is None else objective.by_layer(self.layers)
            return self._measure_chunk(tests[: self.chunk], into, layered, limit)

        results, faults, panel, pass_size = self._memory.attempt(attempt)
        if self.observer is not None:
            results = replace(results, raised=self.observer.take(results.was_run))
        passes, wide_chunk = self.passes - before, self.graphs.wide_chunk
        return Measurement(results, faults, panel, passes, self.chunk, pass_size, wide_chunk)

    def run_chunk(self, tests: Tests, chunk: int) -> ChunkAnswers:
        """Run at most `chunk` tests at that shape; nothing is folded."""
        rows, theta, noise_seed = self._columns(tests, chunk)
        n = len(tests)
        with torch.no_grad():
            _, disturbed, motion = self.disturb(rows, theta, noise_seed, n)
            self.passes += n
            outputs = self.target.forward(disturbed)[:n].float()
            return ChunkAnswers(disturbed[:n], outputs, motion and motion[:n])

    def disturb(self, rows: Tensor, theta: Tensor, noise_seed: Tensor, n_tests: int) -> DisturbedInputs:
        """The inputs of the seeds `rows`, clean and disturbed at `theta`; rows from `n_tests` on are padding."""
        inputs = self._read_inputs(rows)
        size = attack_size(len(rows), self.layers, self.device) if self.perturbation.passes else len(rows)
        if size == len(rows):
            return DisturbedInputs(inputs, *self._perturb(inputs, rows, theta, noise_seed, n_tests))
        blocks: list[tuple[Tensor, Motion | None]] = []
        before: list[Tensor] = []
        for first in range(0, n_tests, size):
            block = [padded(column[first : first + size], size) for column in (rows, theta, noise_seed)]
            is_same = before and not theta.requires_grad and all(map(torch.equal, before, block))  # as in a replay
            if is_same:
                blocks.append(blocks[-1])
                continue
            seed, point, noise = before = block
            part = padded(inputs[first : first + size], size)
            blocks.append(self._perturb(part, seed, point, noise, min(size, n_tests - first)))
        disturbed = padded(torch.cat([block for block, _ in blocks])[:n_tests], len(rows))
        motions = [motion for _, motion in blocks if motion is not None]
        if not motions:
            return DisturbedInputs(inputs, disturbed, None)
        repeated = torch.arange(len(rows), device=self.device).clamp(max=n_tests - 1)
        return DisturbedInputs(inputs, disturbed, Motion.joined(motions)[repeated])

    def _perturb(
        self, inputs: Tensor, rows: Tensor, theta: Tensor, noise_seed: Tensor, n_tests: int
    ) -> tuple[Tensor, Motion | None]:
        """The disturbed inputs and their motion; those from `n_tests` on are padding, whose passes do not count."""
        place_others(self.target, self.seeds, rows)
        context = self._context(rows)
        disturbed = perturb(self.perturbation, inputs, theta, noise_seed, context)
        self.passes += context.passes * n_tests // len(rows)
        self._own_passes = max(self._own_passes, -(-context.passes // len(rows)))
        return disturbed, context.motion

    def cost(self, needs_gradient: bool, n_rivals: int = 0) -> int:
        """Passes per test; with its gradient in theta if it needs one, and those of rival models beside the target."""
        own = self._own_passes + self._reruns_clean
        if not needs_gradient:
            return 1 + own
        gradient = 3 + own if self.has_gradient else (1 + own) * (1 + 2 * len(self.perturbation.theta))
        return gradient + 3 * n_rivals

    def check_repeats(self) -> None:
        """Refuse a model whose answers to the same inputs differ from one run to the next.

        Such a model would be full of faults that no disturbance caused.
        """
        rows = self.usable[:REPEATED]
        self.passes += 2 * len(rows)
        with torch.no_grad(), fresh_answers(self.target):
            if isinstance(self.target, Target):  # the first chunk again: every row is an independent chance to differ
                first, second = self._memory.attempt(partial(self._repeat_first_chunk, self.chunk))
            else:
                inputs = self._read_inputs(rows)
                first, second = (self.target.forward(inputs).float() for _ in range(2))
        difference = self._difference(first, second)
        if difference > REPEAT_TOLERANCE:
            n_different = int(((first - second).flatten(1).abs().amax(1) > 0).sum())
            raise ModelError(
                f"the model must give the same output for the same input, but {n_different} of {len(first)} outputs "
                f"differ between two runs, by up to {difference:.2g} of the largest output: switch off what is random, "
                "such as functional dropout without training=self.training, noise layers or sampling"
            )

    def _repeat_first_chunk(self, swept: int) -> tuple[Tensor, Tensor]:
        """The outputs of the first clean inputs: of the sweep, in chunks of `swept`, and of another pass.

        On a CPU, a part of the chunk suffices if the model draws no random numbers from the usual generators and the
        answers agree; they may also differ because another shape rounds differently, or another batch matters. If the
        chunk has been halved since, both are of passes of this size, for the same reason. Where memory is short, cuDNN
        falls back to kernels that need less of it and round differently: then passes that follow one another are
        compared, until the choice has settled.
        """
        if self.device.type == "cpu" and self.chunk == swept:
            before = host_randomness()
            rows, outputs = self._run_first(pass_size(-(-self.chunk // REPEATED_PART), self.chunk, self.device))
            clean = self.clean_outputs[rows]
            if host_randomness() == before and self._difference(clean, outputs) <= REPEAT_TOLERANCE:
                return clean, outputs
        rows, outputs = self._run_first(self.chunk)
        first = self.clean_outputs[rows] if self.chunk == swept else self._run_first(self.chunk)[1]
        for _ in range(SETTLING_PASSES if self._memory.is_short or self.device.type != "cpu" else 0):
            if self._difference(first, outputs) <= REPEAT_TOLERANCE:
                break
            first, outputs = outputs, self._run_first(self.chunk)[1]
        return first, outputs

    def _run_first(self, size: int) -> tuple[Tensor, Tensor]:
        """The rows of a pass of the first clean inputs, and their outputs."""
        rows = padded(torch.arange(min(size, len(self.inputs)), device=self.device), size)
        return rows, self.target.forward(self._read_inputs(rows)).float()

    def _difference(self, first: Tensor, second: Tensor) -> float:
        """The largest difference between outputs, as a share of the largest clean output."""
        scale = self.clean_outputs.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
        return float((first - second).abs().amax() / scale)

    def batch_dependence(self) -> float | None:
        """How much the outputs of an input alone differ from those in a batch, as a share of the largest output.

        None if they agree, but for rounding, or if the model does not accept an input alone.
        """
        rows = self.usable[:ALONE]
        if len(self.inputs) == 1:
            return None
        self.passes += len(rows)
        try:
            with torch.no_grad(), fresh_answers(self.target):
                alone = torch.cat([self.target.forward(self._read_inputs(rows[k : k + 1])) for k in range(len(rows))])
        except ModelError:
            return None
        difference = self._difference(alone.float(), self.clean_outputs[rows])
        has_few_bits = self.target.dtype.itemsize <= 2 or getattr(self.target, "autocast", None) is not None
        has_few_bits |= self.device.type == "cuda" and self.target.dtype == torch.float32
        tolerance = ROUGH_BATCH_TOLERANCE if has_few_bits else BATCH_TOLERANCE
        return difference if difference > tolerance else None

    def probe_gradient(self) -> None:
        """Find out, once, whether outputs and sensitivities have a gradient in theta, and set `has_gradient`.

        A model may leave the graph (NumPy, `no_grad`), and so may a perturbation of the user's own.
        """
        if not self.has_gradient or self.perturbation.passes:  # an attack needs the gradient and has been checked
            return
        n = min(PROBED, len(self.usable))
        rows = self.usable[:n]
        middle = torch.tensor([(theta.low + theta.high) / 2 for theta in self.perturbation.theta], device=self.device)
        noise_seed = torch.arange(n, device=self.device)
        self.passes += 3 * n
        self.has_gradient = is_differentiable(
            lambda theta: self.target.forward(self.disturb(rows, theta, noise_seed, n).disturbed).float(),
            middle.float().repeat(n, 1),
        )

    # One chunk

    def _measure_chunk(
        self, tests: Tests, into: Accumulator, objective: LayeredObjective | None, limit: int | None
    ) -> _Measured:
        """Disturb, forward and fold one chunk, then compare its outputs."""
        backward = objective if self.has_gradient else None
        with torch.set_grad_enabled(backward is not None):
            chunk = self._disturb_chunk(tests, backward is not None)
            if chunk.n_run == 0:
                return self._nothing_run(chunk, objective is not None)
            fold, outputs, gradient = self._forward_chunk(chunk, into, backward)
        if objective is not None and backward is None:
            gradient = self._gradient_by_differences(chunk, objective, fold.locate)
        n, rows = chunk.n_run, unpadded(chunk.rows, chunk.n_run)
        with torch.no_grad():
            outputs = unpadded(outputs.detach(), n).float()
            if self.observer is not None:
                self.observer.end(n, outputs, rows)
            verdict = self.compare(rows, outputs, chunk.motion and chunk.motion[:n])
            results = self._results(chunk, verdict, gradient)
            if np.count_nonzero(results.is_fault):
                faults = self._faults_of_chunk(chunk, outputs, verdict, fold)
            else:
                faults = self._no_faults(chunk.inputs)
            if are_all_finite(outputs):
                into.commit(n)
                panel = None if self._panel is None else (fold.panel_differences, rows)
            else:
                is_finite, run = are_finite(outputs), chunk.tests[chunk.order[:n].cpu().numpy()]
                panel = self._fold_finite(run[is_finite.cpu().numpy()], into, limit)
        return _Measured(results, faults, panel, len(chunk.rows))

    # Chunks as a CUDA graph

    def _graph(self, objective: Objective | None, n_tests: int) -> CapturedChunk | None:
        """The graph that runs the first of so many tests with this objective; None if there can be none."""
        if not self.captures or not (objective is None or (self.has_gradient and objective.is_plain)):
            return None
        return self.graphs.choose(n_tests, self.chunk, self._capture, ascends=objective is not None)

    def _no_graphs(self, wide_chunk: int | None) -> Graphs:
        n_activations = sum(math.prod(layer.shape) for layer in self.layers)
        return Graphs(self.chunk, n_activations, wide_chunk)

    def _capture(self, rows: int, ascends: bool) -> CapturedChunk | None:
        """A graph of a pass of so many rows."""
        is_plain = self.min_ssim is None and not self._reruns_clean and self.seeds.others is None
        is_plain = is_plain and (self.observer is None or self.observer.can_be_captured)
        is_usual = isinstance(self.target, Target) and isinstance(self.inputs, Tensor) and self.dtype == torch.float32
        if not (is_plain and is_usual and can_fold(self.device)):
            self.captures = False
            return None
        before = self.passes
        if self.observer is not None:  # graphs of all sizes write to the same memory, which must not move
            self.observer.begin(self.chunk, self.device, self.dtype)
        try:
            return CapturedChunk(
                rows,
                len(self.perturbation.theta),
                self.layers,
                {layer.name: self.kept.all(layer.name) for layer in self.layers},
                self._panel,
                lambda rows, theta, noise_seed: self.disturb(rows, theta, noise_seed, len(rows)),
                partial(self._run_model, observer=self.observer),
                self.compare,
                are_finite,
                self.device,
                self.inputs[:1].nbytes + self.clean_outputs[:1].nbytes,
                ascends,
                is_observed=self.observer is not None,
                overwritten=self.graphs.overwritten,
            )
        except CaptureError:
            return None
        finally:
            self.passes = before

    def _measure_captured(
        self,
        captured: CapturedChunk,
        tests: Tests,
        into: Accumulator,
        objective: Objective | None,
        limit: int | None,
        ahead: Sequence[PlannedTests],
    ) -> _Measured:
        """Run the first chunks of `tests`, and start the next ones before the results are recorded.

        An observer sees one chunk at a time, before the next one overwrites what it has read.
        """
        first = self.graphs.first(captured, tests)
        following = tests[len(first) :]
        launch = self.graphs.launch(captured, first, into, objective)
        if self.observer is None:
            next_ones = [PlannedTests(following, into, objective)] if len(following) else []
            for planned in (*next_ones, *ahead):
                self.graphs.start(self._graph(planned.objective, len(planned.tests)), *planned)
        columns = captured.columns(launch)
        if self.observer is not None:
            self.observer.begin(captured.chunk, self.device, self.dtype)
            self.observer.end(len(first), captured.kept(launch, "outputs"), captured.seeds(launch))
        is_fault, outcome, margin, value, is_finite = columns[:, :5].T
        n_models = 1 if objective is None else 3
        self.passes += len(first) * (n_models + self._own_passes)
        gradient = None if objective is None else columns[:, 5:].astype(np.float32)
        results = Results(is_fault > 0, outcome.astype(np.int64), margin.astype(np.float32), gradient)
        with torch.no_grad():
            faults = self._faults_of_launch(captured, launch, results.is_fault, value)
        panel = self._fold_launch(captured, launch, is_finite > 0, into, limit)
        return _Measured(results, faults, panel, captured.chunk)

    def _fold_launch(
        self, captured: CapturedChunk, launch: Launch, is_finite: Bools, into: Accumulator, limit: int | None
    ) -> tuple[Tensor, Tensor] | None:
        """Commit the sums of a launch. Chunks in which some outputs are not finite have none, and are folded again."""
        tests = launch.tests
        starts = np.arange(0, len(tests), captured.chunk)
        counts = np.logical_and.reduceat(is_finite, starts)
        is_counted = np.repeat(counts, captured.chunk)[: len(tests)]
        captured.take_sums(launch, into, int(is_counted.sum()))
        panels = []
        if self._panel is not None and is_counted.any():
            differences, seed = captured.kept(launch, "panel"), captured.seeds(launch)
            if not is_counted.all():
                kept = torch.from_numpy(np.flatnonzero(is_counted)).to(self.device)
                differences, seed = differences[kept], seed[kept]
            panels.append((differences, seed))
        for start in starts[~counts].tolist():
            chunk = slice(start, start + captured.chunk)
            panel = self._fold_finite(tests[chunk][is_finite[chunk]], into, limit)
            panels += [] if panel is None else [panel]
        if len(panels) < 2:
            return panels[0] if panels else None
        return torch.cat([differences for differences, _ in panels]), torch.cat([seed for _, seed in panels])

    def _faults_of_launch(
        self, captured: CapturedChunk, launch: Launch, is_fault: Bools, value: NDArray[np.float64]
    ) -> FaultDetails:
        rows = np.flatnonzero(is_fault)
        if not len(rows):
            return self._no_faults(captured.kept(launch, "disturbed"))
        at = torch.from_numpy(rows).to(self.device)
        seed = captured.seeds(launch)[at]
        disturbed, outputs, by_layer = (
            captured.kept(launch, name)[at] for name in ("disturbed", "outputs", "by_layer")
        )
        number = torch.from_numpy(value[rows].astype(np.float32)).to(self.device)
        return self._describe_faults(rows % captured.chunk, self.inputs[seed], disturbed, outputs, number, by_layer)

    # One chunk, operation by operation

    def _disturb_chunk(self, tests: Tests, needs_gradient: bool) -> _DisturbedChunk:
        """The tests' inputs; those that are too dissimilar from their seed are moved to the end and not run."""
        n = len(tests)
        block = attack_size(self.chunk, self.layers, self.device) if self.perturbation.passes else 1
        rows, theta, noise_seed = self._columns(tests, pass_size(n, self.chunk, self.device, block))
        leaf = theta.requires_grad_(needs_gradient)
        inputs, disturbed, motion = self.disturb(rows, theta, noise_seed, n)
        order = unpadded(self._every_row, rows.shape[0])
        chunk = _DisturbedChunk(tests, rows, theta, noise_seed, inputs, disturbed, motion, order, n, leaf)
        if self.min_ssim is None:
            return chunk
        order, n_similar = similar_first(inputs, disturbed, n, self.target.bounds, self.min_ssim)
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

    def _forward_chunk(
        self, chunk: _DisturbedChunk, into: Accumulator, objective: LayeredObjective | None
    ) -> tuple[ChunkFold, Tensor, Tensor | None]:
        """One forward pass that folds every layer; with an objective, one backward pass for its gradient in theta."""
        n, of_margin, climbing = chunk.n_run, None, None
        locate = self._locate_clean(chunk.rows, n)
        if objective is not None and (kinds := objective.objective.of_margin(chunk.tests)).any():
            of_margin = torch.from_numpy(kinds).to(self.device)[chunk.order[:n]]
            climbing = (~of_margin).nonzero().squeeze(1)
        fold = ChunkFold(locate, self._memory.buffers, n, into, self._panel, self._panel_clean, objective, climbing)
        place_others(self.target, self.seeds, chunk.rows)
        outputs = self._run_model(chunk.disturbed, fold.on_activation, self.observer)
        if objective is None:
            self.passes += n
            return fold, outputs, None
        value, output_term = fold.objective_value, objective.objective.output_term
        if of_margin is not None:
            motion = chunk.motion and chunk.motion[:n]
            value = value - self.compare(chunk.rows[:n], outputs[:n].float(), motion).margin[of_margin].sum()
        if output_term is not None:
            value = value + output_term(chunk.disturbed[:n], outputs[:n].float(), chunk.rows[:n])
        gradient = by_backward(value, chunk.leaf)[chunk.order][:n]
        self.passes += n * (3 + 3 * objective.objective.n_models)
        return fold, outputs, gradient

    def _gradient_by_differences(
        self, chunk: _DisturbedChunk, objective: LayeredObjective, locate: Callable[[Layer], Located]
    ) -> Tensor:
        """The gradient in theta by finite differences with the same noise."""

        def value_at(theta: Tensor) -> Tensor:
            meter = ObjectiveMeter(locate, chunk.n_run, objective)
            with torch.no_grad():
                _, disturbed, _ = self.disturb(chunk.rows, theta, chunk.noise_seed, chunk.n_run)
                self._forward(disturbed, meter.on_activation)
            self.passes += chunk.n_run
            return meter.objective_value

        return by_differences(chunk.theta, self.perturbation.theta, chunk.n_run, value_at)

    def _fold_finite(self, tests: Tests, into: Accumulator, limit: int | None) -> tuple[Tensor, Tensor] | None:
        """Fold the tests of a chunk whose outputs are finite, as far as passes are left.

        A model that breaks down on an input is a fault, not a sensitivity.
        """
        affordable = None if limit is None else max(0, limit - self.passes) // self.cost(False)
        tests = tests[:affordable]
        if not len(tests):
            return None
        observer, self.observer = self.observer, None  # it has seen these tests
        try:
            return self._measure_chunk(tests, into, None, limit).panel
        finally:
            self.observer = observer

    def compare(self, rows: Tensor, outputs: Tensor, motion: Motion | None) -> Verdict:
        """The oracle's verdict on tests of the seeds `rows`, whose pictures have moved."""
        labels = None if self.labels is None else self.labels.index_select(0, rows)
        return self.oracle.verdict(self.clean_outputs.index_select(0, rows), outputs, labels, motion)

    def _results(self, chunk: _DisturbedChunk, verdict: Verdict, gradient: Tensor | None) -> Results:
        """One row per test, in the order of the tests; tests that were not run are not faults."""
        if gradient is not None:
            gradient = gradient.nan_to_num_(0.0)
        columns = (verdict.is_fault, verdict.outcome, verdict.margin, gradient)
        n, n_run = len(chunk.tests), chunk.n_run
        if n_run == n:
            return Results(*(None if column is None else column.cpu().numpy() for column in columns))  # type: ignore[arg-type]
        positions = chunk.order[:n_run]

        def spread(column: Tensor, dropped: float) -> Any:
            full = column.new_full((n, *column.shape[1:]), dropped)
            full[positions] = column
            return full.cpu().numpy()

        is_dropped = torch.ones(n, dtype=torch.bool, device=self.device)
        is_dropped[positions] = False
        return Results(
            spread(verdict.is_fault, 0.0),
            spread(verdict.outcome, KEPT_ANSWER),
            spread(verdict.margin, torch.nan),
            None if gradient is None else spread(gradient, 0.0),
            is_dropped=is_dropped.cpu().numpy(),
        )

    def _faults_of_chunk(
        self, chunk: _DisturbedChunk, outputs: Tensor, verdict: Verdict, fold: ChunkFold
    ) -> FaultDetails:
        at = verdict.is_fault.nonzero().squeeze(1)
        value = torch.full_like(verdict.margin, torch.nan) if verdict.value is None else verdict.value
        inputs, disturbed, by_layer = chunk.inputs, chunk.disturbed.detach(), fold.sensitivity_by_layer()
        return self._describe_faults(at.cpu().numpy(), inputs[at], disturbed[at], outputs[at], value[at], by_layer[at])

    def _describe_faults(
        self, position: Ints, inputs: Tensor, disturbed: Tensor, outputs: Tensor, value: Tensor, by_layer: Tensor
    ) -> FaultDetails:
        """What is recorded of faults, given their rows in the forward pass and their sensitivity `[faults, layers]`."""
        columns = {
            "value": value,
            "confidence": self.oracle.confidence(outputs),
            **distances(inputs, disturbed, self.target.bounds),
        }
        arrays = {name: column.cpu().numpy() for name, column in columns.items()}
        if np.isnan(arrays["distance"]).any():  # seeds are finite, so disturbed inputs are not
            raise ModelError(
                f"perturbation {self.perturbation.name!r} must return finite inputs, but it returned a NaN: correct "
                f"its function {self.perturbation.code}"
            )
        # Four decimals: more would say nothing, and such numbers are stored in a third of the time.
        shares = signature(by_layer).cpu().numpy()
        arrays["signature"] = np.rint(shares * np.float32(1e4)) / np.float32(1e4)
        return FaultDetails({**arrays, "position": position}, disturbed.cpu(), outputs.cpu())

    def _no_faults(self, inputs: Tensor) -> FaultDetails:
        """What is recorded of a chunk with such `inputs` and no fault; always the same."""
        if self._without_faults is None:
            self._without_faults = FaultDetails({}, inputs[:0].cpu(), self.clean_outputs[:0].cpu())
        return self._without_faults

    def _nothing_run(self, chunk: _DisturbedChunk, needs_gradient: bool) -> _Measured:
        """The measurement of tests that were all dropped."""
        outputs = self.clean_outputs[:0]
        verdict = self.compare(chunk.rows[:0], outputs, None)
        gradient = chunk.theta.detach()[:0] if needs_gradient else None
        faults = self._no_faults(chunk.inputs)
        return _Measured(self._results(chunk, verdict, gradient), faults, None, len(chunk.rows))

    # Forward passes

    def _context(self, rows: Tensor) -> Context:
        features = self.seeds.features if self.perturbation.inputs == "table" else None
        return Context.of_task(
            self.target, self.oracle, self.clean_outputs, self.labels, features, reference=self.reference, rows=rows
        )

    def _read_inputs(self, rows: Tensor) -> Tensor:
        """The clean inputs of the seeds `rows`, which the target runs next.

        Those in memory were checked when the calculator was created.
        """
        place_others(self.target, self.seeds, rows)
        inputs = self.inputs.index_select(0, rows) if isinstance(self.inputs, Tensor) else self.inputs[rows]
        if isinstance(self.seeds.inputs, Rows):
            inputs = within_bounds(inputs, self.target.bounds, self.seeds.seed_id[rows.cpu()])
        return inputs

    def _columns(self, tests: Tests, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
        """Seeds, theta and noise seeds, padded to the chunk's shape by repeating the last test."""
        rows, theta, noise_seed = (
            padded(torch.from_numpy(np.ascontiguousarray(column)), chunk).to(self.device)
            for column in (tests.seed, tests.theta, tests.noise_seed)
        )
        return rows, theta, noise_seed

    def _locate_clean(self, rows: Tensor, n_tests: int) -> Callable[[Layer], Located]:
        """A function that locates each layer's clean activations of the seeds `rows`; runs those that were not kept."""
        kept = self.kept
        if kept.n_kept == len(self.inputs) or not len(missing := kept.missing(rows[:n_tests])):
            return lambda layer: (kept.all(layer.name), rows)
        recomputed: Activations = {}

        def keep(layer: Layer, activations: Tensor) -> None:
            recomputed[layer.name] = activations[: len(missing)].clone()

        self._clean_pass(rows[missing], keep)
        buffers, n = self._memory.buffers, len(rows)
        return lambda layer: kept.gather(layer.name, rows, missing, recomputed, buffers[layer.name][0][:n])

    def _clean_pass(self, rows: Tensor, on_activation: OnActivation, observer: Observer | None = None) -> Tensor:
        self.passes += len(rows)
        inputs = self._read_inputs(padded(rows, self.chunk))
        with torch.no_grad():
            return self._forward(inputs, on_activation, observer)

    def _forward(self, inputs: Tensor, on_activation: OnActivation, observer: Observer | None = None) -> Tensor:
        """One forward pass; `on_activation` gets activations `[inputs, neurons]`, the observer as they are."""
        return self._run_model(
            inputs, lambda layer, activation: on_activation(layer, flatten(activation, layer, len(inputs))), observer
        )

    def _run_model(self, inputs: Tensor, on_activation: OnActivation, observer: Observer | None = None) -> Tensor:
        """One forward pass; both get activations as they are."""
        n_layers = 0
        if observer is not None:
            observer.begin(len(inputs), self.device, self.dtype)

        def show(name: str, activation: Tensor) -> None:
            nonlocal n_layers
            layer = self.by_name[name]
            on_activation(layer, activation)
            if observer is not None:
                observer.on_activation(layer, activation)
            n_layers += 1

        outputs = self.target.forward(inputs, show, self.by_name)
        if OUTPUT in self.by_name:
            show(OUTPUT, outputs)
        if n_layers != len(self.layers):
            raise ModelError(
                f"the model must compute each of its {len(self.layers)} layers once per forward pass, got {n_layers}: "
                "name layers that are always computed with layers=[...]"
            )
        return outputs
