"""`themis gate`: hold a finished run against limits; the exit code says whether it may ship."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING

from themis.cli.gating import add_gates, is_asked, judge, read_gates, say
from themis.cli.options import Parser, add_fields
from themis.cli.replay import PLACES
from themis.cli.resume import moved
from themis.errors import UsageError
from themis.runs.source import Origin

if TYPE_CHECKING:
    from argparse import Namespace

HELP = (
    "Hold a finished run against limits: a line a gate, with its value, its limit and what to do. Exit code 0 if all "
    "pass, 1 if one fails. New faults are found by running both runs' faults on both models, not by their numbers."
)
EXAMPLES = """
themis gate runs/new --fail-under coverage=0.99 --max-fault-rate 0.05
themis gate runs/new --max-new-faults 0 --baseline runs/main
themis gate runs/new --max-fault-rate 0.05 --junit gates.xml --markdown "$GITHUB_STEP_SUMMARY"
"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    add_gates(parser)
    places = parser.add_argument_group("model and data, if they are elsewhere now")
    add_fields(places, Origin, only=PLACES, shows_default=False)
    output = parser.add_argument_group("output")
    output.add_argument("--quiet", action="store_true", help="print failed gates alone")
    output.add_argument("--json", action="store_true", help="print the verdicts as JSON and nothing else")


def execute(arguments: Namespace, said: set[str]) -> int:
    gates = read_gates(arguments)
    if not is_asked(arguments, gates):
        raise UsageError("a gate must be given, as --max-fault-rate 0.05 or --fail-under coverage=0.99: see --help")
    from themis.runs.replay import Replayer
    from themis.runs.store.reader import Reader

    with closing(Reader(arguments.run)) as run:
        verdicts = judge(Replayer(run, origin=moved(run, arguments, said)), gates, arguments, folder=None)
    if arguments.json:
        print(json.dumps({"run": arguments.run, **verdicts.as_dict()}, indent=2, allow_nan=False))
    return say(verdicts, arguments)
