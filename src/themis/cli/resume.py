"""`themis resume`: go on with a run."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from themis.cli.gating import add_gates, read_gates
from themis.cli.options import Parser, add_fields, chosen
from themis.cli.run import LIMITS, add_report, add_track, add_verbosity, callbacks, report
from themis.errors import UsageError
from themis.runs.source import Origin
from themis.settings import Settings

if TYPE_CHECKING:
    from argparse import Namespace

    from themis.runs.store import Reader

HELP = (
    "Go on with a run where it stopped, to the same result as if it had never been interrupted. A run that has spent "
    "its budget goes on if it is given a larger one. Model and data are made again as the run remembers them."
)
EXAMPLES = """
themis resume runs/first
themis resume runs/first --max-tests 50000 --max-seconds null
"""
PLACES = ("model", "weights", "trust", "data", "features", "device")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    limits = parser.add_argument_group("when to stop, if not as before")
    add_fields(limits, Settings, only=LIMITS, shows_default=False)
    places = parser.add_argument_group("model and data, if they are elsewhere now")
    add_fields(places, Origin, only=PLACES, shows_default=False)
    add_gates(parser)
    output = parser.add_argument_group("output")
    add_report(output)
    add_track(output)
    add_verbosity(output)


def execute(arguments: Namespace, said: set[str]) -> int:
    from themis import resume
    from themis.runs.store import Reader

    gates = read_gates(arguments)
    before = Reader(arguments.run)
    gates.check_ahead(before.record["settings"]["uniform_share"], before.record["perturbation_code"])
    summary, origin = before.summary(), moved(before, arguments, said)
    before.close()
    limits = chosen(arguments, Settings, said)
    result = resume(arguments.run, origin=origin, callbacks=callbacks(arguments), **limits)
    arguments.out = arguments.run
    has_ended = summary is not None and summary["tests"] == result.rounds[-1].tests
    if has_ended and not (arguments.quiet or arguments.json):
        print("The run had ended already and was left as it is: give it more to go on, as --max-tests N")
    return report(result, arguments, gates)


def moved(run: Reader, arguments: Namespace, said: set[str]) -> Origin | None:
    """What the run remembers of its model and data, with what was said now; None where nothing was."""
    from themis.runs.replay import recorded_origin

    # A command may have options of its own under names that an origin has too, as retrain's --layers.
    recorded, changes = recorded_origin(run), chosen(arguments, Origin, said & set(PLACES))
    if not changes:
        return None
    if recorded is None and not {"model", "data"} <= set(changes):
        raise UsageError("--model and --data must both be given: the run was made in Python and remembers neither")
    if "model" in changes:
        changes["zoo"] = None
    for name in ("weights", "features"):
        if changes.get(name):
            changes[name] = os.path.abspath(changes[name])  # said here, not where the run was made
    if os.path.isfile(changes.get("model", "")):
        changes["model"] = os.path.abspath(changes["model"])
    if changes.get("trust"):
        changes["trust"] = [os.path.abspath(each) for each in changes["trust"]]
    kind, colon, path = changes.get("data", "").partition(":")
    if os.path.exists(path):
        changes["data"] = f"{kind}{colon}{os.path.abspath(path)}"
    sys.path.insert(0, os.getcwd())
    return replace(recorded or Origin(folder=os.getcwd()), **changes)
