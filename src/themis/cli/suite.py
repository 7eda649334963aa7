"""Test a model under many perturbations in one go. Clean inputs are run once for all of them; a share of the tests is
divided among the perturbations, and the rest goes where faults and uncertainty are. SUITE is corruptions, weather,
camera, noise, geometry, signals, tables, attacks or a YAML file; --perturb names perturbations instead;
cifar10c:FOLDER, cifar100c:FOLDER and imagenetc:FOLDER are published files, on which the model is only graded. Every
perturbation gets an ordinary run folder. The same command with the same --out resumes.

themis suite corruptions --zoo lenet5-mnist --out suites/lenet5
themis suite street.yaml --model mine:make_net --data mine:make_data --max-tests 20000
themis suite --perturb fog --perturb 'gaussian(sigma=0:0.3)' --model mine:make_net --data mine:make_data
themis suite corruptions --print-suite
themis suite cifar10c:CIFAR-10-C --model mine:make_net --data cifar:cifar-10-batches-py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from themis.cli import DONE, gate
from themis.cli.options import CommandLine, Parser, add_config, add_fields, add_option, as_yaml, fields_of
from themis.cli.output import AUTO, add_track, add_verbosity, finish, new_folder
from themis.cli.source import add_executor, named_origin, read_executor, require
from themis.errors import UsageError
from themis.report.table import table_console
from themis.report.tracking import Tracker, choose_trackers, close_trackers
from themis.runs.source import OPTIONS, Origin
from themis.settings import Settings
from themis.suites.options import MEMBER_DEFAULTS, UNSUPPORTED_OPTIONS, SuiteOptions, read_options
from themis.text import counted, print_text

if TYPE_CHECKING:
    from themis.suites.api import SuiteListener

NOT_SUITE_OPTIONS = {*UNSUPPORTED_OPTIONS, "max_tests", "max_seconds", "preset", "decide"}


def add_arguments(parser: Parser) -> None:
    parser.add_argument("suite", metavar="SUITE", nargs="?", help="name of a suite, or a YAML file")
    add_config(parser)
    of_campaigns = {"train", "rivals", "against"}  # for criteria, policies and oracles that a suite does not have
    add_fields(parser.add_argument_group("model and data"), Origin, only={*OPTIONS} - of_campaigns)
    suite = parser.add_argument_group("suite")
    text = "perturbations, instead of SUITE: fog or 'gaussian(sigma=0:0.3)'; can be repeated"
    add_option(suite, "perturb", list[str] | None, None, text)
    add_fields(suite, SuiteOptions)
    suite.add_argument("--print-suite", action="store_true", help="print the suite as YAML to edit, and exit")
    campaign = parser.add_argument_group("campaigns")
    of_members = {field.name for field in fields(Settings)} - NOT_SUITE_OPTIONS
    add_fields(campaign, Settings, only=of_members, defaults=MEMBER_DEFAULTS)
    add_executor(parser)
    gate.add_gates(parser)
    gate.add_mce(parser)
    output = parser.add_argument_group("output")
    text = "folder for the results, new or of the same suite; auto is runs/suite-DATE-TIME"
    add_option(output, "out", str, AUTO, text)
    output.add_argument("--no-report", action="store_true", help="do not write the reports at the end")
    add_track(output)
    add_verbosity(output)


def execute(arguments: CommandLine) -> int:
    from themis.suites.definition import SUITES, choose_suite, is_graded_only

    options = fields_of(SuiteOptions, arguments.given)
    options |= {
        name: value for name, value in fields_of(Settings, arguments.given).items() if name not in NOT_SUITE_OPTIONS
    }
    suite_options, settings = read_options(options)
    gates, executor = gate.read_gates(arguments), read_executor(arguments)
    gate.check_mce_options(arguments, is_suite=True)
    if gate.is_requested(arguments, gates):
        from themis.report.gates.gates import check_suite_ahead

        check_suite_ahead(gates, settings.uniform_share)
    source = _source(arguments)
    if arguments.print_suite:
        print_text(as_yaml(_describe_suite(source, arguments)))
        return DONE
    if arguments.print_config:
        values = {**asdict(settings), **asdict(suite_options)}
        print_text(as_yaml({name: values.get(name, given) for name, given in vars(arguments).items()}))
        return DONE
    require(arguments, "model", "data")
    origin = named_origin(arguments)
    if not (is_graded_only(source) or (isinstance(source, str) and source in SUITES)):
        with origin.in_folder():
            choose_suite(source, ())  # rejects unknown names before the model is loaded
    from themis.suites.api import run_suite
    from themis.suites.result import SuiteRun

    choose_trackers(arguments.track or (), arguments.out)  # rejects unknown trackers before the model is loaded
    out = str(new_folder("suite-")) if arguments.out == AUTO else arguments.out
    target, data = origin.target(), origin.read()
    with origin.in_folder(), suite_progress(arguments) as listener:
        run_suite(
            target,
            data,
            source,
            out=Path(out).absolute(),
            baseline=arguments.mce_baseline if (suite_options.decide or "").startswith("mce") else None,
            origin=origin,
            listener=listener,
            executor=executor,
            **options,
        )
    return finish(SuiteRun(out), arguments, out=out, gates=gates)


def _source(arguments: CommandLine) -> Any:
    from themis.suites.definition import SUITES

    if arguments.perturb and arguments.suite:
        raise UsageError(f"a suite and --perturb must not both be given, got {arguments.suite!r} too: choose one")
    if not arguments.perturb and not arguments.suite:
        names = "; ".join(f"{name}: {suite.about}" for name, suite in SUITES.items())
        raise UsageError(f"SUITE or --perturb must be given: {names}")
    if arguments.perturb:
        return arguments.perturb
    name = str(arguments.suite)
    reader, colon, path = name.partition(":")
    if colon:  # published files, on which the model is graded
        return f"{reader}:{Path(path).absolute()}"
    return str(Path(name).absolute()) if name.endswith((".yaml", ".yml")) else name


def _describe_suite(source: Any, arguments: CommandLine) -> dict[str, Any]:
    """The suite for the data, or for pictures of 224 pixels if no data is named, without default values."""
    from themis.data.seeds import read_seeds
    from themis.suites.definition import choose_suite

    is_named = arguments.data or arguments.zoo is not None
    shape = read_seeds(named_origin(arguments).read(), 1).shape[1:] if is_named else (3, 224, 224)
    plain = choose_suite(source, shape).plain()
    defaults: list[Any] = [None, "", [], 1.0]
    members = [{key: value for key, value in member.items() if value not in defaults} for member in plain["members"]]
    return {**plain, "members": members}


@contextmanager
def suite_progress(arguments: CommandLine) -> Iterator[SuiteListener]:
    """Gives the trackers of `--track` to every member, and shows the progress unless `--quiet` or `--json` is set."""
    from themis.report.progress import StepBar
    from themis.suites.api import SuiteListener
    from themis.suites.definition import suite_title

    class Shown(SuiteListener):
        trackers: Sequence[Tracker] = ()

        def callbacks_of(self, folder: Path) -> Sequence[Tracker]:
            # TensorBoard needs a separate folder for the event files of each run.
            names = [f"{n}/{folder.name}" if n.startswith("tensorboard:") else n for n in arguments.track or ()]
            self.trackers = choose_trackers(names, str(folder))
            return self.trackers

        def on_start(self, suite: Any, n_seeds: int, max_tests: int) -> None:
            members, seeds = counted(len(suite.members), "perturbation"), counted(n_seeds, "seed")
            tests = f"{max_tests:,} tests, " if max_tests else ""  # none if it is only graded
            for note in (f"{suite_title(suite.name)}: {members}, {tests}{seeds}", *suite.notes):
                bar.note(note)
            bar.start(0, max_tests)

        def on_step(self, step: Any, run: Any, n_tests: int, max_tests: int) -> None:
            close_trackers(self.trackers)
            last = run.rounds[-1]
            found = f"{step.member}: {counted(last.distinct_faults, 'distinct fault')} in {last.tests:,} tests"
            bar.say(found, f"{n_tests:,}/{max_tests:,} {found}", n_tests)

        def on_grades(self, member: str, grades: Any) -> None:
            text = f"{member}: graded at {len(grades)} levels"
            bar.say(text, text, None)

    with closing(StepBar(table_console(is_silent=arguments.is_silent))) as bar:
        yield Shown()
