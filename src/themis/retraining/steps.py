"""The steps of a retraining: examine the original model, train copies of it, examine each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from themis.errors import UsageError
from themis.experiments import ExperimentFolder, Listener, run_cells
from themis.perturb import Perturbation
from themis.perturb.perturbation import check_fits, check_gradient
from themis.retraining import readings
from themis.retraining.copies import check_layers
from themis.retraining.examine import Reading, examine
from themis.retraining.frontier import choose_point, join_frontiers
from themis.retraining.losses import Loss
from themis.retraining.material import Material
from themis.retraining.plan import RetrainingPlan
from themis.retraining.recipe import Recipe
from themis.retraining.result import RetrainingOutcome, Stage, TrainedModel
from themis.retraining.source import Source
from themis.retraining.tune import Epoch, tune
from themis.runs.weights import write_weights
from themis.target.ledger import Ledger, remember
from themis.target.target import Target
from themis.text import counted
from themis.version import __version__

STEPS, WEIGHTS = "steps", "weights.safetensors"


@dataclass(frozen=True)
class ExaminationStep:
    """Examine a model under one perturbation: the original model, or the copy of a round and random seed."""

    case: int
    name: str
    round: int = 0
    """0 is the original model."""
    seed: int = 0
    share: float = 1.0
    """The share of the way to the trained weights that the copy is at."""
    group: str = ""

    @property
    def file(self) -> str:
        place = f"{self.round}/model-{self.seed}/after-{self.share:g}" if self.round else "before"
        return f"{STEPS}/{place}-{self.case}.safetensors"

    def __str__(self) -> str:
        return f"random seed {self.seed} on {self.name}" if self.round else f"the original model on {self.name}"


@dataclass(frozen=True)
class TrainingStep:
    """Train a copy of the model of a round."""

    round: int
    seed: int
    group: str = ""

    @property
    def file(self) -> str:
        return f"{STEPS}/{self.round}/model-{self.seed}/{WEIGHTS}"

    def __str__(self) -> str:
        return f"training with random seed {self.seed}"


Step = ExaminationStep | TrainingStep


@dataclass(frozen=True)
class Retraining:
    """The fixed inputs of a retraining, and where its steps are stored."""

    source: Source
    cases: dict[str, Perturbation]
    """What models are examined on, by name; the first are the perturbations of the runs."""
    plan: RetrainingPlan
    recipe: Recipe
    folder: ExperimentFolder
    listener: Listener
    loss: Loss | None = None

    @property
    def passes(self) -> int:
        """Per campaign on the judge seeds; by default as many after the clean sweep as the run had."""
        parts = self.source.parts
        spent = max(source.passes for source in self.source.all)
        return self.plan.passes or spent - len(parts.search) + len(parts.judge)

    def check(self) -> None:
        """Raise if a step is bound to fail, before the first one runs."""
        for perturbation in self.cases.values():
            check_fits(perturbation, self.source.parts.judge.shape[1:])
            check_gradient(perturbation, self.source.target)
        n_judge = len(self.source.parts.judge)
        costs = [1 + perturbation.passes for perturbation in self.cases.values()]
        if self.passes < n_judge + 10 * max(costs):
            raise UsageError(
                f"passes must leave room for tests after one pass for each of {n_judge:,} judge seeds, got "
                f"{self.passes:,}: raise it"
            )
        check_layers(self.source.target.module, self.recipe.layers)
        self.source.ledger.refuse(self.source.parts.judge, "judge")

    def examine_original(self) -> dict[str, Reading]:
        """Examine the original model, by the name of the perturbation."""
        source = self.source

        def run(step: ExaminationStep) -> Reading:
            return self.examine(source.target, source.ledger, self.cases[step.name], None)

        steps = [ExaminationStep(case, name) for case, name in enumerate(self.cases)]
        finished = run_cells(
            steps,
            lambda: run,
            results=_Readings(self.folder),
            describe=lambda step, _: f"{step.name}: original model examined",
            listener=self.listener,
            noun="examination",
        )
        return {step.name: reading for step, reading in finished.items()}

    def run_round(
        self, number: int, target: Target, ledger: Ledger, material: Material, original: dict[str, Reading]
    ) -> Stage:
        """Train copies of a model, one per random seed, and examine each of them."""
        copies = _Copies(self, target, ledger, material, original)
        seeds = range(self.plan.random_seeds)

        def run(steps: Sequence[Step], noun: str) -> dict[Step, Reading | TrainedModel]:
            return run_cells(
                steps,
                lambda: copies.run,
                results=copies,
                describe=lambda step, _: self.describe(step),
                listener=self.listener,
                noun=noun,
            )

        run([TrainingStep(number, seed) for seed in seeds], "training")
        copies.settle(number)
        cases = list(enumerate(self.cases))
        steps = [ExaminationStep(case, name, number, seed) for seed in seeds for case, name in cases]
        finished = run(steps, "examination")
        after: dict[str, list[Reading]] = {name: [] for name in self.cases}
        for step, result in finished.items():
            if isinstance(step, ExaminationStep) and isinstance(result, Reading):
                after[step.name].append(result)
        models = tuple(copies.models[seed] for seed in range(self.plan.random_seeds))
        outcomes = [RetrainingOutcome(name, original[name], tuple(after[name])) for name in self.cases]
        return Stage(number, len(material), models, tuple(outcomes))

    def describe(self, step: Step) -> str:
        """A finished step of a round, in one line."""
        result = f"examined on {step.name}" if isinstance(step, ExaminationStep) else "trained"
        return f"{self.title(step)}: {result}"

    def title(self, step: Step) -> str:
        """The copy that a step is about."""
        return f"round {step.round}, random seed {step.seed}" if self.plan.rounds > 1 else f"random seed {step.seed}"

    def examine(self, target: Target, ledger: Ledger, perturbation: Perturbation, before: Reading | None) -> Reading:
        """Examine a model on the judge seeds; `before` is the examination of the original model."""
        plan, settings = self.plan, self.source.settings
        return examine(
            target,
            self.source.parts.judge,
            perturbation,
            ledger=ledger,
            draws=plan.draws,
            passes=self.passes,
            random_seed=settings.random_seed,
            before=before,
            strengths=plan.strengths,
            min_ssim=settings.min_ssim,
        )

    def train(
        self,
        step: TrainingStep,
        target: Target,
        ledger: Ledger,
        material: Material,
        on_epoch: Callable[[Epoch], None],
    ) -> TrainedModel:
        """Train a copy of a model, or continue after the last epoch that was stored."""
        recipe = replace(self.recipe, random_seed=self.recipe.random_seed + step.seed)
        weights = self.folder.within(step.file)
        if weights is not None:
            weights.parent.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {} if self.loss is None else {"loss": self.loss}
        tuned = tune(
            target,
            material,
            self.source.perturbations,
            recipe,
            oracle=self.source.oracle,
            folder=None if weights is None else weights.parent,
            on_epoch=on_epoch,
            groups=self.source.groups,
            **options,
        )
        trained_on = ledger.merge(tuned.ledger)
        remember(tuned.target.module, trained_on)
        return TrainedModel(
            recipe.random_seed,
            tuned.target,
            trained_on,
            tuned.history,
            tuned.best,
            tuned.frontier,
            tuned.chosen,
            weights,
            tuned.ends,
        )

    def metadata(self, number: int, random_seed: int) -> dict[str, str]:
        """The metadata of a file of weights."""
        return {
            "made_by": f"themis {__version__} retrain",
            "run": str(self.source.about["run"] or "in memory"),
            "round": str(number),
            "random_seed": str(random_seed),
        }


@dataclass(frozen=True)
class _Readings:
    """Stores examinations."""

    folder: ExperimentFolder

    def load(self, step: ExaminationStep) -> Reading | None:
        return readings.read(self.folder, step.file)

    def save(self, step: ExaminationStep, reading: Reading) -> None:
        readings.keep(self.folder, step.file, reading)


class _Copies:
    """The copies of one round: how they are trained, examined, stored and loaded.

    All copies are trained before the first one is examined, by the same process: the steps of a round run in order.
    """

    def __init__(
        self,
        retraining: Retraining,
        target: Target,
        ledger: Ledger,
        material: Material,
        original: dict[str, Reading],
    ) -> None:
        self.retraining, self.target, self.ledger = retraining, target, ledger
        self.material, self.original = material, original
        self.readings = _Readings(retraining.folder)
        self.models: dict[int, TrainedModel] = {}

    def run(self, step: Step) -> Reading | TrainedModel:
        retraining = self.retraining
        if isinstance(step, ExaminationStep):
            model = self.models[step.seed]
            perturbation = retraining.cases[step.name]
            return retraining.examine(model.target, model.ledger, perturbation, self.original[step.name])
        title = retraining.title(step)
        n_epochs = retraining.recipe.epochs

        def report(epoch: Epoch) -> None:
            retraining.listener.on_progress(f"{title}, {describe_epoch(epoch, n_epochs)}")

        return self._train(step, report)

    def load(self, step: Step) -> Reading | TrainedModel | None:
        if isinstance(step, ExaminationStep):
            return self.readings.load(self._at_share(step)) if step.seed in self.models else None
        weights = self.retraining.folder.within(step.file)
        if weights is None or not weights.exists():
            return None
        return self._train(step, lambda epoch: None)  # all of its epochs are stored

    def save(self, step: Step, result: Reading | TrainedModel) -> None:
        if isinstance(step, ExaminationStep) and isinstance(result, Reading):
            self.readings.save(self._at_share(step), result)
        elif isinstance(result, TrainedModel) and result.weights is not None:
            metadata = self.retraining.metadata(step.round, result.random_seed)
            write_weights(result.weights, result.target.module, result.ledger, metadata)

    def settle(self, number: int) -> None:
        """Move all copies to one point of their mean frontier, which all seeds that they held out decide together."""
        recipe = self.retraining.recipe
        models = [self.models[seed] for seed in range(len(self.models))]
        if recipe.share is None:
            chosen = choose_point(join_frontiers([model.frontier for model in models]), recipe.tolerance)
        else:
            chosen = models[0].chosen
        for seed, model in enumerate(models):
            self.models[seed] = model.at(chosen)
            self.save(TrainingStep(number, seed), self.models[seed])

    def _at_share(self, step: ExaminationStep) -> ExaminationStep:
        """The step, with the share at which its copy is."""
        return replace(step, share=self.models[step.seed].point.share)

    def _train(self, step: TrainingStep, on_epoch: Callable[[Epoch], None]) -> TrainedModel:
        model = self.retraining.train(step, self.target, self.ledger, self.material, on_epoch)
        self.models[step.seed] = model
        return model


def describe_epoch(epoch: Epoch, n_epochs: int) -> str:
    """An epoch in one line, with an estimate of the time that the remaining ones take at most."""
    text = f"epoch {epoch.number}: {epoch.clean:.1%} clean, {epoch.disturbed:.1%} disturbed on the seeds held out"
    n_left = n_epochs - epoch.number
    if not epoch.number or not n_left:
        return text
    seconds = n_left * epoch.seconds
    time = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return f"{text}, at most {time} left for {counted(n_left, 'epoch')}"
