"""`themis.retrain`: learn from the faults of runs, and measure the gain on seeds that were not used before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from themis.errors import UsageError, nearest
from themis.experiments import CellEnd, ExperimentFolder, ExperimentPlan, Listener
from themis.keywords import RetrainOptions
from themis.perturb import Perturbation
from themis.perturb.perturbation import check_fits, check_gradient
from themis.retraining.examine import Exam, Reading, examine, read_reading, write_reading
from themis.retraining.frontier import choose_share, join_frontiers
from themis.retraining.grading import Loss, name_loss, picture_kind
from themis.retraining.material import Material, join_material, of_faults
from themis.retraining.recipe import RESUMABLE_OPTIONS, Recipe, RetrainingPlan, task_defaults
from themis.retraining.result import Retrained, RetrainingOutcome, markdown, verdict
from themis.retraining.source import Given, Source, list_runs, open_sources
from themis.retraining.tune import Epoch, TrainedModel, tune
from themis.retraining.weights import choose_parameters
from themis.runs.environment import describe_environment
from themis.runs.run import Run
from themis.runs.source import Origin
from themis.runs.store.tensors import write_weights
from themis.runs.trust import Trusted
from themis.suites.result import SuiteRun
from themis.target.fingerprint import hash_seeds
from themis.target.ledger import Ledger, remember
from themis.target.target import Target
from themis.text import counted
from themis.version import __version__

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
    origin: Origin | None = None,
    command: str | None = None,
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
        origin: How to create the model and the data again, if not as recorded in the run.
        command: The command line, for the record.
        trust: True if code that the folder names may run although the folder was not made on this machine by this user.
    """
    runs = list_runs(run if isinstance(run, list | tuple) else [run])
    given = Given(target, data, judge, perturbation, origin, train, trust)
    recipe, plan, own = read_options(dict(options))
    if not runs:
        raise UsageError("run must be a finished Run or the folder of one, or several of them, got none")
    if len(runs) > 1 and perturbation is not None:
        raise UsageError("perturbation must be left out for several runs, each of which has its own")
    with closing(ExperimentFolder(out, "retraining")) as folder, open_sources(runs, given) as source:
        with nullcontext() if source.origin is None else source.origin.in_folder():
            cases = {**source.perturbations, **plan.examined(), **own}
        retraining = Retraining(source, cases, plan, recipe, folder, listener or Listener(), loss)
        retraining.check()
        environment = describe_environment(source.target.device)
        defaults = task_defaults(picture_kind(source.oracle, source.parts.search))
        folder.begin(ExperimentPlan(_record(retraining), RESUMABLE_OPTIONS, defaults), environment)
        result = _retrain(retraining, environment)
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


def _retrain(retraining: Retraining, environment: dict[str, Any]) -> Retrained:
    """Examine the original model, train copies of it, and examine each of them."""
    source, recipe = retraining.source, retraining.recipe
    before = retraining.examine_original()
    models = retraining.train(_material(retraining))
    after = retraining.examine_trained(models, before)
    outcomes = tuple(RetrainingOutcome(name, before[name], tuple(after[name])) for name in retraining.cases)
    chosen = max(range(len(models)), key=lambda k: models[k].held_out)  # no result comes from the seeds held out
    sentences, has_failed = verdict(outcomes, recipe.tolerance, chosen, len(source.all))
    return Retrained(
        plan=retraining.plan,
        recipe=recipe,
        perturbation=", ".join(source.perturbations),
        n_trained=len(source.all),
        models=tuple(models),
        chosen=chosen,
        outcomes=outcomes,
        verdict=sentences,
        has_failed=has_failed,
        seeds={name: len(seeds) for name, seeds in vars(source.parts).items()},
        weights=retraining.folder.within(WEIGHTS_FILE),
        about=_about([run.about for run in source.all]),
        environment=environment,
    )


def _material(retraining: Retraining) -> Material:
    """What models learn from: the faults of the runs, of which some may have none, and clean seeds."""
    source, parts = retraining.source, retraining.source.parts
    _, n_stored, _ = retraining.recipe.counts()
    materials = [
        of_faults(
            run.faults,
            parts.search,
            run.perturbation,
            source.target,
            clean=parts.train,
            run=run.folder,
            has_inputs=n_stored > 0,
        )
        for run in [run for run in source.all if len(run.faults)] or [source]
    ]
    return replace(join_material(materials), groups=source.groups, loss=retraining.loss)


def _write(folder: ExperimentFolder, result: Retrained, command: str | None) -> None:
    if folder.path is None:
        return
    weights = result.model.weights
    assert weights is not None  # there is a folder
    folder.write_bytes(WEIGHTS_FILE, weights.read_bytes())
    folder.write("retrain.json", {"command": command, **result.summary()})
    folder.write_bytes("table.md", f"{markdown(result)}\n".encode())


class RetrainingStep(NamedTuple):
    """Train a copy of the model, or examine a model under one perturbation."""

    title: str
    """What it is about."""
    file: str
    """Where the result is stored."""
    run: Callable[[], Any]
    """Returns the result: what is stored, or else it is made and stored."""
    group: str = ""


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

    def _run_steps(self, kind: str, done: str, steps: Sequence[RetrainingStep]) -> list[Any]:
        """The results of steps of a kind, which are reported unless they were finished before."""
        finished = {step.file for step in steps if self._is_stored(step.file)}
        self.listener.on_cells(len(finished), len(steps), kind)
        results = []
        for step in steps:
            results.append(step.run())
            if step.file not in finished:
                finished.add(step.file)
                end = CellEnd(step, results[-1], f"{step.title}: {done}", None, len(finished), len(steps))
                self.listener.on_cell_end(end)
        return results

    def _is_stored(self, file: str) -> bool:
        path = self.folder.within(file)
        return path is not None and path.exists()

    def _examination(
        self, title: str, file: str, name: str, target: Target, ledger: Ledger, before: Reading | None = None
    ) -> RetrainingStep:
        """Examine a model on the judge seeds under the perturbation with a name."""
        settings = self.source.settings
        exam = Exam(self.plan.draws, self.passes, settings.random_seed, settings.min_ssim, settings.min_vif)
        file = f"{file}-{list(self.cases).index(name)}.safetensors"

        def run() -> Reading:
            reading = read_reading(self.folder, file)
            if reading is None:
                reading = examine(target, self.source.parts.judge, self.cases[name], exam, ledger=ledger, before=before)
                write_reading(self.folder, file, reading)
            return reading

        return RetrainingStep(f"{title} on {name}", file, run)

    def examine_original(self) -> dict[str, Reading]:
        """Examine the original model, by the name of the perturbation."""
        model = self.source.target, self.source.ledger
        steps = [self._examination("the original model", f"{STEPS_FOLDER}/before", name, *model) for name in self.cases]
        return dict(zip(self.cases, self._run_steps("examination", "examined", steps), strict=True))

    def examine_trained(self, models: Sequence[TrainedModel], before: dict[str, Reading]) -> dict[str, list[Reading]]:
        """Examine models as the original one was, by the name of the perturbation."""
        steps = [
            self._examination(
                _title(k), f"{_folder(k)}/after-{model.share:g}", name, model.target, model.ledger, before[name]
            )
            for k, model in enumerate(models)
            for name in self.cases
        ]
        readings, n = self._run_steps("examination", "examined", steps), len(self.cases)
        return {name: readings[k::n] for k, name in enumerate(self.cases)}

    def train(self, material: Material) -> list[TrainedModel]:
        """Train copies of the model, and move them to one point of their mean frontier, which all of them decide."""
        recipe = self.recipe
        files = [f"{_folder(k)}/{WEIGHTS_FILE}" for k in range(self.plan.random_seeds)]
        steps = [
            RetrainingStep(_title(k), file, partial(self._train, k, material, file)) for k, file in enumerate(files)
        ]
        models = self._run_steps("training", "trained", steps)
        share = recipe.share
        if share is None:
            frontier = join_frontiers([model.frontier for model in models])
            share = choose_share(frontier, recipe.tolerance, recipe.confidence)
        models = [model.at(share) for model in models]
        for model in models:
            self._save(model)
        return models

    def _train(self, k: int, material: Material, file: str) -> TrainedModel:
        """Train a copy; one that is finished is loaded from its checkpoint."""
        source, weights = self.source, self.folder.within(file)
        recipe = replace(self.recipe, random_seed=self.recipe.random_seed + k)
        folder = None if weights is None else weights.parent
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        is_finished = self._is_stored(file)

        def on_epoch(epoch: Epoch) -> None:
            if not is_finished:
                self.listener.on_progress(f"{_title(k)}, {describe_epoch(epoch, recipe.epochs)}")

        model = tune(source.target, material, source.perturbations, recipe, folder=folder, on_epoch=on_epoch)
        ledger = source.ledger.merge(model.ledger)
        remember(model.target.module, ledger)
        model = replace(model, ledger=ledger, weights=weights)
        self._save(model)
        return model

    def _save(self, model: TrainedModel) -> None:
        if model.weights is not None:
            metadata = {
                "made_by": f"themis {__version__} retrain",
                "run": str(self.source.about["run"] or "in memory"),
                "random_seed": str(model.random_seed),
            }
            write_weights(model.weights, model.target.module, model.ledger, metadata)


def _folder(k: int) -> str:
    return f"{STEPS_FOLDER}/1/model-{k}"


def _title(k: int) -> str:
    return f"random seed {k}"


def describe_epoch(epoch: Epoch, n_epochs: int) -> str:
    """An epoch in one line, with an estimate of the time that the remaining ones take at most."""
    text = f"epoch {epoch.number}: {epoch.clean:.1%} clean, {epoch.disturbed:.1%} disturbed on the seeds held out"
    n_left = n_epochs - epoch.number
    if not epoch.number or not n_left:
        return text
    seconds = n_left * epoch.seconds
    time = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return f"{text}, at most {time} left for {counted(n_left, 'epoch')}"
