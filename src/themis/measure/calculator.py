"""The sensitivity calculator: runs tests and folds `|N_i(I + E(theta)) - N_i(I)|` into moments as it appears."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from themis.data.seeds import Seeds
from themis.errors import DataError, ModelError
from themis.measure.clean import Activations, CleanActivations, Located
from themis.measure.distance import l2, ssim
from themis.measure.fold import Fold, Objective, Picked
from themis.measure.moments import Accumulator, Moments
from themis.measure.tests import Details, Results, Tests
from themis.oracle import Oracle, are_probabilities, confidence
from themis.perturb.perturbation import Context, Perturbation, perturb
from themis.probe import OUTPUT, Layer, flatten
from themis.target import Target

CHUNK_ACTIVATIONS = 1 << 24
"""Activations of one chunk on a CPU: 64 MiB of them; larger chunks fall out of its caches."""
CHUNK_LEAST, CHUNK_MOST = 8, 256
ACCELERATOR_BATCH = 256

OnPanel = Callable[[Tensor, Tensor], None]
"""Takes the panel's signed differences `[tests, panel]` and the tests' seeds `[tests]`, chunk by chunk."""


def chunk_size(n_neurons: int, device: torch.device, batch_size: int | None) -> int:
    """Tests in one forward pass.

    On a CPU a function of the model alone: kernels round differently for different batch shapes, and results must not
    depend on `batch_size`. On an accelerator it is `batch_size`, and only near-ties can differ.
    """
    if device.type != "cpu":
        return batch_size or ACCELERATOR_BATCH
    fitting = max(1, CHUNK_ACTIVATIONS // n_neurons)
    return min(CHUNK_MOST, max(CHUNK_LEAST, 1 << round(math.log2(fitting))))


class Calculator:
    """Phase 1 for one target, its seeds and one perturbation. The target must be open, `sweep` comes first."""

    def __init__(
        self,
        target: Target,
        seeds: Seeds,
        perturbation: Perturbation,
        oracle: Oracle,
        *,
        batch_size: int | None = None,
        chunk: int | None = None,
        clean_bytes: int,
    ) -> None:
        """`chunk` is the number of tests a forward pass when it is known, from an earlier campaign."""
        check_bounds(seeds, target.bounds)
        self.target, self.perturbation, self.oracle, self.device = target, perturbation, oracle, target.device
        self.inputs = seeds.inputs.to(self.device)
        self.labels = None if seeds.labels is None else seeds.labels.to(self.device)
        self.layers = target.find_layers(self.inputs[0])
        self.by_name = {layer.name: layer for layer in self.layers}
        self.n_neurons = self.layers[-1].stop
        self.dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
        self._clean_bytes = clean_bytes
        self.chunk = chunk or chunk_size(self.n_neurons, self.device, batch_size)
        self._buffers: dict[str, tuple[Tensor, Tensor]] = {}  # made when first used
        self.clean_outputs = self.reference = torch.empty(0)
        self.panel: tuple[Picked, OnPanel] | None = None
        self._panel_clean: Activations | None = None
        self.passes = 5  # find_layers traced a batch of two and one of three

    def sweep(self) -> Moments:
        """Run every clean input once: sets the clean outputs and reference answers, keeps the activations that fit.

        Returns the moments of the clean activations themselves.
        """
        before = self.passes
        moments, outputs = self._with_room(self._sweep)
        self.passes = before + len(self.inputs)
        clean_outputs = torch.cat(outputs).float()
        is_finite = clean_outputs.reshape(len(self.inputs), -1).isfinite().all(1)
        if not bool(is_finite.all()):
            raise ModelError(
                f"the model must give finite outputs on clean inputs, {int((~is_finite).sum())} of {len(is_finite)} "
                f"have a NaN or an infinity, first seed {int((~is_finite).nonzero()[0])}: check the weights and the "
                "preprocessing"
            )
        self.usable = self.oracle.check(clean_outputs, self.labels).nonzero().squeeze(1)
        self.take_clean(clean_outputs)
        self.gives_probabilities = are_probabilities(self.clean_outputs)
        return self.checked(moments.moments())

    def take_clean(self, outputs: Tensor) -> None:
        """Set the clean outputs, and with them the answers that the seeds should keep."""
        self.clean_outputs = outputs.float()
        self.reference = self.oracle.reference(self.clean_outputs, self.labels)

    def _sweep(self) -> tuple[Accumulator, list[Tensor]]:
        self.kept = CleanActivations(self.layers, len(self.inputs), self._clean_bytes, self.dtype, self.device)
        moments = self.accumulator()
        outputs = []
        for first in range(0, len(self.inputs), self.chunk):
            rows = torch.arange(first, min(first + self.chunk, len(self.inputs)), device=self.device)

            def visit(layer: Layer, activations: Tensor, first: int = first, n: int = len(rows)) -> None:
                self.kept.keep(layer.name, first, activations[:n])
                moments.add(self._buffers[layer.name][0].copy_(activations)[:n], layer.start, layer.stop)

            outputs.append(self._clean_pass(rows, visit)[: len(rows)])
            moments.commit(len(rows))
        return moments, outputs

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

        With an `objective` each test also gets its gradient in theta, by one backward pass. What raises leaves no
        trace. Where memory runs out the chunk is halved, for good.
        """
        climbed = None if objective is None else Picked.of(objective.neurons, self.layers)
        scale = None if objective is None else objective.scale

        def attempt() -> dict[str, Tensor]:
            return self._measure_chunk(tests[: self.chunk], into, climbed, scale)

        columns = {name: column.cpu() for name, column in self._with_room(attempt).items()}
        tensors = {name: columns.pop(name) for name in ("inputs", "outputs")}
        arrays: dict[str, Any] = {name: column.numpy() for name, column in columns.items()}
        details = {name: arrays.pop(name) for name in ("confidence", "distance", "ssim", "signature")}
        # Four decimals: more says nothing, and whole numbers are stored in a third of the time.
        details["signature"] = np.rint(details["signature"] * np.float32(1e4)) / np.float32(1e4)
        return Results(**{"gradient": None, **arrays}, faults=Details(**details, **tensors))

    def _with_room(self, attempt: Callable[[], Any]) -> Any:
        """What `attempt` gives; it is made again with a smaller chunk while memory runs out."""
        while True:
            try:
                if not self._buffers:
                    self._make_buffers()
                return attempt()
            except Exception as error:
                if not is_out_of_memory(error) or self.chunk == 1:
                    raise
            self.chunk //= 2
            self._buffers = {}
            gc.collect()  # the error's frames hold tensors in circles
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            warnings.warn(
                f"out of memory on {self.device} with {2 * self.chunk} tests at once: going on with {self.chunk}; "
                f"pass batch_size={self.chunk} to begin with it",
                RuntimeWarning,
                stacklevel=2,
            )

    def _make_buffers(self) -> None:
        widest = max(layer.n_neurons for layer in self.layers)
        scratch = torch.empty(2, self.chunk * widest, dtype=self.dtype, device=self.device)
        self._buffers = {layer.name: self._cut(scratch, layer) for layer in self.layers}

    def disturb(self, rows: Tensor, theta: Tensor, noise_seed: Tensor, n_valid: int) -> tuple[Tensor, Tensor]:
        """The inputs of the seeds `rows`, and the same disturbed at `theta`; rows from `n_valid` on are padding."""
        context = Context(self.target, self.reference[rows])
        inputs = self.inputs[rows]
        disturbed = perturb(self.perturbation, inputs, theta, noise_seed, context)
        self.passes += context.passes * n_valid // len(rows)
        return inputs, disturbed

    def run_chunk(self, tests: Tests, chunk: int) -> tuple[Tensor, Tensor]:
        """Inputs and outputs of at most `chunk` tests, computed at that shape; nothing is folded."""
        rows, theta, noise_seed = self._columns(tests, chunk)
        with torch.no_grad():
            _, disturbed = self.disturb(rows, theta, noise_seed, len(tests))
            self.passes += len(tests)
            return disturbed[: len(tests)], self.target.forward(disturbed)[: len(tests)].float()

    def release(self) -> None:
        """Free what only a running campaign needs; single tests can still be run."""
        self.kept = CleanActivations(self.layers, 0, 0, self.dtype, self.device)
        self._buffers, self._panel_clean = {}, None

    def checked(self, moments: Moments) -> Moments:
        """`moments`, unless an activation overflowed: then say where."""
        is_finite = moments.m2.isfinite()
        if not bool(is_finite.all()):
            at = int((~is_finite).nonzero()[0])
            name = next(layer.name for layer in self.layers if at < layer.stop)
            raise ModelError(
                f"activations must be finite, layer {name!r} has a NaN or an infinity while the output has none: leave "
                "the layer out with layers=[...], or run the model in float32"
            )
        return moments

    def _measure_chunk(
        self, tests: Tests, into: Accumulator, climbed: Picked | None, scale: Tensor | None
    ) -> dict[str, Tensor]:
        n = len(tests)
        rows, theta, noise_seed = self._columns(tests, self.chunk)
        panel = None if self.panel is None else self.panel[0]
        fold = Fold(self._clean(rows, n), self._buffers, n, into, panel, self._panel_clean, climbed, scale)
        theta.requires_grad_(climbed is not None)
        with torch.set_grad_enabled(climbed is not None):
            inputs, disturbed = self.disturb(rows, theta, noise_seed, n)
            outputs = self._forward(disturbed, fold.visit)
            gradient = None if climbed is None else _gradient(fold.objective, theta)[:n]
        self.passes += n * (1 if climbed is None else 3)
        with torch.no_grad():
            outputs, rows = outputs.detach()[:n].float(), rows[:n]
            labels = None if self.labels is None else self.labels[rows]
            verdict = self.oracle.compare(self.clean_outputs[rows], outputs, labels)
            at = verdict.is_fault.nonzero().squeeze(1)
            found = self._details(inputs[at], disturbed.detach()[at], outputs[at], fold.signature(at))
            climb = {} if gradient is None else {"gradient": gradient.nan_to_num_(0.0)}
            is_finite = outputs.flatten(1).isfinite().all(1)
            if bool(is_finite.all()):
                into.commit(n)
                if self.panel is not None:
                    self.panel[1](fold.panel_differences(), rows)
            elif bool(is_finite.any()):
                # A model that breaks down on an input is a fault, not a sensitivity: fold the others alone.
                self._measure_chunk(tests[is_finite.cpu().numpy()], into, None, None)
            return {**verdict._asdict(), **climb, **found}

    def _details(self, inputs: Tensor, disturbed: Tensor, outputs: Tensor, signature: Tensor) -> dict[str, Tensor]:
        return {
            "confidence": confidence(outputs, self.gives_probabilities),
            "distance": l2(inputs, disturbed),
            "ssim": ssim(inputs, disturbed, self.target.bounds),
            "signature": signature,
            "inputs": disturbed,
            "outputs": outputs,
        }

    def _columns(self, tests: Tests, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
        """Seeds, theta and noise seeds, padded to the chunk's shape by repeating the last test."""
        rows, theta, noise_seed = (
            _padded(torch.from_numpy(np.ascontiguousarray(each)), chunk).to(self.device)
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
        return lambda layer: self.kept.locate(layer.name, rows, missing, recomputed, self._buffers[layer.name][0])

    def _clean_pass(self, rows: Tensor, visit: Callable[[Layer, Tensor], None]) -> Tensor:
        self.passes += len(rows)
        with torch.no_grad():
            return self._forward(self.inputs[_padded(rows, self.chunk)], visit)

    def _forward(self, inputs: Tensor, visit: Callable[[Layer, Tensor], None]) -> Tensor:
        """One forward pass; `visit` gets every layer with its activations `[inputs, neurons]`."""
        n_seen = 0

        def show(name: str, activation: Tensor) -> None:
            nonlocal n_seen
            layer = self.by_name[name]
            visit(layer, flatten(activation, layer, len(inputs)))
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

    def _cut(self, scratch: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        first, second = scratch[:, : self.chunk * layer.n_neurons].view(2, self.chunk, layer.n_neurons)
        return first, second


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, says that memory ran out."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
            return True
        error = error.__cause__
    return False


def check_bounds(seeds: Seeds, bounds: tuple[float, float]) -> None:
    """Refuse inputs outside the bounds; the common mistakes get their own remedy."""
    low, high = bounds
    least, most = float(seeds.inputs.min()), float(seeds.inputs.max())
    if low <= least and most <= high:
        return
    remedy = "rescale the inputs or pass their true bounds"
    if high <= 1 and most > 2 and least >= 0:
        remedy = "divide by 255 or pass bounds=(0, 255)"
    elif least < 0 <= low:
        remedy = "give raw inputs, and pass the normalisation as preprocess=Normalize(mean, std)"
    raise DataError(f"inputs must lie in bounds ({low:g}, {high:g}), got {least:g} to {most:g}: {remedy}")


def _gradient(objective: Tensor | float, theta: Tensor) -> Tensor:
    if not isinstance(objective, Tensor) or not objective.requires_grad:
        return torch.zeros_like(theta)
    return torch.autograd.grad(objective, theta)[0]


def _padded(rows: Tensor, size: int) -> Tensor:
    """`rows` filled up to `size` by repeating the last: a forward pass always has the same shape."""
    if len(rows) == size:
        return rows
    return torch.cat([rows, rows[-1:].expand(size - len(rows), *rows.shape[1:])])
