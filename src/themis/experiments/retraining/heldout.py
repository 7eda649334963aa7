"""Seeds held out of a training: how right a model is on them, clean and disturbed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from themis.experiments.retraining.batches import FOR_TEST, Disturber, Split, uniform_tests, walk
from themis.experiments.retraining.grading import grade
from themis.experiments.retraining.losses import Loss
from themis.experiments.retraining.material import AT_ONCE, Material
from themis.experiments.retraining.recipe import Recipe
from themis.oracle import Oracle
from themis.perturb import Perturbation
from themis.target.target import Target

TESTS = 2_000
"""Uniform tests of the seeds held out, after each epoch."""
MOST_DRAWS = 20
"""Of them a seed."""
ATTACKS = 256
"""In their place where each costs passes of its own: an attack is made anew on each epoch's model."""
MOST_CLEAN = 10_000
"""Seeds that are held out and answered clean, at most."""


class Marks(NamedTuple):
    """How a model does on seeds held out: mean grade and mean loss."""

    score: float
    loss: float
    of_parts: tuple[float, ...]
    """The mean grade of searched seeds and of clean ones, which a model may know by heart; each if there are any."""


class HeldOut:
    """The same tests after every epoch: seeds in turn, theta drawn uniformly."""

    def __init__(
        self,
        target: Target,
        material: Material,
        split: Split,
        perturbation: Perturbation,
        oracle: Oracle,
        loss: Loss,
        recipe: Recipe,
    ) -> None:
        self.target, self.oracle, self.loss = target, oracle, loss
        self.parts = [
            Disturber(target, seeds, perturbation, oracle)
            for seeds in (material.pool[split.held_pool], material.clean[split.held_clean])
            if len(seeds)
        ]
        held = (material.pool.seed_id[split.held_pool], material.clean.seed_id[split.held_clean])
        seed_id = torch.cat(held).numpy()
        n = len(seed_id)
        n_tests = ATTACKS if perturbation.passes else min(TESTS, MOST_DRAWS * n)
        rows = walk(n, 0, max(n, n_tests), recipe.random_seed, FOR_TEST)
        self.clean_rows, self.rows = torch.from_numpy(rows[: min(n, MOST_CLEAN)]), torch.from_numpy(rows[:n_tests])
        tests = uniform_tests(perturbation, seed_id[rows[:n_tests]], np.arange(n_tests), recipe.random_seed, FOR_TEST)
        self.tests = tuple(torch.from_numpy(each) for each in tests)

    def clean(self) -> Marks:
        """How the target does now on the clean inputs."""
        return self._measure(self.clean_rows, ())

    def disturbed(self) -> Marks:
        """How it does on the tests."""
        return self._measure(self.rows, self.tests)

    def _measure(self, rows: Tensor, tests: tuple[Tensor, ...]) -> Marks:
        lost, first, right, counts = 0.0, 0, [0.0 for _ in self.parts], []
        with self.target.opened(), torch.no_grad():
            for k, part in enumerate(self.parts):
                here = ((rows >= first) & (rows < first + len(part.labels))).nonzero()[:, 0]
                for at in torch.split(here, AT_ONCE):
                    where = (rows[at] - first).to(self.target.device)
                    given = [each[at].to(where.device) for each in tests]
                    outputs = self.target.forward(part(where, *given) if given else part.inputs[where]).float()
                    right[k] += float(grade(self.oracle, outputs, part.labels[where]).sum())
                    lost += float(self.loss(outputs, part.labels[where]).double().mean()) * len(at)
                counts.append(len(here))
                first += len(part.labels)
        of_parts = tuple(each / n for each, n in zip(right, counts, strict=True) if n)
        return Marks(sum(right) / len(rows), lost / len(rows), of_parts)
