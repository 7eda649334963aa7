"""Write a run as one HTML file that opens in any browser without a network: the verdict, the numbers with their
intervals, the faults with pictures, and how to reproduce them. The run may still be in progress. For a suite, its page
and those of all its perturbations are written. Nothing that the folder names is run.

themis report runs/first
themis report runs/first --out first.html --most-pictures 200
themis report runs/first --evidence evidence/first
"""

from pathlib import Path
from typing import Any

from themis.cli import DONE
from themis.cli.gate import MCE_BASELINE_HELP
from themis.cli.options import FORCE_HELP, CommandLine, Parser, add_option, check_file
from themis.errors import UsageError
from themis.plugins import Extensible
from themis.suites.folder import is_suite
from themis.text import print_text

REPORT_FOLDERS: Extensible[Any] = Extensible("themis.reports", {})
"""What can be written instead of the page, by the option that names its folder; packages add it."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run, or of a suite")
    output = parser.add_argument_group("output")
    output.add_argument("--out", metavar="FILE", help="file to write instead of report.html in RUN")
    for name, module in REPORT_FOLDERS.usable().items():
        text = " ".join((module.__doc__ or "").split()).rstrip(".")
        output.add_argument(f"--{name}", dest=name, metavar="FOLDER", help=text[:1].lower() + text[1:])
    output.add_argument("--force", action="store_true", help=FORCE_HELP)
    text = "number of faults shown with their inputs, the most telling first; fewer make a smaller file"
    add_option(output, "most_pictures", int, 1000, text)
    add_option(output, "mce_baseline", str | None, None, MCE_BASELINE_HELP)
    output.add_argument("-q", "--quiet", action="store_true", help="print only errors")


def execute(arguments: CommandLine) -> int:
    if arguments.most_pictures < 0:
        raise UsageError(f"--most-pictures must be 0 or more, got {arguments.most_pictures}: 0 shows none")
    out = None if arguments.out is None else Path(arguments.out)
    for name in REPORT_FOLDERS:
        if getattr(arguments, name, None) is not None:
            return _write_folder(arguments, name, out)
    if out is not None:
        check_file("--out", out, (".html", ".htm"), replaces=arguments.force)
    from themis.report.page import write_report

    if is_suite(arguments.run):
        from themis.report.suite import MAX_MEMBER_PICTURES, write_suite_report
        from themis.suites.result import SuiteRun

        suite, most = SuiteRun(arguments.run), min(arguments.most_pictures, MAX_MEMBER_PICTURES)
        errors = None if arguments.mce_baseline is None else suite.corruption_errors(arguments.mce_baseline)
        path = write_suite_report(suite, out, errors=errors, most_pictures=most, replaces=arguments.force)
    else:
        path = write_report(arguments.run, out, most_pictures=arguments.most_pictures, replaces=arguments.force)
    if not arguments.quiet:
        print_text(f"Report: {path} ({path.stat().st_size / 1e6:.1f} MB)")
    return DONE


def _write_folder(arguments: CommandLine, name: str, out: Path | None) -> int:
    if out is not None:
        raise UsageError(f"--out must not be given with --{name}, which writes only to its own folder: leave it out")
    text = REPORT_FOLDERS[name].write(arguments.run, getattr(arguments, name), most_pictures=arguments.most_pictures)
    if not arguments.quiet:
        print_text(text)
    return DONE
