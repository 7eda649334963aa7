"""What a retraining gives back: every figure before and after, on judge seeds alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from themis.experiments.retraining.changes import Changes, changes
from themis.experiments.retraining.examine import Reading
from themis.experiments.retraining.plan import Plan
from themis.experiments.retraining.recipe import Recipe
from themis.experiments.retraining.tune import Epoch
from themis.target.ledger import Ledger
from themis.target.target import Target


@dataclass(frozen=True)
class Model:
    """A copy that was trained with one random seed."""

    random_seed: int
    target: Target = field(repr=False)
    ledger: Ledger = field(repr=False)
    history: tuple[Epoch, ...] = field(repr=False)
    best: int
    """The epoch whose weights were kept; 0 is the model as it came."""
    weights: Path | None

    @property
    def held_out(self) -> float:
        """Its score on the seeds that training held out, clean and disturbed alike."""
        return next(each.score for each in self.history if each.number == self.best)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "random_seed": self.random_seed,
            "best_epoch": self.best,
            "held_out": self.held_out,
            "epochs": [asdict(each) for each in self.history],
            "weights": None if self.weights is None else str(self.weights),
        }


@dataclass(frozen=True)
class Outcome:
    """One perturbation at one magnitude: the model as it came, and each one that was trained."""

    name: str
    before: Reading
    after: tuple[Reading, ...]
    """One a random seed."""

    @cached_property
    def change(self) -> Changes:
        """Every figure before and after, with intervals."""
        return changes(self.before, self.after)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "before": self.before.as_dict(),
            "after": [each.as_dict() for each in self.after],
            "change": self.change.as_dict(),
        }


@dataclass(frozen=True)
class Stage:
    """One round: what was learnt from, the models, and how each did on the judge seeds."""

    number: int
    n_faults: int
    """Faults that were learnt from."""
    models: tuple[Model, ...]
    outcomes: tuple[Outcome, ...]
    """The first is the run's own perturbation."""
    campaign: dict[str, Any] | None = None
    """Of the loop: the campaign on the search seeds that follows, its folder and what it found."""

    @property
    def chosen(self) -> int:
        """The model that is given back: the best on the seeds that training held out, which no figure comes from."""
        return max(range(len(self.models)), key=lambda k: self.models[k].held_out)

    @property
    def model(self) -> Model:
        return self.models[self.chosen]

    @property
    def fault_rate(self) -> float:
        """Share of the uniform tests of judge seeds that the chosen model answers wrongly."""
        return 1 - self.outcomes[0].after[self.chosen].disturbed_score

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "round": self.number,
            "faults_learnt_from": self.n_faults,
            "fault_rate": self.fault_rate,
            "chosen": self.models[self.chosen].random_seed,
            "models": [each.as_dict() for each in self.models],
            "outcomes": [each.as_dict() for each in self.outcomes],
            "campaign": self.campaign,
        }


@dataclass(frozen=True)
class Retrained:
    """A finished retraining."""

    plan: Plan
    recipe: Recipe
    perturbation: str
    stages: tuple[Stage, ...]
    """One a round."""
    kept: int
    """Which of them the model is from."""
    stop: str
    """Why the loop stopped, as a sentence; empty where there was one round."""
    verdict: tuple[str, ...]
    """What came of it, in sentences; where the clean score fell too far, that first."""
    has_failed: bool
    """Whether the clean score fell by more than the tolerance, in any perturbation's reading."""
    seeds: dict[str, int]
    """How many seeds each part has."""
    weights: Path | None
    about: dict[str, Any] = field(repr=False)
    environment: dict[str, Any] = field(repr=False)

    @property
    def stage(self) -> Stage:
        """The round whose model is given back."""
        return self.stages[self.kept]

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """Before and after, by perturbation; the first is the run's own."""
        return self.stage.outcomes

    @property
    def gain(self) -> float:
        """How far the disturbed score rose on judge seeds, under the run's own perturbation, mean over random seeds."""
        return self.outcomes[0].change.disturbed.difference

    @property
    def target(self) -> Target:
        """The retrained model of the random seed that was best on the seeds that training held out."""
        return self.stage.model.target

    @property
    def ledger(self) -> Ledger:
        """All seeds that its weights have seen."""
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
            "outcomes": [each.as_dict() for each in self.outcomes],
            "rounds": [each.as_dict() for each in self.stages],
            "stop": self.stop or None,
            "plan": self.plan.as_dict(),
            "recipe": self.recipe.as_dict(),
            "source": self.about,
            "environment": self.environment,
        }
