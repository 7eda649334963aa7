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
    "intervals, the faults with pictures, and how to reproduce them. The run may still be in progress. "
    f"{ONLY_READ_HELP}"
)
EXAMPLES = """
themis report runs/first
themis report runs/first --out first.html --most-pictures 200
"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    output = parser.add_argument_group("output")
    output.add_argument("--out", metavar="FILE", help="file to write instead of report.html in RUN")
    output.add_argument("--force", action="store_true", help=FORCE_HELP)
    text = "number of faults shown with their inputs, the most telling first; fewer make a smaller file"
    add_option(output, "most_pictures", int, 1000, text)
    output.add_argument("--quiet", action="store_true", help="print only errors")


def execute(arguments: Namespace, explicit_options: set[str]) -> int:
    if arguments.most_pictures < 0:
        raise UsageError(f"--most-pictures must be 0 or more, got {arguments.most_pictures}: 0 shows none")
    from themis.report.page import write_report

    out = None if arguments.out is None else Path(arguments.out)
    path = write_report(arguments.run, out, most_pictures=arguments.most_pictures, replaces=arguments.force)
    if not arguments.quiet:
        print_text(f"Report: {path} ({path.stat().st_size / 1e6:.1f} MB)")
    return DONE
