"""The contents of each batch and the held-out seeds: functions of the random seed and a counter, without state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.compute import rng
from themis.data.seeds import Seeds
from themis.errors import DataError
from themis.experiments.retraining.grading import grade
from themis.experiments.retraining.losses import ideal
from themis.experiments.retraining.material import CHUNK, Material
from themis.experiments.retraining.recipe import Recipe
from themis.experiments.retraining.steering import Steering
from themis.measure.inputs import place
from themis.measure.tests import Floats, Ints
from themis.oracle import Motion, Oracle
from themis.perturb import Context, Perturbation, perturb
from themis.target.target import Target

FOR_HOLD_OUT, FOR_CLEAN, FOR_STORED, FOR_FRESH, FOR_TEST, FOR_FRESH_SEEDS, FOR_CASES = range(101, 108)
"""Purposes of random numbers; campaigns use smaller numbers."""
N_HELD = 1_000
"""Searched seeds that are held out, at most, if the recipe does not ask for more."""
MAX_ANSWERS = 1 << 30
"""Bytes of a model's outputs that are kept, at most."""
FRESH_CHUNK = 512
"""Fresh inputs that are created at a time, unless they depend on the weights, which change with each batch."""


@dataclass(frozen=True)
class BatchSplit:
    """Rows that are trained on, and rows of the pool and of the clean seeds that are held out."""

    disturbed: Tensor  # rows of the material's disturbed inputs
    pool: Tensor  # rows of its pool, used as clean inputs
    clean: Tensor  # rows of its clean seeds
    held_pool: Tensor
    held_clean: Tensor


def hold_out(material: Material, hashes: tuple[NDArray[np.uint64], NDArray[np.uint64]], recipe: Recipe) -> BatchSplit:
    """Hold out a share of the failing seeds, of the other seeds that were searched, and of the clean seeds.

    hashes: those of the contents of the pool and of the clean seeds. Of several copies of an input, all are held out or
    none. A model may know the clean seeds by heart, so the searched ones show best what it loses: if there are no fewer
    clean seeds to learn from, up to half of the searched ones are held out.
    """
    pool_hashes, clean_hashes = hashes
    n_pool, n_clean = (len(np.unique(contents)) for contents in hashes)
    share = recipe.hold_out
    if n_clean >= n_pool:
        share = max(share, min(0.5, N_HELD / n_pool))
    failing = pool_hashes[np.unique(material.seed.numpy())]
    held: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
    seen = held
    groups = ((failing, 1, share), (pool_hashes, 0, share), (clean_hashes, 1, recipe.hold_out))
    for candidates, n_trained, held_share in groups:  # n_trained must not be held out
        group = np.setdiff1d(candidates, seen)
        seen = np.union1d(seen, group)
        n = min(max(1, round(held_share * len(group))), max(0, len(group) - n_trained))
        order = np.argsort(rng.mix(recipe.random_seed, FOR_HOLD_OUT, group.view(np.int64)), kind="stable")
        held = np.union1d(held, group[order[:n]])
    in_pool, in_clean = np.isin(pool_hashes, held), np.isin(clean_hashes, held)
    if not in_pool.any() and not in_clean.any():
        raise DataError(
            f"some seeds must be held out to choose the best epoch, but there are only {len(seen)}: give more seeds"
        )
    is_trained = ~in_pool[material.seed.numpy()]
    masks = (is_trained, ~in_pool, ~in_clean, in_pool, in_clean)
    split = BatchSplit(*(torch.from_numpy(np.flatnonzero(mask)) for mask in masks))
    if recipe.mix > 0 and recipe.fresh < 1 and not len(split.disturbed):
        raise DataError(
            "retraining needs disturbed inputs to learn from, but there are none: run a campaign that finds faults"
        )
    if not len(split.clean) + len(split.pool):
        raise DataError("retraining needs seeds to train on, but all are held out: give more seeds")
    return split


def walk(n: int, start: int, count: int, random_seed: int, purpose: int) -> Ints:
    """Steps `start` to `start + count` of an endless walk over `n` rows, which are shuffled again for each lap."""
    steps = np.arange(start, start + count)
    lap, within = np.divmod(steps, n)
    orders = [
        np.argsort(rng.uniform(random_seed, purpose, number, np.arange(n)), kind="stable")
        for number in range(int(lap[0]), int(lap[-1]) + 1)
    ]
    rows: Ints = np.stack(orders)[lap - lap[0], within]
    return rows


def uniform_shares(
    perturbation: Perturbation, seed_id: Ints, counter: Ints, random_seed: int, purpose: int
) -> tuple[Floats, Ints]:
    """Uniform places in the box of theta, 0..1, and noise seeds, as functions of seed and counter."""
    shares = [rng.uniform(random_seed, purpose, k, seed_id, counter) for k in range(len(perturbation.theta))]
    return np.stack(shares, -1).astype(np.float32), rng.mix(random_seed, purpose, -1, seed_id, counter)


def theta_at(perturbation: Perturbation, shares: Floats) -> Floats:
    """Theta at places in its box."""
    low, high = (np.array([getattr(t, end) for t in perturbation.theta], np.float32) for end in ("low", "high"))
    theta: Floats = (low + shares * (high - low)).astype(np.float32).clip(low, high)
    return theta


class Disturber:
    """Disturbs seeds. An attack uses the current weights of the model and aims away from the labels."""

    def __init__(self, target: Target, seeds: Seeds, oracle: Oracle) -> None:
        assert seeds.labels is not None  # material always has labels
        self.target, self.oracle, self.seeds = target, oracle, seeds
        self.inputs, self.labels = place(seeds.inputs, target.device), seeds.labels.to(target.device)

    def __call__(
        self, perturbation: Perturbation, rows: Tensor, theta: Tensor, noise_seed: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Disturbed inputs of the seeds in `rows`, and their labels."""
        inputs, labels, oracle = self.inputs[rows], self.labels[rows], self.oracle
        features = self.seeds.features if perturbation.inputs == "table" else None
        with self.target.opened() if perturbation.passes else nullcontext(), torch.no_grad():
            if perturbation.passes:
                perfect = ideal(oracle, self.target.forward(inputs), labels)
                context = Context.of_task(self.target, oracle, perfect, labels, features)
            else:
                motion = Motion() if oracle.is_spatial else None
                context = Context(self.target.bounds, features=features, motion=motion)
            disturbed = perturb(perturbation, inputs, theta, noise_seed, context)
            return disturbed, oracle.move_labels(labels, context.motion) if context.motion else labels


class Batches:
    """The batches of every epoch; all inputs are on the target's device if they fit."""

    def __init__(
        self,
        target: Target,
        material: Material,
        split: BatchSplit,
        perturbations: Sequence[Perturbation],
        oracle: Oracle,
        recipe: Recipe,
    ) -> None:
        self.recipe, self.split, self.perturbations, self.device = recipe, split, perturbations, target.device
        self.oracle = oracle
        self.n_clean, self.n_stored, self.n_fresh = recipe.counts()
        self.parts = [
            (Disturber(target, seeds, oracle), rows)
            for seeds, rows in ((material.clean, split.clean), (material.pool, split.pool))
            if len(rows)
        ]
        """The seeds that are trained on, and their rows."""
        self.n_seeds = sum(len(rows) for _, rows in self.parts)
        self.stored = place(material.disturbed, self.device)
        self.labels = material.disturbed_labels.to(self.device)
        labels = [part.labels[rows.to(self.device)].cpu() for part, rows in self.parts]
        self.steering = Steering(perturbations, torch.cat(labels), recipe.steer)
        n_disturbed = self.n_stored + self.n_fresh
        n_needed = (
            -(-len(split.disturbed) // n_disturbed) if n_disturbed else 0,
            -(-self.n_seeds // self.n_clean) if self.n_clean else 0,
        )
        self.n = recipe.batches or max(n_needed)
        """Batches per epoch."""

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Inputs and labels of an epoch's batches, clean ones first, and the rows of these among the training seeds.

        The first epoch is 1.
        """
        first = (number - 1) * self.n
        clean = self._rows(self.n_seeds, self.n_clean, first, FOR_CLEAN)
        stored = self._rows(len(self.split.disturbed), self.n_stored, first, FOR_STORED)
        stored = self.split.disturbed[stored].to(self.device)
        fresh_batches = self._fresh(first)
        for k in range(self.n):
            inputs, labels, rows = [], [], []
            for part, places, seeds in self._locate(clean[k].numpy()):
                inputs.append(part.inputs[seeds.to(self.device)])
                labels.append(part.labels[seeds.to(self.device)])
                rows.append(clean[k][torch.from_numpy(places)])
            if self.n_stored:
                inputs.append(self.stored[stored[k]])
                labels.append(self.labels[stored[k]])
            if self.n_fresh:
                fresh_inputs, fresh_labels = next(fresh_batches)
                inputs.append(fresh_inputs)
                labels.append(fresh_labels)
            yield torch.cat(inputs), torch.cat(labels), torch.cat(rows)

    def clean_answers(self, target: Target) -> Tensor | None:
        """A model's outputs for all clean seeds that are trained on, by row; None if they are too large to be kept.

        The target must be open.
        """
        outputs: list[Tensor] = []
        with torch.no_grad():
            for part, rows in self.parts:
                for chunk in torch.split(rows.to(self.device), CHUNK):
                    outputs.append(target.forward(part.inputs[chunk]).float())
                    if outputs[0].nbytes / len(outputs[0]) * self.n_seeds > MAX_ANSWERS:
                        return None
        return torch.cat(outputs)

    def observe(self, outputs: Tensor, labels: Tensor) -> None:
        """Learn from the answers to a batch, in which fresh inputs come last, what breaks the model as it is now."""
        if self.n_fresh and self.recipe.steer:
            self.steering.observe(1 - grade(self.oracle, outputs[-self.n_fresh :], labels[-self.n_fresh :]))

    def _locate(self, rows: Ints) -> Iterator[tuple[Disturber, Ints, Tensor]]:
        """For each part of the training seeds: the part, the places of its seeds in `rows`, and their rows in it."""
        offset = 0
        for part, trained in self.parts:
            places = np.flatnonzero((rows >= offset) & (rows < offset + len(trained)))
            yield part, places, trained[torch.from_numpy(rows[places] - offset)]
            offset += len(trained)

    def _rows(self, n: int, n_per_batch: int, first: int, purpose: int) -> Tensor:
        """The rows in each batch of an epoch, `[batches, n_per_batch]`, out of `n`."""
        if not n_per_batch:
            return torch.zeros(self.n, 0, dtype=torch.int64)
        steps = walk(n, first * n_per_batch, self.n * n_per_batch, self.recipe.random_seed, purpose)
        return torch.from_numpy(steps).view(self.n, n_per_batch)

    def _fresh(self, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        """New disturbances for each batch, for several batches at once unless they depend on the weights."""
        if not self.n_fresh:
            return
        is_attack = any(perturbation.passes for perturbation in self.perturbations)
        n_batches = 1 if is_attack else max(1, FRESH_CHUNK // self.n_fresh)
        for k in range(0, self.n, n_batches):
            n = min(n_batches, self.n - k) * self.n_fresh
            inputs, labels = self._disturb(np.arange(n) + (first + k) * self.n_fresh)
            yield from zip(torch.split(inputs, self.n_fresh), torch.split(labels, self.n_fresh), strict=True)

    def _disturb(self, counter: Ints) -> tuple[Tensor, Tensor]:
        """Disturbed inputs and labels: for each counter, a seed, a perturbation and theta are drawn."""
        random_seed = self.recipe.random_seed
        self.steering.fold()
        draws = [rng.uniform(random_seed, purpose, counter) for purpose in (FOR_FRESH_SEEDS, FOR_CASES)]
        row, case = self.steering.choose_rows(draws[0]), self.steering.choose_cases(draws[1])
        bins = np.zeros((len(counter), self.steering.n_dimensions), dtype=np.int64)
        parts: list[tuple[Ints, Tensor, Tensor]] = []
        for part, places, seeds in self._locate(row):
            for k, perturbation in enumerate(self.perturbations):
                is_case = case[places] == k
                here, rows = places[is_case], seeds[torch.from_numpy(is_case)]
                if not len(here):
                    continue
                seed_id = part.seeds.seed_id[rows].numpy()
                shares, noise_seed = uniform_shares(perturbation, seed_id, counter[here], random_seed, FOR_FRESH)
                shares, bins[here, : shares.shape[1]] = self.steering.warp(k, shares)
                theta = theta_at(perturbation, shares)
                disturbed = part(perturbation, *(_on(self.device, values) for values in (rows, theta, noise_seed)))
                parts.append((here, *disturbed))
        self.steering.expect(row, case, bins)
        order = torch.from_numpy(np.argsort(np.concatenate([here for here, _, _ in parts]))).to(self.device)
        return torch.cat([inputs for _, inputs, _ in parts])[order], torch.cat([labels for *_, labels in parts])[order]


def _on(device: torch.device, values: Tensor | NDArray[np.float32] | Ints) -> Tensor:
    return (values if isinstance(values, Tensor) else torch.from_numpy(values)).to(device)
