"""The contents of each batch and the held-out seeds: functions of the random seed and a counter, without state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.compute import rng
from themis.data.seeds import Seeds
from themis.errors import DataError
from themis.experiments.retraining.losses import ideal
from themis.experiments.retraining.material import Material
from themis.experiments.retraining.recipe import Recipe
from themis.measure.inputs import place
from themis.measure.tests import Floats, Ints
from themis.oracle import Motion, Oracle
from themis.perturb import Context, Perturbation, perturb
from themis.target.target import Target

FOR_HOLD_OUT, FOR_CLEAN, FOR_STORED, FOR_FRESH, FOR_TEST = range(101, 106)
"""Purposes of random numbers; campaigns use smaller numbers."""
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
    none.
    """
    pool_hashes, clean_hashes = hashes
    failing = pool_hashes[np.unique(material.seed.numpy())]
    held: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
    seen = held
    for candidates, n_trained in ((failing, 1), (pool_hashes, 0), (clean_hashes, 1)):  # n_trained must not be held out
        group = np.setdiff1d(candidates, seen)
        seen = np.union1d(seen, group)
        n = min(max(1, round(recipe.hold_out * len(group))), max(0, len(group) - n_trained))
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
    if recipe.mix > 0 and not len(split.disturbed):
        raise DataError(
            "retraining needs disturbed inputs to learn from, but there are none: run a campaign that finds faults"
        )
    if recipe.mix < 1 and not len(split.clean) + len(split.pool):
        raise DataError(
            f"a mix of {recipe.mix:g} needs clean inputs, but all are held out: give more seeds, or set mix to 1"
        )
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


def uniform_tests(
    perturbation: Perturbation, seed_id: Ints, counter: Ints, random_seed: int, purpose: int
) -> tuple[Floats, Ints]:
    """Theta drawn uniformly from its box, and noise seeds, as functions of seed and counter."""
    low, high = (np.array([getattr(t, end) for t in perturbation.theta], np.float32) for end in ("low", "high"))
    shares = [rng.uniform(random_seed, purpose, k, seed_id, counter) for k in range(len(low))]
    theta = (low + np.stack(shares, -1) * (high - low)).astype(np.float32).clip(low, high)
    return theta, rng.mix(random_seed, purpose, -1, seed_id, counter)


class Disturber:
    """Disturbs seeds. An attack uses the current weights of the model and aims away from the labels."""

    def __init__(self, target: Target, seeds: Seeds, perturbation: Perturbation, oracle: Oracle) -> None:
        assert seeds.labels is not None  # material always has labels
        self.target, self.perturbation, self.oracle = target, perturbation, oracle
        self.inputs, self.labels = place(seeds.inputs, target.device), seeds.labels.to(target.device)
        features = seeds.features if perturbation.inputs == "table" else None
        self._plain = Context(target.bounds, features=features, motion=Motion() if oracle.is_spatial else None)

    def __call__(self, rows: Tensor, theta: Tensor, noise_seed: Tensor) -> tuple[Tensor, Tensor]:
        """Disturbed inputs of the seeds in `rows`, and their labels."""
        inputs, labels = self.inputs[rows], self.labels[rows]
        with self.target.opened() if self.perturbation.passes else nullcontext(), torch.no_grad():
            context = self._attack_context(inputs, labels) if self.perturbation.passes else self._plain
            disturbed = perturb(self.perturbation, inputs, theta, noise_seed, context)
            return disturbed, self.oracle.move_labels(labels, context.motion) if context.motion else labels

    def _attack_context(self, inputs: Tensor, labels: Tensor) -> Context:
        perfect = ideal(self.oracle, self.target.forward(inputs), labels)
        return Context.of_task(self.target, self.oracle, perfect, labels, self._plain.features)


class Batches:
    """The batches of every epoch; all inputs are on the target's device if they fit."""

    def __init__(
        self,
        target: Target,
        material: Material,
        split: BatchSplit,
        perturbation: Perturbation,
        oracle: Oracle,
        recipe: Recipe,
    ) -> None:
        self.recipe, self.split, self.perturbation, self.device = recipe, split, perturbation, target.device
        self.n_clean, self.n_stored, self.n_fresh = recipe.counts()
        self.clean = [
            (place(seeds.inputs, self.device), seeds.labels.to(self.device), rows)
            for seeds, rows in ((material.clean, split.clean), (material.pool, split.pool))
            if seeds.labels is not None and len(rows)
        ]
        self.stored = place(material.disturbed, self.device)
        self.labels = material.disturbed_labels.to(self.device)
        self.seed, self.seed_id = material.seed, material.pool.seed_id.numpy()
        self.disturber = Disturber(target, material.pool, perturbation, oracle) if self.n_fresh else None
        n_disturbed = self.n_stored + self.n_fresh
        n_needed = (
            -(-len(split.disturbed) // n_disturbed) if n_disturbed else 0,
            -(-(len(split.clean) + len(split.pool)) // self.n_clean) if self.n_clean else 0,
        )
        self.n = recipe.batches or max(n_needed)
        """Batches per epoch."""

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and labels of an epoch's batches; the first epoch is 1."""
        first = (number - 1) * self.n
        clean = self._rows(sum(len(rows) for _, _, rows in self.clean), self.n_clean, first, FOR_CLEAN)
        disturbed = self._rows(len(self.split.disturbed), self.n_stored + self.n_fresh, first, FOR_STORED)
        disturbed = self.split.disturbed[disturbed].to(self.device)
        fresh, stored = disturbed[:, : self.n_fresh], disturbed[:, self.n_fresh :]
        fresh_batches = self._fresh(fresh, first)
        for k in range(self.n):
            inputs, labels = [], []
            offset = 0
            for part_inputs, part_labels, rows in self.clean if self.n_clean else ():
                within = clean[k] - offset
                chosen = rows[within[(within >= 0) & (within < len(rows))]].to(self.device)
                inputs.append(part_inputs[chosen])
                labels.append(part_labels[chosen])
                offset += len(rows)
            if self.n_stored:
                inputs.append(self.stored[stored[k]])
                labels.append(self.labels[stored[k]])
            if self.n_fresh:
                fresh_inputs, fresh_labels = next(fresh_batches)
                inputs.append(fresh_inputs)
                labels.append(fresh_labels)
            yield torch.cat(inputs), torch.cat(labels)

    def _rows(self, n: int, n_per_batch: int, first: int, purpose: int) -> Tensor:
        """The rows in each batch of an epoch, `[batches, n_per_batch]`, out of `n`."""
        if not n_per_batch:
            return torch.zeros(self.n, 0, dtype=torch.int64)
        steps = walk(n, first * n_per_batch, self.n * n_per_batch, self.recipe.random_seed, purpose)
        return torch.from_numpy(steps).view(self.n, n_per_batch)

    def _fresh(self, rows: Tensor, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The fresh inputs and labels of each batch, for several batches at once unless they depend on the weights."""
        if self.disturber is None:
            return
        n_batches = 1 if self.perturbation.passes else max(1, FRESH_CHUNK // self.n_fresh)
        for k in range(0, self.n, n_batches):
            seed = self.seed[rows[k : k + n_batches].flatten().cpu()]
            counter = np.arange(len(seed)) + (first + k) * self.n_fresh
            theta, noise_seed = uniform_tests(
                self.perturbation, self.seed_id[seed], counter, self.recipe.random_seed, FOR_FRESH
            )
            disturbed = self.disturber(*(_on(self.device, values) for values in (seed, theta, noise_seed)))
            yield from zip(*(torch.split(values, self.n_fresh) for values in disturbed), strict=True)


def _on(device: torch.device, values: Tensor | NDArray[np.float32] | Ints) -> Tensor:
    return (values if isinstance(values, Tensor) else torch.from_numpy(values)).to(device)
