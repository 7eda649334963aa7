"""`themis replay`: run faults again, in another process, and compare them with what was recorded."""

from __future__ import annotations

import json
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from themis.cli import DONE, GATE_FAILED
from themis.cli.faults import read_ids
from themis.cli.options import Parser, add_fields
from themis.cli.resume import moved
from themis.errors import UsageError, nearest
from themis.report.gates.testing.words import describe_answer
from themis.runs.source import Origin

if TYPE_CHECKING:
    from argparse import Namespace

    from themis.runs.faults import Fault, Replay
    from themis.runs.store.reader import Reader

HELP = (
    "Run faults again and compare them with what was recorded. Model and data are made again as the run remembers "
    "them; the run may be going on. Exit code 0 if every fault shows again as it was, 1 if one does not."
)
EXAMPLES = """
themis replay runs/first 1204
themis replay runs/first 1204 1377 --weights retrained.pt --out replayed.png
"""
PLACES = ("model", "weights", "trust", "data", "features", "bounds", "mean", "std", "oracle", "device")
ENDINGS = (".png", ".npz")
SHOWN = ("id", "seed_id", "perturbation", "theta", "label", "clean_answer", "clean_value")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    parser.add_argument("ids", metavar="FAULT", nargs="+", help="number of a fault, as `themis faults RUN` lists them")
    places = parser.add_argument_group("model and data, if not as the run remembers them")
    add_fields(places, Origin, only=PLACES, shows_default=False)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")
    output.add_argument("--out", metavar="FILE", help="write clean and disturbed inputs as .png or .npz")
    output.add_argument("--force", action="store_true", help="replace the file if it exists")


def execute(arguments: Namespace, said: set[str]) -> int:
    out = None if arguments.out is None else Path(arguments.out)
    if out is not None and out.suffix.lower() not in ENDINGS:
        raise UsageError(f"--out must be a file with a known ending, got {out}: {nearest(out.suffix, ENDINGS)}")
    from themis.runs.replay import Replayer
    from themis.runs.store.export import check_free
    from themis.runs.store.reader import Reader

    if out is not None:
        check_free(out, replaces=arguments.force)

    with closing(Reader(arguments.run)) as run:
        ids = read_ids(run, arguments.ids)
        replayer = Replayer(run, origin=moved(run, arguments, said))
        found = run.faults("id IN (SELECT value FROM json_each(?))", (json.dumps(ids),))
        faults = {fault.id: fault for fault in found}
        replays = []
        for id in dict.fromkeys(ids):
            replay = replayer.replay(faults[id])
            replays.append((faults[id], replay))
            if not arguments.json:
                print(_describe(faults[id], replay, bool(replayer.perturbation.passes)), flush=True)
        if arguments.json:
            every = [_as_object(*each) for each in replays]
            print(json.dumps({"faults": every, "changes": replayer.changes}, indent=2, allow_nan=False))
        else:
            print(_conclude(replays, replayer.changes))
        if out is not None:
            _write(run, replays, out, arguments.force)
    return DONE if all(replay.is_same for _, replay in replays) else GATE_FAILED


def _describe(fault: Fault, replay: Replay, is_attack: bool) -> str:
    theta = ", ".join(f"{name} {value:.4g}" for name, value in fault.theta.items())
    recorded, now = (describe_answer(each.answer, each.value, each.confidence) for each in (fault, replay))
    clean = fault.clean_answer if fault.clean_value is None else f"{fault.clean_value:.6g}"
    said = f"recorded {recorded}, now {now}" if clean is None else f"clean {clean}, recorded {recorded}, now {now}"
    given = ": the recorded one was given to the model" if is_attack and replay.input_gap else ""
    return "\n".join(
        [
            f"fault {fault.id}: seed {fault.seed_id}, {fault.perturbation} with {theta}",
            f"  answer  {said}: {_judge(fault, replay)}",
            f"  input   {_compare(replay.input_gap)}{given}",
            f"  output  {_compare(replay.output_gap)}",
        ]
    )


def _judge(fault: Fault, replay: Replay) -> str:
    if replay.is_same:
        return "the same"
    if not replay.is_fault:
        return "no longer a fault"
    return "the same answer, but another output" if replay.answer == fault.answer else "another fault"


def _compare(gap: float | None) -> str:
    if gap is None:
        return "not kept"
    if gap == 0:
        return "equal to the bit"
    return f"differs by up to {gap:.3g}" if math.isfinite(gap) else "differs in shape, or in values that are not finite"


def _conclude(replays: list[tuple[Fault, Replay]], changes: list[str]) -> str:
    n = sum(replay.is_same for _, replay in replays)
    result = f"{n} of {len(replays)} reproduced"
    if not changes:
        return f"{result}; model, data and environment are as when the run began"
    return "\n".join([f"{result}; not as when the run began:", *(f"  {each}" for each in changes)])


def _as_object(fault: Fault, replay: Replay) -> dict[str, Any]:
    """Plain data; a number that JSON cannot hold is null."""
    return {
        **{name: getattr(fault, name) for name in SHOWN},
        "recorded": {"answer": fault.answer, "value": fault.value, "confidence": _finite(fault.confidence)},
        "now": {"answer": replay.answer, "value": replay.value, "confidence": _finite(replay.confidence)},
        "is_fault": replay.is_fault,
        "is_same": replay.is_same,
        "input": {"is_kept": replay.input_gap is not None, "gap": _finite(replay.input_gap)},
        "output": {"is_kept": replay.output_gap is not None, "gap": _finite(replay.output_gap)},
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _write(run: Reader, replays: list[tuple[Fault, Replay]], path: Path, is_forced: bool) -> None:
    """The inputs as they were replayed, with what the model says to them now."""
    from themis.runs.store.export import fresh_file

    with fresh_file(path, replaces=is_forced) as part, part.open("wb") as file:
        if path.suffix.lower() == ".png":
            from themis.runs.display.figure import draw_pairs

            now = [
                (
                    replace(fault, answer=each.answer, value=each.value, confidence=each.confidence),
                    each.clean_inputs,
                    each.inputs,
                )
                for fault, each in replays
            ]
            title = f"Replayed ({run.record['perturbation']})"
            draw_pairs(now, file, title=title, bounds=run.record["start"]["bounds"])
        else:
            import numpy as np

            names = ("clean_inputs", "inputs", "outputs")
            arrays: dict[str, Any] = {name: np.stack([getattr(each, name) for _, each in replays]) for name in names}
            np.savez(file, id=[fault.id for fault, _ in replays], **arrays)
