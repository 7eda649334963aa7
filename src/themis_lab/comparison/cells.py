"""The campaigns of a comparison: how one is run, and what is stored of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from themis.campaign.api import run
from themis.criteria.criterion import Criterion
from themis.criteria.fitting import fit_to
from themis.criteria.names import choose_criterion
from themis.data.seeds import Seeds, read_seeds
from themis.perturb import Perturbation, choose_perturbation
from themis.reading import Form, flag, items, number, record, text, whole
from themis.runs.run import Round, Run
from themis.runs.source import Origin
from themis.target.target import AnyTarget
from themis_lab.comparison.plan import CampaignCell, ComparisonPlan
from themis_lab.comparison.rates import split_seeds
from themis_lab.techniques import DIFFERENTIAL, Technique

IDLE_SHARE = 0.25
"""A plateau: coverage below 100% that did not rise in this last share of the passes."""
COUNTS = ("faults", "distinct", "selected", "selected_distinct")
"""Counts per seed: faults executed, raw and distinct, and those among tests that raised the criterion."""
MOST = 10**12
"""The largest number that a campaign may have measured; sums of such numbers stay finite."""


def _by_seed(value: Any, place: str) -> None:
    """Counts of every failing seed, in columns of one length."""
    record({"seed_id": items(whole()), **dict.fromkeys(COUNTS, items(whole(0, MOST)))})(value, place)
    if len({len(value[name]) for name in ("seed_id", *COUNTS)}) > 1:
        raise ValueError(f"{place} must have columns of one length")


MEASURED: dict[str, Form] = {
    "technique": text(),
    "magnitude": number(),
    "random_seed": whole(),
    **dict.fromkeys(
        ("campaign", "passes", "tests", "seeds", "faults", "distinct_faults", "failing_seeds"), whole(0, MOST)
    ),
    **dict.fromkeys(
        ("coverage", "scc", "seconds", "coverage_rose_at", "fit_inputs", "fit_seconds"), number(-MOST, MOST)
    ),
    **dict.fromkeys(("is_share", "is_plateau", "has_criterion"), flag),
    "stop_reason": text(),
}
"""What is stored of a campaign beside its counts by seed."""
CAMPAIGN = record({**MEASURED, "by_seed": _by_seed})
"""What is stored of a campaign."""


class CellRunner:
    """Runs campaigns on a target and its search seeds; each criterion is fitted when it is first needed."""

    def __init__(
        self,
        target: AnyTarget,
        seeds: Seeds,
        perturbation: Perturbation,
        plan: ComparisonPlan,
        train: Any,
        rivals: Any,
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
        limits = {"max_passes": self.plan.max_passes, "max_tests": None, "plateau": None, "coverage": None}
        result, fitting = self.search(cell, **limits)
        return describe_campaign(cell, result) | fitting

    def search(self, cell: CampaignCell, **limits: Any) -> tuple[Run, dict[str, Any]]:
        """Run a campaign until `limits`, which are options of `run`; returns it and the cost of fitting a criterion."""
        plan = self.plan
        (technique,) = (technique for technique in plan.chosen() if technique.name == cell.technique)
        options, fitting = self._options(technique)
        result = run(
            self.target,
            self.seeds,
            self.perturbation,
            magnitude=cell.magnitude,
            random_seed=plan.random_seed + cell.campaign,
            **{"round_size": plan.round_size, "uniform_share": plan.uniform_share, **options, **limits},
        )
        if result.stop_reason == "user":
            raise KeyboardInterrupt
        return result, fitting

    def _options(self, technique: Technique) -> tuple[dict[str, Any], dict[str, Any]]:
        """The options of `run` for a technique, and what fitting its criterion has cost."""
        if technique.preset is not None:
            own = {"preset": technique.preset, "uniform_share": 0.0, "round_size": None}
            return own, {"fit_inputs": 0, "fit_seconds": 0.0}
        if technique.criterion is None:
            options: dict[str, Any] = {"policy": technique.name}
            if technique.name == DIFFERENTIAL:
                self._rivals = self._rivals() if callable(self._rivals) else self._rivals
                options["rivals"] = self._rivals
            return options, {"fit_inputs": 0, "fit_seconds": 0.0}
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
        start, train = perf_counter(), self._training_data()
        criterion = fit_to(choose_criterion(spec), self.target, train)
        return criterion, {
            "fit_inputs": len(train) if criterion.learns else 0,
            "fit_seconds": perf_counter() - start,
        }

    def _training_data(self) -> Seeds:
        """The training data, read once; the clean search seeds if there is none."""
        if callable(self._train):
            self._train = self._train()
        train = self.seeds if self._train is None else read_seeds(self._train, self.plan.train_inputs)
        self._train = train
        return train


@dataclass(frozen=True)
class RebuildRunner:
    """Makes a `CellRunner` again in another process, from names only."""

    origin: Origin
    perturbation: str
    plan: ComparisonPlan

    def __call__(self) -> Callable[[CampaignCell], dict[str, Any]]:
        plan, origin = self.plan, self.origin
        with origin.in_folder():
            perturbation = choose_perturbation(self.perturbation)
        parts = split_seeds(read_seeds(origin.read()), plan.seeds, plan.judge_seeds, plan.grid_seeds)
        target, train, rivals = origin.target(), origin.read_train, origin.read_rivals
        return CellRunner(target, parts.search, perturbation, plan, train, rivals).run


def failed_campaign(cell: CampaignCell, reason: str) -> dict[str, Any]:
    """What is stored of a campaign that failed."""
    return {"technique": cell.technique, "magnitude": cell.magnitude, "campaign": cell.campaign, "error": reason}


def describe_campaign(cell: CampaignCell, result: Run) -> dict[str, Any]:
    """What is stored of a campaign, as plain data."""
    criterion = result.start.criterion
    last = result.rounds[-1]
    passes = [round.passes for round in result.rounds]
    sensitivity = [round.coverage.all for round in result.rounds]
    scores = sensitivity if criterion is None else [_criterion_score(round) for round in result.rounds]
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
        return {"seed_id": [], **{name: [] for name in COUNTS}}
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


def _criterion_score(round: Round) -> float:
    return round.criterion_score or 0.0
