"""Three disjoint parts of the seeds, and the error rates of a model on one of them, under two definitions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.compute import rng
from themis.data.seeds import Seeds
from themis.errors import DataError
from themis.measure.calculator import Calculator, ChunkAnswers
from themis.measure.sweep import sweep
from themis.measure.tests import Bools, Tests
from themis.oracle import choose_oracle
from themis.perturb import Perturbation
from themis.search.policy import UNIFORM_STREAM, Space
from themis.target.target import AnyTarget

SHARES = {"search": 0.4, "judge": 0.4, "grid": 0.2}
"""Shares of the data, by the purpose of its seeds."""
FOR_PART, FOR_RANK = 101, 102
FULL, BOX = "full", "box"
"""Where an error rate is taken: at full strength, or uniformly over the box of theta that techniques search."""
DRAWS = 5
"""Draws of noise and theta per seed, if they differ and the perturbation does not cost passes."""
BOX_PASSES = 20
"""Passes per seed that draws from the box may cost together; the first draw is always made."""


@dataclass(frozen=True)
class SeedParts:
    """Seeds for the techniques, for the error rates, and for the grid."""

    search: Seeds
    judge: Seeds
    grid: Seeds


def split_seeds(seeds: Seeds, n_search: int, n_judge: int, n_grid: int) -> SeedParts:
    """Split by seed_id alone; if a part has too many seeds, those with the smallest hashes are kept."""
    seed_id = seeds.seed_id.numpy()
    draw, rank = rng.uniform(FOR_PART, seed_id), rng.mix(FOR_RANK, seed_id)
    parts, low = {}, 0.0
    for (name, share), n in zip(SHARES.items(), (n_search, n_judge, n_grid), strict=True):
        rows = np.flatnonzero((low <= draw) & (draw < low + share))
        low += share
        if not len(rows):
            raise DataError(f"the data must have seeds for the {name}, but {len(seeds)} are too few: provide more data")
        kept = np.sort(rows[np.argsort(rank[rows], kind="stable")[:n]])
        parts[name] = seeds[torch.from_numpy(kept)].in_memory()
    return SeedParts(**parts)


class ErrorRates:
    """Error rates on seeds: the share that fails when disturbed, among those answered correctly when clean.

    The target must be open. At full strength, theta is drawn as `corners` draws it; over the box, uniformly, as
    `random` does. Noise is the same at every magnitude.
    """

    def __init__(self, target: AnyTarget, seeds: Seeds, perturbation: Perturbation, random_seed: int) -> None:
        self.perturbation, self.random_seed = perturbation, random_seed
        self.calculator = Calculator.trace(target, seeds, perturbation, choose_oracle(target.oracle))
        sweep(self.calculator)
        self.usable = self.calculator.clean.usable.cpu().numpy()
        self.seed_id = seeds.seed_id.numpy()[self.usable]
        is_drawn = perturbation.is_random or len(perturbation.theta) > 1
        self.draws = DRAWS if is_drawn and not perturbation.passes else 1
        self.box_draws = min(DRAWS, max(1, int(BOX_PASSES // (1 + perturbation.passes))))

    @property
    def chance(self) -> float:
        """The error rate of guessing among the classes; 1 if there are no classes."""
        outputs, oracle = self.calculator.clean.outputs, self.calculator.clean.oracle.spec()
        has_classes = outputs.ndim == 2 and outputs.shape[1] > 1 and oracle in ("wrong", "changed")
        return 1 - 1 / outputs.shape[1] if has_classes else 1.0

    def errors(self, magnitude: float, where: str = FULL) -> NDArray[np.float64]:
        """The share of draws that are faults, per usable seed: `[seeds]`."""
        calculator, n = self.calculator, len(self.usable)
        draws = self.draws if where == FULL else self.box_draws
        calculator.perturbation = self.perturbation.at(magnitude).fitted(tuple(calculator.seeds.shape[1:]))
        margin = np.zeros(n, dtype=np.float32)
        space = Space.of(calculator.perturbation, self.usable, self.seed_id, margin, self.random_seed)
        number = np.arange(n * draws)
        if where == FULL:
            tests = space.tests(number, number % n, space.corners(number), "corner")
        else:
            tests = space.tests(number, number % n, space.uniform_theta(UNIFORM_STREAM, number), "uniform")
        shares: NDArray[np.float64] = self.find_faults(tests).reshape(draws, n).mean(0)
        return shares

    def find_faults(self, tests: Tests) -> Bools:
        """Which tests are faults."""
        calculator, is_fault = self.calculator, []
        for chunk, (_, outputs, motion) in self._run(tests):
            rows = torch.from_numpy(chunk.seed).to(outputs.device)
            is_fault.append(calculator.clean.compare(rows, outputs, motion).is_fault.cpu())
        return torch.cat(is_fault).numpy() if is_fault else np.zeros(0, dtype=bool)

    def inputs(self, tests: Tests) -> Tensor:
        """The disturbed inputs of tests."""
        return torch.cat([answers.inputs for _, answers in self._run(tests)])

    def _run(self, tests: Tests) -> Iterator[tuple[Tests, ChunkAnswers]]:
        """Tests and their answers, chunk by chunk."""
        size = self.calculator.chunk
        for first in range(0, len(tests), size):
            chunk = tests[first : first + size]
            yield chunk, self.calculator.run_chunk(chunk, size)

    def rate(self, magnitude: float) -> float:
        """The mean of the errors at full strength."""
        return float(self.errors(magnitude).mean())
