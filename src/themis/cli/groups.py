"""`themis groups`: the faults of a run as a few stories, each with what to look at. Rows are enough, but to locate."""

from __future__ import annotations

import json
from contextlib import closing
from shlex import quote
from textwrap import fill
from typing import TYPE_CHECKING, Any

from themis.cli import DONE
from themis.cli.options import Parser, add_fields, add_option
from themis.cli.replay import PLACES
from themis.errors import UsageError
from themis.runs.source import Origin

if TYPE_CHECKING:
    from argparse import Namespace

    from themis.runs.analysis.group import Group
    from themis.runs.analysis.locate import Located
    from themis.runs.faults import Faults
    from themis.runs.store.reader import Reader

HELP = (
    "Put the faults of a run into groups that are the same story, by wrong outcome, theta and the layers that changed: "
    "what the faults of a group share, and which to look at. The run may be going on."
)
EXAMPLES = """
themis groups runs/first
themis groups runs/first --most 5 --locate
themis groups runs/first --apart 0.5
themis groups runs/first --json
"""

UNUSUAL = 2.0
"""Spreads of ordinary tests that a layer must be off by for a change to be said to enter there."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    add_option(parser, "most", int, 20, "this many groups at most, and about as many faults to look at in all")
    add_option(parser, "apart", float, 0.75, "how far groups must differ in two of three views; less gives more groups")
    text = "run faults of each group again, and say which layers and neurons carry the change against their usual"
    parser.add_argument("--locate", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")
    places = parser.add_argument_group("model and data to locate with, if not as the run remembers them")
    add_fields(places, Origin, only=PLACES, shows_default=False)


def execute(arguments: Namespace, said: set[str]) -> int:
    from themis.runs.analysis.group import group
    from themis.runs.store.reader import Reader

    if not arguments.locate and (given := said & set(PLACES)):
        names = ", ".join(f"--{each}" for each in sorted(given))
        raise UsageError(f"{names} must go with --locate, groups need no model: add --locate, or leave it out")
    with closing(Reader(arguments.run)) as run:
        faults = run.faults()
        groups = group(faults, arguments.most, arguments.apart)
        located: list[Located | None] = [None] * len(groups)
        if arguments.locate and groups:
            located = _locate(run, faults, groups, arguments, said)
        if arguments.json:
            print(json.dumps([_as_object(*each) for each in zip(groups, located, strict=True)], indent=2))
        else:
            _print(run, faults, groups, located, arguments.most)
    return DONE


def _locate(
    run: Reader, faults: Faults, groups: list[Group], arguments: Namespace, said: set[str]
) -> list[Located | None]:
    from themis.cli.resume import moved
    from themis.runs.analysis.locate import learn_usual, locate
    from themis.runs.replay import Replayer

    usual = learn_usual(Replayer(run, origin=moved(run, arguments, said)))
    return [locate(each, usual, faults) for each in groups]


def _print(run: Reader, faults: Faults, groups: list[Group], located: list[Located | None], most: int) -> None:
    n, n_groups = len(faults), len(groups)
    shown = sum(len(each.representatives) for each in groups)
    if not n:
        print(f"{run.path} has no faults to group")
        return
    print(
        f"{n:,} fault{'s' * (n != 1)} in {n_groups} group{'s' * (n_groups != 1)}, {shown} of them to look at; "
        f"one again: themis replay {quote(str(run.path))} FAULT"
    )
    if n > n_groups == 1 < most:
        print("no structure was found: no two sets of these faults differ in two of outcome, theta and layers")
    for number, (each, found) in enumerate(zip(groups, located, strict=True), 1):
        print()
        print(fill(each.text, 100, initial_indent=f"{number:>3}  ", subsequent_indent="     "))
        print(f"     look at {' '.join(str(fault.id) for fault in each.representatives)}")
        if found is not None:
            print(f"     {_say(found)}")


def _say(found: Located) -> str:
    first = found.layers[0]
    if first.score < UNUSUAL:
        return f"no layer moves more than is usual: {first.layer} comes nearest ({first.score:.1f} spreads)"
    neurons = ", ".join(f"{','.join(map(str, each.place))} ({each.times:.2g}x)" for each in first.neurons[:3])
    return (
        f"enters in {first.layer}: {first.times:.2g} times what is expected ({first.score:.1f} spreads); most {neurons}"
    )


def _as_object(group: Group, located: Located | None) -> dict[str, Any]:
    return group.as_dict() | ({} if located is None else {"located": located.as_dict()})
