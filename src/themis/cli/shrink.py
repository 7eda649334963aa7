"""Make faults smaller: find the weakest perturbation with the same noise that still breaks the model, first for all of
theta at once, then dimension by dimension. The result is also written to shrunk.json in the run folder, which is
otherwise left unchanged. The model and the data are rebuilt as recorded in the run.

themis shrink runs/first
themis shrink runs/first 1204 1377 --simplest
themis shrink runs/first --most 100 --curve
"""

from __future__ import annotations

import json
from contextlib import closing
from io import BytesIO
from typing import TYPE_CHECKING, Any

from themis.cli import DONE
from themis.cli.faults import named_faults
from themis.cli.options import CommandLine, Parser, add_option
from themis.cli.source import REPLAY_OPTIONS, add_overrides, rebuild
from themis.errors import UsageError
from themis.options import check_count
from themis.runs.fault import show_outcome
from themis.runs.store.files import check_free, made_by, write_fresh
from themis.runs.store.reader import Reader
from themis.text import counted, print_columns, print_json, print_text

if TYPE_CHECKING:
    from themis.runs.analysis.shrink import ShrunkFault
    from themis.runs.replay import Replayer

N_SHRUNK = 20
SHRUNK_FILE, CURVE_FILE = "shrunk.json", "robustness.png"
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
    add_overrides(parser, REPLAY_OPTIONS)
    output = parser.add_argument_group("output")
    text = (
        f"also shrink one fault of every seed that failed, and plot how many seeds and random disturbances the model "
        f"withstands at each strength, as {CURVE_FILE} in RUN"
    )
    output.add_argument("--curve", action="store_true", help=text)
    output.add_argument("--json", action="store_true", help="print only the result, as JSON")


def execute(arguments: CommandLine) -> int:
    check_count("most", arguments.most)
    if arguments.ids and "most" in arguments.given:
        raise UsageError("--most and fault numbers cannot be combined: leave one of them out")
    from themis.runs.analysis.shrink import robustness, shrink
    from themis.runs.replay import read_run

    remedy = "remove it, or move it elsewhere"
    with closing(Reader(arguments.run)) as run:
        file, picture = run.path / SHRUNK_FILE, run.path / CURVE_FILE
        for path in [file, picture] if arguments.curve else [file]:
            check_free(path, remedy=remedy)
        chosen = named_faults(run, arguments.ids)
        replayer = rebuild(run, arguments.given)
        stored = read_run(replayer)
        faults = chosen or stored.faults.most_telling(arguments.most)
        shrunk = shrink(stored, faults, is_simplest=arguments.simplest)
        still_faults = {fault.id for fault in shrunk}
        lost = [fault.id for fault in faults if fault.id not in still_faults]
        if not arguments.json:
            _print(shrunk, lost, replayer)
        curve = robustness(stored, shrunk) if arguments.curve else None
        result: dict[str, Any] = {
            "faults": [fault.as_dict() for fault in shrunk],
            "no_longer_faults": lost,
            "robustness": None if curve is None else curve.as_dict(),
            "changes": replayer.changes if faults or curve else [],
        }
        content = json.dumps({**made_by("shrink"), **result}, indent=2, allow_nan=False)
        write_fresh(file, content.encode(), remedy=remedy)
        if curve is not None:
            from themis.runs.display.figure import robustness_figure, save_figure

            drawn, title = BytesIO(), f"Robustness by strength ({run.record['perturbation']})"
            save_figure(robustness_figure(curve, title), drawn, dpi=130)
            write_fresh(picture, drawn.getvalue(), remedy=remedy)
    if arguments.json:
        print_json(result)
        return DONE
    if curve is not None:
        print_text("\n".join(curve.lines()))
    if result["changes"]:
        print_text("\n".join(["Changed since the start of the run:", *(f"  {text}" for text in result["changes"])]))
    print_text(f"Details: {file}" + ("" if curve is None else f"; curve: {picture}"))
    return DONE


def _print(shrunk: list[ShrunkFault], lost: list[int], replayer: Replayer) -> None:
    if not shrunk and not lost:
        print_text(f"{replayer.run.path} has no faults to shrink")
        return

    task, classes = replayer.run.task, replayer.run.classes
    if shrunk:
        rows = [HEADERS, *(_row(fault, task, classes) for fault in shrunk)]
        print_columns(rows, [name == "change" for name in HEADERS])
    passes = sum(fault.passes for fault in shrunk)
    print_text(f"Shrank {counted(len(shrunk), 'fault')} in {passes:,} passes", flush=True)
    if lost:
        noun, verb = ("fault", "breaks") if len(lost) == 1 else ("faults", "break")
        print_text(f"{len(lost)} {noun} no longer {verb} the model: {', '.join(map(str, lost))}")


def _row(fault: ShrunkFault, task: str, classes: list[str] | None) -> tuple[str, ...]:
    answer, before = (show_outcome(task, outcome, classes) for outcome in (fault.answer, fault.answer_before))
    return (
        str(fault.id),
        str(fault.seed_id),
        f"{fault.strength_before:.3g} -> {fault.strength:.3g}",
        f"{fault.distance:.3g}",
        answer if fault.is_same else f"{answer}, was {before}",
        fault.sentence,
    )
