"""What commands share: options of the output, progress, result folders and the last lines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from themis.cli import INTERRUPTED
from themis.cli.gate import check_finished, print_results, write_files
from themis.cli.options import Group, add_option
from themis.errors import ModelError
from themis.text import own_stream, print_json, print_text

if TYPE_CHECKING:
    from argparse import Namespace

    from themis.campaign.callback import Callback
    from themis.report.gates.gates import Gates
    from themis.report.trackers import Tracker
    from themis.runs.analysis.bench import OnProgress
    from themis.runs.run import Run

AUTO = "auto"
"""The value of `--out` that stands for a new folder with a name of its own."""


def add_verbosity(group: Group) -> None:
    """Add `--quiet` and `--json`."""
    group.add_argument("-q", "--quiet", action="store_true", help="print only errors")
    group.add_argument("--json", action="store_true", help="print only the summary, as JSON")


def add_verbose(group: Group) -> None:
    """Add `--verbose`."""
    text = "print all figures at the end: sampling, proposals, time, normality and forecasts too"
    group.add_argument("-v", "--verbose", action="store_true", help=text)


def add_report(group: Group) -> None:
    """Add `--no-report`."""
    group.add_argument("--no-report", action="store_true", help="do not write report.html into the folder at the end")


def add_track(group: Group) -> None:
    """Add `--track`."""
    text = "log to tensorboard, mlflow or wandb, in FOLDER/track of the run; NAME:PLACE writes to another place"
    add_option(group, "track", list[str] | None, None, text)


def read_trackers(names: list[str] | None, folder: str | None) -> list[Tracker]:
    """The trackers named by `--track`."""
    if not names:
        return []
    from themis.report.trackers import choose_trackers

    return choose_trackers(names, folder)


def progress_callbacks(arguments: Namespace) -> list[Callback]:
    """The callback that shows the progress in the terminal, unless `--quiet` or `--json` is set."""
    return [] if arguments.quiet or arguments.json else [_show_progress(arguments.verbose)]


def _show_progress(is_verbose: bool) -> Callback:
    """Progress in the terminal; without rich, only the summary."""
    from themis.campaign.callback import Callback

    try:
        from rich.console import Console

        from themis.report.progress import ShowProgress
    except ImportError:

        class ShowSummary(Callback):
            def on_end(self, run: Run) -> None:
                from themis.runs.display.text import summary_lines

                print_text("\n".join(summary_lines(run, is_verbose=is_verbose)))

        return ShowSummary()

    class PatientConsole(Console):
        def on_broken_pipe(self) -> None:
            """Keep the campaign running when the reader of the output has gone; by default, rich exits."""
            self.quiet = True

    return ShowProgress(PatientConsole(file=own_stream(sys.stdout)), is_verbose=is_verbose)


@contextmanager
def analysis_progress(*, is_silent: bool) -> Iterator[OnProgress]:
    """Shows the progress of an analysis: a bar with the time left in a terminal, occasional lines elsewhere."""
    if is_silent:
        from themis.runs.analysis.bench import ignore_progress

        yield ignore_progress
        return
    from rich.progress import TimeRemainingColumn

    from themis.report.progress import StepBar
    from themis.report.table import table_console

    bar, shown = StepBar(table_console(), TimeRemainingColumn(), is_patient=True), ("", 0)

    def show(text: str, n_done: int, n: int) -> None:
        nonlocal shown
        if (text, n) != shown:
            shown = text, n
            bar.start(0, max(n, 1))
        bar.say(text, f"{text}: {n_done:,} of at most {n:,} tests" if n else text, n_done)

    try:
        yield show
    finally:
        bar.stop()


def finish(
    result: Run,
    arguments: Namespace,
    *,
    out: str | None,
    trackers: Sequence[Tracker] = (),
    gates: Gates | None = None,
    writes_report: bool = True,
) -> int:
    """Write the report, check the gates and print where the results are; returns the exit code."""
    is_interrupted = result.stop_reason == "user"
    page = _earlier_page(out)
    try:
        results = check_finished(result, gates, arguments, folder=out)
    finally:  # the page needs no gates
        if not arguments.no_report and (writes_report or (gates and page)):
            page = write_page(out)
    if results is not None:
        write_files(results, arguments)
    if trackers:
        from themis.report.trackers import finish as finish_trackers

        finish_trackers(trackers, *([] if page is None else [Path(page)]))
    if arguments.json:
        gate_results = {} if results is None else {"gates": results.as_dict()}
        print_json(json.dumps({**result.summary(), "out": out, "report": page, **gate_results}, indent=2))
        return INTERRUPTED if is_interrupted else print_results(results, arguments)
    if out and not arguments.quiet:
        print_text(f"Results in {out}" if page is None else f"Report: {page}")
        if len(result.faults):
            print_text(f"List the faults: themis faults {quote(out)}")
        if is_interrupted:
            print_text(f"Resume: themis resume {quote(out)}")
    if is_interrupted:
        return INTERRUPTED
    return print_results(results, arguments)


def _earlier_page(out: str | None) -> str | None:
    """The report that a run folder already has."""
    path = None if out is None else Path(out) / "report.html"
    return str(path) if path is not None and path.is_file() else None


def write_page(out: str | None) -> str | None:
    """Write the report of a run and return its path; a failure is printed, and does not fail the campaign."""
    if out is None:
        return None
    from themis.report.page import write_report

    return attempt_report(out, lambda: write_report(out))


def attempt_report(out: str, write: Callable[[], Path]) -> str | None:
    """Write a report of the folder `out` and return its path; a failure is printed, and None returned."""
    try:
        return str(write())
    except Exception as error:
        text = " ".join(str(error).split())
        remedy = f"themis report {quote(out)} tries again"
        print_text(f"themis: could not write the report: {text}; {remedy}", file=sys.stderr)
        return None


@contextmanager
def point_to_results(out: str | None, *, has_report: bool = False) -> Iterator[None]:
    """If the model fails during a campaign, add to the error where the results so far are, and write their report."""
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
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
