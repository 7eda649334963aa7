"""The sensitivity calculator: runs tests and folds `|N_i(I + E(theta)) - N_i(I)|` into moments as it appears."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from themis.data.rows import Rows
from themis.data.seeds import Seeds
from themis.errors import ModelError
from themis.measure.chunk import chunk_size, padded
from themis.measure.clean import Activations, CleanActivations, Located
from themis.measure.distance import l2, linf, ssim
from themis.measure.fold import Aim, Climb, Fold, Objective, Picked
from themis.measure.gradient import by_backward, by_differences
from themis.measure.inputs import check_bounds, place
from themis.measure.memory import Room
from themis.measure.moments import Accumulator, Moments
from themis.measure.similarity import recognisable_first, spread
from themis.measure.tests import Details, Results, Tests
from themis.oracle import Oracle
from themis.oracle.oracle import Verdict, are_finite
from themis.perturb import Context, Perturbation, perturb
from themis.target.activations import OUTPUT, Layer, flatten
from themis.target.target import AnyTarget

if TYPE_CHECKING:
    from themis.criteria.view import View

OnPanel = Callable[[Tensor, Tensor], None]
"""Takes the panel's signed differences `[tests, panel]` and the tests' seeds `[tests]`, chunk by chunk."""


class Calculator:
    """Phase 1 for one target, its seeds and one perturbation. The target must be open, `sweep` comes first."""

    def __init__(
        self,
        target: AnyTarget,
        seeds: Seeds,
        perturbation: Perturbation,
        oracle: Oracle,
        *,
        batch_size: int | None = None,
        chunk: int | None = None,
        clean_bytes: int,
        min_ssim: float | None = None,
    ) -> None:
        """`chunk` is the number of tests a forward pass when it is known, from an earlier campaign."""
        self.target, self.perturbation, self.oracle, self.device = target, perturbation, oracle, target.device
        self.seeds, self.min_ssim = seeds, min_ssim
        if isinstance(seeds.inputs, Tensor):
            check_bounds(seeds.inputs, target.bounds, seeds.seed_id)
        self.inputs = place(seeds.inputs, self.device)
        self.layers = target.find_layers(self.inputs[0])
        self.by_name = {layer.name: layer for layer in self.layers}
        self.n_neurons = self.layers[-1].stop
        self.dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
        self.clean_bytes = clean_bytes
        size = chunk or chunk_size(self.n_neurons, self.device, batch_size)
        self._room = Room(self.layers, size, self.dtype, self.device)
        self.clean_outputs = self.reference = torch.empty(0)
        self.panel: tuple[Picked, OnPanel] | None = None
        self.view: View | None = None
        self._panel_clean: Activations | None = None
        self._own_passes = perturbation.passes  # at the least: some tasks take more
        self._is_run_again = False  # whether clean inputs are run with tests, for want of memory
        self.passes = 5  # find_layers traced a batch of two and one of three
        self.max_passes: int | None = None

    @property
    def chunk(self) -> int:
        """Tests a forward pass."""
        return self._room.chunk

    @cached_property
    def labels(self) -> Tensor | None:
        """Asked for after the sweep, when those that come with the inputs are known."""
        return None if self.seeds.labels is None else self.seeds.labels.to(self.device)

    def sweep(self) -> Moments:
        """Run every clean input once: sets the clean outputs and reference answers, keeps the activations that fit.

        Returns the moments of the clean activations themselves.
        """
        before = self.passes
        moments, outputs = self._room.attempt(self._sweep)
        self.passes = before + len(self.inputs)
        clean_outputs = torch.cat(outputs).float()
        is_finite = are_finite(clean_outputs)
        if not bool(is_finite.all()):
            raise ModelError(
                f"the model must give finite outputs on clean inputs, {int((~is_finite).sum())} of {len(is_finite)} "
                f"have a NaN or an infinity, first seed {int((~is_finite).nonzero()[0])}: check the weights and the "
                "preprocessing"
            )
        self.oracle = self.oracle.settle(clean_outputs, self.labels)
        self.usable = self.oracle.check(clean_outputs, self.labels).nonzero().squeeze(1)
        self.take_clean(clean_outputs)
        return moments.checked(self.layers)

    def take_clean(self, outputs: Tensor) -> None:
        """Set the clean outputs, and with them the answers that the seeds should keep."""
        self.clean_outputs = outputs.float()
        self.reference = self.oracle.reference(self.clean_outputs, self.labels)

    def _sweep(self) -> tuple[Moments, list[Tensor]]:
        self.kept = CleanActivations(self.layers, len(self.inputs), self.clean_bytes, self.dtype, self.device)
        self._is_run_again = self.kept.n_kept < len(self.inputs)
        moments = self.accumulator()
        outputs = []
        for first in range(0, len(self.inputs), self.chunk):
            rows = torch.arange(first, min(first + self.chunk, len(self.inputs)), device=self.device)

            def visit(layer: Layer, activations: Tensor, first: int = first, n: int = len(rows)) -> None:
                self.kept.keep(layer.name, first, activations[:n])
                moments.add(self._room.buffers[layer.name][0].copy_(activations)[:n], layer.start, layer.stop)

            outputs.append(self._clean_pass(rows, visit, self.view)[: len(rows)])
            moments.commit(len(rows))
            if self.view is not None:
                self.view.keep_clean(first, len(rows), len(self.inputs))
        return moments.moments(), outputs

    def accumulator(self) -> Accumulator:
        """An empty accumulator of the right size and place."""
        return Accumulator(self.n_neurons, self.device, self.dtype)

    def watch_panel(self, neurons: Tensor, take: OnPanel) -> None:
        """From now on give `take` the signed differences of these neurons (ascending)."""
        picked = Picked.of(neurons.to(self.device), self.layers)
        self.panel = (picked, take)
        if self.kept.n_kept == len(self.inputs):
            self._panel_clean = {name: self.kept.columns(name, at) for name, at in picked.within.items()}

    def measure(self, tests: Tests, into: Accumulator, objective: Objective | None = None) -> Results:
        """Run the first chunk of `tests`, add its sensitivities to `into`, and say what came of each.

        With an `objective` each test also gets its gradient in theta: by one backward pass, or by two forward passes a
        dimension where the target has no gradient. What raises leaves no trace. Where memory runs out the chunk is
        halved, for good.
        """
        aim = None if objective is None else objective.aim(self.layers)

        def attempt() -> dict[str, Tensor]:
            return self._measure_chunk(tests[: self.chunk], into, aim, self.view)

        columns = {name: column.cpu() for name, column in self._room.attempt(attempt).items()}
        tensors: dict[str, Any] = {name: columns.pop(name) for name in ("inputs", "outputs")}
        arrays: dict[str, Any] = {name: column.numpy() for name, column in columns.items()}
        details = {each.name: arrays.pop(each.name) for each in fields(Details) if each.name in arrays}
        # Four decimals: more says nothing, and whole numbers are stored in a third of the time.
        details["signature"] = np.rint(details["signature"] * np.float32(1e4)) / np.float32(1e4)
        results = Results(**{"gradient": None, **arrays}, faults=Details(**details, **tensors))
        return results if self.view is None else replace(results, raised=self.view.take(results.was_run))

    def disturb(self, rows: Tensor, theta: Tensor, noise_seed: Tensor, n_valid: int) -> tuple[Tensor, Tensor]:
        """The inputs of the seeds `rows`, and the same disturbed at `theta`; rows from `n_valid` on are padding."""
        context = self._context(rows)
        inputs = self.inputs[rows]
        disturbed = perturb(self.perturbation, inputs, theta, noise_seed, context)
        self.passes += context.passes * n_valid // len(rows)
        self._own_passes = max(self._own_passes, -(-context.passes // len(rows)))
        return inputs, disturbed

    def _context(self, rows: Tensor) -> Context:
        def margin(outputs: Tensor) -> Tensor:
            return self._compare(rows, outputs).margin

        features = self.seeds.features if self.perturbation.inputs == "table" else None
        return Context(self.target.bounds, self.target, self.reference[rows], self.oracle.loss, margin, features)

    def run_chunk(self, tests: Tests, chunk: int) -> tuple[Tensor, Tensor]:
        """Inputs and outputs of at most `chunk` tests, computed at that shape; nothing is folded."""
        rows, theta, noise_seed = self._columns(tests, chunk)
        with torch.no_grad():
            _, disturbed = self.disturb(rows, theta, noise_seed, len(tests))
            self.passes += len(tests)
            return disturbed[: len(tests)], self.target.forward(disturbed)[: len(tests)].float()

    def cost(self, climbs: bool, n_rivals: int = 0) -> int:
        """Passes of one test; with its gradient in theta if it climbs, and those of other models beside the target."""
        own = self._own_passes + self._is_run_again
        if not climbs:
            return 1 + own
        gradient = 3 + own if self.target.has_gradient else (1 + own) * (1 + 2 * len(self.perturbation.theta))
        return gradient + 3 * n_rivals

    def _n_affordable(self) -> int | None:
        """Tests that there are passes left for; None is any number."""
        return None if self.max_passes is None else max(0, self.max_passes - self.passes) // self.cost(False)

    def margin_objective(self) -> Objective:
        """What climbs towards another answer."""

        def fallen(inputs: Tensor, outputs: Tensor, rows: Tensor) -> Tensor:
            return -self._compare(rows, outputs).margin.sum()

        return Objective(torch.empty(0, dtype=torch.int64, device=self.device), differ=fallen)

    def release(self) -> None:
        """Free what only a running campaign needs; single tests can still be run."""
        self.kept = CleanActivations(self.layers, 0, 0, self.dtype, self.device)
        self._is_run_again = False
        self._room.release()
        self._panel_clean = None

    def _measure_chunk(
        self, tests: Tests, into: Accumulator, aim: Aim | None, view: View | None = None
    ) -> dict[str, Tensor]:
        n = n_tests = len(tests)
        rows, theta, noise_seed = self._columns(tests, self.chunk)
        panel = None if self.panel is None else self.panel[0]
        backward = aim if self.target.has_gradient else None
        leaf = theta.requires_grad_(backward is not None)
        with torch.set_grad_enabled(backward is not None):
            inputs, disturbed = self.disturb(rows, theta, noise_seed, n)
            order = torch.arange(len(rows), device=self.device)
            if self.min_ssim is not None:
                order, n = recognisable_first(inputs, disturbed, n, self.target.bounds, self.min_ssim)
            if n < n_tests:
                if n == 0:
                    return self._none_was_run(inputs, theta, n_tests, aim is not None)
                tests = tests[order[:n].cpu().numpy()]
                rows, theta, noise_seed, inputs, disturbed = (
                    each[order] for each in (rows, theta, noise_seed, inputs, disturbed)
                )
            locate = self._clean(rows, n)
            fold = Fold(locate, self._room.buffers, n, into, panel, self._panel_clean, backward)
            outputs = self._forward(disturbed, fold.visit, view)
            gradient = None
            if backward is not None:
                height, differ = fold.height, backward.objective.differ
                if differ is not None:
                    height = height + differ(disturbed[:n], outputs[:n].float(), rows[:n])
                gradient = by_backward(height, leaf)[order][:n]
        self.passes += n * (1 if backward is None else 3 + 3 * backward.objective.n_models)
        if aim is not None and backward is None:
            gradient = self._differences(rows, theta, noise_seed, n, lambda: Climb(locate, n, aim))
        with torch.no_grad():
            outputs, rows = outputs.detach()[:n].float(), rows[:n]
            if view is not None:
                view.end(n, outputs, rows)
            verdict = self._compare(rows, outputs)
            at = verdict.is_fault.nonzero().squeeze(1)
            found = self._details(inputs[at], disturbed.detach()[at], outputs[at], fold.signature(at), verdict, at)
            climb = {} if gradient is None else {"gradient": gradient.nan_to_num_(0.0)}
            is_finite = are_finite(outputs)
            if bool(is_finite.all()):
                into.commit(n)
                if self.panel is not None:
                    self.panel[1](fold.panel_differences(), rows)
            # A model that breaks down on an input is a fault, not a sensitivity: fold the others alone, while they can
            # be paid.
            elif len(again := tests[is_finite.cpu().numpy()][: self._n_affordable()]):
                self._measure_chunk(again, into, None)
            came = {"is_fault": verdict.is_fault, "outcome": verdict.outcome, "margin": verdict.margin, **climb}
            return {**(came if n == n_tests else spread(came, order[:n], n_tests)), **found}

    def _compare(self, rows: Tensor, outputs: Tensor) -> Verdict:
        labels = None if self.labels is None else self.labels[rows]
        return self.oracle.compare(self.clean_outputs[rows], outputs, labels)

    def _none_was_run(self, inputs: Tensor, theta: Tensor, n: int, climbs: bool) -> dict[str, Tensor]:
        """What came of tests that were all dropped."""
        none, outputs = torch.empty(0, dtype=torch.int64, device=self.device), self.clean_outputs[:0]
        verdict = self._compare(none, outputs)
        signature = torch.empty(0, len(self.layers), device=self.device)
        climb = {"gradient": theta.detach()[:0]} if climbs else {}
        came = {"is_fault": verdict.is_fault, "outcome": verdict.outcome, "margin": verdict.margin, **climb}
        return spread(came, none, n) | self._details(inputs[:0], inputs[:0], outputs, signature, verdict, none)

    def _differences(
        self, rows: Tensor, theta: Tensor, noise_seed: Tensor, n: int, climb: Callable[[], Climb]
    ) -> Tensor:
        """The gradient in theta by differences of the same noise."""

        def height(moved: Tensor) -> Tensor:
            side = climb()
            with torch.no_grad():
                self._forward(self.disturb(rows, moved, noise_seed, n)[1], side.visit)
            self.passes += n
            return side.height

        return by_differences(theta, self.perturbation.theta, n, height)

    def _details(
        self, inputs: Tensor, disturbed: Tensor, outputs: Tensor, signature: Tensor, verdict: Verdict, at: Tensor
    ) -> dict[str, Tensor]:
        """What is kept of the faults; `at` is where they stand among the tests of the verdict."""
        value = torch.full_like(verdict.margin, torch.nan) if verdict.value is None else verdict.value
        return {
            "value": value[at],
            "confidence": self.oracle.confidence(outputs),
            "distance": l2(inputs, disturbed),
            "linf": linf(inputs, disturbed),
            "ssim": ssim(inputs, disturbed, self.target.bounds),
            "position": at,
            "signature": signature,
            "inputs": disturbed,
            "outputs": outputs,
        }

    def _columns(self, tests: Tests, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
        """Seeds, theta and noise seeds, padded to the chunk's shape by repeating the last test."""
        rows, theta, noise_seed = (
            padded(torch.from_numpy(np.ascontiguousarray(each)), chunk).to(self.device)
            for each in (tests.seed, tests.theta, tests.noise_seed)
        )
        return rows, theta, noise_seed

    def _clean(self, rows: Tensor, n_valid: int) -> Callable[[Layer], Located]:
        """What locates each layer's clean activations of the seeds `rows`; runs those that were not kept."""
        missing = self.kept.missing(rows[:n_valid])
        recomputed: Activations = {}
        if len(missing):

            def visit(layer: Layer, activations: Tensor) -> None:
                recomputed[layer.name] = activations[: len(missing)].clone()

            self._clean_pass(rows[missing], visit)
        return lambda layer: self.kept.locate(layer.name, rows, missing, recomputed, self._room.buffers[layer.name][0])

    def _clean_pass(self, rows: Tensor, visit: Callable[[Layer, Tensor], None], view: View | None = None) -> Tensor:
        self.passes += len(rows)
        inputs = self.inputs[padded(rows, self.chunk)]
        if isinstance(self.seeds.inputs, Rows):  # others were checked at once
            check_bounds(inputs, self.target.bounds, self.seeds.seed_id[rows.cpu()])
        with torch.no_grad():
            return self._forward(inputs, visit, view)

    def _forward(self, inputs: Tensor, visit: Callable[[Layer, Tensor], None], view: View | None = None) -> Tensor:
        """One forward pass; `visit` gets every layer with its activations `[inputs, neurons]`, `view` as they are."""
        n_seen = 0
        if view is not None:
            view.begin(len(inputs), self.device, self.dtype)

        def show(name: str, activation: Tensor) -> None:
            nonlocal n_seen
            layer = self.by_name[name]
            visit(layer, flatten(activation, layer, len(inputs)))
            if view is not None:
                view.on_activation(layer, activation)
            n_seen += 1

        outputs = self.target.forward(inputs, show, self.by_name)
        if OUTPUT in self.by_name:
            show(OUTPUT, outputs)
        if n_seen != len(self.layers):
            raise ModelError(
                f"the model must compute each of its {len(self.layers)} layers once a forward pass, got {n_seen}: name "
                "layers that are always computed with layers=[...]"
            )
        return outputs
