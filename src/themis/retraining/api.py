"""`themis.retrain`: learn from the faults of a run, and measure the gain on seeds that were not used before."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Unpack

from themis.errors import MissingExtraError, UsageError, nearest
from themis.experiments import ExperimentFolder, ExperimentPlan, Listener
from themis.keywords import RetrainOptions
from themis.perturb import Perturbation
from themis.retraining.batches import show_classes, show_numbers
from themis.retraining.figure import draw
from themis.retraining.grading import Loss, name_loss
from themis.retraining.recipe import RESUMABLE_OPTIONS, Recipe, RetrainingPlan, task_defaults
from themis.retraining.result import Retrained, Stage, markdown, verdict
from themis.retraining.source import Given, open_sources
from themis.retraining.steps import WEIGHTS_FILE, Retraining, run_rounds
from themis.runs.environment import describe_environment
from themis.runs.run import Run
from themis.runs.source import Origin
from themis.runs.trust import Trusted
from themis.target.fingerprint import hash_seeds
from themis.text import counted

RESULT_FILE, TABLE_FILE, FIGURE_FILE = "retrain.json", "table.md", "figure.png"


def retrain(
    run: Run | str | Path | Sequence[Run | str | Path],
    *,
    target: Any = None,
    data: Any = None,
    train: Any = None,
    judge: Any = None,
    perturbation: Perturbation | None = None,
    origin: Origin | None = None,
    out: str | Path | None = None,
    loss: Loss | None = None,
    listener: Listener | None = None,
    command: str | None = None,
    trust: Trusted = False,
    **options: Unpack[RetrainOptions],
) -> Retrained:
    """Retrain the model of a run on its faults; options are the fields of `Recipe` and `RetrainingPlan`.

    Args:
        run: A finished campaign of this process, or its folder; or several, of one model on the same split data, whose
            perturbations are trained on together and graded one by one.
        target: Needed if the run cannot create its model again.
        data: The complete data, as before the split; needed if the run cannot read it again.
        perturbation: Needed if the run cannot create it again.
        train: Clean data to train on instead of the train part, such as the model's own training data.
        judge: Data to judge by, for a run that was not split.
        out: Folder for the results; the same call resumes an interrupted retraining.
        loss: A function of outputs and labels, if the task has no default.
        origin: How to create the target and the data, if not as recorded in the run.
        listener: Is notified of the progress.
        command: The command line, for the record.
        trust: True if code that the folder names may run although the folder was not made on this machine by this user.
    """
    recipe, plan, own = read_options(dict(options))
    runs: list[Any] = list(run) if isinstance(run, list | tuple) else [run]
    if not runs:
        raise UsageError("run must be a finished Run or the folder of one, or several of them, got none")
    _check_several(runs, plan, perturbation)
    given = Given(target, data, judge, perturbation, origin, train, trust)
    with (
        closing(ExperimentFolder(out, "retraining")) as folder,
        open_sources(runs, given) as source,
    ):
        with nullcontext() if source.origin is None else source.origin.in_folder():
            cases = {**source.perturbations, **plan.examined(), **own}
        retraining = Retraining(source, cases, plan, recipe, folder, listener or Listener(), loss)
        retraining.check()
        environment = describe_environment(source.target.device)
        task = (source.oracle, source.parts.search)
        defaults = task_defaults(show_classes(*task), show_numbers(*task))
        folder.begin(ExperimentPlan(_record(retraining), RESUMABLE_OPTIONS, defaults), environment)
        stages, kept, stop = run_rounds(retraining)
        result = _result(retraining, stages, kept, stop, environment)
        _write(folder, result, command)
    return result


def _check_several(runs: list[Any], plan: RetrainingPlan, perturbation: Perturbation | None) -> None:
    """Raise for options that only one run can have."""
    if len(runs) == 1:
        return
    if plan.rounds > 1:
        raise UsageError(
            f"rounds must be 1 for several runs, got {plan.rounds} for {len(runs)} runs: retrain on one run, or repeat "
            "the campaigns yourself"
        )
    if perturbation is not None:
        raise UsageError("perturbation must be left out for several runs, each of which has its own")


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
    trained_in = {
        name: f", {counted(recipe.attack_steps, 'step')} in training"
        for name, perturbation in source.perturbations.items()
        if recipe.shortens([perturbation])
    }
    return {
        "plan": retraining.plan.as_dict(),
        "recipe": recipe.as_dict(),
        **({} if retraining.loss is None else {"loss": name_loss(retraining.loss)}),
        **_about([{name: value for name, value in run.about.items() if name != "run"} for run in source.all]),
        "train_sha256": hash_seeds(source.parts.train),
        "judge_sha256": hash_seeds(source.parts.judge),
        "examined": "; ".join(
            f"{name} ({_range(case)}{trained_in.get(name, '')})" for name, case in retraining.cases.items()
        ),
    }


def _about(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What the first of some runs is, and the further ones."""
    first, *further = runs
    return {**first, "further": further} if further else first


def _range(perturbation: Perturbation) -> str:
    return ", ".join(f"{theta.name} {theta.low:g} to {theta.high:g}" for theta in perturbation.theta)


def _result(
    retraining: Retraining, stages: list[Stage], kept: int, stop: str, environment: dict[str, Any]
) -> Retrained:
    source, parts = retraining.source, retraining.source.parts
    sentences, has_failed = verdict(stages[kept].outcomes, retraining.recipe.tolerance, stages[kept].chosen)
    return Retrained(
        plan=retraining.plan,
        recipe=retraining.recipe,
        perturbation=", ".join(source.perturbations),
        n_trained=len(source.all),
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
