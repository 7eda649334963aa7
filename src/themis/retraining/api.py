"""`themis.retrain`: learn from the faults of runs, and measure the gain on seeds that were not used before."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Unpack

from themis.campaign.api import resume, run
from themis.errors import MissingExtraError, UsageError, nearest
from themis.experiments import CellEnd, ExperimentFolder, ExperimentPlan, Listener
from themis.keywords import RetrainOptions
from themis.perturb import Perturbation, choose_perturbation
from themis.perturb.perturbation import check_fits, check_gradient
from themis.retraining.changes import normal_interval
from themis.retraining.examine import Exam, Reading, examine, read_reading, write_reading
from themis.retraining.frontier import choose_share, join_frontiers
from themis.retraining.grading import Loss, name_loss, show_classes, show_numbers
from themis.retraining.material import Material, join_material, of_faults, without_inputs
from themis.retraining.recipe import RESUMABLE_OPTIONS, Recipe, RetrainingPlan, task_defaults
from themis.retraining.result import Retrained, RetrainingOutcome, Stage, draw, markdown, verdict
from themis.retraining.source import Given, Source, list_runs, open_sources
from themis.retraining.tune import Epoch, TrainedModel, tune
from themis.retraining.weights import choose_parameters
from themis.runs.environment import describe_environment
from themis.runs.faults import Faults
from themis.runs.run import Run
from themis.runs.store.schema import DATABASE
from themis.runs.store.tensors import write_weights
from themis.runs.trust import Trusted
from themis.suites.result import SuiteRun
from themis.target.fingerprint import hash_seeds
from themis.target.ledger import Ledger, allow_trained_seeds, remember
from themis.target.target import Target
from themis.text import counted, percent
from themis.version import __version__

RESULT_FILE, TABLE_FILE, FIGURE_FILE = "retrain.json", "table.md", "figure.png"
STEPS_FOLDER, WEIGHTS_FILE = "steps", "weights.safetensors"


def retrain(
    run: Run | SuiteRun | str | Path | Sequence[Run | str | Path],
    *,
    target: Any = None,
    data: Any = None,
    train: Any = None,
    judge: Any = None,
    perturbation: Perturbation | None = None,
    out: str | Path | None = None,
    loss: Loss | None = None,
    listener: Listener | None = None,
    trust: Trusted = False,
    **options: Unpack[RetrainOptions],
) -> Retrained:
    """Retrain the model of a run on its faults; options are the fields of `Recipe` and `RetrainingPlan`.

    Args:
        run: A finished campaign of this process, or its folder; or several, of one model on the same split data, whose
            perturbations are trained on together and graded one by one; or a suite.
        target: Needed if the run cannot create its model again.
        data: The complete data, as before the split; needed if the run cannot read it again.
        perturbation: Needed if the run cannot create it again.
        train: Clean data to train on instead of the train part, such as the model's own training data.
        judge: Data to judge by, for a run that was not split.
        out: Folder for the results; the same call resumes an interrupted retraining.
        loss: A function of outputs and labels, if the task has no default.
        listener: Is notified of the progress.
        trust: True if code that the folder names may run although the folder was not made on this machine by this user.
    """
    runs = list_runs(run if isinstance(run, list | tuple) else [run])
    given = Given(target, data, judge, perturbation, None, train, trust)
    return retrain_runs(runs, given, dict(options), out=out, loss=loss, listener=listener)


def retrain_runs(
    runs: list[Any],
    given: Given,
    options: dict[str, Any],
    *,
    out: str | Path | None = None,
    loss: Loss | None = None,
    listener: Listener | None = None,
    command: str | None = None,
) -> Retrained:
    """The same for a list of runs; `command` is the command line, for the record."""
    recipe, plan, own = read_options(options)
    if not runs:
        raise UsageError("run must be a finished Run or the folder of one, or several of them, got none")
    if len(runs) > 1 and plan.rounds > 1:
        raise UsageError(
            f"rounds must be 1 for several runs, got {plan.rounds} for {len(runs)} runs: retrain on one run, or repeat "
            "the campaigns yourself"
        )
    if len(runs) > 1 and given.perturbation is not None:
        raise UsageError("perturbation must be left out for several runs, each of which has its own")
    with closing(ExperimentFolder(out, "retraining")) as folder, open_sources(runs, given) as source:
        with nullcontext() if source.origin is None else source.origin.in_folder():
            cases = {**source.perturbations, **plan.examined(), **own}
        retraining = Retraining(source, cases, plan, recipe, folder, listener or Listener(), loss)
        retraining.check()
        environment = describe_environment(source.target.device)
        task = (source.oracle, source.parts.search)
        defaults = task_defaults(show_classes(*task), show_numbers(*task))
        folder.begin(ExperimentPlan(_record(retraining), RESUMABLE_OPTIONS, defaults), environment)
        result = _result(retraining, *run_rounds(retraining), environment)
        _write(folder, result, command)
    return result


def read_options(options: dict[str, Any]) -> tuple[Recipe, RetrainingPlan, dict[str, Perturbation]]:
    """The recipe, the plan, and the `Perturbation` objects in `also`, by name."""
    of_recipe, of_plan = ({field.name for field in fields(kind)} for kind in (Recipe, RetrainingPlan))
    for name in options:
        if name not in of_recipe | of_plan:
            raise UsageError(f"unknown option {name!r}: {nearest(name, of_recipe | of_plan)}")
    also = options.get("also", "")
    listed = [also] if isinstance(also, str | Perturbation) else list(also)
    names = [entry for entry in listed if not isinstance(entry, Perturbation)]
    own = {entry.name: entry for entry in listed if isinstance(entry, Perturbation)}
    plan_options = {name: value for name, value in options.items() if name in of_plan}
    recipe_options = {name: value for name, value in options.items() if name in of_recipe}
    return Recipe.of(**recipe_options), RetrainingPlan.of(**{**plan_options, "also": names}), own


def _record(retraining: Retraining) -> dict[str, Any]:
    """What identifies this retraining, wherever the folders of its runs are."""
    source, recipe = retraining.source, retraining.recipe
    examined = []
    for name, case in retraining.cases.items():
        box = ", ".join(f"{theta.name} {theta.low:g} to {theta.high:g}" for theta in case.theta)
        is_shorter = name in source.perturbations and recipe.shortens([case])
        steps = f", {counted(recipe.attack_steps, 'step')} in training" if is_shorter else ""
        examined.append(f"{name} ({box}{steps})")
    return {
        "plan": retraining.plan.as_dict(),
        "recipe": recipe.as_dict(),
        **({} if retraining.loss is None else {"loss": name_loss(retraining.loss)}),
        **_about([{name: value for name, value in run.about.items() if name != "run"} for run in source.all]),
        "train_sha256": hash_seeds(source.parts.train),
        "judge_sha256": hash_seeds(source.parts.judge),
        "examined": "; ".join(examined),
    }


def _about(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What the first of some runs is, and the further ones."""
    first, *further = runs
    return {**first, "further": further} if further else first


def _result(
    retraining: Retraining, stages: list[Stage], kept: int, stop: str, environment: dict[str, Any]
) -> Retrained:
    source, parts = retraining.source, retraining.source.parts
    n_trained, stage = len(source.all), stages[kept]
    sentences, has_failed = verdict(stage.outcomes, retraining.recipe.tolerance, stage.chosen, n_trained)
    return Retrained(
        plan=retraining.plan,
        recipe=retraining.recipe,
        perturbation=", ".join(source.perturbations),
        n_trained=n_trained,
        stages=tuple(stages),
        kept=kept,
        stop=stop,
        verdict=sentences,
        has_failed=has_failed,
        seeds={"search": len(parts.search), "train": len(parts.train), "judge": len(parts.judge)},
        weights=retraining.folder.within(WEIGHTS_FILE),
        about=_about([run.about for run in source.all]),
        environment=environment,
    )


def _write(folder: ExperimentFolder, result: Retrained, command: str | None) -> None:
    if folder.path is None:
        return
    weights = result.stage.model.weights
    assert weights is not None  # there is a folder
    folder.write_bytes(WEIGHTS_FILE, weights.read_bytes())
    folder.write(RESULT_FILE, {"command": command, **result.summary()})
    folder.write_bytes(TABLE_FILE, f"{markdown(result)}\n".encode())
    with suppress(MissingExtraError):  # without matplotlib there is no figure, but all the rest
        folder.write_bytes(FIGURE_FILE, draw(result))


@dataclass(frozen=True)
class WorkUnit:
    """Train a copy of the model, or examine a model under one perturbation."""

    file: str
    title: str
    """What it is about."""
    seed: int = 0
    """The copy: an index of random seeds."""
    name: str = ""
    """The perturbation of an examination."""
    group: str = ""

    def __str__(self) -> str:
        return self.title


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
        choose_parameters(self.source.target.module, self.recipe.layers)
        self.source.ledger.refuse(self.source.parts.judge, "judge")

    def _run(self, words: tuple[str, str], units: Sequence[WorkUnit], run: Any, load: Any, save: Any) -> list[Any]:
        """The results of units of work, which are called `words`: finished ones are loaded, the others are run."""
        kind, done = words
        results = {unit: result for unit in units if (result := load(unit)) is not None}
        self.listener.on_cells(len(results), len(units), kind)
        for unit in units:
            if unit not in results:
                results[unit] = run(unit)
                save(unit, results[unit])
                end = CellEnd(unit, results[unit], f"{unit}: {done}", None, len(results), len(units))
                self.listener.on_cell_end(end)
        return [results[unit] for unit in units]

    def examine(
        self, units: Sequence[WorkUnit], models: Sequence[tuple[Target, Ledger]], original: dict[str, Reading]
    ) -> list[Reading]:
        """Examine models on the judge seeds; `original` is the examination of the original model, if there is one."""
        plan, settings = self.plan, self.source.settings
        similarity = (settings.min_ssim, settings.min_vif)
        exam = Exam(plan.draws, self.passes, settings.random_seed, plan.strengths, *similarity)

        def run(unit: WorkUnit) -> Reading:
            target, ledger = models[unit.seed]
            case, before = self.cases[unit.name], original.get(unit.name)
            return examine(target, self.source.parts.judge, case, exam, ledger=ledger, before=before)

        def load(unit: WorkUnit) -> Reading | None:
            return read_reading(self.folder, unit.file)

        def save(unit: WorkUnit, reading: Reading) -> None:
            write_reading(self.folder, unit.file, reading)

        return self._run(("examination", "examined"), units, run, load, save)

    def examine_original(self) -> dict[str, Reading]:
        """Examine the original model, by the name of the perturbation."""
        units = [
            WorkUnit(f"{STEPS_FOLDER}/before-{case}.safetensors", f"the original model on {name}", 0, name)
            for case, name in enumerate(self.cases)
        ]
        readings = self.examine(units, [(self.source.target, self.source.ledger)], {})
        return dict(zip(self.cases, readings, strict=True))

    def run_round(
        self, number: int, target: Target, ledger: Ledger, material: Material, original: dict[str, Reading]
    ) -> Stage:
        """Train copies of a model, one per random seed, and examine each of them."""
        models = self.train(number, target, ledger, material)
        units = [
            WorkUnit(
                f"{_folder(number, seed)}/after-{model.share:g}-{case}.safetensors",
                f"{self.title(number, seed)} on {name}",
                seed,
                name,
            )
            for seed, model in enumerate(models)
            for case, name in enumerate(self.cases)
        ]
        readings = self.examine(units, [(model.target, model.ledger) for model in models], original)
        outcomes = [
            RetrainingOutcome(name, original[name], tuple(readings[case :: len(self.cases)]))
            for case, name in enumerate(self.cases)
        ]
        return Stage(number, len(material), tuple(models), tuple(outcomes))

    def train(self, number: int, target: Target, ledger: Ledger, material: Material) -> list[TrainedModel]:
        """Train copies of a model, and move them to one point of their mean frontier, which all of them decide."""
        recipe = self.recipe

        def train(unit: WorkUnit, on_epoch: Callable[[Epoch], None] | None = None) -> TrainedModel:
            own = replace(recipe, random_seed=recipe.random_seed + unit.seed)
            weights = self.folder.within(unit.file)
            folder = None if weights is None else weights.parent
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            model = tune(target, material, self.source.perturbations, own, folder=folder, on_epoch=on_epoch)
            known = ledger.merge(model.ledger)
            remember(model.target.module, known)
            return replace(model, ledger=known, weights=weights)

        def run(unit: WorkUnit) -> TrainedModel:
            title = self.title(number, unit.seed)
            return train(
                unit, lambda epoch: self.listener.on_progress(f"{title}, {describe_epoch(epoch, recipe.epochs)}")
            )

        def load(unit: WorkUnit) -> TrainedModel | None:
            weights = self.folder.within(unit.file)
            return train(unit) if weights is not None and weights.exists() else None  # all of its epochs are stored

        def save(unit: WorkUnit, model: TrainedModel) -> None:
            if model.weights is not None:
                metadata = {
                    "made_by": f"themis {__version__} retrain",
                    "run": str(self.source.about["run"] or "in memory"),
                    "round": str(number),
                    "random_seed": str(model.random_seed),
                }
                write_weights(model.weights, model.target.module, model.ledger, metadata)

        units = [
            WorkUnit(f"{_folder(number, seed)}/{WEIGHTS_FILE}", self.title(number, seed), seed)
            for seed in range(self.plan.random_seeds)
        ]
        models = self._run(("training", "trained"), units, run, load, save)
        share = recipe.share
        if share is None:
            frontier = join_frontiers([model.frontier for model in models])
            share = choose_share(frontier, recipe.tolerance, recipe.confidence)
        models = [model.at(share) for model in models]
        for unit, model in zip(units, models, strict=True):
            save(unit, model)
        return models

    def title(self, number: int, seed: int) -> str:
        """A copy of the model."""
        return f"round {number}, random seed {seed}" if self.plan.rounds > 1 else f"random seed {seed}"


def _folder(number: int, seed: int) -> str:
    return f"{STEPS_FOLDER}/{number}/model-{seed}"


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
    source, plan, parts = retraining.source, retraining.plan, retraining.source.parts

    def collect(run: Source, faults: Faults, target: Target) -> Material:
        given: dict[str, Any] = {"limit": plan.limit, "clean": parts.train}
        if not retraining.recipe.counts()[1]:
            return without_inputs(faults, parts.search, target, **given)
        folder = run.folder if faults is run.faults else None
        return of_faults(faults, parts.search, run.perturbation, target, run=folder, **given)

    with_faults = [run for run in source.all if len(run.faults)] or [source]  # of several, some may have none
    materials = [collect(run, run.faults, source.target) for run in with_faults]
    material = replace(join_material(materials), groups=source.groups, loss=retraining.loss)
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
            found = collect(source, faults, model.target)
            material = join_material([material, found])
            target, ledger, before = model.target, model.ledger, after
    stop = f"Stopped because all {plan.rounds} rounds are done; the fault rate was still falling."
    return stages, len(stages) - 1, stop


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
