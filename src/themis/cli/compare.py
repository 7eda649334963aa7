"""`themis compare`: techniques at equal cost, on the user's model and data."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from dataclasses import fields
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from themis.cli import DONE, INTERRUPTED, RUN_FAILED
from themis.cli.options import Parser, add_config, add_fields, add_option, as_yaml
from themis.cli.output import AUTO, add_verbosity, new_folder
from themis.cli.source import PERTURB_HELP, origin_folder, require
from themis.runs.source import Origin

if TYPE_CHECKING:
    from argparse import Namespace

    from rich.console import Console

    from themis.experiments.comparison import Comparison, Listener
    from themis.experiments.comparison.progress import ShowCells

HELP = (
    "Compare techniques at equal cost: the same seeds, passes and random seeds for each, error rates on seeds that "
    "none has used. Writes compare.json, table.md and figures. Ctrl-C keeps every finished campaign, and the same "
    "command with the same --out goes on. Needs --model and --data, or --zoo, and --perturb. Exit code 3 if a "
    "campaign failed."
)
EXAMPLES = """
themis compare --zoo lenet5-mnist --perturb gaussian --out runs/compare
themis compare --model mine:net --data mine:data --train mine:train --perturb fgsm --magnitudes paper,grid
themis compare --zoo resnet56-cifar10 --perturb rotate --techniques 'kmnc(k=100),scheduled' --campaigns 5
"""
WIDTH = 100
"""Columns of the tables, at most."""


def add_arguments(parser: Parser) -> None:
    from themis.experiments.comparison.plan import Plan

    add_config(parser)
    add_fields(parser.add_argument_group("model and data"), Origin)
    comparison = parser.add_argument_group("comparison")
    add_option(comparison, "perturb", str, "", PERTURB_HELP)
    add_fields(comparison, Plan)
    output = parser.add_argument_group("output")
    text = "processes that run campaigns; by default one a core, on a GPU four; never changes the result"
    add_option(output, "workers", int | None, None, text)
    text = "folder for the results, new or of the same comparison; auto is runs/compare-DATE-TIME"
    add_option(output, "out", str, AUTO, text)
    add_verbosity(output)


def execute(arguments: Namespace, explicit_options: set[str]) -> int:
    from themis.experiments.comparison.plan import Plan

    plan = {each.name: getattr(arguments, each.name) for each in fields(Plan)}
    Plan.of(**plan)  # refuses what breaks a rule before a model is loaded
    if arguments.print_config:
        print(as_yaml(vars(arguments)))
        return DONE
    require(arguments, "model", "data", "perturb")
    origin = Origin.of({**vars(arguments), "folder": origin_folder(arguments.folder)})
    out = new_folder("compare-") if arguments.out == AUTO else Path(arguments.out)
    from themis.experiments.comparison import Listener, compare

    is_silent = arguments.quiet or arguments.json
    console, shown = None if is_silent else _console(), Listener()
    with ExitStack() as stack:
        if console is not None:
            shown = stack.enter_context(closing(_progress(console)))
        how: dict[str, Any] = {"workers": arguments.workers, "origin": origin, "listener": shown}
        try:
            result = compare(perturbation=arguments.perturb, out=out, **how, **plan)
        except KeyboardInterrupt:
            stack.close()
            if not is_silent:
                print(_interruption(shown, out))
            return INTERRUPTED
    return _report(result, out, arguments, console)


def _interruption(shown: Listener, out: Path) -> str:
    """What is kept, and how to go on."""
    from themis.experiments.comparison.progress import ShowCells

    if not isinstance(shown, ShowCells) or not shown.n_cells:
        return "Interrupted before the first campaign"
    kept = f"{shown.n_done:,} of {shown.n_cells:,} campaigns are kept"
    return f"Interrupted; {kept}. Go on: the same command with --out {quote(str(out))}"


def _report(result: Comparison, out: Path, arguments: Namespace, console: Console | None) -> int:
    from themis.experiments.comparison.table import show

    if arguments.json:
        print(json.dumps({**result.as_dict(), "out": str(out)}, indent=2))
    elif console is not None:
        show(result, console)
        figures = sorted(each.name for each in out.glob("*.png"))
        print(f"Results in {out}: {', '.join(['compare.json', 'table.md', *figures])}")
    return RUN_FAILED if result.failed else DONE


def _console() -> Console:
    """Lines of at most 100 columns; that of a file is 100 wide."""
    from rich.console import Console

    console = Console()
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    return console


def _progress(console: Console) -> ShowCells:
    from themis.experiments.comparison.progress import ShowCells

    return ShowCells(console)
