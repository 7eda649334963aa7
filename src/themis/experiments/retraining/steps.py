"""The steps of a round: examine the model as it came, train copies of it, examine each; none is done twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from themis.errors import UsageError
from themis.experiments.retraining import readings
from themis.experiments.retraining.copies import check_layers
from themis.experiments.retraining.examine import Reading, examine
from themis.experiments.retraining.folder import Folder
from themis.experiments.retraining.listener import Listener
from themis.experiments.retraining.losses import Loss
from themis.experiments.retraining.material import Material
from themis.experiments.retraining.plan import Plan
from themis.experiments.retraining.recipe import Recipe
from themis.experiments.retraining.retrained import Model, Outcome, Stage
from themis.experiments.retraining.source import Source
from themis.experiments.retraining.tune import Epoch, tune
from themis.perturb import Perturbation
from themis.perturb.perturbation import check_fits, check_gradient
from themis.runs.weights import write_weights
from themis.target.ledger import Ledger, remember
from themis.target.target import Target
from themis.version import __version__

STEPS = "steps"


@dataclass(frozen=True)
class Steps:
    """How steps are done, and where they are kept."""

    source: Source
    cases: dict[str, Perturbation]
    """What is examined on, by name; the first is the run's own."""
    plan: Plan
    recipe: Recipe
    folder: Folder
    tell: Listener
    loss: Loss | None = None

    @property
    def passes(self) -> int:
        """Of each campaign on the judge seeds; by default as many after its clean sweep as the run had."""
        parts = self.source.parts
        return self.plan.passes or self.source.passes - len(parts.search) + len(parts.judge)

    def check(self) -> None:
        """Refuse what no step could do before the first one is done."""
        for perturbation in self.cases.values():
            check_fits(perturbation, self.source.parts.judge.shape[1:])
            check_gradient(perturbation, self.source.target)
        n_judge = len(self.source.parts.judge)
        costs = [1 + each.passes for each in self.cases.values()]
        if self.passes < n_judge + 10 * max(costs):
            raise UsageError(
                f"passes must leave room for tests after one pass for each of {n_judge:,} judge seeds, got "
                f"{self.passes:,}: raise it"
            )
        check_layers(self.source.target.module, self.recipe.layers)
        self.source.ledger.refuse(self.source.parts.judge, "judge")

    def first(self) -> dict[str, Reading]:
        """The model as it came, examined."""
        found: dict[str, Reading] = {}
        self.tell.on_steps(self._n_kept(_before(k) for k in range(len(self.cases))), len(self.cases))
        for k, (name, perturbation) in enumerate(self.cases.items()):
            file = _before(k)
            found[name] = readings.read(self.folder, file) or self._examine(
                file, self.source.target, perturbation, self.source.ledger, None
            )
            self.tell.on_step(f"{name}: the model as it came examined", k + 1, len(self.cases))
        return found

    def stage(
        self, number: int, target: Target, ledger: Ledger, material: Material, first: dict[str, Reading]
    ) -> Stage:
        """Train copies of a model, one a random seed, and examine each."""
        plan, models, after = self.plan, [], {name: list[Reading]() for name in self.cases}
        n_steps = plan.random_seeds * (1 + len(self.cases))
        files = [_after(number, seed, k) for seed in range(plan.random_seeds) for k in range(len(self.cases))]
        n_done = self._n_kept(files)
        self.tell.on_steps(n_done, n_steps)
        n_done = 0
        for seed in range(plan.random_seeds):
            said = f"round {number}, random seed {seed}" if plan.rounds > 1 else f"random seed {seed}"
            model = self._train(number, seed, target, ledger, material, said)
            models.append(model)
            n_done += 1
            self.tell.on_step(f"{said}: trained", n_done, n_steps)
            for k, (name, perturbation) in enumerate(self.cases.items()):
                file = _after(number, seed, k)
                reading = readings.read(self.folder, file)
                after[name].append(
                    reading or self._examine(file, model.target, perturbation, model.ledger, first[name])
                )
                n_done += 1
                self.tell.on_step(f"{said}: examined on {name}", n_done, n_steps)
        outcomes = tuple(Outcome(name, first[name], tuple(each)) for name, each in after.items())
        return Stage(number, len(material), tuple(models), outcomes)

    def _train(self, number: int, seed: int, target: Target, ledger: Ledger, material: Material, said: str) -> Model:
        recipe = replace(self.recipe, random_seed=self.recipe.random_seed + seed)
        place = self.folder.within(f"{STEPS}/{number}/model-{seed}")
        how: dict[str, Any] = {} if self.loss is None else {"loss": self.loss}

        def on_epoch(epoch: Epoch) -> None:
            self.tell.on_epoch(said, epoch)

        if place is not None:
            place.mkdir(parents=True, exist_ok=True)
        oracle = self.source.oracle
        tuned = tune(
            target, material, self.source.perturbation, recipe, oracle=oracle, folder=place, on_epoch=on_epoch, **how
        )
        seen = ledger.merge(tuned.ledger)
        remember(tuned.target.module, seen)
        weights = None if place is None else place / "weights.safetensors"
        if weights is not None and not weights.exists():
            write_weights(weights, tuned.target.module, seen, self.about(number, recipe.random_seed))
        return Model(recipe.random_seed, tuned.target, seen, tuned.history, tuned.best, weights)

    def about(self, number: int, random_seed: int) -> dict[str, str]:
        """What a file of weights says of itself."""
        return {
            "made_by": f"themis {__version__} retrain",
            "run": str(self.source.about["run"] or "in memory"),
            "round": str(number),
            "random_seed": str(random_seed),
        }

    def _examine(
        self, file: str, target: Target, perturbation: Perturbation, ledger: Ledger, before: Reading | None
    ) -> Reading:
        plan, settings = self.plan, self.source.settings
        reading = examine(
            target,
            self.source.parts.judge,
            perturbation,
            ledger=ledger,
            draws=plan.draws,
            passes=self.passes,
            random_seed=settings.random_seed,
            before=before,
            min_ssim=settings.min_ssim,
        )
        readings.keep(self.folder, file, reading)
        return reading

    def _n_kept(self, files: Iterator[str] | list[str]) -> int:
        places: list[Path | None] = [self.folder.within(each) for each in files]
        return sum(each is not None and each.exists() for each in places)


def _before(case: int) -> str:
    return f"{STEPS}/before-{case}.safetensors"


def _after(number: int, seed: int, case: int) -> str:
    return f"{STEPS}/{number}/model-{seed}/after-{case}.safetensors"
