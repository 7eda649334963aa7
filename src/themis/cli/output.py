"""Output that commands share: its options, progress, result folders and the last lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from itertools import chain, count
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from themis.campaign.callback import Callback
from themis.cli import INTERRUPTED
from themis.cli.gate import check, is_requested, print_results, read_errors, write_files, write_page
from themis.cli.options import CommandLine, Group, add_option
from themis.errors import ModelError
from themis.report.table import Table, table_console
from themis.report.tracking import TRACKERS, Tracker, close_trackers
from themis.text import counted, own_stream, print_json, print_text

if TYPE_CHECKING:
    from themis.report.gates.gates import Gates
    from themis.report.progress import ShowCells
    from themis.runs.run import Run
    from themis.suites.result import CorruptionErrors, SuiteRun

AUTO = "auto"
"""The value of `--out` that stands for a new folder, named after the time."""


def add_verbosity(group: Group) -> None:
    """Add `--quiet` and `--json`."""
    group.add_argument("-q", "--quiet", action="store_true", help="print only errors")
    group.add_argument("--json", action="store_true", help="print only the summary, as JSON")


def add_campaign_output(group: Group) -> None:
    """Add `--no-report`, `--quiet`, `--json` and `--verbose`."""
    group.add_argument("--no-report", action="store_true", help="do not write report.html into the folder at the end")
    add_verbosity(group)
    text = "print all figures at the end: sampling, proposals, time, normality and forecasts too"
    group.add_argument("-v", "--verbose", action="store_true", help=text)


def add_track(group: Group) -> None:
    """Add `--track`."""
    text = f"log to {', '.join(TRACKERS)}, in FOLDER/track of the run; NAME:PLACE writes to another place"
    add_option(group, "track", list[str] | None, None, text)


def progress_callbacks(arguments: CommandLine) -> list[Callback]:
    """The callback that shows the progress in the terminal, unless `--quiet` or `--json` is set."""
    if arguments.is_silent:
        return []
    from rich.console import Console

    from themis.report.progress import ShowProgress

    class PatientConsole(Console):
        def on_broken_pipe(self) -> None:
            """Keep the campaign running when the reader of the output has gone; by default, rich exits."""
            self.quiet = True

    return [ShowProgress(PatientConsole(file=own_stream(sys.stdout)), is_verbose=arguments.verbose)]


@contextmanager
def shown_cells(arguments: CommandLine, out: Path) -> Iterator[ShowCells]:
    """Shows the steps of an experiment, unless `--quiet` or `--json` is set; Ctrl-C prints how to resume it."""
    from themis.report.progress import ShowCells

    with closing(ShowCells(table_console(is_silent=arguments.is_silent))) as progress:
        try:
            yield progress
        except KeyboardInterrupt:
            progress.close()
            kept = f"{progress.n_done:,} of {counted(progress.n_cells, progress.noun)} are kept"
            again = f"To resume, use the same command with --out {quote(str(out))}"
            progress.on_note(
                f"Interrupted; {kept}. {again}" if progress.n_cells else "Interrupted before the first step"
            )
            raise


def finish(
    result: Run | SuiteRun,
    arguments: CommandLine,
    *,
    out: str | None,
    trackers: Sequence[Tracker] = (),
    gates: Gates | None = None,
    writes_report: bool = True,
) -> int:
    """Write the report, check the gates, print where the results are (`out`), and return the exit code."""
    from themis.suites.result import SuiteRun

    if isinstance(result, SuiteRun):
        is_interrupted, errors = result.state == "interrupted", read_errors(result, arguments)
    else:
        is_interrupted, errors = result.stop_reason == "user", None
    before = None if out is None else Path(out) / "report.html"
    page = str(before) if before is not None and before.is_file() else None  # written before the run was resumed
    results = None
    try:
        if gates is not None and not is_interrupted and (is_requested(arguments, gates) or result.decision):
            results = check(result, gates, arguments, folder=out, errors=errors)
    finally:  # the page is written even if a gate cannot be checked
        if out is not None and not arguments.no_report and (writes_report or (gates and page)):
            page = write_page(out, errors)
    if results is not None:
        write_files(results, arguments)
    close_trackers(trackers, *([] if page is None else [Path(page)]))
    if arguments.json:
        more: dict[str, Any] = {} if errors is None else {"corruption_errors": asdict(errors)}
        more |= {} if results is None else {"gates": results.as_dict()}
        print_json({**result.summary(), "out": out, "report": page, **more})
    elif out and not arguments.quiet:
        can_resume = is_interrupted
        if isinstance(result, SuiteRun):
            _show_suite(result, errors)
            can_resume = result.state != "ended"
        if page is None or isinstance(result, SuiteRun):
            print_text(f"Results in {out}")
        if page is not None:
            print_text(f"Report: {page}")
        if not isinstance(result, SuiteRun) and len(result.faults):
            print_text(f"List the faults: themis faults {quote(out)}")
        if can_resume:
            print_text(f"Resume: themis resume {quote(out)}")
    return INTERRUPTED if is_interrupted else print_results(results, arguments)


def _show_suite(suite: SuiteRun, errors: CorruptionErrors | None) -> None:
    from themis.suites.definition import suite_title
    from themis.suites.result import COLUMNS, sentences, slice_sentences, table_rows

    notes = [*sentences(suite, errors), *slice_sentences(suite)]
    notes += ["Stopped because the time of the suite is over."] * (suite.state == "out of time")
    title, optional = suite_title(suite.name), ("magnitude", "time")
    Table(title, COLUMNS, table_rows(suite), notes, optional, "report.html").show(table_console())


@contextmanager
def point_to_results(out: str | None, *, has_report: bool = False) -> Iterator[None]:
    """If the model fails during a campaign, write the report and say in the error where the results so far are."""
    try:
        yield
    except ModelError as error:
        if out is None or not (Path(out) / "run.sqlite").exists():
            raise
        if has_report:
            write_page(out)
        text = f"{error}; the results so far are in {out}, and themis resume {quote(out)} continues"
        raise ModelError(text) from (error.__cause__ or error)


def new_folder(prefix: str = "") -> Path:
    """An unused folder in `runs`, named after the time."""
    return unused_path(Path("runs") / f"{prefix}{time.strftime('%Y%m%d-%H%M%S')}")


def unused_path(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, ... that does not exist."""
    candidates = chain([path], (path.with_name(f"{path.name}-{number}") for number in count(2)))
    return next(candidate for candidate in candidates if not candidate.exists())
