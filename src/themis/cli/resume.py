"""`themis resume`: continue a run."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from themis.cli.executor import add_executor, read_executor
from themis.cli.gate import add_gates, add_mce, check_mce_options, read_gates
from themis.cli.options import Parser, add_fields, explicit_fields, explicit_values
from themis.cli.output import (
    add_report,
    add_track,
    add_verbose,
    add_verbosity,
    finish,
    progress_callbacks,
    read_trackers,
)
from themis.cli.run import LIMIT_OPTIONS
from themis.cli.source import LOCATION_OPTIONS, TRUST_HELP, override_origin
from themis.errors import UsageError
from themis.runs.source import Origin
from themis.settings import Settings
from themis.text import print_text

if TYPE_CHECKING:
    from argparse import Namespace

    from themis.report.gates.gates import Gates
    from themis.runs.run import Run

HELP = (
    "Continue a run where it stopped; the result is the same as if it had never been interrupted. A run that has spent "
    "its budget continues if it gets a larger one. The model and the data are rebuilt as recorded in the run. "
    f"{TRUST_HELP}"
)
EXAMPLES = """
themis resume runs/first
themis resume runs/first --max-tests 50000 --max-seconds null
"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run, or of a suite")
    limits = parser.add_argument_group("when to stop, if not as before")
    add_fields(limits, Settings, only=LIMIT_OPTIONS, shows_default=False)
    source = parser.add_argument_group("model and data, if they have moved")
    add_fields(source, Origin, only=LOCATION_OPTIONS, shows_default=False)
    add_gates(parser)
    add_mce(parser)
    add_executor(parser)
    output = parser.add_argument_group("output")
    add_report(output)
    add_track(output)
    add_verbosity(output)
    add_verbose(output)


def execute(arguments: Namespace, explicit_options: set[str]) -> int:
    from themis import resume
    from themis.runs.store.reader import Reader
    from themis.suites.folder import is_suite

    gates = read_gates(arguments)
    executor = read_executor(arguments, explicit_options)
    check_mce_options(arguments, is_suite=is_suite(arguments.run))
    if is_suite(arguments.run):
        return _resume_suite(arguments, explicit_options, gates)
    with closing(Reader(arguments.run, is_brief=True)) as before:
        gates.check_ahead(before.record["settings"]["uniform_share"], before.record["perturbation_code"])
        origin = override_origin(before, explicit_values(arguments, LOCATION_OPTIONS, explicit_options))
    trackers = read_trackers(arguments.track, arguments.run)
    limits = explicit_fields(arguments, Settings, explicit_options)
    callbacks = [*progress_callbacks(arguments), *trackers]
    summary = Path(arguments.run) / "summary.json"
    before_resume = summary.stat() if summary.exists() else None
    result = resume(
        arguments.run,
        origin=origin,
        trust=arguments.trust or False,
        callbacks=callbacks,
        executor=executor,
        **limits,
    )
    is_unchanged = before_resume is not None and _is_same(before_resume, summary.stat())
    if is_unchanged and not (arguments.quiet or arguments.json):
        print_text(f"The run had already ended and was left unchanged: {_remedy(result)}")
    return finish(result, arguments, out=arguments.run, trackers=trackers, gates=gates, writes_report=not is_unchanged)


def _remedy(run: Run) -> str:
    """What to pass so that a run that has ended continues."""
    last = run.rounds[-1]
    remedies = {
        "tests": f"to continue it, pass --max-tests with more than its {last.tests:,} tests",
        "passes": f"to continue it, pass --max-passes with more than its {last.passes:,} passes",
        "seconds": f"to continue it, pass --max-seconds with more than its {last.seconds:.0f} seconds",
        "plateau": "to continue it, pass --plateau null, or a larger number of rounds",
    }
    goal = (
        "it reached its goal, which a larger budget does not change; to continue it, pass --coverage null, which sets "
        "no goal, and a limit to stop at, such as --max-tests N"
    )
    return remedies.get(run.stop_reason, goal)


def _is_same(before: os.stat_result, after: os.stat_result) -> bool:
    """Whether a file was not written in the meantime."""
    return (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def _resume_suite(arguments: Namespace, explicit_options: set[str], gates: Gates) -> int:
    """Continue a suite; its limits are the number of tests of all its members, and the time."""
    from themis.cli.suite import ShowSuite, finish_suite
    from themis.suites.api import resume_suite
    from themis.suites.result import SuiteRun

    limits = explicit_fields(arguments, Settings, explicit_options)
    for name in limits:
        if name not in ("max_tests", "max_seconds"):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"a suite can be resumed with more tests only, got {flag}: its budget is --max-tests, and --max-seconds"
            )
    if arguments.executor != "local":
        raise UsageError("--executor must be left out for a suite, whose members share one process: run one with it")
    origin = override_origin(SuiteRun(arguments.run), explicit_values(arguments, LOCATION_OPTIONS, explicit_options))
    read_trackers(arguments.track, arguments.run)
    shown = ShowSuite(is_silent=arguments.quiet or arguments.json, track=arguments.track)
    resume_suite(arguments.run, origin=origin, trust=arguments.trust or False, listener=shown.listener(), **limits)
    shown.close()
    return finish_suite(arguments.run, arguments, gates)
