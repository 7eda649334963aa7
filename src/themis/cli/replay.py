"""Run faults again and compare them with the recorded ones. The model and the data are rebuilt as recorded in the run,
which may still be in progress. The exit code is 0 if every fault is reproduced, and 1 if one is not.

themis replay runs/first 1204
themis replay runs/first 1204 1377 --weights retrained.pt
"""

import math
from contextlib import closing
from typing import Any

from themis.cli import DONE, GATE_FAILED
from themis.cli.faults import named_faults
from themis.cli.options import CommandLine, Parser
from themis.cli.source import REPLAY_OPTIONS, add_overrides, rebuild
from themis.runs.fault import Fault, Replay
from themis.runs.store.files import json_safe
from themis.runs.store.reader import Reader
from themis.text import print_json, print_text

RECORDED_FIELDS = ("id", "seed_id", "perturbation", "theta", "label", "clean_answer", "clean_value")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    parser.add_argument("ids", metavar="FAULT", nargs="+", help="number of a fault, as listed by `themis faults RUN`")
    add_overrides(parser, REPLAY_OPTIONS)
    parser.add_argument("--json", action="store_true", help="print only the result, as JSON")


def execute(arguments: CommandLine) -> int:
    with closing(Reader(arguments.run)) as run:
        faults = named_faults(run, arguments.ids)
        replayer = rebuild(run, arguments.given)
        replays = []
        for fault in faults:
            replays.append((fault, replay := replayer.replay(fault)))
            if not arguments.json:
                print_text(_describe(fault, replay, bool(replayer.perturbation.passes)), flush=True)
        if arguments.json:
            print_json(json_safe({"faults": [_as_object(*pair) for pair in replays], "changes": replayer.changes}))
        else:
            print_text(_conclude(replays, replayer.changes))
    return DONE if all(replay.is_same for _, replay in replays) else GATE_FAILED


def _describe(fault: Fault, replay: Replay, is_attack: bool) -> str:
    from themis.runs.display.fault import answered, answers, describe_theta

    (clean, recorded), (_, now) = answers(fault), answers(answered(fault, replay))
    if replay.is_same:
        verdict = "the same"
    elif not replay.is_fault:
        verdict = "no longer a fault"
    else:
        verdict = "the same answer, but a different output" if replay.answer == fault.answer else "a different fault"
    note = "; the model was given the recorded one" if is_attack and replay.input_gap else ""
    return "\n".join(
        [
            f"fault {fault.id}: seed {fault.seed_id}, {fault.perturbation} with {describe_theta(fault)}",
            f"  answer  clean {clean}, recorded {recorded}, now {now}: {verdict}",
            f"  input   {_describe_gap(replay.input_gap)}{note}",
            f"  output  {_describe_gap(replay.output_gap)}",
        ]
    )


def _describe_gap(gap: float | None) -> str:
    if gap is None:
        return "not kept"
    if gap == 0:
        return "identical, bit for bit"
    return f"differs by up to {gap:.3g}" if math.isfinite(gap) else "differs in shape, or in values that are not finite"


def _conclude(replays: list[tuple[Fault, Replay]], changes: list[str]) -> str:
    n = sum(replay.is_same for _, replay in replays)
    result = f"{n} of {len(replays)} reproduced"
    if not changes:
        return f"{result}; model, data and environment are the same as at the start of the run"
    return "\n".join([f"{result}; changed since the start of the run:", *(f"  {change}" for change in changes)])


def _as_object(fault: Fault, replay: Replay) -> dict[str, Any]:
    answers = {
        name: {figure: getattr(test, figure) for figure in ("answer", "value", "confidence")}
        for name, test in (("recorded", fault), ("now", replay))
    }
    return {
        **{name: getattr(fault, name) for name in RECORDED_FIELDS},
        **answers,
        "is_fault": replay.is_fault,
        "is_same": replay.is_same,
        "input": {"is_kept": replay.input_gap is not None, "gap": replay.input_gap},
        "output": {"is_kept": replay.output_gap is not None, "gap": replay.output_gap},
    }
