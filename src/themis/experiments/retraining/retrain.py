"""Retraining itself: a run's faults are learnt from, and what it gained is measured on seeds that nobody has used."""

from __future__ import annotations

from contextlib import closing, nullcontext, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from themis.errors import MissingExtraError, UsageError, nearest
from themis.experiments.retraining.changes import normal_interval
from themis.experiments.retraining.figure import draw
from themis.experiments.retraining.folder import FIGURE, RESULT, TABLE, WEIGHTS, Folder
from themis.experiments.retraining.listener import Listener
from themis.experiments.retraining.loop import campaign, together
from themis.experiments.retraining.losses import Loss, name_loss
from themis.experiments.retraining.material import Material, of_faults
from themis.experiments.retraining.plan import Plan
from themis.experiments.retraining.recipe import Recipe
from themis.experiments.retraining.retrained import Retrained, Stage
from themis.experiments.retraining.source import Source, opened
from themis.experiments.retraining.steps import Steps
from themis.experiments.retraining.table import markdown, verdict
from themis.perturb import Perturbation
from themis.runs.environment import describe_environment
from themis.runs.run import Run
from themis.runs.source import Origin
from themis.target.fingerprint import hash_seeds


def retrain(
    run: Run | str | Path,
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
    **options: Any,
) -> Retrained:
    """Retrain a run's model on its faults; options are the fields of `Recipe` and of `Plan`.

    run: a finished campaign of this process, or its folder. target, data, perturbation, origin: needed where the run
    cannot make them again; data is all of it, as before the split. train: clean data to train on in
    the place of the train part, as the model's own training data. judge: data to judge by, for a run that was not
    split. out: folder for the results; the same call again goes on where it was stopped. loss: of outputs and labels,
    where the task has none of its own. command: how it was called, for the record.
    """
    recipe, plan, own = read_options(options)
    with closing(Folder(out)) as folder, opened(run, target, data, judge, perturbation, origin, train) as source:
        with nullcontext() if source.origin is None else source.origin.in_folder():
            cases = {source.name: source.perturbation, **plan.examined(), **own}
        steps = Steps(source, cases, plan, recipe, folder, listener or Listener(), loss)
        steps.check()
        environment = describe_environment(source.target.device)
        folder.begin(_record(steps), environment)
        stages, kept, stop = _stages(steps)
        result = _result(steps, stages, kept, stop, environment)
        _write(folder, result, command)
    return result


def read_options(options: dict[str, Any]) -> tuple[Recipe, Plan, dict[str, Perturbation]]:
    """The recipe, the plan, and perturbations of the user's own among those to examine on, from keyword options."""
    of_recipe, of_plan = ({each.name for each in fields(kind)} for kind in (Recipe, Plan))
    for name in options:
        if name not in of_recipe | of_plan:
            raise UsageError(f"unknown option {name!r}: {nearest(name, of_recipe | of_plan)}")
    also = options.get("also", "")
    listed = [also] if isinstance(also, str | Perturbation) else list(also)
    words = [each for each in listed if not isinstance(each, Perturbation)]
    own = {each.name: each for each in listed if isinstance(each, Perturbation)}
    plan = Plan.of(**{**{name: value for name, value in options.items() if name in of_plan}, "also": words})
    return Recipe.of(**{name: value for name, value in options.items() if name in of_recipe}), plan, own


def _record(steps: Steps) -> dict[str, Any]:
    """What tells a retraining from others."""
    source = steps.source
    return {
        "plan": steps.plan.as_dict(),
        "recipe": steps.recipe.as_dict(),
        **({} if steps.loss is None else {"loss": name_loss(steps.loss)}),
        **source.about,
        "train_sha256": hash_seeds(source.parts.train),
        "judge_sha256": hash_seeds(source.parts.judge),
        "examined": "; ".join(f"{name} ({_range(each)})" for name, each in steps.cases.items()),
    }


def _range(perturbation: Perturbation) -> str:
    return ", ".join(f"{each.name} {each.low:g} to {each.high:g}" for each in perturbation.theta)


def _stages(steps: Steps) -> tuple[list[Stage], int, str]:
    """All rounds, which of them is kept, and why they ended."""
    source, plan = steps.source, steps.plan
    material = _material(steps, source, None)
    first = steps.first()
    own = source.name
    target, ledger, before = source.target, source.ledger, first[own]
    stages: list[Stage] = []
    for number in range(1, plan.rounds + 1):
        stage = steps.stage(number, target, ledger, material, first)
        after = stage.outcomes[0].after[stage.chosen]
        fell = normal_interval(after.disturbed - before.disturbed)
        rates = f"{1 - before.disturbed_score:.2%} before round {number}, {1 - after.disturbed_score:.2%} after it"
        if plan.rounds == 1:
            return [stage], 0, ""
        stage, faults = _campaign(steps, stage)
        stages.append(stage)
        steps.tell.on_note(f"round {number}: fault rate on judge seeds {rates}")
        if fell.low <= 0:
            kept = number - 1 if fell.value > 0 or number == 1 else number - 2
            return stages, kept, f"Stopped because the fault rate on judge seeds stopped falling: {rates}."
        if not len(faults):
            return stages, number - 1, f"Stopped because the campaign of round {number} found no fault to learn from."
        if number < plan.rounds:
            model = stage.model
            found = _material(steps, replace(source, target=model.target, faults=faults), material)
            material = together(material, found)
            target, ledger, before = model.target, model.ledger, after
    return stages, len(stages) - 1, f"Stopped because {plan.rounds} rounds are done; the fault rate was still falling."


def _material(steps: Steps, source: Source, known: Material | None) -> Material:
    """What a campaign found, made again. Labels are those of the first round."""
    pool = source.parts.search if known is None else known.pool
    clean = source.parts.train if known is None else known.clean
    run = source.folder if known is None else None
    how: dict[str, Any] = {"limit": steps.plan.limit, "clean": clean, "oracle": source.oracle, "run": run}
    return of_faults(source.faults, pool, source.perturbation, source.target, **how)


def _campaign(steps: Steps, stage: Stage) -> tuple[Stage, Any]:
    """The campaign that follows a round's retraining, in a folder of its own."""
    out = steps.folder.within(f"round-{stage.number}")
    steps.tell.on_note(f"round {stage.number}: a campaign on the retrained model")
    faults = campaign(steps.source, stage.model, stage.number, out)
    distinct = len(faults.distinct())
    found = {"folder": None if out is None else str(out), "faults": len(faults), "distinct_faults": distinct}
    return replace(stage, campaign=found), faults


def _result(steps: Steps, stages: list[Stage], kept: int, stop: str, environment: dict[str, Any]) -> Retrained:
    source, parts = steps.source, steps.source.parts
    said, has_failed = verdict(stages[kept].outcomes, steps.plan.tolerance, stages[kept].chosen)
    return Retrained(
        plan=steps.plan,
        recipe=steps.recipe,
        perturbation=source.name,
        stages=tuple(stages),
        kept=kept,
        stop=stop,
        verdict=said,
        has_failed=has_failed,
        seeds={"search": len(parts.search), "train": len(parts.train), "judge": len(parts.judge)},
        weights=steps.folder.within(WEIGHTS),
        about=source.about,
        environment=environment,
    )


def _write(folder: Folder, result: Retrained, command: str | None) -> None:
    if folder.path is None:
        return
    weights = result.stage.model.weights
    assert weights is not None  # there is a folder
    folder.write_bytes(WEIGHTS, weights.read_bytes())
    folder.write(RESULT, {"command": command, **result.summary()})
    folder.write_bytes(TABLE, f"{markdown(result)}\n".encode())
    with suppress(MissingExtraError):  # without matplotlib there is no picture, and all else
        folder.write_bytes(FIGURE, draw(result))
