"""`themis run`: a campaign on the user's model and data."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from themis.cli import DONE, INTERRUPTED
from themis.cli.gating import add_gates, judge_stopped, read_gates, say
from themis.cli.options import Group, Parser, add_config, add_fields, add_option, as_yaml, chosen
from themis.errors import ModelError, UsageError
from themis.runs.source import Origin
from themis.settings import Settings

if TYPE_CHECKING:
    from argparse import Namespace

    from themis.campaign.callback import Callback
    from themis.perturb import Perturbation
    from themis.report.gates.gates import Gates
    from themis.report.trackers import Tracker
    from themis.runs.run import Run

HELP = (
    "Test a model: find inputs on which its answer breaks, until coverage, a budget or a plateau stops the search. "
    "Ctrl-C stops it too and keeps everything. Needs --model and --data, or --zoo, and --perturb. Every option can "
    "stand in a YAML file given with --config."
)
EXAMPLES = """
themis run --model mine:make_net --data mine:make_data --perturb gaussian
themis run --config campaign.yaml --max-seconds 60 --out runs/short
themis run --zoo resnet56-cifar10 --perturb gaussian
"""
LIMITS = ("coverage", "max_tests", "max_passes", "max_seconds", "plateau")
PERTURB = "a perturbation, as gaussian, 'rain(angle=-10:10) + fog' or module:NAME; see themis perturbations"
FRESH = "auto"
"""The value of `--out` that stands for a folder of its own."""


def add_arguments(parser: Parser) -> None:
    add_config(parser)
    add_fields(parser.add_argument_group("model and data"), Origin)
    campaign = parser.add_argument_group("campaign")
    add_option(campaign, "perturb", str, "", PERTURB)
    add_fields(campaign, Settings, only={each.name for each in fields(Settings)} - {*LIMITS})
    add_fields(parser.add_argument_group("when to stop"), Settings, only=LIMITS)
    add_gates(parser)
    output = parser.add_argument_group("output")
    text = "new folder for the results; auto is runs/DATE-TIME, none keeps nothing on disk"
    add_option(output, "out", str | None, FRESH, text)
    add_report(output)
    add_track(output)
    add_verbosity(output)


def add_track(group: Group) -> None:
    """`--track`."""
    text = "show it in tensorboard, mlflow or wandb, written to FOLDER/track; NAME:PLACE writes elsewhere"
    add_option(group, "track", list[str] | None, None, text)


def add_report(group: Group) -> None:
    """`--no-report`."""
    group.add_argument("--no-report", action="store_true", help="write no report.html into the folder at the end")


def add_verbosity(group: Group) -> None:
    """`--quiet` and `--json`."""
    group.add_argument("--quiet", action="store_true", help="print nothing but errors")
    group.add_argument("--json", action="store_true", help="print the summary as JSON and nothing else")


def execute(arguments: Namespace, said: set[str]) -> int:
    options = chosen(arguments, Settings, said)
    settings = Settings.of(**options)
    if arguments.print_config:
        print(as_yaml({**vars(arguments), **asdict(settings)}))
        return DONE
    require(arguments, "model", "data", "perturb")
    gates = read_gates(arguments)
    origin = Origin.of({**vars(arguments), "folder": home(arguments.folder)})
    with origin.at_home():
        perturbation = check_names(arguments.perturb, settings)
    gates.check_ahead(settings.uniform_share, perturbation.code)
    trackers(arguments)  # refused before a model is loaded
    from themis.campaign.api import run

    target, data = origin.target(), origin.read()
    train = None if settings.criterion is None and origin.train is None else origin.read_train()
    if arguments.out == FRESH:
        arguments.out = str(fresh_folder())
    with kept_in(arguments.out, has_report=not arguments.no_report):
        how = {"out": arguments.out, "origin": origin, "callbacks": callbacks(arguments), "train": train}
        how["rivals"] = origin.read_rivals()
        result = run(target, data, perturbation, **how, **options)
    return report(result, arguments, gates)


def require(arguments: Namespace, *names: str) -> None:
    """Refuse options that were left out; a model of the zoo brings its data."""
    texts = {each.name: each.metadata["help"] for each in fields(Origin)} | {"perturb": PERTURB}
    for name in names:
        is_brought = arguments.zoo is not None and name in ("model", "data")
        if not getattr(arguments, name) and not is_brought:
            raise UsageError(f"--{name} must be given: {texts[name]}")


def callbacks(arguments: Namespace) -> list[Callback]:
    arguments.trackers = trackers(arguments)
    shown = [] if arguments.quiet or arguments.json else [show_progress()]
    return [*shown, *arguments.trackers]


def trackers(arguments: Namespace) -> list[Tracker]:
    """Those that `--track` names."""
    if not getattr(arguments, "track", None):
        return []
    from themis.report.trackers import choose_trackers

    return choose_trackers(arguments.track, getattr(arguments, "run", None) or arguments.out)


def show_progress() -> Callback:
    """Progress in the terminal; without rich the summary alone."""
    from themis.campaign.callback import Callback

    try:
        from rich.console import Console

        from themis.report.progress import ShowProgress
    except ImportError:

        class Say(Callback):
            def on_end(self, run: Run) -> None:
                from themis.runs.display.text import summary_rows

                print(*(f"{name:<13}  {text}" for name, text in summary_rows(run)), run.stop, sep="\n")

        return Say()

    class Patient(Console):
        def on_broken_pipe(self) -> None:
            """Whoever read the progress has gone; the campaign goes on. (By default rich ends the process.)"""
            self.quiet = True

    return ShowProgress(Patient())


def report(result: Run, arguments: Namespace, gates: Gates | None = None) -> int:
    """Say where the results are and what can be done with them; the exit code of a campaign that has stopped."""
    import json
    from shlex import quote

    is_interrupted = result.stop_reason == "user"
    page = None if arguments.no_report else write_page(arguments.out)
    if arguments.trackers:
        from themis.report.trackers import finish

        finish(arguments.trackers, *([] if page is None else [Path(page)]))
    if arguments.json:
        verdicts = judge_stopped(result, gates, arguments)
        judged = {} if verdicts is None else {"gates": verdicts.as_dict()}
        print(json.dumps({**result.summary(), "out": arguments.out, "report": page, **judged}, indent=2))
        return INTERRUPTED if is_interrupted else say(verdicts, arguments)
    if arguments.out and not arguments.quiet:
        print(f"Results in {arguments.out}")
        if page is not None:
            print(f"Report: {page}")
        if len(result.faults):
            print(f"List the faults: themis faults {quote(arguments.out)}")
        if is_interrupted:
            print(f"Go on: themis resume {quote(arguments.out)}")
    return INTERRUPTED if is_interrupted else say(judge_stopped(result, gates, arguments), arguments)


def write_page(out: str | None) -> str | None:
    """Write the run's report, and name it; a campaign's result never hangs on it."""
    if out is None:
        return None
    from themis.report.page import write_report

    try:
        return str(write_report(out))
    except Exception as error:
        text = " ".join(str(error).split())
        print(f"themis: the report was not written, themis report {out} tries again: {text}", file=sys.stderr)
        return None


@contextmanager
def kept_in(out: str | None, *, has_report: bool = False) -> Iterator[None]:
    """If the model fails in mid-campaign, say where to find what was found until then, and report it."""
    try:
        yield
    except ModelError as error:
        if out is None or not (Path(out) / "run.sqlite").exists():
            raise
        if has_report:
            write_page(out)
        text = f"{error}; what was found is kept in {out}, themis resume {out} goes on"
        raise ModelError(text) from (error.__cause__ or error)


def home(folder: str | None) -> str:
    """Where modules and relative paths are looked up, as a run remembers it."""
    if folder is not None and not os.path.isdir(folder):
        raise UsageError(f"--folder must be a folder that exists, {folder} is none: check the path")
    return os.path.abspath(folder or os.getcwd())


def fresh_folder() -> Path:
    """A folder named by the time, in `runs`."""
    from time import strftime

    return free(Path("runs") / strftime("%Y%m%d-%H%M%S"))


def free(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, ... that does not exist."""
    tried, number = path, 1
    while tried.exists():
        number += 1
        tried = path.with_name(f"{path.name}-{number}")
    return tried


def check_names(perturbation: str, settings: Settings) -> Perturbation:
    """Refuse unknown names before a model and its data are loaded, which may take long; the perturbation meant."""
    from themis.campaign.criterion import choose_guide
    from themis.judge import choose_judge
    from themis.perturb import choose_perturbation
    from themis.search import choose_policy

    chosen = choose_perturbation(perturbation)
    chosen.at(settings.magnitude)
    choose_policy(settings.policy)
    if settings.criterion is not None:
        choose_guide(settings.criterion)
    choose_judge(settings.judge)
    return chosen
