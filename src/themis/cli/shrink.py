"""`themis shrink`: find the weakest perturbation that still breaks the model, per fault and as a curve over seeds."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from themis.cli import DONE
from themis.cli.faults import read_ids
from themis.cli.options import Parser, add_fields, add_option, explicit_values
from themis.cli.output import analysis_progress
from themis.cli.source import REPLAY_OPTIONS, TRUST_HELP, rebuild
from themis.errors import UsageError
from themis.runs.source import Origin
from themis.text import print_text

if TYPE_CHECKING:
    from argparse import Namespace

    from themis.runs.analysis.robustness import Robustness
    from themis.runs.analysis.shrink import ShrunkFault
    from themis.runs.fault import Fault
    from themis.runs.replay import Replayer
    from themis.runs.store.reader import Reader

HELP = (
    "Make faults smaller: find the weakest perturbation with the same noise that still breaks the model, first for all "
    "of theta at once, then dimension by dimension. The result is also written to shrunk.json in the run folder, which "
    "is otherwise left unchanged. The model and the data are rebuilt as recorded in the run. "
    f"{TRUST_HELP}"
)
EXAMPLES = """
themis shrink runs/first
themis shrink runs/first 1204 1377 --simplest
themis shrink runs/first --most 100 --curve
"""
N_SHRUNK = 20
FILE, PICTURE = "shrunk.json", "robustness.png"
HEADERS = ("fault", "seed", "strength", "distance", "answer", "change")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    text = "number of a fault, as listed by `themis faults RUN` (default: the most telling faults)"
    parser.add_argument("ids", metavar="FAULT", nargs="*", help=text)
    which = parser.add_argument_group("which faults")
    add_option(which, "most", int, N_SHRUNK, "number of the most telling faults to shrink, if no FAULT is given")
    method = parser.add_argument_group("method")
    text = "first remove whole dimensions of theta: fewer remain, but they may have to be stronger"
    method.add_argument("--simplest", action="store_true", help=text)
    source = parser.add_argument_group("model and data, if not as recorded in the run")
    add_fields(source, Origin, only=REPLAY_OPTIONS, shows_default=False)
    output = parser.add_argument_group("output")
    text = (
        f"also shrink one fault of every seed that failed, and plot as {PICTURE} in RUN, by strength, the seeds that "
    )
    text += "could not be broken and the random disturbances that were withstood"
    output.add_argument("--curve", action="store_true", help=text)
    output.add_argument("--json", action="store_true", help="print only the result, as JSON")


def execute(arguments: Namespace, explicit_options: set[str]) -> int:
    if arguments.most < 1:
        raise UsageError(f"most must be at least 1, got {arguments.most}")
    if arguments.ids and "most" in explicit_options:
        raise UsageError("--most and fault numbers cannot be combined: leave one of them out")
    from themis.runs.analysis.robustness import robustness
    from themis.runs.analysis.shrink import shrink
    from themis.runs.store.files import check_free, made_by
    from themis.runs.store.reader import Reader

    with closing(Reader(arguments.run)) as run:
        for name in [FILE, PICTURE] if arguments.curve else [FILE]:
            check_free(run.path / name, remedy="remove it, or move it elsewhere")
        ids = read_ids(run, arguments.ids)
        replayer = rebuild(run, explicit_values(arguments, REPLAY_OPTIONS, explicit_options))
        faults = _choose(run, ids, arguments.most)
        with analysis_progress(is_silent=arguments.json) as show:
            shrunk = shrink(replayer, faults, is_simplest=arguments.simplest, on_progress=show)
        still_faults = {fault.id for fault in shrunk}
        lost = [fault.id for fault in faults if fault.id not in still_faults]
        if not arguments.json:
            _print(shrunk, lost, replayer)
        with analysis_progress(is_silent=arguments.json) as show:
            curve = robustness(replayer, shrunk, on_progress=show) if arguments.curve else None
        result = {
            "faults": [fault.as_dict() for fault in shrunk],
            "no_longer_faults": lost,
            "robustness": None if curve is None else curve.as_dict(),
            "changes": replayer.changes if faults or curve else [],
        }
        text = json.dumps(result, indent=2, allow_nan=False)
        _write(run.path / FILE, json.dumps({**made_by("shrink"), **result}, indent=2, allow_nan=False).encode())
        if curve is not None:
            _draw(run, curve)
        if arguments.json:
            print_text(text)
        else:
            _conclude(run.path, curve, result["changes"])
    return DONE


def _choose(run: Reader, ids: list[int], most: int) -> list[Fault]:
    from themis.runs.analysis.shrink import read_faults

    if not ids:
        return read_faults(run).most_telling(most)
    faults = {fault.id: fault for fault in run.faults("id IN (SELECT value FROM json_each(?))", (json.dumps(ids),))}
    return [faults[id] for id in dict.fromkeys(ids)]


def _print(shrunk: list[ShrunkFault], lost: list[int], replayer: Replayer) -> None:
    if not shrunk and not lost:
        print_text(f"{replayer.run.path} has no faults to shrink")
        return
    from themis.report.names import class_names, task_of

    task, classes = task_of(replayer.run), class_names(replayer.run)
    rows = [HEADERS, *(_row(fault, task, classes) for fault in shrunk)] if shrunk else []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        numbers = [cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        print_text("  ".join([*numbers, row[-1]]))
    passes = sum(fault.passes for fault in shrunk)
    print_text(f"Shrank {len(shrunk)} fault{'s' * (len(shrunk) != 1)} in {passes:,} passes", flush=True)
    if lost:
        noun, verb = ("fault", "breaks") if len(lost) == 1 else ("faults", "break")
        print_text(f"{len(lost)} {noun} no longer {verb} the model: {', '.join(map(str, lost))}")


def _row(fault: ShrunkFault, task: str, classes: list[str] | None) -> tuple[str, ...]:
    from themis.runs.fault import show_outcome

    answer, before = (show_outcome(task, outcome, classes) for outcome in (fault.answer, fault.answer_before))
    return (
        str(fault.id),
        str(fault.seed_id),
        f"{fault.strength_before:.3g} -> {fault.strength:.3g}",
        f"{fault.distance:.3g}",
        answer if fault.is_same else f"{answer}, was {before}",
        fault.sentence,
    )


def _write(path: Path, content: bytes) -> None:
    from themis.runs.store.files import write_fresh

    write_fresh(path, content, remedy="remove it, or move it elsewhere")


def _draw(run: Reader, curve: Robustness) -> None:
    from io import BytesIO

    from themis.runs.display.plots import draw_robustness

    picture = BytesIO()
    draw_robustness(curve, picture, title=f"Robustness by strength ({run.record['perturbation']})")
    _write(run.path / PICTURE, picture.getvalue())


def _conclude(folder: Path, curve: Robustness | None, changes: Any) -> None:
    if curve is not None:
        print_text("\n".join(curve.lines()))
    if changes:
        print_text("\n".join(["Changed since the start of the run:", *(f"  {change}" for change in changes)]))
    print_text(f"Details: {folder / FILE}" + ("" if curve is None else f"; curve: {folder / PICTURE}"))
