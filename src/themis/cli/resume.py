"""Continue a run where it stopped; the result is the same as if it had never been interrupted. A run that has spent its
budget continues if it gets a larger one. The model and the data are rebuilt as recorded in the run.

themis resume runs/first
themis resume runs/first --max-tests 50000 --max-seconds null
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from themis.cli.gate import add_gates, add_mce, check_mce_options, read_gates
from themis.cli.options import CommandLine, Parser, add_fields, fields_of
from themis.cli.output import add_campaign_output, add_track, finish, progress_callbacks
from themis.cli.run import LIMIT_OPTIONS
from themis.cli.source import LOCATION_OPTIONS, add_executor, add_overrides, override_origin, read_executor
from themis.errors import UsageError
from themis.report.tracking import choose_trackers
from themis.runs.store.reader import Reader
from themis.settings import Settings
from themis.suites.folder import is_suite
from themis.text import print_text

if TYPE_CHECKING:
    from themis.campaign.setup import Executor
    from themis.report.gates.gates import Gates

RESUME_REMEDY = (
    "A run whose budget is spent continues with a larger one, such as --max-tests N; one that has reached its goal, "
    "with --coverage null or --plateau null too."
)
"""How to continue a run that has ended."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run, or of a suite")
    limits = parser.add_argument_group("when to stop, if not as before")
    add_fields(limits, Settings, only=LIMIT_OPTIONS, shows_default=False)
    add_overrides(parser, LOCATION_OPTIONS)
    add_gates(parser)
    add_mce(parser)
    add_executor(parser)
    output = parser.add_argument_group("output")
    add_campaign_output(output)
    add_track(output)


def execute(arguments: CommandLine) -> int:
    from themis import resume

    gates = read_gates(arguments)
    executor = read_executor(arguments)
    check_mce_options(arguments, is_suite=is_suite(arguments.run))
    if is_suite(arguments.run):
        return _resume_suite(arguments, gates, executor)
    with closing(Reader(arguments.run, is_brief=True)) as before:
        gates.check_ahead(before.record["settings"]["uniform_share"], before.record["perturbation_code"])
        origin = override_origin(before, arguments.given)
    trackers = choose_trackers(arguments.track or (), arguments.run)
    limits = fields_of(Settings, arguments.given)
    callbacks = [*progress_callbacks(arguments), *trackers]
    summary = Path(arguments.run) / "summary.json"
    written_at = summary.stat().st_mtime_ns if summary.exists() else None  # it may be a pipe, which must not be read
    result = resume(
        arguments.run, origin=origin, trust=arguments.trust or False, callbacks=callbacks, executor=executor, **limits
    )
    is_unchanged = written_at is not None and summary.exists() and summary.stat().st_mtime_ns == written_at
    if is_unchanged and not arguments.is_silent:
        print_text(f"The run had already ended and was left unchanged. {result.stop} {RESUME_REMEDY}")
    return finish(result, arguments, out=arguments.run, trackers=trackers, gates=gates, writes_report=not is_unchanged)


def _resume_suite(arguments: CommandLine, gates: Gates, executor: Executor | None) -> int:
    """Continue a suite, whose limits are the tests of all members together, and the time."""
    from themis.cli.suite import suite_progress
    from themis.suites.api import resume_suite
    from themis.suites.result import SuiteRun

    limits = fields_of(Settings, arguments.given)
    for name in limits:
        if name not in ("max_tests", "max_seconds"):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"a suite can be resumed with more --max-tests or --max-seconds only, got {flag}")
    origin = override_origin(SuiteRun(arguments.run), arguments.given)
    choose_trackers(arguments.track or (), arguments.run)
    with suite_progress(arguments) as listener:
        trust = arguments.trust or False
        resume_suite(arguments.run, origin=origin, trust=trust, listener=listener, executor=executor, **limits)
    return finish(SuiteRun(arguments.run), arguments, out=arguments.run, gates=gates)
