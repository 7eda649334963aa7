"""What each batch holds, and the seeds held out: functions of the random seed and a counter, so nothing to remember."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.compute import rng
from themis.data.seeds import Seeds
from themis.errors import DataError
from themis.experiments.retraining.losses import margins, reference
from themis.experiments.retraining.material import Material
from themis.experiments.retraining.recipe import Recipe
from themis.measure.inputs import place
from themis.measure.tests import Floats, Ints
from themis.oracle import Oracle
from themis.perturb import Context, Perturbation, perturb
from themis.target.target import Target

FOR_HOLD_OUT, FOR_CLEAN, FOR_STORED, FOR_FRESH, FOR_TEST = range(101, 106)
"""What a random number is for; campaigns use smaller numbers."""
AT_ONCE = 512
"""Fresh inputs that are made at a time, where they do not depend on weights that change with each batch."""


@dataclass(frozen=True)
class Split:
    """Rows that are trained on, and rows of pool and clean seeds that are held out."""

    disturbed: Tensor  # of the material
    pool: Tensor  # of its pool, as clean inputs
    clean: Tensor  # of its clean seeds
    held_pool: Tensor
    held_clean: Tensor


def hold_out(material: Material, hashes: tuple[NDArray[np.uint64], NDArray[np.uint64]], recipe: Recipe) -> Split:
    """Hold out a share of the failing seeds, of the others that were searched, and of the clean ones.

    hashes: of the content of pool and clean seeds. Copies of one input are all held out or none.
    """
    of_pool, of_clean = hashes
    failing = of_pool[np.unique(material.seed.numpy())]
    held: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
    seen = held
    for each, least in ((failing, 1), (of_pool, 0), (of_clean, 1)):  # at least so many must be left to train on
        group = np.setdiff1d(each, seen)
        seen = np.union1d(seen, group)
        n = min(max(1, round(recipe.hold_out * len(group))), max(0, len(group) - least))
        order = np.argsort(rng.mix(recipe.random_seed, FOR_HOLD_OUT, group.view(np.int64)), kind="stable")
        held = np.union1d(held, group[order[:n]])
    in_pool, in_clean = np.isin(of_pool, held), np.isin(of_clean, held)
    if not in_pool.any() and not in_clean.any():
        raise DataError(f"some seeds must be held out to choose the best epoch, there are {len(seen)}: give more seeds")
    is_trained = ~in_pool[material.seed.numpy()]
    which = (is_trained, ~in_pool, ~in_clean, in_pool, in_clean)
    split = Split(*(torch.from_numpy(np.flatnonzero(each)) for each in which))
    if recipe.mix > 0 and not len(split.disturbed):
        raise DataError("retraining needs disturbed inputs to learn from, there are none: find faults first")
    if recipe.mix < 1 and not len(split.clean) + len(split.pool):
        raise DataError(f"a mix of {recipe.mix:g} needs clean inputs, all are held out: give more, or set mix to 1")
    return split


def walk(n: int, start: int, count: int, random_seed: int, purpose: int) -> Ints:
    """Steps `start` to `start + count` of an endless walk over `n` rows, in an order shuffled each time round."""
    steps = np.arange(start, start + count)
    lap, within = np.divmod(steps, n)
    orders = [
        np.argsort(rng.uniform(random_seed, purpose, each, np.arange(n)), kind="stable")
        for each in range(int(lap[0]), int(lap[-1]) + 1)
    ]
    rows: Ints = np.stack(orders)[lap - lap[0], within]
    return rows


def uniform_tests(
    perturbation: Perturbation, seed_id: Ints, counter: Ints, random_seed: int, purpose: int
) -> tuple[Floats, Ints]:
    """Theta drawn uniformly from its box, and noise seeds, for tests of seeds by a counter."""
    low, high = (np.array([getattr(t, end) for t in perturbation.theta], np.float32) for end in ("low", "high"))
    shares = [rng.uniform(random_seed, purpose, k, seed_id, counter) for k in range(len(low))]
    theta = (low + np.stack(shares, -1) * (high - low)).astype(np.float32).clip(low, high)
    return theta, rng.mix(random_seed, purpose, -1, seed_id, counter)


class Disturber:
    """Disturbs seeds anew. An attack is one on the model as it is then, against the labels."""

    def __init__(self, target: Target, seeds: Seeds, perturbation: Perturbation, oracle: Oracle) -> None:
        assert seeds.labels is not None  # material has labels
        self.target, self.perturbation, self.oracle = target, perturbation, oracle
        self.inputs, self.labels = place(seeds.inputs, target.device), seeds.labels.to(target.device)
        features = seeds.features if perturbation.inputs == "table" else None
        self._plain = Context(target.bounds, features=features)

    def __call__(self, rows: Tensor, theta: Tensor, noise_seed: Tensor) -> Tensor:
        """The inputs of the seeds `rows`, disturbed."""
        inputs = self.inputs[rows]
        if not self.perturbation.passes:
            with torch.no_grad():
                return perturb(self.perturbation, inputs, theta, noise_seed, self._plain)
        with self.target.opened(), torch.no_grad():
            return perturb(self.perturbation, inputs, theta, noise_seed, self._attack(inputs, self.labels[rows]))

    def _attack(self, inputs: Tensor, labels: Tensor) -> Context:
        like = self.target.forward(inputs)

        def margin(outputs: Tensor) -> Tensor:
            return margins(self.oracle, outputs, labels)

        of_labels = reference(self.oracle, like, labels)
        attacked = replace(self._plain, target=self.target, reference=of_labels, loss=self.oracle.loss)
        attacked.margin = margin
        return attacked


class Batches:
    """The batches of every epoch; everything lies on the target's device, where it fits."""

    def __init__(
        self,
        target: Target,
        material: Material,
        split: Split,
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
        enough = (
            -(-len(split.disturbed) // n_disturbed) if n_disturbed else 0,
            -(-(len(split.clean) + len(split.pool)) // self.n_clean) if self.n_clean else 0,
        )
        self.n = recipe.batches or max(enough)
        """Batches an epoch."""

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and labels of an epoch's batches; the first epoch is 1."""
        first = (number - 1) * self.n
        clean = self._rows(sum(len(rows) for _, _, rows in self.clean), self.n_clean, first, FOR_CLEAN)
        disturbed = self._rows(len(self.split.disturbed), self.n_stored + self.n_fresh, first, FOR_STORED)
        disturbed = self.split.disturbed[disturbed].to(self.device)
        fresh, stored = disturbed[:, : self.n_fresh], disturbed[:, self.n_fresh :]
        made = self._fresh(fresh, first)
        for k in range(self.n):
            inputs, labels = [], []
            begin = 0
            for some, answers, rows in self.clean if self.n_clean else ():
                at = clean[k] - begin
                at = rows[at[(at >= 0) & (at < len(rows))]].to(self.device)
                inputs.append(some[at])
                labels.append(answers[at])
                begin += len(rows)
            if self.n_stored:
                inputs.append(self.stored[stored[k]])
                labels.append(self.labels[stored[k]])
            if self.n_fresh:
                inputs.append(next(made))
                labels.append(self.labels[fresh[k]])
            yield torch.cat(inputs), torch.cat(labels)

    def _rows(self, n: int, a_batch: int, first: int, purpose: int) -> Tensor:
        """`[batches, a batch]`, of `n` rows."""
        if not a_batch:
            return torch.zeros(self.n, 0, dtype=torch.int64)
        steps = walk(n, first * a_batch, self.n * a_batch, self.recipe.random_seed, purpose)
        return torch.from_numpy(steps).view(self.n, a_batch)

    def _fresh(self, rows: Tensor, first: int) -> Iterator[Tensor]:
        """The fresh inputs of each batch, several batches made at once unless they depend on the weights."""
        if self.disturber is None:
            return
        at_once = 1 if self.perturbation.passes else max(1, AT_ONCE // self.n_fresh)
        for k in range(0, self.n, at_once):
            seed = self.seed[rows[k : k + at_once].flatten().cpu()]
            counter = np.arange(len(seed)) + (first + k) * self.n_fresh
            theta, noise_seed = uniform_tests(
                self.perturbation, self.seed_id[seed], counter, self.recipe.random_seed, FOR_FRESH
            )
            made = self.disturber(*(_on(self.device, each) for each in (seed, theta, noise_seed)))
            yield from torch.split(made, self.n_fresh)


def _on(device: torch.device, values: Tensor | NDArray[np.float32] | Ints) -> Tensor:
    return (values if isinstance(values, Tensor) else torch.from_numpy(values)).to(device)
