"""`themis report`: write a run as one HTML file. It only reads the run folder, so it needs no model and no data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from themis.cli import DONE
from themis.cli.options import FORCE_HELP, ONLY_READ_HELP, Parser, add_option
from themis.errors import UsageError
from themis.text import print_text

if TYPE_CHECKING:
    from argparse import Namespace

HELP = (
    "Write a run as one HTML file that opens in any browser without a network: the verdict, the numbers with their "
    "intervals, the faults with pictures, and how to reproduce them. The run may still be in progress. For a suite, "
    f"its page and those of all its perturbations are written. {ONLY_READ_HELP}"
)
EXTENSIONS = (".html", ".htm")
MEMBER_PICTURES = 60
"""Faults with pictures in the report of each member of a suite, at most."""
MCE_HELP = "model that the mCE of a suite is relative to: the folder of its suite, or a file with its errors"
EXAMPLES = """
themis report runs/first
themis report runs/first --out first.html --most-pictures 200
"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run, or of a suite")
    output = parser.add_argument_group("output")
    output.add_argument("--out", metavar="FILE", help="file to write instead of report.html in RUN")
    output.add_argument("--force", action="store_true", help=FORCE_HELP)
    text = "number of faults shown with their inputs, the most telling first; fewer make a smaller file"
    add_option(output, "most_pictures", int, 1000, text)
    add_option(output, "mce_baseline", str | None, None, MCE_HELP)
    output.add_argument("-q", "--quiet", action="store_true", help="print only errors")


def execute(arguments: Namespace, explicit_options: set[str]) -> int:
    if arguments.most_pictures < 0:
        raise UsageError(f"--most-pictures must be 0 or more, got {arguments.most_pictures}: 0 shows none")
    if arguments.out is not None and Path(arguments.out).suffix.lower() not in EXTENSIONS:
        raise UsageError(f"--out must end in .html, since a report is a page, got {arguments.out}: choose another name")
    from themis.report.page import write_report
    from themis.suites.folder import is_suite

    out = None if arguments.out is None else Path(arguments.out)
    if is_suite(arguments.run):
        path = _write_suite(arguments, out)
    else:
        path = write_report(arguments.run, out, most_pictures=arguments.most_pictures, replaces=arguments.force)
    if not arguments.quiet:
        print_text(f"Report: {path} ({path.stat().st_size / 1e6:.1f} MB)")
    return DONE


def _write_suite(arguments: Namespace, out: Path | None) -> Path:
    """Write the report of a suite, and those of its members into their folders."""
    from themis.report.suite import write_suite_report
    from themis.suites.result import SuiteRun

    suite = SuiteRun(arguments.run)
    baseline = arguments.mce_baseline
    errors = None if baseline is None else suite.corruption_errors(baseline)
    most = min(arguments.most_pictures, MEMBER_PICTURES)
    return write_suite_report(suite, out, errors=errors, most_pictures=most, replaces=arguments.force)
