"""Check a finished run against limits and print each gate with its value, its limit and what to do. The exit code is 0
if all gates pass, 1 if one fails, and 4 if only the claim of --decide is undecided. New faults are found by running the
faults of both runs on both models, not by comparing their numbers. The limits of a suite hold for every perturbation.
The results are recorded in the folder as gates.json, and shown in its report.

themis gate runs/new --fail-under coverage=0.99 --max-fault-rate 0.05
themis gate runs/new --max-fault-rate 0.05 --slice-by class,scenes.csv:weather
themis gate runs/new --max-valid-fault-rate 0.02
themis gate runs/new --max-new-faults 0 --baseline runs/main
themis gate runs/new --max-fault-rate 0.05 --junit gates.xml --markdown "$GITHUB_STEP_SUMMARY"
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from themis.cli import DONE, GATE_FAILED, UNDECIDED
from themis.cli.options import CommandLine, Parser, add_option
from themis.cli.source import REPLAY_OPTIONS, add_overrides, rebuild
from themis.errors import StoreError, UsageError
from themis.runs.store.files import check_free
from themis.runs.store.reader import Reader
from themis.suites.folder import is_suite
from themis.text import one_line, print_json, print_text, wrapped

if TYPE_CHECKING:
    from themis.report.gates.gates import Gates
    from themis.report.gates.results import GateResults
    from themis.suites.result import CorruptionErrors, SuiteRun

KNOWN_METRICS = (
    "coverage, coverage_all, coverage_low, coverage_uniform, recall, clean_accuracy, clean_iou, clean_map, criterion"
)
MCE_BASELINE_HELP = (
    "baseline of mCE: the folder of another suite, a file with errors by perturbation, or alexnet for published mCE"
)
BASELINE_REMEDY = "name the model of the baseline with --baseline-weights FILE or --baseline-model MODEL"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run, or of a suite")
    add_gates(parser)
    text = (
        "columns for whose slices --max-fault-rate holds too: class, FILE:COLUMN of a CSV file with a row per input of "
        "the data, or several, separated by commas; by default those that the run was given"
    )
    add_option(parser.add_argument_group("slices"), "slice_by", str | None, None, text)
    text = "fail if the rate of valid faults may exceed this, by the marks of themis review"
    add_option(parser, "max_valid_fault_rate", float | None, None, text)
    add_mce(parser)
    add_overrides(parser, REPLAY_OPTIONS)
    output = parser.add_argument_group("output")
    output.add_argument("-q", "--quiet", action="store_true", help="print only the gates that fail")
    output.add_argument("--json", action="store_true", help="print only the result, as JSON")


def add_gates(parser: Parser) -> None:
    """Add the options of the gates."""
    group = parser.add_argument_group("gates (exit code 1 if one fails)")
    text = f"fail if a metric is below a limit, such as coverage=0.99; can be repeated. Metrics: {KNOWN_METRICS}"
    add_option(group, "fail_under", list[str] | None, None, text, metavar="METRIC=X")
    text = "fail if the fault rate may exceed this: the upper end of its 95% interval in the uniform stream"
    add_option(group, "max_fault_rate", float | None, None, text)
    text = "let --max-fault-rate pass although the clean answers are all the same, or no better than a constant"
    add_option(group, "allow_constant", bool, False, text)
    text = "fail if there are more new faults than this: faults that do not break the model of the baseline"
    add_option(group, "max_new_faults", int | None, None, text)
    text = "folder of the run to compare with for new faults"
    add_option(group, "baseline", str | None, None, text)
    text = "weights of the baseline's model, if they have moved"
    add_option(group, "baseline_weights", str | None, None, text)
    text = "model of the baseline, if it is built differently now"
    add_option(group, "baseline_model", str | None, None, text)
    text = "write the gates as JUnit XML, one test case per gate; replaces only a file of Themis"
    add_option(group, "junit", str | None, None, text)
    text = "append a summary in Markdown to a file such as $GITHUB_STEP_SUMMARY"
    add_option(group, "markdown", str | None, None, text)


def add_mce(parser: Parser) -> None:
    """Add the options of the mean corruption error of a suite."""
    group = parser.add_argument_group("mean corruption error of a suite")
    add_option(group, "mce_baseline", str | None, None, MCE_BASELINE_HELP)
    text = "fail if mCE exceeds this share of the errors of the baseline; 1 allows as many"
    add_option(group, "max_mce", float | None, None, text)


def check_mce_options(arguments: CommandLine, *, is_suite: bool) -> None:
    """Refuse a limit on mCE without a baseline or without a suite, and a baseline that does not exist."""
    baseline, most = arguments.mce_baseline, arguments.max_mce
    if not is_suite and (baseline is not None or most is not None):
        raise UsageError(f"--max-mce and --mce-baseline are for suites, but {arguments.run} is not one: leave them out")
    if most is not None and baseline is None:
        raise UsageError("--max-mce must be given with --mce-baseline: name the suite of the baseline")
    if most is not None and most < 0:
        raise UsageError(f"--max-mce must be 0 or more, got {most:g}: 1 allows as many errors as the baseline makes")
    if baseline not in (None, "alexnet") and not Path(baseline).exists():
        raise UsageError(f"--mce-baseline must be a suite, a file or alexnet, but {baseline} does not exist")


def execute(arguments: CommandLine) -> int:
    gates = read_gates(arguments, slice_by=arguments.slice_by)

    is_of_suite = is_suite(arguments.run)
    check_mce_options(arguments, is_suite=is_of_suite)
    if not is_requested(arguments, gates) and not _has_claim(arguments.run):
        raise UsageError("a gate must be given, such as --max-fault-rate 0.05 or --fail-under coverage=0.9: see --help")
    if is_of_suite:
        from themis.suites.result import SuiteRun

        suite = SuiteRun(arguments.run)
        errors = read_errors(suite, arguments)
        results = check(suite, gates, arguments, errors=errors, given=arguments.given)
    else:
        from themis.runs.replay import read_run

        with closing(Reader(arguments.run)) as run:
            results, errors = check(read_run(rebuild(run, arguments.given)), gates, arguments), None
    write_files(results, arguments)
    if results.folder is not None and (results.folder / "report.html").is_file():
        write_page(str(results.folder), errors)  # with the gates
    if arguments.json:
        print_json({"suite" if is_of_suite else "run": arguments.run, **results.as_dict()})
    return print_results(results, arguments)


def write_page(out: str, errors: CorruptionErrors | None = None) -> str | None:
    """Write the report of a run or a suite and return its path; a failure is only printed."""
    from themis.report.page import write_report
    from themis.report.suite import write_suite_report
    from themis.suites.result import SuiteRun

    try:
        return str(write_suite_report(SuiteRun(out), errors=errors) if is_suite(out) else write_report(out))
    except Exception as error:
        text = f"could not write the report: {one_line(str(error))}; themis report {quote(out)} tries again"
        print_text(f"themis: {text}", file=sys.stderr)
        return None


def read_gates(arguments: CommandLine, *, slice_by: str | None = None) -> Gates:
    """The requested gates; refuses files that cannot be written."""
    from themis.report.gates.gates import Gates

    markdown = arguments.markdown
    if markdown is not None and (Path(markdown).is_dir() or not Path(markdown).absolute().parent.is_dir()):
        raise UsageError(f"--markdown must be a file in an existing folder, got {markdown}: create the folder first")
    if arguments.junit is not None:
        check_free(Path(arguments.junit), remedy="choose another, or remove it")
    has_baseline_model = arguments.baseline_weights is not None or arguments.baseline_model is not None
    if has_baseline_model and arguments.baseline is None:
        raise UsageError("--baseline must be given with --baseline-weights and --baseline-model: name the run")
    names = ("max_fault_rate", "max_new_faults", "baseline", "allow_constant")
    limits = {name: getattr(arguments, name) for name in names}
    valid = getattr(arguments, "max_valid_fault_rate", None)  # a new run has no marks
    return Gates.of(arguments.fail_under or (), **limits, slice_by=slice_by, max_valid_fault_rate=valid)


def is_requested(arguments: CommandLine, gates: Gates) -> bool:
    """Whether there is anything to check or to write."""
    is_limited = bool(gates) or getattr(arguments, "max_mce", None) is not None
    return is_limited or arguments.junit is not None or arguments.markdown is not None


def _has_claim(path: str) -> bool:
    """Whether a campaign or a suite has a claim to decide, which is then a gate."""
    if is_suite(path):
        from themis.suites.result import SuiteRun

        return SuiteRun(path).decision is not None
    with closing(Reader(path, is_brief=True)) as run:
        return run.record["settings"].get("decide") is not None


def check(
    run: Any,
    gates: Gates,
    arguments: CommandLine,
    *,
    folder: str | None = None,
    errors: CorruptionErrors | None = None,
    given: Mapping[str, Any] | None = None,
) -> GateResults:
    """Check a run or a suite, and record the results.

    errors: the corruption errors of a suite, for the limit on mCE. given: options that say where its model is.
    """
    from themis.report.gates.gates import check_gates, check_mce, check_suite_gates
    from themis.runs.replay import read_run
    from themis.suites.result import SuiteRun

    moved = {"model": arguments.baseline_model, "weights": arguments.baseline_weights, "trust": arguments.trust}
    moved = {name: value for name, value in moved.items() if value is not None}  # of the baseline
    if isinstance(run, SuiteRun):
        results = check_suite_gates(
            run,
            replace(gates, trust=arguments.trust or False),
            rebuild=lambda member: rebuild(member, given or {}),
            rebuild_baseline=lambda member: rebuild(member, moved),
            remedy=BASELINE_REMEDY,
        )
        if arguments.max_mce is not None and errors is not None:
            results = replace(results, results=(*results.results, check_mce(arguments.max_mce, errors)))
    else:
        with ExitStack() as stack:
            if moved and arguments.baseline is not None:
                reader = stack.enter_context(closing(Reader(arguments.baseline)))
                gates = replace(gates, baseline=read_run(rebuild(reader, moved)))
            results = check_gates(run, gates, folder=folder, remedy=BASELINE_REMEDY)
    _record(results)
    return results


def read_errors(suite: SuiteRun, arguments: CommandLine) -> CorruptionErrors | None:
    """The corruption errors of a suite, if the user has named a baseline."""
    return None if arguments.mce_baseline is None else suite.corruption_errors(arguments.mce_baseline)


def _record(results: GateResults) -> None:
    """Record the results in their folder, if it can be written; a file that must not be replaced is reported."""
    from themis.report.gates.results import record_gates

    try:
        record_gates(results)
    except StoreError:  # gates can also be checked on a full disk or in a read-only folder
        pass
    except Exception as error:
        print_text(f"themis: could not record the gates in {results.folder}: {one_line(str(error))}", file=sys.stderr)


def write_files(results: GateResults, arguments: CommandLine) -> None:
    """Write the results to the requested files."""
    from themis.report.gates.results import write_junit, write_markdown

    page = None if results.folder is None else results.folder / "report.html"
    report = page if page is not None and page.is_file() else None
    if arguments.junit is not None:
        write_junit(arguments.junit, results, report=report)
    if arguments.markdown is not None:
        write_markdown(arguments.markdown, results, report=report)


def print_results(results: GateResults | None, arguments: CommandLine) -> int:
    """Print the gates, with --quiet only failed ones; return the exit code."""
    if results is None:
        return DONE
    if getattr(arguments, "quiet", False) and not arguments.json:
        for line in results.failed_lines:
            print_text(line, file=sys.stderr)
    elif not arguments.json:
        overall = [] if results.members is None else [results.sentence]
        print_text(wrapped("\n".join([*results.lines, *overall]), 8))
    if results.is_undecided:
        return UNDECIDED
    return GATE_FAILED if results.has_failed else DONE
