"""`themis suite`: many perturbations in one go, with one folder, one budget and one report."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from themis.cli import DONE, INTERRUPTED
from themis.cli.gate import (
    add_gates,
    add_mce,
    check_mce_options,
    check_suite,
    is_requested,
    print_suite_results,
    read_gates,
    write_suite_files,
)
from themis.cli.options import Option, Parser, add_config, add_fields, add_option, as_yaml, explicit_fields
from themis.cli.output import AUTO, add_track, add_verbosity, attempt_report, new_folder, read_trackers
from themis.cli.source import named_origin, require
from themis.errors import UsageError
from themis.runs.source import OPTIONS, Origin
from themis.settings import Settings
from themis.text import print_json, print_text

if TYPE_CHECKING:
    from themis.report.gates.gates import Gates
    from themis.report.trackers import Tracker
    from themis.suites.definition import SuiteDefinition
    from themis.suites.result import SuiteRun

HELP = (
    "Test a model under many perturbations in one go. Clean inputs are run once for all of them; a share of the tests "
    "is divided among the perturbations, and the rest goes where faults and uncertainty are. SUITE is corruptions, "
    "weather, camera, noise, geometry, signals, tables, attacks or a YAML file; --perturb names perturbations instead. "
    "Every perturbation gets an ordinary run folder. The same command with the same --out resumes."
)
EXAMPLES = """
themis suite corruptions --zoo lenet5-mnist --out suites/lenet5
themis suite street.yaml --model mine:make_net --data mine:make_data --max-tests 20000
themis suite --perturb fog --perturb 'gaussian(sigma=0:0.3)' --model mine:make_net --data mine:make_data
themis suite corruptions --print-suite
"""
NOT_OF_A_SUITE = ("magnitude", "criterion", "train_inputs", "max_tests", "max_passes", "max_seconds", "preset")


class RepeatedText(Option):
    """A flag that can be repeated; commas do not separate its values."""

    def __call__(self, parser: Any, namespace: Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest, None) or []), values])


def add_arguments(parser: Parser) -> None:
    from themis.suites.options import MEMBER_DEFAULTS, SuiteOptions

    parser.add_argument("suite", metavar="SUITE", nargs="?", help="name of a suite, or a YAML file")
    add_config(parser)
    of_campaigns = {"train", "rivals"}  # for criteria and policies that a suite does not have
    add_fields(parser.add_argument_group("model and data"), Origin, only={*OPTIONS} - of_campaigns)
    suite = parser.add_argument_group("suite")
    suite.add_argument(
        "--perturb",
        action=RepeatedText,
        kind=list[str] | None,
        is_required=False,
        default=None,
        metavar="NAME",
        help="a perturbation, instead of SUITE: fog or 'gaussian(sigma=0:0.3)'; can be repeated",
    )
    add_fields(suite, SuiteOptions)
    text = "CSV file with columns to slice the faults by, one row per input of the data"
    add_option(suite, "metadata", str | None, None, text)
    suite.add_argument("--print-suite", action="store_true", help="print the suite as YAML to edit, and exit")
    campaign = parser.add_argument_group("campaigns")
    of_members = {field.name for field in fields(Settings)} - {*NOT_OF_A_SUITE}
    add_fields(campaign, Settings, only=of_members, defaults=MEMBER_DEFAULTS)
    add_gates(parser)
    add_mce(parser)
    output = parser.add_argument_group("output")
    text = "folder for the results, new or of the same suite; auto is runs/suite-DATE-TIME"
    add_option(output, "out", str, AUTO, text)
    output.add_argument("--no-report", action="store_true", help="do not write the reports at the end")
    add_track(output)
    add_verbosity(output)


def execute(arguments: Namespace, explicit_options: set[str]) -> int:
    from themis.suites.options import SuiteOptions, read_options

    options = explicit_fields(arguments, SuiteOptions, explicit_options)
    options |= {
        name: value
        for name, value in explicit_fields(arguments, Settings, explicit_options).items()
        if name not in NOT_OF_A_SUITE
    }
    suite_options, settings = read_options(options)
    gates = read_gates(arguments)
    check_mce_options(arguments, is_suite=True)
    if is_requested(arguments, gates):
        from themis.report.gates.suite import check_suite_ahead

        check_suite_ahead(gates, settings.uniform_share)
    source = _source(arguments)
    if arguments.print_suite:
        print_text(as_yaml(_without_defaults(_definition(source, arguments))))
        return DONE
    if arguments.print_config:
        values = {**asdict(settings), **asdict(suite_options)}
        print_text(as_yaml({name: values.get(name, given) for name, given in vars(arguments).items()}))
        return DONE
    require(arguments, "model", "data")
    origin = named_origin(arguments)
    with origin.in_folder():
        _check_names(source)
    from themis.suites.api import run_suite

    read_trackers(arguments.track, arguments.out)  # rejects unknown trackers before the model is loaded
    out = str(new_folder("suite-")) if arguments.out == AUTO else arguments.out
    target, data = origin.target(), origin.read()
    shown = ShowSuite(is_silent=arguments.quiet or arguments.json, track=arguments.track)
    with origin.in_folder():
        run_suite(
            target,
            data,
            source,
            out=Path(out).absolute(),
            metadata=arguments.metadata,
            origin=origin,
            listener=shown.listener(),
            **options,
        )
    shown.close()
    return finish_suite(out, arguments, gates)


def _source(arguments: Namespace) -> Any:
    """The suite that the user names."""
    if arguments.perturb and arguments.suite:
        raise UsageError(f"a suite and --perturb must not both be given, got {arguments.suite!r} too: choose one")
    if not arguments.perturb and not arguments.suite:
        from themis.suites.named import SUITES

        names = "; ".join(f"{name}: {suite.about}" for name, suite in SUITES.items())
        raise UsageError(f"SUITE or --perturb must be given: {names}")
    if arguments.perturb:
        return list(arguments.perturb)
    name = str(arguments.suite)
    return str(Path(name).absolute()) if name.endswith((".yaml", ".yml")) else name


def _check_names(source: Any) -> None:
    """Refuse unknown names before the model and the data are loaded, which may take long."""
    from themis.suites.named import SUITES, choose_suite

    if source not in SUITES if isinstance(source, str) else True:
        choose_suite(source, ())


def _definition(source: Any, arguments: Namespace) -> SuiteDefinition:
    """The suite for the data, or for pictures of 224 pixels if no data is named."""
    from themis.suites.named import choose_suite

    if not arguments.data and arguments.zoo is None:
        return choose_suite(source, (3, 224, 224))
    from themis.data.seeds import read_seeds

    return choose_suite(source, read_seeds(named_origin(arguments).read(), 1).shape[1:])


def _without_defaults(suite: SuiteDefinition) -> dict[str, Any]:
    plain = suite.plain()
    empty: Sequence[Any] = (None, "", [], 1.0)
    members = [{key: value for key, value in member.items() if value not in empty} for member in plain["members"]]
    return {**plain, "members": members}


def _of_member(spec: str, member: str) -> str:
    """A tracker of `--track` for a member: event files of TensorBoard need a folder of their own."""
    return f"{spec}/{member}" if spec.startswith("tensorboard:") else spec


class ShowSuite:
    """The progress of a suite in the terminal."""

    def __init__(self, *, is_silent: bool, track: list[str] | None = None) -> None:
        self._bar: Any = None
        self._track = track or []
        if not is_silent:
            from themis.report.progress import StepBar
            from themis.report.table import table_console

            self._bar = StepBar(table_console())

    def listener(self) -> Any:
        from themis.suites.api import SuiteListener
        from themis.suites.definition import suite_title
        from themis.text import counted

        bar, track = self._bar, self._track

        class Tracked(SuiteListener):
            trackers: Sequence[Tracker] = ()

            def callbacks_of(self, folder: Path) -> Sequence[Tracker]:
                self.trackers = read_trackers([_of_member(spec, folder.name) for spec in track], str(folder))
                return self.trackers

            def on_step(self, step: Any, run: Any, n_tests: int, max_tests: int) -> None:
                if self.trackers:
                    from themis.report.trackers import finish

                    finish(self.trackers)

        class Shown(Tracked):
            def on_start(self, suite: Any, n_seeds: int, max_tests: int) -> None:
                bar.note(
                    f"{suite_title(suite.name)}: {counted(len(suite.members), 'perturbation')}, {max_tests:,} tests, "
                    f"{counted(n_seeds, 'seed')}"
                )
                for note in suite.notes:
                    bar.note(note)
                bar.start(0, max_tests)

            def on_step(self, step: Any, run: Any, n_tests: int, max_tests: int) -> None:
                super().on_step(step, run, n_tests, max_tests)
                last = run.rounds[-1]
                found = f"{step.member}: {counted(last.distinct_faults, 'distinct fault')} in {last.tests:,} tests"
                bar.say(found, f"{n_tests:,}/{max_tests:,} {found}", n_tests)

            def on_grades(self, member: str, grades: Any) -> None:
                bar.say(f"{member}: graded at {len(grades)} levels", f"{member}: graded at {len(grades)} levels", None)

        return Tracked() if bar is None else Shown()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def finish_suite(out: str, arguments: Namespace, gates: Gates) -> int:
    """Write the reports, check the gates, and print the table and where the results are; returns the exit code.

    out: the folder of the suite, as the user wrote it.
    """
    from themis.suites.result import SuiteRun

    suite = SuiteRun(out)
    baseline = arguments.mce_baseline
    errors = None if baseline is None else suite.corruption_errors(baseline)
    is_interrupted = suite.state == "interrupted"
    results, page = None, None
    try:
        if is_requested(arguments, gates) and not is_interrupted:
            results, _ = check_suite(out, gates, arguments, {})
    finally:  # the page needs no gates
        if not arguments.no_report:
            page = _write_pages(suite, errors)
    if results is not None:
        write_suite_files(results, arguments)
    if arguments.json:
        more: dict[str, Any] = {} if errors is None else {"corruption_errors": asdict(errors)}
        more |= {} if results is None else {"gates": results.as_dict()}
        print_json(json.dumps({**suite.summary(), **more, "out": out, "report": page}, indent=2))
    elif not arguments.quiet:
        print_suite(suite, errors)
        print_text(f"Results in {out}")
        if page is not None:
            print_text(f"Report: {page}")
        if suite.state == "out of time":
            print_text("Stopped because the time of the suite is over.")
        if suite.state != "ended":
            print_text(f"Resume: themis resume {quote(out)}")
    if is_interrupted:
        return INTERRUPTED
    return DONE if results is None else print_suite_results(results, arguments)


def _write_pages(suite: SuiteRun, errors: Any) -> str | None:
    """Write the reports and return the path of that of the suite; a failure is printed, and does not fail the suite."""
    from themis.report.suite import write_suite_report

    return attempt_report(str(suite.path), lambda: write_suite_report(suite, errors=errors))


def print_suite(suite: SuiteRun, errors: Any = None) -> None:
    """Print the table of a suite, and what it says in sentences."""
    from themis.report.table import Table, table_console
    from themis.suites.definition import suite_title
    from themis.suites.result import COLUMNS, sentences, slice_sentences, table_rows

    Table(
        suite_title(suite.name),
        COLUMNS,
        table_rows(suite),
        [*sentences(suite, errors), *slice_sentences(suite)],
        optional=("magnitude", "time"),
        file="report.html",
    ).show(table_console())
