"""Train a copy of a model on disturbances like those that broke it in a run, made anew in every batch, move the weights
as far as --tolerance allows, and measure the gain on judge seeds, which were neither searched nor trained on: clean and
disturbed score, old faults that are now answered correctly, and the faults that a new campaign finds. The run must have
been split (themis run --split 0.5,0.2,0.3), or --judge must name other data. Writes weights.safetensors, retrain.json
and table.md. Ctrl-C keeps every finished step, and the same command with the same --out resumes. Exit code 1 if
--fail-under is given and not reached.

themis retrain runs/first --out runs/better
themis retrain runs/first --tolerance 0.01 --also rain,gaussian:0.3 --fail-under 0.02
themis retrain runs/noise runs/fog --out runs/both
themis retrain suites/corruptions --out runs/all
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from shlex import join, quote
from typing import TYPE_CHECKING, Any

from themis.cli import DONE, GATE_FAILED
from themis.cli.options import CommandLine, Parser, add_fields, add_option, fields_of
from themis.cli.output import AUTO, add_verbosity, new_folder, shown_cells
from themis.cli.source import LOCATION_OPTIONS, add_overrides, override_origin
from themis.report.table import table_console
from themis.retraining.recipe import Recipe, RetrainingPlan
from themis.runs.source import Origin
from themis.runs.store.reader import Reader
from themis.text import print_json, print_text, printable

if TYPE_CHECKING:
    from themis.retraining.result import Retrained


def add_arguments(parser: Parser) -> None:
    text = "folder of the run; several, or the folder of a suite, are retrained on together and shown in one table"
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
    add_option(measuring, "judge", str | None, None, text, metavar="DATA")
    text = "exit code 1 unless the disturbed score gains this much and the clean one stays within --tolerance"
    add_option(measuring, "fail_under", float | None, None, text)
    add_overrides(parser, LOCATION_OPTIONS)
    output = parser.add_argument_group("output")
    text = "folder for the results, new or of the same retraining; auto is runs/retrain-DATE-TIME"
    add_option(output, "out", str, AUTO, text)
    add_verbosity(output)


def execute(arguments: CommandLine) -> int:
    recipe = fields_of(Recipe, arguments.given)
    plan = fields_of(RetrainingPlan, arguments.given)
    Recipe.of(**recipe)  # raises for invalid options before a model is loaded
    RetrainingPlan.of(**plan)
    out = new_folder("retrain-") if arguments.out == AUTO else Path(arguments.out)
    from themis.retraining.api import retrain
    from themis.retraining.source import list_runs

    runs = list_runs(arguments.run)
    where = places(runs[0], arguments)
    options, command = {**recipe, **plan}, join(arguments.words)
    with shown_cells(arguments, out) as progress:
        result = retrain(runs, out=out, listener=progress, command=command, **where, **options)
    return _report(result, out, runs[0], arguments)


def places(run_folder: str, arguments: CommandLine) -> dict[str, Any]:
    """Where the model and the data come from, if not as recorded in the run."""
    with closing(Reader(run_folder)) as run:
        origin = override_origin(run, arguments.given)
    home = origin or Origin()
    if home.permission is not None:
        home = replace(home, permission=home.permission.with_own(("data",)))
    names = {name: getattr(arguments, name) for name in ("train", "judge")}
    data = {name: text and replace(home, data=text, features=None).read() for name, text in names.items()}
    return {"origin": origin, "trust": arguments.trust or False, **data}


def _report(result: Retrained, out: Path, run: str, arguments: CommandLine) -> int:
    from themis.retraining.result import points, show

    least = arguments.fail_under
    has_failed = least is not None and (result.has_failed or result.gain < least)
    if arguments.json:
        print_json({**result.summary(), "out": str(out), "failed": has_failed})
    elif not arguments.quiet:
        console = table_console()
        show(result, console)
        if has_failed:
            text = f"a gain of {points(result.gain)} is below --fail-under, {points(least)}"
            text = "the clean score fell by more than --tolerance" if result.has_failed else text
            console.print(printable(f"Failed: {text}"), style="bold red", highlight=False, markup=False)
        print_text(f"Results in {out}: weights.safetensors, retrain.json, table.md")
        config = f"--config {quote(str(Path(run) / 'config.yaml'))} --split null --split-by null"
        new = f"--weights {quote(str(out / 'weights.safetensors'))} --data DATA --out {quote(str(out / 'run'))}"
        print_text(f"Test the new model on data that it has not seen: themis run {config} {new}")
    return GATE_FAILED if has_failed else DONE
