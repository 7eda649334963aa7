"""The campaigns of a comparison, and the error rates that they are compared with, on separate parts of the seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.campaign.api import run
from themis.compute import rng
from themis.criteria import choose_criterion
from themis.data.seeds import Seeds, read_seeds
from themis.errors import DataError
from themis.measure.calculator import Calculator, ChunkAnswers
from themis.measure.sweep import sweep
from themis.measure.tests import Bools, Tests
from themis.oracle import choose_oracle
from themis.perturb import Perturbation, choose_perturbation
from themis.runs.run import Run
from themis.runs.source import Origin
from themis.search.policy import UNIFORM_STREAM, Space
from themis.target.target import AnyTarget
from themis_lab.comparison.plan import CampaignCell, ComparisonPlan
from themis_lab.criteria.criterion import Criterion
from themis_lab.criteria.view import fit_to
from themis_lab.techniques import DIFFERENTIAL, Technique

PART_SHARES = {"search": 0.4, "judge": 0.4, "grid": 0.2}
"""Shares of the data, by the purpose of its seeds."""
FOR_PART, FOR_RANK = 101, 102
FULL, BOX = "full", "box"
"""Where an error rate is taken: at full strength, or uniformly over the box of theta that techniques search."""
DRAWS_PER_SEED = 5
"""Draws of noise and theta per seed, if they can differ and the perturbation takes no passes."""
BOX_PASSES = 20
"""Limit for the passes per seed of all draws from the box; the first draw is always made."""


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
    for (name, share), n in zip(PART_SHARES.items(), (n_search, n_judge, n_grid), strict=True):
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
        self.draws = DRAWS_PER_SEED if is_drawn and not perturbation.passes else 1
        self.box_draws = min(DRAWS_PER_SEED, max(1, int(BOX_PASSES // (1 + perturbation.passes))))

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
        size = self.calculator.chunk
        for first in range(0, len(tests), size):
            chunk = tests[first : first + size]
            yield chunk, self.calculator.run_chunk(chunk, size)

    def rate(self, magnitude: float) -> float:
        """The mean of the errors at full strength."""
        return float(self.errors(magnitude).mean())


IDLE_SHARE = 0.25
"""A plateau: coverage below 100% that did not rise in this last share of the passes."""
TALLIES = ("faults", "distinct", "selected", "selected_distinct")
"""Counts per seed: faults executed, raw and distinct, and those among tests that raised the criterion."""


PASSES_ALONE: dict[str, Any] = {"max_tests": None, "plateau": None, "coverage": None}
"""Only passes stop a campaign."""


def run_to_the_end(target: Any, seeds: Seeds, perturbation: Perturbation, **options: Any) -> Run:
    """Run a campaign; Ctrl-C ends the whole experiment, not only the campaign."""
    result = run(target, seeds, perturbation, **options)
    if result.stop_reason == "user":
        raise KeyboardInterrupt
    return result


class CellRunner:
    """Runs campaigns on a target and its search seeds; each criterion is fitted when it is first needed."""

    def __init__(
        self, target: AnyTarget, seeds: Seeds, perturbation: Perturbation, plan: ComparisonPlan, train: Any, rivals: Any
    ) -> None:
        """`train` is training data and `rivals` are other models of the task, or functions that read them."""
        self.target, self.seeds, self.perturbation, self.plan = target, seeds, perturbation, plan
        self._train, self._rivals = train, rivals
        self._fitted: dict[str, tuple[Criterion, dict[str, Any]] | Exception] = {}

    def on(self, target: AnyTarget) -> CellRunner:
        """The same for another model, to which criteria are fitted anew."""
        return CellRunner(target, self.seeds, self.perturbation, self.plan, self._train, self._rivals)

    def run(self, cell: CampaignCell) -> dict[str, Any]:
        """Run a campaign until its passes are spent; the result is plain data."""
        result, fitting = self.search(cell, max_passes=self.plan.max_passes, **PASSES_ALONE)
        return describe_campaign(cell, result) | fitting

    def search(self, cell: CampaignCell, **limits: Any) -> tuple[Run, dict[str, Any]]:
        """Run a campaign until `limits`, which are options of `run`; returns it and the cost of fitting a criterion."""
        plan = self.plan
        (technique,) = (technique for technique in plan.chosen() if technique.name == cell.technique)
        options, fitting = self._options(technique)
        shared = {"round_size": plan.round_size, "uniform_share": plan.uniform_share, "magnitude": cell.magnitude}
        random_seed = plan.random_seed + cell.campaign
        data = (self.target, self.seeds, self.perturbation)
        return run_to_the_end(*data, random_seed=random_seed, **{**shared, **options, **limits}), fitting

    def _options(self, technique: Technique) -> tuple[dict[str, Any], dict[str, Any]]:
        """The options of `run` for a technique, and what fitting its criterion has cost."""
        unfitted = {"fit_inputs": 0, "fit_seconds": 0.0}
        if technique.preset is not None:
            return {"preset": technique.preset, "uniform_share": 0.0, "round_size": None}, unfitted
        if technique.name == DIFFERENTIAL:
            self._rivals = self._rivals() if callable(self._rivals) else self._rivals
            return {"policy": technique.name, "rivals": self._rivals}, unfitted
        if technique.criterion is None:
            return {"policy": technique.name}, unfitted
        if technique.name not in self._fitted:
            try:
                self._fitted[technique.name] = self._fit(technique.criterion)
            except Exception as error:  # it would fail again, after the same time
                self._fitted[technique.name] = error
        fitted = self._fitted[technique.name]
        if isinstance(fitted, Exception):
            raise fitted
        criterion, fitting = fitted
        return {"criterion": criterion}, fitting

    def _fit(self, spec: str) -> tuple[Criterion, dict[str, Any]]:
        start = perf_counter()
        train = self._train() if callable(self._train) else self._train
        self._train = self.seeds if train is None else read_seeds(train, self.plan.train_inputs)
        criterion = fit_to(choose_criterion(spec), self.target, self._train)
        n_inputs = len(self._train) if criterion.learns else 0
        return criterion, {"fit_inputs": n_inputs, "fit_seconds": perf_counter() - start}


def make_runner(origin: Origin, perturbation: str, plan: ComparisonPlan) -> Callable[[CampaignCell], dict[str, Any]]:
    """The function that runs campaigns, made from names only in another process."""
    with origin.in_folder():
        chosen = choose_perturbation(perturbation)
    parts = split_seeds(read_seeds(origin.read()), plan.seeds, plan.judge_seeds, plan.grid_seeds)
    return CellRunner(origin.target(), parts.search, chosen, plan, origin.read_train, origin.read_rivals).run


def failed_campaign(cell: CampaignCell, reason: str) -> dict[str, Any]:
    """What is stored of a campaign that failed."""
    return {"technique": cell.technique, "magnitude": cell.magnitude, "campaign": cell.campaign, "error": reason}


def describe_campaign(cell: CampaignCell, result: Run) -> dict[str, Any]:
    """What is stored of a campaign, as plain data."""
    criterion = result.start.criterion
    last = result.rounds[-1]
    passes = [round.passes for round in result.rounds]
    sensitivity = [round.coverage.all for round in result.rounds]
    scores = sensitivity if criterion is None else [round.criterion_score or 0.0 for round in result.rounds]
    is_share = criterion is None or bool(criterion["is_share"])
    rose_at = last_rise(passes, scores)
    return {
        "technique": cell.technique,
        "magnitude": cell.magnitude,
        "campaign": cell.campaign,
        "random_seed": result.start.settings.random_seed,
        "passes": last.passes,
        "tests": last.tests,
        "seeds": result.start.n_usable,
        "faults": last.faults,
        "distinct_faults": last.distinct_faults,
        "failing_seeds": last.failing_seeds,
        "coverage": scores[-1],
        "is_share": is_share,
        "coverage_rose_at": rose_at,
        "is_plateau": not (is_share and scores[-1] >= 1) and rose_at <= (1 - IDLE_SHARE) * last.passes,
        "scc": sensitivity[-1],
        "stop_reason": result.stop_reason,
        "seconds": result.seconds.total,
        "has_criterion": criterion is not None,
        "by_seed": count_by_seed(result.faults.columns if len(result.faults) else {}),
    }


def last_rise(passes: list[int], scores: list[float]) -> int:
    """The passes after which a score last exceeded all earlier ones."""
    rose_at, best = 0, 0.0
    for spent, score in zip(passes, scores, strict=True):
        if score > best:
            rose_at, best = spent, score
    return rose_at


def count_by_seed(columns: dict[str, NDArray[Any]]) -> dict[str, list[int]]:
    """The counts of every failing seed, one list per count; `columns` are those of the faults."""
    if not columns:
        return {"seed_id": [], **{name: [] for name in TALLIES}}
    seed_id, row = np.unique(columns["seed_id"], return_inverse=True)
    counts: dict[str, list[int]] = {"seed_id": seed_id.tolist()}
    for raw, distinct, is_counted in (
        ("faults", "distinct", np.ones(len(row), dtype=bool)),
        ("selected", "selected_distinct", columns["raised"]),
    ):
        pairs = np.unique(np.stack([row[is_counted], columns["answer"][is_counted]], 1), axis=0)
        counts[raw] = np.bincount(row[is_counted], minlength=len(seed_id)).tolist()
        counts[distinct] = np.bincount(pairs[:, 0], minlength=len(seed_id)).tolist()
    return counts
