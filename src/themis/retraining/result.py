"""The result of a retraining: all measurements before and after, on judge seeds only."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from themis.retraining.changes import Changes, changes
from themis.retraining.checkpoint import put_weights
from themis.retraining.examine import Reading
from themis.retraining.frontier import FrontierPoint, join_frontiers, next_point
from themis.retraining.plan import RetrainingPlan
from themis.retraining.recipe import Recipe
from themis.retraining.tune import Epoch, interpolate
from themis.target.ledger import Ledger
from themis.target.target import Target


@dataclass(frozen=True)
class TrainedModel:
    """A copy of the model that was trained with one random seed."""

    random_seed: int
    target: Target = field(repr=False)
    ledger: Ledger = field(repr=False)
    history: tuple[Epoch, ...] = field(repr=False)
    best: int
    """The epoch that the weights are on the way to; 0 if they are those of the original model."""
    frontier: tuple[FrontierPoint, ...] = field(repr=False)
    """Shares of the way to the trained weights, measured on the seeds that training held out."""
    chosen: int
    """The index of the point of the frontier that the weights are at."""
    weights: Path | None
    ends: tuple[dict[str, Tensor], dict[str, Tensor]] = field(repr=False)
    """The weights at both ends of the frontier."""

    def at(self, chosen: int) -> TrainedModel:
        """The model with its weights moved to a point of the frontier, which changes the target's module."""
        put_weights(self.target.module, interpolate(*self.ends, self.frontier[chosen].share))
        best = max(range(1, len(self.history)), key=lambda k: (self.history[k].score, -self.history[k].loss))
        return replace(self, chosen=chosen, best=best if chosen else 0)

    @property
    def point(self) -> FrontierPoint:
        """The point of the frontier that the weights are at."""
        return self.frontier[self.chosen]

    @property
    def held_out(self) -> float:
        """The score on the seeds that training held out, clean and disturbed in equal parts."""
        return (self.point.clean + self.point.disturbed) / 2

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "random_seed": self.random_seed,
            "best_epoch": self.best,
            "share": self.point.share,
            "frontier": [{**asdict(point), "is_chosen": k == self.chosen} for k, point in enumerate(self.frontier)],
            "held_out": self.held_out,
            "epochs": [asdict(epoch) for epoch in self.history],
            "weights": None if self.weights is None else str(self.weights),
        }


@dataclass(frozen=True)
class RetrainingOutcome:
    """One perturbation at one magnitude: the original model, and every trained one."""

    name: str
    before: Reading
    after: tuple[Reading, ...]
    """One per random seed."""

    @cached_property
    def change(self) -> Changes:
        """All measurements before and after, with intervals."""
        return changes(self.before, self.after)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "before": self.before.as_dict(),
            "after": [reading.as_dict() for reading in self.after],
            "change": self.change.as_dict(),
        }


@dataclass(frozen=True)
class Stage:
    """One round: the number of faults learned from, the trained models, and their results on the judge seeds."""

    number: int
    n_faults: int
    """The number of faults that the models learned from."""
    models: tuple[TrainedModel, ...]
    outcomes: tuple[RetrainingOutcome, ...]
    """The first is for the run's own perturbation."""
    campaign: dict[str, Any] | None = None
    """The campaign on the search seeds that follows the round: its folder and its faults."""

    @property
    def chosen(self) -> int:
        """The index of the model that is returned: the best on the seeds held out, which no result comes from."""
        return max(range(len(self.models)), key=lambda k: self.models[k].held_out)

    @property
    def model(self) -> TrainedModel:
        return self.models[self.chosen]

    @cached_property
    def frontier(self) -> tuple[FrontierPoint, ...]:
        """The mean frontier of all models; they are at the same point of it."""
        return join_frontiers([model.frontier for model in self.models])

    @property
    def next(self) -> int | None:
        """The index of the next point of the frontier that gains more; None if there is none."""
        return next_point(self.frontier, self.model.chosen)

    @property
    def fault_rate(self) -> float:
        """The share of the uniform tests of judge seeds that the chosen model answers incorrectly."""
        return 1 - self.outcomes[0].after[self.chosen].disturbed_score

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "round": self.number,
            "faults_learnt_from": self.n_faults,
            "fault_rate": self.fault_rate,
            "chosen": self.models[self.chosen].random_seed,
            "frontier": [
                {**asdict(point), "is_chosen": k == self.model.chosen, "is_next": k == self.next}
                for k, point in enumerate(self.frontier)
            ],
            "models": [model.as_dict() for model in self.models],
            "outcomes": [outcome.as_dict() for outcome in self.outcomes],
            "campaign": self.campaign,
        }


@dataclass(frozen=True)
class Retrained:
    """A finished retraining."""

    plan: RetrainingPlan
    recipe: Recipe
    perturbation: str
    stages: tuple[Stage, ...]
    """One per round."""
    kept: int
    """The index of the round whose model is returned."""
    stop: str
    """Why the rounds ended, as a sentence; empty if there was only one round."""
    verdict: tuple[str, ...]
    """The result in sentences; a clean score that fell too far comes first."""
    has_failed: bool
    """Whether the clean score fell by more than the tolerance, and by more than chance."""
    seeds: dict[str, int]
    """The number of seeds in each part."""
    weights: Path | None
    about: dict[str, Any] = field(repr=False)
    environment: dict[str, Any] = field(repr=False)
    n_trained: int = 1
    """The number of runs, whose perturbations were trained on: the first outcomes."""

    def __repr__(self) -> str:
        return f"<Retrained: {' '.join(self.verdict)}>"

    def _repr_markdown_(self) -> str:
        from themis.retraining.table import markdown

        return markdown(self)

    @property
    def stage(self) -> Stage:
        """The round whose model is returned."""
        return self.stages[self.kept]

    @property
    def outcomes(self) -> tuple[RetrainingOutcome, ...]:
        """Before and after, by perturbation; the first are those of the runs."""
        return self.stage.outcomes

    @property
    def gain(self) -> float:
        """How far the disturbed score on judge seeds rose, mean over random seeds and the runs' perturbations."""
        return fmean(outcome.change.disturbed.difference for outcome in self.outcomes[: self.n_trained])

    @property
    def target(self) -> Target:
        """The retrained model of the random seed that was best on the seeds held out."""
        return self.stage.model.target

    @property
    def ledger(self) -> Ledger:
        """All seeds that its weights were trained on."""
        return self.stage.model.ledger

    def summary(self) -> dict[str, Any]:
        """Plain data, as written to `retrain.json`."""
        return {
            "verdict": list(self.verdict),
            "clean_fell": self.has_failed,
            "perturbation": self.perturbation,
            "seeds": self.seeds,
            "kept_round": self.stage.number,
            "kept_random_seed": self.stage.model.random_seed,
            "weights": None if self.weights is None else str(self.weights),
            "outcomes": [outcome.as_dict() for outcome in self.outcomes],
            "rounds": [stage.as_dict() for stage in self.stages],
            "stop": self.stop or None,
            "plan": self.plan.as_dict(),
            "recipe": self.recipe.as_dict(),
            "source": self.about,
            "environment": self.environment,
        }
