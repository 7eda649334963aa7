"""The steps of a retraining: examine the original model, train copies of it, examine each of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from themis.campaign.api import resume, run
from themis.errors import UsageError
from themis.experiments import ExperimentFolder, Listener, run_cells
from themis.perturb import Perturbation, choose_perturbation
from themis.perturb.perturbation import check_fits, check_gradient
from themis.retraining.changes import normal_interval
from themis.retraining.copies import check_layers
from themis.retraining.examine import Exam, Reading, examine, read_reading, write_reading
from themis.retraining.frontier import choose_point, join_frontiers
from themis.retraining.grading import Loss
from themis.retraining.material import Material, of_faults
from themis.retraining.recipe import Recipe, RetrainingPlan
from themis.retraining.result import RetrainingOutcome, Stage, TrainedModel
from themis.retraining.source import Source
from themis.retraining.tune import Epoch, tune
from themis.runs.faults import Faults
from themis.runs.store.schema import DATABASE
from themis.runs.store.tensors import write_weights
from themis.target.ledger import Ledger, allow_trained_seeds, remember
from themis.target.target import Target
from themis.text import counted, percent
from themis.version import __version__

STEPS_FOLDER, WEIGHTS_FILE = "steps", "weights.safetensors"


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
        return f"{STEPS_FOLDER}/{place}-{self.case}.safetensors"

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
        return f"{STEPS_FOLDER}/{self.round}/model-{self.seed}/{WEIGHTS_FILE}"

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
        exam = Exam(plan.draws, self.passes, settings.random_seed, plan.strengths, settings.min_ssim)
        return examine(target, self.source.parts.judge, perturbation, exam, ledger=ledger, before=before)

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
        folder = None if weights is None else weights.parent
        tuned = tune(target, material, self.source.perturbations, recipe, folder=folder, on_epoch=on_epoch)
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
        return read_reading(self.folder, step.file)

    def save(self, step: ExaminationStep, reading: Reading) -> None:
        write_reading(self.folder, step.file, reading)


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


def run_rounds(retraining: Retraining) -> tuple[list[Stage], int, str]:
    """All rounds, the index of the one that is kept, and why they ended."""
    source, plan = retraining.source, retraining.plan
    material = _first_material(retraining)
    original = retraining.examine_original()
    target, ledger, before = source.target, source.ledger, original[source.name]
    stages: list[Stage] = []
    for number in range(1, plan.rounds + 1):
        stage = retraining.run_round(number, target, ledger, material, original)
        if plan.rounds == 1:
            return [stage], 0, ""
        after = stage.outcomes[0].after[stage.chosen]
        fall = normal_interval(after.disturbed - before.disturbed)
        rate_before, rate_after = (percent(1 - reading.disturbed_score, 2) for reading in (before, after))
        rates = f"{rate_before} before round {number}, {rate_after} after it"
        stage, faults = _follow_up(retraining, stage)
        stages.append(stage)
        retraining.listener.on_note(f"round {number}: fault rate on judge seeds {rates}")
        if fall is None or fall.low <= 0:
            has_risen = after.disturbed_score > before.disturbed_score
            kept = number - 1 if has_risen or number == 1 else number - 2
            return stages, kept, f"Stopped because the fault rate on judge seeds stopped falling: {rates}."
        if not len(faults):
            return stages, number - 1, f"Stopped because the campaign of round {number} found no fault to learn from."
        if number < plan.rounds:
            model = stage.model
            material = join_material(material, _next_material(source, model, faults, material, plan.limit))
            target, ledger, before = model.target, model.ledger, after
    stop = f"Stopped because all {plan.rounds} rounds are done; the fault rate was still falling."
    return stages, len(stages) - 1, stop


def _first_material(retraining: Retraining) -> Material:
    """The faults of the runs, as inputs to learn from; of several runs, some may have none."""
    source = retraining.source
    with_faults = [run for run in source.all if len(run.faults)] or [source]
    materials = [
        of_faults(
            run.faults,
            source.parts.search,
            run.perturbation,
            source.target,
            limit=retraining.plan.limit,
            clean=source.parts.train,
            run=run.folder,
        )
        for run in with_faults
    ]
    return replace(reduce(join_material, materials), groups=source.groups, loss=retraining.loss)


def _next_material(source: Source, model: TrainedModel, faults: Faults, first: Material, limit: int | None) -> Material:
    """The faults of a later campaign, with the labels of the first round."""
    return of_faults(faults, first.pool, source.perturbation, model.target, limit=limit, clean=first.clean)


def join_material(first: Material, second: Material) -> Material:
    """The material of two campaigns on the same seeds."""
    return replace(
        first,
        disturbed=torch.cat([first.disturbed, second.disturbed]),
        disturbed_labels=torch.cat([first.disturbed_labels, second.disturbed_labels]),
        seed=torch.cat([first.seed, second.seed]),
    )


def _follow_up(retraining: Retraining, stage: Stage) -> tuple[Stage, Faults]:
    """The campaign that follows a round, in its own run folder."""
    out = retraining.folder.within(f"round-{stage.number}")
    retraining.listener.on_note(f"round {stage.number}: running a campaign on the retrained model")
    faults = run_campaign(retraining.source, stage.model, stage.number, out)
    campaign = {
        "folder": None if out is None else str(out),
        "faults": len(faults),
        "distinct_faults": len(faults.distinct()),
    }
    return replace(stage, campaign=campaign), faults


def run_campaign(source: Source, model: TrainedModel, number: int, out: Path | None) -> Faults:
    """The faults of a campaign like the run's on a retrained model and the search seeds, with other random tests."""
    origin = source.origin
    if origin is not None and model.weights is not None:
        origin = replace(origin, weights=os.path.abspath(model.weights))
    inputs: dict[str, Any] = {"origin": origin}
    if source.settings.criterion is not None and origin is not None:
        inputs["train"] = origin.read_train()
    if origin is not None and origin.rivals:
        inputs["rivals"] = origin.read_rivals()
    with allow_trained_seeds():
        name = _perturbation_name(source)
        if out is not None and (out / DATABASE).is_file():
            perturbation = source.perturbation if name is None else None
            result = resume(out, model.target, source.data, perturbation=perturbation, **inputs)
        else:
            options = {field.name: getattr(source.settings, field.name) for field in fields(source.settings)}
            options["random_seed"] += number
            if name is None:  # the range of its theta already has the magnitude
                options["magnitude"] = None
            result = run(model.target, source.data, name or source.perturbation, out=out, **inputs, **options)
    if result.stop_reason == "user":
        raise KeyboardInterrupt
    return result.faults


def _perturbation_name(source: Source) -> str | None:
    """The name from which another process can make the run's perturbation; None if there is none."""
    own = source.perturbation
    try:
        permission = None if source.origin is None else source.origin.permission
        imports = permission is None or permission.is_granted
        with nullcontext() if source.origin is None else source.origin.in_folder():
            named = choose_perturbation(own.name, source.settings.magnitude, imports=imports)
    except UsageError:
        return None
    return own.name if (named.theta, named.code) == (own.theta, own.code) else None
