"""Held-out seeds: the score of a model on them, clean and disturbed, chooses the best epoch of a training."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from themis.experiments.retraining.batches import FOR_TEST, BatchSplit, Disturber, uniform_tests, walk
from themis.experiments.retraining.grading import grade
from themis.experiments.retraining.losses import Loss
from themis.experiments.retraining.material import CHUNK, Material
from themis.experiments.retraining.recipe import Recipe
from themis.oracle import Oracle
from themis.perturb import Perturbation
from themis.target.target import Target

MAX_TESTS = 2_000
"""Uniform tests of the held-out seeds after each epoch, at most."""
MAX_TESTS_PER_SEED = 20
"""Uniform tests per held-out seed, at most."""
N_ATTACKS = 256
"""Number of tests if each costs passes of its own: an attack is computed again for the model of each epoch."""
MAX_CLEAN = 10_000
"""Held-out seeds on which the clean score is measured, at most."""


class HeldOutScore(NamedTuple):
    """Mean grade and mean loss of a model on held-out seeds."""

    score: float
    loss: float
    part_scores: tuple[float, ...]
    """The mean grade on searched seeds and on clean seeds, which a model may have memorised; each if there are any."""


class HeldOut:
    """Runs the same tests of the held-out seeds after every epoch, with theta drawn uniformly."""

    def __init__(
        self,
        target: Target,
        material: Material,
        split: BatchSplit,
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
        n_tests = N_ATTACKS if perturbation.passes else min(MAX_TESTS, MAX_TESTS_PER_SEED * n)
        rows = walk(n, 0, max(n, n_tests), recipe.random_seed, FOR_TEST)
        self.clean_rows, self.rows = torch.from_numpy(rows[: min(n, MAX_CLEAN)]), torch.from_numpy(rows[:n_tests])
        tests = uniform_tests(perturbation, seed_id[rows[:n_tests]], np.arange(n_tests), recipe.random_seed, FOR_TEST)
        self.tests = tuple(map(torch.from_numpy, tests))

    def clean(self) -> HeldOutScore:
        """The score of the target on the clean inputs."""
        return self._measure(self.clean_rows, ())

    def disturbed(self) -> HeldOutScore:
        """The score of the target on the disturbed inputs."""
        return self._measure(self.rows, self.tests)

    def _measure(self, rows: Tensor, tests: tuple[Tensor, ...]) -> HeldOutScore:
        total_loss, offset, totals, counts = 0.0, 0, [0.0 for _ in self.parts], []
        with self.target.opened(), torch.no_grad():
            for k, part in enumerate(self.parts):
                in_part = ((rows >= offset) & (rows < offset + len(part.labels))).nonzero()[:, 0]
                for chunk in torch.split(in_part, CHUNK):
                    seeds = (rows[chunk] - offset).to(self.target.device)
                    arguments = [values[chunk].to(seeds.device) for values in tests]
                    inputs, labels = part(seeds, *arguments) if arguments else (part.inputs[seeds], part.labels[seeds])
                    outputs = self.target.forward(inputs).float()
                    totals[k] += float(grade(self.oracle, outputs, labels).sum())
                    total_loss += float(self.loss(outputs, labels).double().mean()) * len(chunk)
                counts.append(len(in_part))
                offset += len(part.labels)
        part_scores = tuple(total / n for total, n in zip(totals, counts, strict=True) if n)
        return HeldOutScore(sum(totals) / len(rows), total_loss / len(rows), part_scores)
