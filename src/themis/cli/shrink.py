"""`themis shrink`: the smallest disturbance that still breaks the model, fault by fault and as a curve over seeds."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from themis.cli import DONE
from themis.cli.faults import read_ids
from themis.cli.options import Parser, add_fields, add_option
from themis.cli.replay import PLACES
from themis.cli.resume import moved
from themis.errors import UsageError
from themis.runs.source import Origin

if TYPE_CHECKING:
    from argparse import Namespace

    from themis.runs.analysis.robustness import Robustness
    from themis.runs.analysis.shrink import Shrunk
    from themis.runs.faults import Fault
    from themis.runs.replay import Replayer
    from themis.runs.store.reader import Reader

HELP = (
    "Make faults smaller: the weakest disturbance with the same noise that still breaks the model, first all of theta "
    "at once, then dimension by dimension. The result also goes to shrunk.json in the run's folder, which is else left "
    "as it is. Model and data are made again as the run remembers them."
)
EXAMPLES = """
themis shrink runs/first
themis shrink runs/first 1204 1377 --simplest
themis shrink runs/first --most 100 --curve
"""
N_SHRUNK = 20
FILE, PICTURE = "shrunk.json", "robustness.png"
HEADERS = ("fault", "seed", "strength", "distance", "answer", "what it takes")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    text = "number of a fault, as `themis faults RUN` lists them; by default the most telling"
    parser.add_argument("ids", metavar="FAULT", nargs="*", help=text)
    which = parser.add_argument_group("which faults")
    add_option(which, "most", int, N_SHRUNK, "this many of the most telling, where none are named")
    how = parser.add_argument_group("how")
    text = "leave out whole dimensions of theta first: few are left, if stronger than all together need to be"
    how.add_argument("--simplest", action="store_true", help=text)
    places = parser.add_argument_group("model and data, if not as the run remembers them")
    add_fields(places, Origin, only=PLACES, shows_default=False)
    output = parser.add_argument_group("output")
    text = f"also shrink a fault of every seed that failed, and draw how many seeds stand what, as {PICTURE} in RUN"
    output.add_argument("--curve", action="store_true", help=text)
    output.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")


def execute(arguments: Namespace, said: set[str]) -> int:
    if arguments.most < 1:
        raise UsageError(f"most must be 1 or more, got {arguments.most}")
    if arguments.ids and "most" in said:
        raise UsageError("--most and numbers of faults must not both be given: leave one out")
    from themis.runs.analysis.robustness import robustness
    from themis.runs.analysis.shrink import shrink
    from themis.runs.replay import Replayer
    from themis.runs.store.reader import Reader

    with closing(Reader(arguments.run)) as run:
        ids = read_ids(run, arguments.ids)
        replayer = Replayer(run, origin=moved(run, arguments, said))
        faults = _choose(run, ids, arguments.most)
        shrunk = shrink(replayer, faults, is_simplest=arguments.simplest)
        lost = [fault.id for fault in faults if fault.id not in {each.id for each in shrunk}]
        if not arguments.json:
            _print(shrunk, lost, replayer)
        curve = robustness(replayer, shrunk) if arguments.curve else None
        result = {
            "faults": [each.as_dict() for each in shrunk],
            "no_longer_faults": lost,
            "robustness": None if curve is None else curve.as_dict(),
            "changes": replayer.changes if faults or curve else [],
        }
        text = json.dumps(result, indent=2, allow_nan=False)
        _write(run.path / FILE, text.encode())
        if curve is not None:
            _draw(run, curve)
        if arguments.json:
            print(text)
        else:
            _conclude(run.path, curve, result["changes"])
    return DONE


def _choose(run: Reader, ids: list[int], most: int) -> list[Fault]:
    from themis.runs.analysis.shrink import read_faults

    if not ids:
        return read_faults(run).most_telling(most)
    found = {fault.id: fault for fault in run.faults("id IN (SELECT value FROM json_each(?))", (json.dumps(ids),))}
    return [found[id] for id in dict.fromkeys(ids)]


def _print(shrunk: list[Shrunk], lost: list[int], replayer: Replayer) -> None:
    if not shrunk and not lost:
        print(f"{replayer.run.path} has no faults to shrink")
        return
    rows = [HEADERS, *map(_row, shrunk)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        numbers = [cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        print("  ".join([*numbers, row[-1]]))
    passes = sum(each.passes for each in shrunk)
    print(f"{len(shrunk)} fault{'s' * (len(shrunk) != 1)} shrunk in {passes:,} passes", flush=True)
    if lost:
        print(f"{len(lost)} no longer break{'s' * (len(lost) == 1)} the model: {', '.join(map(str, lost))}")


def _row(each: Shrunk) -> tuple[str, ...]:
    answer = "not finite" if each.answer < 0 else str(each.answer)
    return (
        str(each.id),
        str(each.seed_id),
        f"{each.strength_before:.3g} -> {each.strength:.3g}",
        f"{each.distance:.3g}",
        answer if each.is_same else f"{answer}, was {each.answer_before}",
        each.sentence,
    )


def _write(path: Path, content: bytes) -> None:
    from themis.runs.store.files import explained, write_file

    with explained(path.parent):
        write_file(path, content)


def _draw(run: Reader, curve: Robustness) -> None:
    from io import BytesIO

    from themis.runs.analysis.robustness import draw_robustness

    picture = BytesIO()
    draw_robustness(curve, picture, title=f"Seeds still right ({run.record['perturbation']})")
    _write(run.path / PICTURE, picture.getvalue())


def _conclude(folder: Path, curve: Robustness | None, changes: Any) -> None:
    if curve is not None:
        print("\n".join(curve.sentences()))
    if changes:
        print("\n".join(["not as when the run began:", *(f"  {each}" for each in changes)]))
    print(f"{folder / FILE} has all of it" + ("" if curve is None else f", {folder / PICTURE} the curve"))
