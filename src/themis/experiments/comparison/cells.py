"""A cell: one campaign of one technique at one magnitude, and what is kept of it."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from themis.campaign.api import run
from themis.criteria.criterion import Criterion
from themis.criteria.fitting import fit_to
from themis.criteria.names import choose_criterion
from themis.data.seeds import Seeds, read_seeds
from themis.experiments.comparison.plan import DIFFERENTIAL, Cell, Plan, Technique
from themis.perturb import Perturbation
from themis.runs.run import Round, Run
from themis.target.target import AnyTarget

IDLE_SHARE = 0.25
"""A plateau: coverage under 100% that did not rise in this last share of the passes."""
COUNTS = ("faults", "distinct", "selected", "selected_distinct")
"""What is counted a seed: faults executed, raw and distinct; and those among tests that raised the criterion."""


class Bench:
    """What cells are run on: the target, its search seeds, and criteria, each fitted when it is first needed."""

    def __init__(
        self, target: AnyTarget, seeds: Seeds, perturbation: Perturbation, plan: Plan, train: Any, rivals: Any
    ) -> None:
        """`train` is training data, `rivals` other models of the task, or functions that read them."""
        self.target, self.seeds, self.perturbation, self.plan = target, seeds, perturbation, plan
        self._techniques = {each.name: each for each in plan.chosen()}
        self._train, self._rivals = train, rivals
        self._fitted: dict[str, tuple[Criterion, dict[str, Any]] | Exception] = {}

    def run(self, cell: Cell) -> dict[str, Any]:
        """Run a cell; plain data."""
        how, fitting = self._how(self._techniques[cell.technique])
        plan = self.plan
        result = run(
            self.target,
            self.seeds,
            self.perturbation,
            magnitude=cell.magnitude,
            max_passes=plan.max_passes,
            max_tests=None,
            plateau=None,
            coverage=None,
            round_size=plan.round_size,
            uniform_share=plan.uniform_share,
            random_seed=plan.random_seed + cell.campaign,
            **how,
        )
        if result.stop_reason == "user":
            raise KeyboardInterrupt
        return describe_cell(cell, result) | fitting

    def _how(self, technique: Technique) -> tuple[dict[str, Any], dict[str, Any]]:
        """The options that make a technique, and what its criterion cost before the first test."""
        if technique.criterion is None:
            how: dict[str, Any] = {"policy": technique.name}
            if technique.name == DIFFERENTIAL:
                self._rivals = self._rivals() if callable(self._rivals) else self._rivals
                how["rivals"] = self._rivals
            return how, {"fit_inputs": 0, "fit_seconds": 0.0}
        if technique.name not in self._fitted:
            try:
                self._fitted[technique.name] = self._fit(technique.criterion)
            except Exception as error:  # it would fail again, after as long
                self._fitted[technique.name] = error
        fitted = self._fitted[technique.name]
        if isinstance(fitted, Exception):
            raise fitted
        criterion, fitting = fitted
        return {"criterion": criterion}, fitting

    def _fit(self, spec: str) -> tuple[Criterion, dict[str, Any]]:
        began, train = perf_counter(), self._training_data()
        criterion = fit_to(choose_criterion(spec), self.target, train)
        return criterion, {
            "fit_inputs": len(train) if criterion.learns else 0,
            "fit_seconds": perf_counter() - began,
        }

    def _training_data(self) -> Seeds:
        """Read once; the clean search seeds where there is none."""
        if callable(self._train):
            self._train = self._train()
        train = self.seeds if self._train is None else read_seeds(self._train, self.plan.train_inputs)
        self._train = train
        return train


def describe_cell(cell: Cell, result: Run) -> dict[str, Any]:
    """What is kept of a campaign, as plain data."""
    criterion = result.start.criterion
    last, usable = result.rounds[-1], result.start.n_usable
    passes = [each.passes for each in result.rounds]
    sensitivity = [each.coverage.all for each in result.rounds]
    own = sensitivity if criterion is None else [_score(each) for each in result.rounds]
    is_share = criterion is None or bool(criterion["is_share"])
    rose_at = last_rise(passes, own)
    return {
        "technique": cell.technique,
        "magnitude": cell.magnitude,
        "campaign": cell.campaign,
        "random_seed": result.start.settings.random_seed,
        "passes": last.passes,
        "tests": last.tests,
        "seeds": usable,
        "faults": last.faults,
        "distinct_faults": last.distinct_faults,
        "failing_seeds": last.failing_seeds,
        "coverage": own[-1],
        "is_share": is_share,
        "coverage_rose_at": rose_at,
        "is_plateau": not (is_share and own[-1] >= 1) and rose_at <= (1 - IDLE_SHARE) * last.passes,
        "scc": sensitivity[-1],
        "stop_reason": result.stop_reason,
        "seconds": result.seconds.total,
        "has_criterion": criterion is not None,
        "by_seed": count_by_seed(result.faults.columns if len(result.faults) else {}),
    }


def last_rise(passes: list[int], scores: list[float]) -> int:
    """The passes at which a score was last seen above all before."""
    rose_at, best = 0, 0.0
    for spent, score in zip(passes, scores, strict=True):
        if score > best:
            rose_at, best = spent, score
    return rose_at


def count_by_seed(columns: dict[str, NDArray[Any]]) -> dict[str, list[int]]:
    """The counts of each failing seed, a list each; `columns` are those of the faults."""
    if not columns:
        return {"seed_id": [], **{name: [] for name in COUNTS}}
    seed_id, of = np.unique(columns["seed_id"], return_inverse=True)
    counts: dict[str, list[int]] = {"seed_id": seed_id.tolist()}
    for name, is_counted in (("", np.ones(len(of), dtype=bool)), ("selected", columns["raised"])):
        pairs = np.unique(np.stack([of[is_counted], columns["answer"][is_counted]], 1), axis=0)
        raw, distinct = (np.bincount(each, minlength=len(seed_id)).tolist() for each in (of[is_counted], pairs[:, 0]))
        counts[name or "faults"], counts[f"{name}_distinct" if name else "distinct"] = raw, distinct
    return counts


def _score(round: Round) -> float:
    return round.criterion_score or 0.0
