"""The Sensitivity Calculator: a target with its seeds under one perturbation, and the passes that run them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from themis.data.rows import Rows
from themis.data.seeds import Seeds
from themis.errors import ModelError
from themis.measure.captured import CapturedChunk, Graphs
from themis.measure.chunk import ChunkBuffers, attack_size, chunk_size, columns_of, padded, pass_size
from themis.measure.clean import NO_SEEDS, Clean, CleanActivations, place, place_others, spare_bytes, within_bounds
from themis.measure.moments import Accumulator
from themis.measure.tests import Bools, Ints, Tests
from themis.oracle import Motion, Oracle
from themis.perturb import Context, Perturbation, perturb
from themis.progress import step
from themis.settings import Settings, least_similarity
from themis.target.activations import OUTPUT, Layer, flatten
from themis.target.blackbox import BlackBox
from themis.target.target import AnyTarget

TRACING_PASSES = 5
"""`find_layers` traces one batch of two inputs and one of three."""

Forward = Callable[[Tensor], Tensor]
Disturb = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps seeds, theta and noise seeds `[tests]` to disturbed inputs."""
OnActivation = Callable[[Layer, Tensor], None]
"""Takes a layer and its activations `[inputs, neurons]`."""


class DisturbedInputs(NamedTuple):
    """The inputs of tests, clean and disturbed."""

    clean: Tensor
    disturbed: Tensor
    motion: Motion | None
    """How the disturbed pictures have moved; None if it does not matter to the oracle."""


class ChunkAnswers(NamedTuple):
    """The disturbed inputs of tests, how they have moved, and the model's outputs."""

    inputs: Tensor
    outputs: Tensor
    motion: Motion | None


class GradedChunk(NamedTuple):
    """The outputs of tests, whether each is a fault, and the labels, if there are any."""

    outputs: Tensor
    is_fault: Tensor
    labels: Tensor | None


class Observer(Protocol):
    """Receives every activation that the calculator computes; the view of a campaign's criterion is an observer."""

    can_be_captured: bool
    """Whether a CUDA graph may capture `on_activation`; `begin` is then also called when the graph is run."""

    def begin(self, n_inputs: int, device: torch.device, dtype: torch.dtype) -> None:
        """A forward pass is about to start."""

    def on_activation(self, layer: Layer, activation: Tensor) -> None:
        """Receive one layer's activation as the model computed it."""

    def keep_clean(self, first: int, n: int, n_seeds: int) -> None:
        """Keep the activations of the last pass as the clean ones of the `n` seeds from `first` on."""

    def end(self, n: int, outputs: Tensor, seed: Tensor | None = None) -> object:
        """The pass has ended; its first `n` inputs were tests of the seeds `seed`."""

    def take(self, was_run: Bools) -> Bools:
        """Count the pass that has ended. Returns which of the tests raised the criterion."""


@dataclass(frozen=True)
class Limits:
    """How many tests share a forward pass, the memory for clean activations, and which tests are not run."""

    clean_bytes: int = 0
    """Memory for clean activations."""
    chunk: int | None = None
    """Tests per forward pass, if an earlier campaign has determined this number."""
    batch_size: int | None = None
    least: Mapping[str, float] = field(default_factory=dict)
    """The least similarity of tests to their seeds, by measure."""

    @staticmethod
    def of(settings: Settings, device: torch.device, chunk: int | None = None, n_sharing: int = 1) -> Limits:
        """The limits of a campaign whose memory is shared by `n_sharing` processes."""
        if settings.clean_memory_gib is None:
            clean_bytes = spare_bytes(device) // n_sharing
        else:
            clean_bytes = int(settings.clean_memory_gib * 2**30)
        return Limits(clean_bytes, chunk, settings.batch_size, least_similarity(vars(settings)))


class Calculator:
    """Runs clean inputs and tests for one target, its seeds and one perturbation, and counts the passes.

    The target must be open. Tests need the clean inputs' outputs: from `sweep`, or given to `take_clean`.
    """

    def __init__(
        self,
        target: AnyTarget,
        seeds: Seeds,
        perturbation: Perturbation,
        oracle: Oracle,
        layers: tuple[Layer, ...],
        limits: Limits,
        inputs: Tensor | Rows | None = None,
    ) -> None:
        """inputs: the inputs of the seeds, if they have been checked."""
        self.target, self.seeds, self.layers, self.limits = target, seeds, layers, limits
        self.by_name = {layer.name: layer for layer in layers}
        self.device, self.n_neurons = target.device, layers[-1].stop
        self.perturbation = perturbation.fitted(tuple(seeds.shape[1:]))
        self.inputs = place(_checked(seeds, target) if inputs is None else inputs, self.device)
        self.dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
        size = limits.chunk or chunk_size(self.n_neurons, self.device, limits.batch_size)
        self.memory = ChunkBuffers(layers, size, self.dtype, self.device)
        self.has_gradient = target.has_gradient
        self._sent_before: Counter[str] = Counter()
        if isinstance(target, BlackBox):
            target.requests.campaign_batch = limits.batch_size
            self._sent_before = target.requests.sent.copy()
        nothing = torch.empty(0)
        self.clean = Clean(oracle, nothing, nothing, None, CleanActivations(layers, 0, 0, self.dtype, self.device))
        self.observer: Observer | None = None
        self.own_passes = perturbation.passes
        """Passes that the perturbation of a test takes: the most so far, since some tasks take more than others."""
        self.passes = self.n_recomputed = 0
        """Passes that count, and clean inputs that were run again, which do not count."""
        is_undecided = target.device.type == "cuda" and limits.batch_size is None
        self.graphs = self._no_graphs(None if is_undecided else 0)
        self._shared_graphs: dict[int, CapturedChunk] = {}

    @staticmethod
    def trace(
        target: AnyTarget, seeds: Seeds, perturbation: Perturbation, oracle: Oracle, limits: Limits | None = None
    ) -> Calculator:
        """Trace the target with the first seed, and return a calculator for the layers that are found."""
        inputs = _checked(seeds, target)
        before = target.requests.sent.copy() if isinstance(target, BlackBox) else Counter[str]()
        place_others(target, seeds, torch.zeros(1, dtype=torch.int64))
        with step("running the model on the first inputs"):
            layers = target.find_layers(seeds.inputs[0].to(target.device))
        calculator = Calculator(target, seeds, perturbation, oracle, layers, limits or Limits(), inputs)
        calculator.passes += TRACING_PASSES
        calculator._sent_before = before
        return calculator

    def with_perturbation(self, perturbation: Perturbation) -> Calculator:
        """Return a calculator for another perturbation that shares the swept inputs, outputs and activations.

        It starts with 0 passes and buffers of its own.
        """
        other = copy(self)
        other.perturbation = perturbation.fitted(tuple(self.seeds.shape[1:]))
        other.own_passes, other.passes, other.n_recomputed, other.observer = perturbation.passes, 0, 0, None
        other.memory = ChunkBuffers(self.layers, self.chunk, self.dtype, self.device)
        other.has_gradient = self.target.has_gradient
        if isinstance(self.target, BlackBox):
            other._sent_before = self.target.requests.sent.copy()
        other.graphs = other._no_graphs(self.graphs.wide_chunk)
        if not self.clean.oracle.is_spatial:  # else verdicts depend on how the perturbation has moved the pictures
            other.graphs.shared = self._shared_graphs
        return other

    def _no_graphs(self, wide_chunk: int | None) -> Graphs:
        n_activations = sum(math.prod(layer.shape) for layer in self.layers)
        return Graphs(self.chunk, n_activations, wide_chunk)

    @property
    def chunk(self) -> int:
        """The number of tests per forward pass."""
        return self.memory.chunk

    @property
    def sent(self) -> dict[str, int] | None:
        """What a black box has received, including to find its layers; None for other targets."""
        if not isinstance(self.target, BlackBox) or self.target.keeps_padding:
            return None
        return {name: n - self._sent_before[name] for name, n in self.target.requests.sent.items()}

    def accumulator(self) -> Accumulator:
        """An empty accumulator of the right size, on the right device."""
        return Accumulator(self.n_neurons, self.device, self.dtype)

    def cost(self, needs_gradient: bool, n_rivals: int = 0) -> int:
        """Passes per test, including those for its gradient in theta, if it needs one, and those of rival models."""
        own = self.own_passes
        if not needs_gradient:
            return 1 + own
        gradient = 3 + own if self.has_gradient else (1 + own) * (1 + 2 * len(self.perturbation.theta))
        return gradient + 3 * n_rivals

    # Clean inputs

    def allocate_clean(self, device: torch.device) -> None:
        """Allocate memory for clean activations on a device; on `meta`, only determine how many fit."""
        n_seeds, max_bytes = len(self.inputs), self.limits.clean_bytes
        kept = CleanActivations(self.layers, n_seeds, max_bytes, self.dtype, device, least=self.chunk)
        self.clean = replace(self.clean, kept=kept)

    def keep_clean(self, seeds: Ints, in_use: Ints = NO_SEEDS) -> None:
        """Keep the clean activations of `seeds`: run those that are missing, and replace the least used ones.

        Only the passes of the sweep count, so that results do not depend on the memory. in_use: see `make_room`.
        """
        kept = self.clean.kept
        if kept.is_complete:
            return
        missing, rows = kept.make_room(seeds, in_use)
        self.n_recomputed += len(missing)
        for first in range(0, len(missing), self.chunk):
            part = torch.from_numpy(missing[first : first + self.chunk]).to(self.device)
            n, at = len(part), kept.index(rows[first : first + self.chunk])

            def keep(layer: Layer, activations: Tensor, n: int = n, at: slice | Tensor = at) -> None:
                kept.by_layer[layer.name][at] = activations[:n]

            self.clean_pass(padded(part, pass_size(n, self.chunk, self.device)), keep)
        kept.filled(missing, rows)

    def take_clean(self, outputs: Tensor, oracle: Oracle | None = None, *, settles: bool = False) -> None:
        """Set the clean outputs and the answers that tests are compared with.

        oracle: the new oracle, if it changes. settles: whether to settle the oracle with these outputs.
        """
        oracle, outputs = oracle or self.clean.oracle, outputs.float()
        labels = None if self.seeds.labels is None else self.seeds.labels.to(self.device)
        if settles:
            oracle = oracle.settle(outputs, labels)
            oracle.check(outputs, labels)  # refuses outputs and labels that it cannot compare
        self.clean = Clean(oracle, outputs, oracle.reference(outputs, labels), labels, self.clean.kept)
        if oracle.is_spatial:
            self.graphs.shared = None

    def release(self) -> None:
        """Free what only a running campaign needs; single tests can still be run."""
        self.clean = replace(self.clean, kept=CleanActivations(self.layers, 0, 0, self.dtype, self.device))
        self.memory.release()
        self.graphs.drop()

    # Tests

    def run_chunk(
        self, tests: Tests, chunk: int, forward: Forward | None = None, disturb: Disturb | None = None
    ) -> ChunkAnswers:
        """Run at most `chunk` tests, padded to that number; nothing is folded.

        forward and disturb: replacements for the model and the perturbation; inputs from `disturb` have not moved.
        """
        columns, n, motion = columns_of(tests, chunk, self.device), len(tests), None
        with torch.no_grad():
            if disturb is None:
                _, disturbed, motion = self.disturb(*columns, n)
            else:
                disturbed = disturb(*columns)
            self.passes += n
            outputs = (forward or self.target.forward)(disturbed)[:n].float()
            return ChunkAnswers(disturbed[:n], outputs, motion and motion[:n])

    def grade_chunk(self, tests: Tests, forward: Forward | None = None, disturb: Disturb | None = None) -> GradedChunk:
        """Run at most a chunk of tests, see `run_chunk`, and compare their outputs; labels move with the pictures."""
        rows, clean = torch.from_numpy(tests.seed).to(self.device, non_blocking=True), self.clean
        _, outputs, motion = self.run_chunk(tests, self.chunk, forward, disturb)
        with torch.no_grad():
            is_fault = clean.compare(rows, outputs, motion).is_fault
            labels = None if clean.labels is None else clean.labels[rows]
            if labels is not None and motion is not None:
                labels = clean.oracle.move_labels(labels, motion)
        return GradedChunk(outputs, is_fault, labels)

    def disturb(self, rows: Tensor, theta: Tensor, noise_seed: Tensor, n_tests: int) -> DisturbedInputs:
        """The inputs of the seeds `rows`, clean and disturbed at `theta`; rows from `n_tests` on are padding."""
        inputs = self.read(rows)
        size = attack_size(len(rows), self.layers, self.device) if self.perturbation.passes else len(rows)
        if size == len(rows):
            return DisturbedInputs(inputs, *self._perturb(inputs, rows, theta, noise_seed, n_tests))
        blocks: list[tuple[Tensor, Motion | None]] = []
        before: list[Tensor] = []
        for first in range(0, n_tests, size):
            block = [padded(column[first : first + size], size) for column in (rows, theta, noise_seed)]
            is_same = (
                before and not theta.requires_grad and all(map(torch.equal, before, block))
            )  # in a replay, all tests are the same
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
        """The disturbed inputs and their motion; the passes of padding, from `n_tests` on, do not count."""
        place_others(self.target, self.seeds, rows)
        clean, features = self.clean, self.seeds.features if self.perturbation.inputs == "table" else None
        context = Context.of_task(
            self.target, clean.oracle, clean.outputs, clean.labels, features, reference=clean.reference, rows=rows
        )
        context.n_tests = n_tests
        disturbed = perturb(self.perturbation, inputs, theta, noise_seed, context)
        self.passes += context.passes
        self.own_passes = max(self.own_passes, -(-context.passes // max(n_tests, 1)))
        return disturbed, context.motion

    # Forward passes

    def read(self, rows: Tensor) -> Tensor:
        """The clean inputs of the seeds `rows`, which the target runs next.

        Inputs in memory were checked when the calculator was created, others are checked here.
        """
        place_others(self.target, self.seeds, rows)
        inputs = self.inputs.index_select(0, rows) if isinstance(self.inputs, Tensor) else self.inputs[rows]
        if isinstance(self.seeds.inputs, Rows):
            inputs = within_bounds(inputs, self.target.bounds, self.seeds.seed_id[rows.cpu()])
        return inputs

    def clean_pass(self, rows: Tensor, on_activation: OnActivation, observer: Observer | None = None) -> Tensor:
        """One forward pass of the clean inputs of the seeds `rows`, which does not count."""
        with torch.no_grad():
            return self.forward(self.read(rows), on_activation, observer)

    def forward(self, inputs: Tensor, on_activation: OnActivation, observer: Observer | None = None) -> Tensor:
        """One forward pass; only `on_activation` gets activations in the shape `[inputs, neurons]`."""
        return self.run_model(
            inputs, lambda layer, activation: on_activation(layer, flatten(activation, layer, len(inputs))), observer
        )

    def run_model(self, inputs: Tensor, on_activation: OnActivation, observer: Observer | None = None) -> Tensor:
        """One forward pass; both callbacks get activations as the model computed them."""
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
        if OUTPUT in self.by_name and n_layers < len(self.layers):
            show(OUTPUT, outputs)
        if n_layers != len(self.layers):
            raise ModelError(
                f"the model must compute each of its {len(self.layers)} layers once per forward pass, got {n_layers}: "
                "name layers that are always computed with layers=[...]"
            )
        return outputs


def _checked(seeds: Seeds, target: AnyTarget) -> Tensor | Rows:
    """The clean inputs, within the bounds; `Rows` are checked when they are read."""
    inputs = seeds.inputs
    return within_bounds(inputs, target.bounds, seeds.seed_id) if isinstance(inputs, Tensor) else inputs
