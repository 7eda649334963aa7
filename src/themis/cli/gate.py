"""`themis gate`: check a finished run against limits.

The options and the output of the gates are shared with `themis run` and `themis resume`, which can check their run at
its end.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from themis.cli import DONE, GATE_FAILED
from themis.cli.options import Group, Option, Parser, Repeated, add_fields, add_option, explicit_values
from themis.cli.source import REPLAY_OPTIONS, TRUST_HELP, rebuild
from themis.errors import StoreError, UsageError
from themis.runs.source import Origin
from themis.text import one_line, print_json, print_text

if TYPE_CHECKING:
    from argparse import Namespace

    from themis.report.gates.gates import GateResult, GateResults, Gates
    from themis.report.gates.suite import SuiteGateResults
    from themis.runs.run import Run
    from themis.suites.result import CorruptionErrors

HELP = (
    "Check a finished run against limits and print one line per gate, with its value, its limit and what to do. The "
    "exit code is 0 if all gates pass and 1 if one fails. New faults are found by running the faults of both runs on "
    "both models, not by comparing their numbers. The limits of a suite hold for every perturbation. The results are "
    "recorded in the folder as gates.json, and shown in its report. "
    f"{TRUST_HELP}"
)
EXAMPLES = """
themis gate runs/new --fail-under coverage=0.99 --max-fault-rate 0.05
themis gate runs/new --max-new-faults 0 --baseline runs/main
themis gate runs/new --max-fault-rate 0.05 --junit gates.xml --markdown "$GITHUB_STEP_SUMMARY"
"""
KNOWN_METRICS = (
    "coverage, coverage_all, coverage_low, coverage_uniform, recall, clean_accuracy, clean_iou, clean_map, criterion"
)
BASELINE_REMEDY = "name the model of the baseline with --baseline-weights FILE or --baseline-model MODEL"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run, or of a suite")
    add_gates(parser)
    add_mce(parser)
    source = parser.add_argument_group("model and data, if they have moved")
    add_fields(source, Origin, only=REPLAY_OPTIONS, shows_default=False)
    output = parser.add_argument_group("output")
    output.add_argument("-q", "--quiet", action="store_true", help="print only the gates that fail")
    output.add_argument("--json", action="store_true", help="print only the result, as JSON")


def add_gates(parser: Parser) -> None:
    """Add the options of the gates."""
    group = parser.add_argument_group("gates (exit code 1 if one fails)")
    text = f"fail if a metric is below a limit, such as coverage=0.99; can be repeated. Metrics: {KNOWN_METRICS}"
    _add(group, "--fail-under", "METRIC=X", text, Repeated, list[str] | None)
    text = "fail if the fault rate may exceed this: the upper end of its 95% interval in the uniform stream"
    add_option(group, "max_fault_rate", float | None, None, text)
    text = "let --max-fault-rate pass although the clean answers are all the same, or no better than a constant"
    add_option(group, "allow_constant", bool, False, text)
    text = "fail if there are more new faults than this: faults that do not break the model of the baseline"
    add_option(group, "max_new_faults", int | None, None, text)
    _add(group, "--baseline", "RUN", "folder of the run to compare with for new faults")
    _add(group, "--baseline-weights", "FILE", "weights of the baseline's model, if they have moved")
    _add(group, "--baseline-model", "MODEL", "model of the baseline, if it is built differently now")
    _add(
        group,
        "--junit",
        "FILE",
        "write the gates as JUnit XML, one test case per gate; replaces only a file of Themis",
    )
    _add(group, "--markdown", "FILE", "append a summary in Markdown to a file such as $GITHUB_STEP_SUMMARY")


def add_mce(parser: Parser) -> None:
    """Add the options of the mean corruption error of a suite."""
    group = parser.add_argument_group("mean corruption error of a suite")
    text = "model that mCE is relative to: the folder of its suite, or a file with its errors by perturbation"
    _add(group, "--mce-baseline", "SUITE", text)
    text = "fail if mCE exceeds this share of the errors of the baseline; 1 is as many"
    add_option(group, "max_mce", float | None, None, text)


def check_mce_options(arguments: Namespace, *, is_suite: bool) -> None:
    """Refuse a limit on mCE without a baseline or without a suite, and a baseline that does not exist."""
    baseline, most = arguments.mce_baseline, arguments.max_mce
    if not is_suite and (baseline is not None or most is not None):
        raise UsageError(f"--max-mce and --mce-baseline are for suites, but {arguments.run} is a run: leave them out")
    if most is not None and baseline is None:
        raise UsageError("--max-mce must be given with --mce-baseline: name the suite of the baseline")
    if most is not None and most < 0:
        raise UsageError(f"--max-mce must be 0 or more, got {most:g}: 1 allows as many errors as the baseline makes")
    if baseline is not None and not Path(baseline).exists():
        raise UsageError(f"--mce-baseline must be the folder of a suite or a file, but {baseline} does not exist")


def _add(group: Group, flag: str, metavar: str, text: str, action: Any = Option, kind: Any = str | None) -> None:
    text = text.replace("%", "%%")
    group.add_argument(flag, action=action, kind=kind, is_required=False, default=None, metavar=metavar, help=text)


def execute(arguments: Namespace, explicit_options: set[str]) -> int:
    gates = read_gates(arguments)
    from themis.suites.folder import is_suite

    check_mce_options(arguments, is_suite=is_suite(arguments.run))
    if not is_requested(arguments, gates):
        raise UsageError(
            "a gate must be given, such as --max-fault-rate 0.05 or --fail-under coverage=0.99: see --help"
        )
    from themis.runs.store.reader import Reader

    if is_suite(arguments.run):
        return gate_suite(arguments, gates, explicit_values(arguments, REPLAY_OPTIONS, explicit_options))
    with closing(Reader(arguments.run)) as run:
        replayer = rebuild(run, explicit_values(arguments, REPLAY_OPTIONS, explicit_options))
        results = check(replayer, gates, arguments, folder=None)
    if results.folder is not None and (results.folder / "report.html").is_file():
        from themis.report.page import write_report

        folder = results.folder
        attempt(f"write the report of {folder}", lambda: write_report(folder))
    write_files(results, arguments)
    if arguments.json:
        print_json(json.dumps({"run": arguments.run, **results.as_dict()}, indent=2, allow_nan=False))
    return print_results(results, arguments)


def read_gates(arguments: Namespace) -> Gates:
    """The requested gates; rejects files that cannot be written before anything runs."""
    from themis.report.gates.gates import Gates
    from themis.runs.store.files import check_free

    for name in ("junit", "markdown"):
        path = getattr(arguments, name)
        if path is not None and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
            raise UsageError(f"--{name} must be a file in an existing folder, got {path}: create the folder first")
    if arguments.junit is not None:
        check_free(Path(arguments.junit), remedy="choose another, or remove it")
    has_baseline_model = arguments.baseline_weights is not None or arguments.baseline_model is not None
    if has_baseline_model and arguments.baseline is None:
        raise UsageError("--baseline must be given with --baseline-weights and --baseline-model: name the run")
    limits = (arguments.max_fault_rate, arguments.max_new_faults, arguments.baseline)
    return Gates.of(arguments.fail_under or (), *limits, allow_constant=arguments.allow_constant)


def is_requested(arguments: Namespace, gates: Gates) -> bool:
    """Whether there is anything to check or to write."""
    is_limited = bool(gates) or getattr(arguments, "max_mce", None) is not None
    return is_limited or arguments.junit is not None or arguments.markdown is not None


def check(run: Any, gates: Gates, arguments: Namespace, *, folder: str | None) -> GateResults:
    """Check a run against the gates, and record the results in its folder."""
    from themis.report.gates.gates import check_gates
    from themis.report.gates.limits import open_baseline
    from themis.report.gates.record import record_gates

    values = {
        "model": arguments.baseline_model,
        "weights": arguments.baseline_weights,
        "trust": arguments.trust,
    }
    overrides = {name: value for name, value in values.items() if value is not None}
    with ExitStack() as stack:
        if overrides and arguments.baseline is not None:
            reader = stack.enter_context(closing(open_baseline(arguments.baseline)))
            gates = replace(gates, baseline=rebuild(reader, overrides))
        results = check_gates(run, gates, folder=folder, remedy=BASELINE_REMEDY)
    if (own := results.folder) is not None:
        attempt(f"record the gates in {own}", lambda: record_gates(own, results, gates.max_fault_rate))
    return results


def write_files(results: GateResults, arguments: Namespace) -> None:
    """Write the results to the requested files."""
    from themis.report.gates.gates import write_junit, write_markdown

    page = None if results.folder is None else results.folder / "report.html"
    report = page if page is not None and page.is_file() else None
    if arguments.junit is not None:
        write_junit(arguments.junit, results, report=report)
    if arguments.markdown is not None:
        write_markdown(arguments.markdown, results, report=report)


def attempt(purpose: str, write: Callable[[], object]) -> None:
    """Write into the folder of a run, if it can be written; a file that must not be replaced is reported."""
    try:
        write()
    except StoreError:  # a full disk, or a folder that may only be read, does not keep anybody from checking a run
        pass
    except Exception as error:
        print_text(f"themis: could not {purpose}: {one_line(str(error))}", file=sys.stderr)


def gate_suite(arguments: Namespace, gates: Gates, overrides: dict[str, Any]) -> int:
    """Check a suite against the gates, write the requested files and print the results; returns the exit code."""
    results, errors = check_suite(arguments.run, gates, arguments, overrides)
    if (Path(arguments.run) / "report.html").is_file():
        from themis.report.suite import write_suite_report
        from themis.suites.result import SuiteRun

        attempt(
            f"write the report of {arguments.run}",
            lambda: write_suite_report(SuiteRun(arguments.run), errors=errors),
        )
    write_suite_files(results, arguments)
    if arguments.json:
        print_json(json.dumps({"suite": arguments.run, **results.as_dict()}, indent=2, allow_nan=False))
    return print_suite_results(results, arguments)


def check_suite(
    path: str, gates: Gates, arguments: Namespace, overrides: dict[str, Any]
) -> tuple[SuiteGateResults, CorruptionErrors | None]:
    """Check every member of a suite against the gates and record the results; also the errors that mCE is made of."""
    from themis.report.gates.record import record_suite_gates
    from themis.report.gates.suite import check_mce, check_suite_gates
    from themis.suites.result import SuiteRun

    values = {"model": arguments.baseline_model, "weights": arguments.baseline_weights, "trust": arguments.trust}
    of_baseline = {name: value for name, value in values.items() if value is not None}
    suite = SuiteRun(path)
    results = check_suite_gates(
        suite,
        replace(gates, trust=arguments.trust or False),
        rebuild=lambda run: rebuild(run, overrides),
        rebuild_baseline=lambda run: rebuild(run, of_baseline),
        remedy=BASELINE_REMEDY,
    )
    errors = None if arguments.mce_baseline is None else suite.corruption_errors(arguments.mce_baseline)
    if arguments.max_mce is not None and errors is not None:
        results = replace(results, overall=check_mce(suite, arguments.max_mce, errors))
    attempt(f"record the gates in {path}", lambda: record_suite_gates(suite, results, gates.max_fault_rate))
    return results, errors


def write_suite_files(results: SuiteGateResults, arguments: Namespace) -> None:
    """Write the results of a suite to the requested files."""
    from themis.report.gates.formats import append_markdown
    from themis.report.gates.gates import write_junit

    page = Path(results.suite) / "report.html"
    report = page if page.is_file() else None
    if arguments.junit is not None:
        write_junit(arguments.junit, [part for _, part in results.parts], report=report)
    if arguments.markdown is not None:
        append_markdown(arguments.markdown, results.markdown(report))


def print_suite_results(results: SuiteGateResults, arguments: Namespace) -> int:
    """Print a table of the members' gates, or only the lines of the failed ones with --quiet; returns the exit code."""
    if not arguments.json and getattr(arguments, "quiet", False):
        for line in results.failed_lines:
            print_text(line, file=sys.stderr)
    elif not arguments.json:
        from themis.report.table import Table, table_console

        rows: list[tuple[str, ...]] = [
            ("passed" if result.has_passed else "FAILED", name, result.gate, *_value_and_limit(result))
            for name, result in results.results
        ]
        remedies = [f"{name}: {result.remedy}" for name, result in results.results if not result.has_passed]
        notes = [results.sentence, *remedies[:1]]
        Table("Gates", ("result", "perturbation", "gate", "value", "limit"), rows, notes).show(table_console())
    return GATE_FAILED if results.has_failed else DONE


def _value_and_limit(result: GateResult) -> tuple[str, str]:
    """The value of a gate that is compared with its limit, and the limit, with the digits to tell them apart."""
    from themis.report.gates.gates import distinguishable

    if result.value is None or result.limit is None:
        return result.text, ""
    if result.gate == "max_new_faults":
        return f"{result.value:,.0f}", f"{result.limit:,.0f}"
    value, limit = distinguishable(result.value, result.limit, result.gate != "criterion")
    return value, limit


def check_finished(result: Run, gates: Gates | None, arguments: Namespace, *, folder: str | None) -> GateResults | None:
    """Check a campaign that has just stopped; None if no gate was requested, or if the user stopped it."""
    if gates is None or result.stop_reason == "user" or not is_requested(arguments, gates):
        return None
    return check(result, gates, arguments, folder=folder)


def print_results(results: GateResults | None, arguments: Namespace) -> int:
    """Print one line per gate, or only the failed ones with --quiet; returns the exit code."""
    if results is None:
        return DONE
    is_quiet = getattr(arguments, "quiet", False)
    if not arguments.json:
        for result in results.results:
            if not (is_quiet and result.has_passed):
                print_text(result.line, file=sys.stderr if is_quiet else sys.stdout)
    return GATE_FAILED if results.has_failed else DONE
