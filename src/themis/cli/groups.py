"""Group related faults of a run, by wrong outcome, theta and the layers that changed or by content, and print what the
faults of each group have in common and which of them to look at. The run may still be in progress.

themis groups runs/first
themis groups runs/first --apart 0.5
themis groups runs/first --by content
themis groups runs/first --json
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from shlex import quote
from textwrap import fill
from typing import TYPE_CHECKING

from themis.cli import DONE
from themis.cli.options import CommandLine, Parser, add_option
from themis.cli.source import REPLAY_OPTIONS, add_overrides, rebuild
from themis.errors import UsageError, nearest
from themis.plugins import Extensible
from themis.runs.store.reader import Reader
from themis.text import counted, print_json, print_text

if TYPE_CHECKING:
    from themis.runs.analysis.groups import Group
    from themis.runs.faults import Faults

NO_STRUCTURE = "no two sets of these faults differ in two of outcome, theta and layers"
GROUPINGS: Extensible[Callable[..., list[Group]]] = Extensible("themis.groupings", {})
"""Further ways to group faults, which run the model again."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    add_option(parser, "most", int, 20, "maximum number of groups, and about as many faults to look at in total")
    others = " or ".join(GROUPINGS)
    text = (
        f"what is alike in a group: change (outcome, theta and layers), or {others}, for which the model is run again"
    )
    add_option(parser, "by", str, "change", text)
    text = "how much groups by change must differ in two of three views; less gives more groups"
    add_option(parser, "apart", float, 0.75, text)
    parser.add_argument("--json", action="store_true", help="print only the result, as JSON")
    add_overrides(parser, REPLAY_OPTIONS, "model and data for another --by, if not as recorded in the run")


def execute(arguments: CommandLine) -> int:
    from themis.runs.analysis.groups import group

    by = arguments.by
    if by != "change" and by not in GROUPINGS:
        known = ["change", *GROUPINGS]
        raise UsageError(f"--by must be {' or '.join(known)}, got {by!r}: {nearest(by, known)}")
    if by == "change" and (unused := arguments.given.keys() & {*REPLAY_OPTIONS}):
        names = ", ".join(f"--{name}" for name in sorted(unused))
        raise UsageError(f"{names} must be combined with another --by: grouping by change needs no model")
    if by != "change" and "apart" in arguments.given:
        raise UsageError(f"--apart must be left out with --by {by}: it is for groups by change")
    with closing(Reader(arguments.run)) as run:
        faults = run.faults()
        if by == "change":
            groups = group(faults, arguments.most, arguments.apart)
        else:
            from themis.runs.replay import read_run

            groups = GROUPINGS[by](read_run(rebuild(run, arguments.given)), arguments.most)
        if arguments.json:
            print_json([group.as_dict() for group in groups])
        else:
            _print(run, faults, groups, arguments.most)
    return DONE


def _print(run: Reader, faults: Faults, groups: list[Group], most: int) -> None:
    if not len(faults):
        print_text(f"{run.path} has no faults to group")
        return
    found = f"{counted(len(faults), 'fault')} in {counted(len(groups), 'group')}"
    shown = sum(len(group.representatives) for group in groups)
    print_text(f"{found}, {shown} of them to look at; run one again: themis replay {quote(str(run.path))} FAULT")
    if len(faults) > len(groups) == 1 and most > 1:
        print_text(f"No structure found: {NO_STRUCTURE}")
    for number, group in enumerate(groups, 1):
        print_text()
        print_text(fill(group.text, 100, initial_indent=f"{number:>3}  ", subsequent_indent="     "))
        print_text(f"     look at {' '.join(str(fault.id) for fault in group.representatives)}")
