"""`themis groups`: group related faults. It only reads rows; `--locate` needs the model and the data."""

from __future__ import annotations

import json
from contextlib import closing
from shlex import quote
from textwrap import fill
from typing import TYPE_CHECKING, Any

from themis.cli import DONE
from themis.cli.options import Parser, add_fields, add_option, explicit_values
from themis.cli.output import analysis_progress
from themis.cli.source import REPLAY_OPTIONS, TRUST_HELP, rebuild
from themis.errors import UsageError
from themis.runs.source import Origin
from themis.text import print_json, print_text

if TYPE_CHECKING:
    from argparse import Namespace

    from themis.runs.analysis.bench import OnProgress
    from themis.runs.analysis.groups import Group
    from themis.runs.analysis.locate import Localization
    from themis.runs.faults import Faults
    from themis.runs.store.reader import Reader

HELP = (
    "Group related faults of a run, by wrong outcome, theta and the layers that changed, and print what the faults of "
    "each group have in common and which of them to look at. The run may still be in progress. "
    f"{TRUST_HELP}"
)
EXAMPLES = """
themis groups runs/first
themis groups runs/first --most 5 --locate
themis groups runs/first --apart 0.5
themis groups runs/first --json
"""

UNUSUAL = 2.0
"""Standard deviations from ordinary tests at which a layer counts as the one where a change starts."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    add_option(parser, "most", int, 20, "maximum number of groups, and about as many faults to look at in total")
    add_option(
        parser, "apart", float, 0.75, "how much groups must differ in two of three views; less gives more groups"
    )
    text = "run faults of each group again, and print the layers and neurons that react unusually strongly"
    parser.add_argument("--locate", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="print only the result, as JSON")
    source = parser.add_argument_group("model and data for --locate, if not as recorded in the run")
    add_fields(source, Origin, only=REPLAY_OPTIONS, shows_default=False)


def execute(arguments: Namespace, explicit_options: set[str]) -> int:
    from themis.runs.analysis.groups import group
    from themis.runs.store.reader import Reader

    if not arguments.locate and (unused := explicit_options & {*REPLAY_OPTIONS}):
        names = ", ".join(f"--{name}" for name in sorted(unused))
        raise UsageError(
            f"{names} must be combined with --locate, because grouping needs no model: add --locate, or leave it out"
        )
    with closing(Reader(arguments.run)) as run:
        faults = run.faults()
        groups = group(faults, arguments.most, arguments.apart)
        located: list[Localization | None] = [None] * len(groups)
        if arguments.locate and groups:
            overrides = explicit_values(arguments, REPLAY_OPTIONS, explicit_options)
            with analysis_progress(is_silent=arguments.json) as show:
                located = _locate(run, faults, groups, overrides, show)
        if arguments.json:
            print_json(json.dumps([_as_object(*pair) for pair in zip(groups, located, strict=True)], indent=2))
        else:
            _print(run, faults, groups, located, arguments.most)
    return DONE


def _locate(
    run: Reader, faults: Faults, groups: list[Group], overrides: dict[str, Any], show: OnProgress
) -> list[Localization | None]:
    from themis.runs.analysis.locate import MEMBERS, learn_baseline, locate

    baseline = learn_baseline(rebuild(run, overrides), on_progress=show)
    n_done, n = 0, sum(min(MEMBERS, len(group.ids)) for group in groups)
    located: list[Localization | None] = []
    for group in groups:
        location = locate(group, baseline, faults)
        n_done += location.n_faults
        show("running faults of the groups", n_done, n)
        located.append(location)
    return located


def _print(run: Reader, faults: Faults, groups: list[Group], located: list[Localization | None], most: int) -> None:
    n, n_groups = len(faults), len(groups)
    shown = sum(len(group.representatives) for group in groups)
    if not n:
        print_text(f"{run.path} has no faults to group")
        return
    print_text(
        f"{n:,} fault{'s' * (n != 1)} in {n_groups} group{'s' * (n_groups != 1)}, {shown} of them to look at; "
        f"run one again: themis replay {quote(str(run.path))} FAULT"
    )
    if n > n_groups == 1 < most:
        print_text("No structure found: no two sets of these faults differ in two of outcome, theta and layers")
    for number, (group, location) in enumerate(zip(groups, located, strict=True), 1):
        print_text()
        print_text(fill(group.text, 100, initial_indent=f"{number:>3}  ", subsequent_indent="     "))
        print_text(f"     look at {' '.join(str(fault.id) for fault in group.representatives)}")
        if location is not None:
            print_text(f"     {_describe_location(location)}")


def _describe_location(location: Localization) -> str:
    first = location.layers[0]
    if first.score < UNUSUAL:
        score = round(first.score, 1) + 0.0  # never -0.0
        return f"no layer moves more than usual; layer {first.layer} is closest ({score:.1f} standard deviations)"
    neurons = ", ".join(f"{','.join(map(str, neuron.place))} ({neuron.times:.2g}x)" for neuron in first.neurons[:3])
    return (
        f"starts in {first.layer}: moves {first.times:.2g} times as much as expected "
        f"({first.score:.1f} standard deviations); strongest neurons {neurons}"
    )


def _as_object(group: Group, located: Localization | None) -> dict[str, Any]:
    return group.as_dict() | ({} if located is None else {"located": located.as_dict()})
