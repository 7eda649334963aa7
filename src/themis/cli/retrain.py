"""`themis retrain`: improve a model with the faults of a run, and measure the gain on seeds that it has not seen."""

from __future__ import annotations

import json
from argparse import SUPPRESS
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from shlex import join, quote
from typing import TYPE_CHECKING, Any

from themis.cli import DONE, GATE_FAILED, INTERRUPTED, RUN_FAILED
from themis.cli.executor import RAY_ONLY, add_executor, read_executor
from themis.cli.options import Parser, add_fields, add_option, explicit_fields, explicit_values
from themis.cli.output import AUTO, add_verbosity, new_folder
from themis.cli.source import LOCATION_OPTIONS, TRUST_HELP, override_origin
from themis.errors import UsageError
from themis.runs.source import Origin
from themis.text import print_text, printable

if TYPE_CHECKING:
    from argparse import Namespace

    from rich.console import Console

    from themis.experiments.retraining.result import Retrained

HELP = (
    "Train a copy of a model on disturbances like those that broke it in a run, made anew in every batch, move the "
    "weights as far as --tolerance allows, and measure the gain on judge seeds, which were neither searched nor "
    "trained on: clean and disturbed score, old faults that are now answered correctly, and the faults that a new "
    "campaign finds. The run must have been split (themis run --split "
    "0.5,0.2,0.3), or --judge must name other data. Writes weights.safetensors, retrain.json, table.md and figure.png. "
    "Ctrl-C keeps every finished step, and the same command with the same --out resumes. Exit code 1 if --fail-under "
    "is given and not reached. "
    f"{TRUST_HELP}"
)
EXAMPLES = """
themis retrain runs/first --out runs/better
themis retrain runs/first --tolerance 0.01 --also rain,gaussian:0.3 --fail-under 0.02
themis retrain runs/first --rounds 5 --out runs/loop
themis retrain runs/noise runs/fog --out runs/both
themis retrain runs/first --from themis,nc,kmnc,idc,lsa,random,corners
"""


def add_arguments(parser: Parser) -> None:
    from themis.experiments.retraining.plan import RetrainingPlan
    from themis.experiments.retraining.recipe import Recipe

    text = "folder of the run; several, or the folder of a suite, are retrained on together and graded one by one"
    parser.add_argument("run", metavar="RUN", nargs="+", help=text)
    training = parser.add_argument_group("how the model is trained")
    add_fields(training, Recipe)
    training.add_argument("--keep-clean", help=SUPPRESS)  # the former name of a limit that is now part of --tolerance
    text = (
        "clean data to train on instead of the train part, as in --data of themis run, such as the model's own "
        "training data"
    )
    add_option(training, "train", str | None, None, text)
    measuring = parser.add_argument_group("what is measured")
    add_fields(measuring, RetrainingPlan)
    text = "data to judge by if the run was not split, as in --data of themis run"
    add_option(measuring, "judge", str | None, None, text, metavar="DATA")
    text = "exit code 1 unless the disturbed score gains this much and the clean one stays within --tolerance"
    add_option(measuring, "fail_under", float | None, None, text)
    contest = parser.add_argument_group("comparing techniques instead")
    text = "techniques that choose inputs to learn from, such as themis,nc,kmnc,idc,lsa,random,corners: --limit each"
    add_option(contest, "from", str | None, None, text)
    add_option(contest, "workers", int, 1, "number of processes; never changes the result")
    add_executor(parser, workers=None)
    places = parser.add_argument_group("model and data, if not as recorded in the run")
    add_fields(places, Origin, only=LOCATION_OPTIONS, shows_default=False)
    output = parser.add_argument_group("output")
    text = "folder for the results, new or of the same retraining; auto is runs/retrain-DATE-TIME"
    add_option(output, "out", str, AUTO, text)
    add_verbosity(output)


def execute(arguments: Namespace, explicit_options: set[str]) -> int:
    from themis.experiments.retraining.plan import RetrainingPlan
    from themis.experiments.retraining.recipe import Recipe

    if arguments.keep_clean is not None:
        Recipe.of(keep_clean=arguments.keep_clean)  # says what to use instead
    runs = [folder for path in arguments.run for folder in _members(path)]
    recipe = explicit_fields(arguments, Recipe, explicit_options)
    plan = explicit_fields(arguments, RetrainingPlan, explicit_options)
    techniques = getattr(arguments, "from")
    Recipe.of(**recipe)  # raises for invalid options before a model is loaded
    RetrainingPlan.of(**plan)
    _check_kind(techniques, explicit_options)
    executor = read_executor(arguments, explicit_options, shares_workers=True)
    out = new_folder("retrain-") if arguments.out == AUTO else Path(arguments.out)
    places = _places(runs[0], arguments, explicit_options)
    from themis.experiments.progress import ShowCells
    from themis.experiments.table import table_console

    console = None if arguments.quiet or arguments.json else table_console()
    with ExitStack() as stack:
        progress = None if console is None else stack.enter_context(closing(ShowCells(console)))
        shared: dict[str, Any] = {**places, "out": out, "listener": progress}
        try:
            if techniques is not None:
                if len(runs) > 1:
                    raise UsageError(f"--from must come with one run, got {len(runs)}: name one of them")
                return _contest(
                    runs[0], arguments, techniques, {**recipe, **plan}, {**shared, "executor": executor}, console
                )
            from themis.experiments.retraining.api import retrain

            result = retrain(runs, **shared, **recipe, **plan, command=join(arguments.words))
        except KeyboardInterrupt:
            stack.close()
            if console is not None:
                print_text(_interruption(out))
            return INTERRUPTED
    return _report(result, out, runs[0], arguments, console)


def _check_kind(techniques: str | None, explicit_options: set[str]) -> None:
    """Raise for options of the other kind of retraining."""
    if techniques is None:
        for name in ("workers", "executor", *RAY_ONLY):
            if name in explicit_options:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} must come with --from, whose trainings can run in parallel: leave it out")
        return
    for name in ("rounds", "also", "strengths", "fail_under", "patience"):
        if name in explicit_options:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} must be left out with --from, which compares techniques in one round")


def _places(run_folder: str, arguments: Namespace, explicit_options: set[str]) -> dict[str, Any]:
    """Where the model and the data come from, if not as recorded in the run."""
    from themis.runs.store.reader import Reader

    with closing(Reader(run_folder)) as run:
        origin = override_origin(run, explicit_values(arguments, LOCATION_OPTIONS, explicit_options))
    home = origin or Origin()
    if home.permission is not None:
        home = replace(home, permission=home.permission.with_own(("data",)))
    names = {name: getattr(arguments, name) for name in ("train", "judge")}
    data = {name: text and replace(home, data=text, features=None).read() for name, text in names.items()}
    return {"origin": origin, "trust": arguments.trust or False, **data}


def _contest(
    run: str,
    arguments: Namespace,
    techniques: str,
    options: dict[str, Any],
    shared: dict[str, Any],
    console: Console | None,
) -> int:
    """Compare techniques by what a model learns from the inputs they choose."""
    from themis.experiments.contest.api import contest_run
    from themis.experiments.contest.standings import show

    if arguments.workers < 1:
        raise UsageError(f"workers must be at least 1, got {arguments.workers}")
    names = {"limit": "inputs", "passes": "judge_passes"}
    plan = {names.get(name, name): value for name, value in options.items() if value is not None or name != "passes"}
    result = contest_run(run, techniques, **shared, workers=arguments.workers, **plan)
    if arguments.json:
        print(json.dumps({**result.as_dict(), "out": str(shared["out"])}, indent=2))
    elif console is not None:
        show(result, console)
        print_text(f"Results in {shared['out']}: contest.json, contest.md, contest.png")
    return RUN_FAILED if any(standing.errors for standing in result.standings) else DONE


def _report(result: Retrained, out: Path, run: str, arguments: Namespace, console: Console | None) -> int:
    from themis.experiments.retraining.table import show

    has_failed = _has_failed(result, arguments.fail_under)
    if arguments.json:
        print(json.dumps({**result.summary(), "out": str(out), "failed": has_failed}, indent=2))
    elif console is not None:
        show(result, console)
        if has_failed:
            console.print(
                printable(_failure(result, arguments.fail_under)), style="bold red", highlight=False, markup=False
            )
        print_text(f"Results in {out}: weights.safetensors, retrain.json, table.md, figure.png")
        config = f"--config {quote(str(Path(run) / 'config.yaml'))} --split null --split-by null"
        new = f"--weights {quote(str(out / 'weights.safetensors'))} --data DATA --out {quote(str(out / 'run'))}"
        print_text(f"Test the new model on data that it has not seen: themis run {config} {new}")
    return GATE_FAILED if has_failed else DONE


def _has_failed(result: Retrained, least: float | None) -> bool:
    """Whether a gate was requested, and the gain or the clean score does not pass it."""
    return least is not None and (result.has_failed or result.gain < least)


def _failure(result: Retrained, least: float) -> str:
    from themis.experiments.retraining.table import points

    if result.has_failed:
        return "Failed: the clean score fell by more than --tolerance"
    return f"Failed: a gain of {points(result.gain)} is below --fail-under, {points(least)}"


def _interruption(out: Path) -> str:
    """What is kept, and how to resume."""
    if not out.exists():
        return "Interrupted before the first step"
    return (
        "Interrupted; every finished step and epoch is kept. To resume, use the same command with --out "
        f"{quote(str(out))}"
    )


def _members(path: str) -> list[str]:
    """The folder of a run, or those of the members of a suite."""
    from themis.suites.folder import is_suite

    if not is_suite(path):
        return [path]
    from themis.suites.result import SuiteRun

    suite = SuiteRun(path)
    return [str(suite.folder(name)) for name in suite.members]
