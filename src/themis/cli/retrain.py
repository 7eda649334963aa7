"""`themis retrain`: improve a model with the faults of a run, and measure the gain on seeds that it has not seen."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from shlex import join, quote
from typing import TYPE_CHECKING, Any

from themis.cli import DONE, GATE_FAILED, INTERRUPTED
from themis.cli.options import Parser, add_fields, add_option, explicit_fields, explicit_values
from themis.cli.output import AUTO, add_verbosity, new_folder
from themis.cli.source import LOCATION_OPTIONS, TRUST_HELP, override_origin
from themis.runs.source import Origin
from themis.text import print_json, print_text, printable

if TYPE_CHECKING:
    from argparse import Namespace

    from rich.console import Console

    from themis.retraining.result import Retrained

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
"""


def add_arguments(parser: Parser) -> None:
    from themis.retraining.recipe import Recipe, RetrainingPlan

    text = "folder of the run; several, or the folder of a suite, are retrained on together and graded one by one"
    parser.add_argument("run", metavar="RUN", nargs="+", help=text)
    training = parser.add_argument_group("how the model is trained")
    add_fields(training, Recipe)
    text = (
        "clean data to train on instead of the train part, as in --data of themis run, such as the model's own "
        "training data"
    )
    add_option(training, "train", str | None, None, text)
    measuring = parser.add_argument_group("what is measured")
    add_fields(measuring, RetrainingPlan)
    text = "data to judge by if the run was not split, as in --data of themis run"
    add_option(measuring, "judge", str | None, None, text).metavar = "DATA"
    text = "exit code 1 unless the disturbed score gains this much and the clean one stays within --tolerance"
    add_option(measuring, "fail_under", float | None, None, text)
    location = parser.add_argument_group("model and data, if not as recorded in the run")
    add_fields(location, Origin, only=LOCATION_OPTIONS, shows_default=False)
    output = parser.add_argument_group("output")
    text = "folder for the results, new or of the same retraining; auto is runs/retrain-DATE-TIME"
    add_option(output, "out", str, AUTO, text)
    add_verbosity(output)


def execute(arguments: Namespace, explicit_options: set[str]) -> int:
    from themis.retraining.recipe import Recipe, RetrainingPlan

    runs = [folder for path in arguments.run for folder in _members(path)]
    recipe = explicit_fields(arguments, Recipe, explicit_options)
    plan = explicit_fields(arguments, RetrainingPlan, explicit_options)
    Recipe.of(**recipe)  # raises for invalid options before a model is loaded
    RetrainingPlan.of(**plan)
    out = new_folder("retrain-") if arguments.out == AUTO else Path(arguments.out)
    where = places(runs[0], arguments, explicit_options)
    from themis.report.progress import ShowCells
    from themis.report.table import table_console
    from themis.retraining.api import retrain

    console = None if arguments.quiet or arguments.json else table_console()
    with ExitStack() as stack:
        progress = None if console is None else stack.enter_context(closing(ShowCells(console)))
        try:
            result = retrain(runs, **where, out=out, listener=progress, **recipe, **plan, command=join(arguments.words))
        except KeyboardInterrupt:
            stack.close()
            if console is not None:
                print_text(_interruption(out))
            return INTERRUPTED
    return _report(result, out, runs[0], arguments, console)


def places(run_folder: str, arguments: Namespace, explicit_options: set[str]) -> dict[str, Any]:
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


def _report(result: Retrained, out: Path, run: str, arguments: Namespace, console: Console | None) -> int:
    from themis.retraining.result import show

    has_failed = _has_failed(result, arguments.fail_under)
    if arguments.json:
        print_json(json.dumps({**result.summary(), "out": str(out), "failed": has_failed}, indent=2))
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
    from themis.retraining.result import points

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
