"""Held-out seeds: the score of a model on them, clean and disturbed, chooses the best epoch of a training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from themis.oracle import Oracle
from themis.perturb import Perturbation
from themis.retraining.batches import FOR_TEST, BatchSplit, Disturber, theta_at, uniform_shares, walk
from themis.retraining.grading import grade
from themis.retraining.losses import Loss
from themis.retraining.material import CHUNK, Material
from themis.retraining.recipe import Recipe
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
    grades: tuple[Tensor, ...]
    """The grades on searched seeds and on clean seeds, which a model may have memorised; each if there are any."""
    groups: tuple[Tensor, ...] = ()
    """What these seeds belong to, in the same order; none if each stands for itself."""


class HeldOut:
    """Runs the same tests of the held-out seeds after every epoch, with theta drawn uniformly."""

    def __init__(
        self,
        target: Target,
        material: Material,
        split: BatchSplit,
        perturbations: Mapping[str, Perturbation],
        oracle: Oracle,
        loss: Loss,
        recipe: Recipe,
    ) -> None:
        self.target, self.oracle, self.loss, self.perturbations = target, oracle, loss, perturbations
        self.parts = [
            Disturber(target, seeds, oracle)
            for seeds in (material.pool[split.held_pool], material.clean[split.held_clean])
            if len(seeds)
        ]
        held = (material.pool.seed_id[split.held_pool], material.clean.seed_id[split.held_clean])
        seed_id = torch.cat(held).numpy()
        n = len(seed_id)
        self.groups = None if split.held_groups is None else torch.from_numpy(split.held_groups)
        self.tests: dict[str, tuple[Tensor, ...]] = {}
        for name, perturbation in perturbations.items():
            n_tests = N_ATTACKS if perturbation.passes else min(MAX_TESTS, MAX_TESTS_PER_SEED * n)
            rows = walk(n, 0, max(n, n_tests), recipe.random_seed, FOR_TEST)
            self.clean_rows = torch.from_numpy(rows[: min(n, MAX_CLEAN)])
            rows, counter = rows[:n_tests], np.arange(n_tests)
            shares, noise_seed = uniform_shares(perturbation, seed_id[rows], counter, recipe.random_seed, FOR_TEST)
            tests = (rows, theta_at(perturbation, shares), noise_seed)
            self.tests[name] = tuple(map(torch.from_numpy, tests))

    def clean(self) -> HeldOutScore:
        """The score of the target on the clean inputs."""
        return self._measure(self.clean_rows)

    def disturbed(self) -> dict[str, HeldOutScore]:
        """The scores of the target on the disturbed inputs, by the name of the perturbation."""
        return {
            name: self._measure(rows, self.perturbations[name], *tests) for name, (rows, *tests) in self.tests.items()
        }

    def _measure(self, rows: Tensor, perturbation: Perturbation | None = None, *tests: Tensor) -> HeldOutScore:
        total_loss, offset, grades, groups = 0.0, 0, [], []
        with self.target.opened(), torch.no_grad():
            for part in self.parts:
                in_part = ((rows >= offset) & (rows < offset + len(part.labels))).nonzero()[:, 0]
                part_grades = []
                for chunk in torch.split(in_part, CHUNK):
                    seeds = (rows[chunk] - offset).to(self.target.device)
                    if perturbation is None:
                        inputs, labels = part.inputs[seeds], part.labels[seeds]
                    else:
                        theta, noise_seed = (values[chunk].to(seeds.device) for values in tests)
                        inputs, labels = part(perturbation, seeds, theta, noise_seed)
                    outputs = self.target.forward(inputs).float()
                    part_grades.append(grade(self.oracle, outputs, labels).double().cpu())
                    total_loss += float(self.loss(outputs, labels).double().mean()) * len(chunk)
                if len(in_part):
                    grades.append(torch.cat(part_grades))
                    groups += [] if self.groups is None else [self.groups[rows[in_part]]]
                offset += len(part.labels)
        score = float(torch.cat(grades).mean())
        return HeldOutScore(score, total_loss / len(rows), tuple(grades), tuple(groups))
