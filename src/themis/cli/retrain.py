"""`themis retrain`: make a model better with what a run has found, and measure it on seeds that it has not seen."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from pathlib import Path
from shlex import join, quote
from typing import TYPE_CHECKING, Any

from themis.cli import DONE, GATE_FAILED, INTERRUPTED, RUN_FAILED
from themis.cli.options import Parser, add_fields, add_option, explicit_fields, explicit_values
from themis.cli.output import AUTO, add_verbosity, new_folder
from themis.cli.source import LOCATION_OPTIONS, override_origin
from themis.errors import UsageError
from themis.runs.source import Origin

if TYPE_CHECKING:
    from argparse import Namespace

    from rich.console import Console

    from themis.experiments.retraining.compare import Contested
    from themis.experiments.retraining.retrained import Retrained

HELP = (
    "Retrain a model on the faults of a run, with the labels of their seeds, and say on judge seeds, which were "
    "neither searched nor trained on, what it gained: clean and disturbed score, old faults now right, what a fresh "
    "campaign finds. The run must have been split (themis run --split 0.5,0.2,0.3), or --judge names other data. "
    "Writes weights.safetensors, retrain.json, table.md and figure.png. Ctrl-C keeps every finished step, and the same "
    "command with the same --out goes on. Exit code 1 if --fail-under is given and not reached."
)
EXAMPLES = """
themis retrain runs/first --out runs/better
themis retrain runs/first --epochs 30 --fresh 1 --also rain,gaussian:0.3 --fail-under 0.02
themis retrain runs/first --rounds 5 --out runs/loop
themis retrain runs/first --from themis,nc,kmnc,idc,lsa,random,corners
"""
WIDTH = 100
"""Columns of the tables, at most."""


def add_arguments(parser: Parser) -> None:
    from themis.experiments.retraining.plan import Plan
    from themis.experiments.retraining.recipe import Recipe

    parser.add_argument("run", metavar="RUN", help="folder of the run")
    trained = parser.add_argument_group("how it is trained")
    add_fields(trained, Recipe)
    text = "clean data to train on in the place of the train part, as --data of themis run: the model's own"
    add_option(trained, "train", str | None, None, text)
    measured = parser.add_argument_group("what is measured")
    add_fields(measured, Plan)
    text = "data to judge by, as --data of themis run, where the run was not split"
    add_option(measured, "judge", str | None, None, text)
    text = "exit code 1 unless the disturbed score gains this much and the clean one stays within --tolerance"
    add_option(measured, "fail_under", float | None, None, text)
    contest = parser.add_argument_group("comparing techniques, instead")
    text = "who chooses what is learnt from, as themis,nc,kmnc,idc,lsa,random,corners: --limit inputs each"
    add_option(contest, "from", str | None, None, text)
    add_option(contest, "workers", int, 1, "processes; never changes the result")
    places = parser.add_argument_group("model and data, if not as the run remembers them")
    add_fields(places, Origin, only=LOCATION_OPTIONS, shows_default=False)
    output = parser.add_argument_group("output")
    text = "folder for the results, new or of the same retraining; auto is runs/retrain-DATE-TIME"
    add_option(output, "out", str, AUTO, text)
    add_verbosity(output)


def execute(arguments: Namespace, explicit_options: set[str]) -> int:
    from themis.experiments.retraining.plan import Plan
    from themis.experiments.retraining.recipe import Recipe

    recipe, plan, techniques = (
        explicit_fields(arguments, Recipe, explicit_options),
        explicit_fields(arguments, Plan, explicit_options),
        getattr(arguments, "from"),
    )
    Recipe.of(**recipe)  # refuses what breaks a rule before a model is loaded
    Plan.of(**plan)
    _check_kind(techniques, explicit_options)
    out = new_folder("retrain-") if arguments.out == AUTO else Path(arguments.out)
    places = _places(arguments, explicit_options)
    is_silent = arguments.quiet or arguments.json
    console = None if is_silent else _console()
    with ExitStack() as stack:
        how: dict[str, Any] = {**places, "out": out, "listener": stack.enter_context(_progress(console))}
        try:
            if techniques is not None:
                return _contest(arguments, techniques, {**recipe, **plan}, how, console)
            from themis.experiments.retraining.retrain import retrain

            result = retrain(arguments.run, **how, **recipe, **plan, command=join(arguments.words))
        except KeyboardInterrupt:
            stack.close()
            if not is_silent:
                print(_interruption(out))
            return INTERRUPTED
    return _report(result, out, arguments, console)


def _check_kind(techniques: str | None, explicit_options: set[str]) -> None:
    """Refuse options of the other kind of retraining."""
    if techniques is None:
        if "workers" in explicit_options:
            raise UsageError("--workers must come with --from, whose trainings can run side by side: leave it out")
        return
    for name in ("rounds", "also", "fail_under", "tolerance", "patience"):
        if name in explicit_options:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} must be left out with --from, which compares techniques in one round")


def _places(arguments: Namespace, explicit_options: set[str]) -> dict[str, Any]:
    """Where model and data come from, if not as the run remembers them."""
    from themis.runs.replay import recorded_origin
    from themis.runs.store.reader import Reader

    with closing(Reader(arguments.run)) as run:
        origin = override_origin(run, explicit_values(arguments, LOCATION_OPTIONS, explicit_options))
        home = origin or recorded_origin(run) or Origin()
    named = {name: getattr(arguments, name) for name in ("train", "judge")}
    read = {name: text and Origin(data=text, folder=home.folder).read() for name, text in named.items()}
    return {"origin": origin, **read}


def _contest(
    arguments: Namespace, techniques: str, options: dict[str, Any], how: dict[str, Any], console: Console | None
) -> int:
    """Compare techniques by what is learnt from the inputs they choose."""
    from themis.experiments.retraining.rivals import contest

    names = {"limit": "inputs", "passes": "judge_passes"}
    terms = {names.get(name, name): value for name, value in options.items() if value is not None or name != "passes"}
    if arguments.workers < 1:
        raise UsageError(f"workers must be at least 1, got {arguments.workers}")
    result = contest(arguments.run, techniques, **how, workers=arguments.workers, **terms)
    failed = [each for each in result.standings if each.errors]
    if arguments.json:
        print(json.dumps({**result.as_dict(), "out": str(how["out"])}, indent=2))
    elif console is not None:
        _show(result, how["out"], console)
    return RUN_FAILED if failed else DONE


def _show(result: Contested, out: Path, console: Console) -> None:
    from themis.experiments.retraining.standing import show

    show(result, console)
    print(f"Results in {out}: contest.json, contest.md, contest.png")


def _report(result: Retrained, out: Path, arguments: Namespace, console: Console | None) -> int:
    from themis.experiments.retraining.table import show

    has_failed = _has_failed(result, arguments.fail_under)
    if arguments.json:
        print(json.dumps({**result.summary(), "out": str(out), "failed": has_failed}, indent=2))
    elif console is not None:
        show(result, console)
        if has_failed:
            console.print(_failure(result, arguments.fail_under), style="bold red", highlight=False, markup=False)
        print(f"Results in {out}: weights.safetensors, retrain.json, table.md, figure.png")
        again = f"--config {quote(str(Path(arguments.run) / 'config.yaml'))}"
        new = f"--weights {quote(str(out / 'weights.safetensors'))} --data DATA --out {quote(str(out / 'run'))}"
        print(f"Test the new model on data that it has not seen: themis run {again} {new}")
    return GATE_FAILED if has_failed else DONE


def _has_failed(result: Retrained, least: float | None) -> bool:
    """Whether a gate was asked for, and the gain or the clean score is under it."""
    return least is not None and (result.has_failed or result.gain < least)


def _failure(result: Retrained, least: float) -> str:
    from themis.experiments.retraining.table import points

    if result.has_failed:
        return "Failed: the clean score fell by more than --tolerance"
    return f"Failed: a gain of {points(result.gain)} is under --fail-under, {points(least)}"


def _interruption(out: Path) -> str:
    """What is kept, and how to go on."""
    if not out.exists():
        return "Interrupted before the first step"
    return f"Interrupted; every finished step and epoch is kept. Go on: the same command with --out {quote(str(out))}"


def _console() -> Console:
    """Lines of at most 100 columns; that of a file is 100 wide."""
    from rich.console import Console

    console = Console()
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    return console


def _progress(console: Console | None) -> Any:
    """Who is told how it goes, as a block."""
    from contextlib import nullcontext

    from themis.experiments.retraining.listener import Listener

    if console is None:
        return nullcontext(Listener())
    from themis.experiments.retraining.progress import ShowSteps

    return closing(ShowSteps(console))
