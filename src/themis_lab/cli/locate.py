"""Name the layers in which the faults of a run start. Faults of each group are run again, and layers and neurons that
react unusually strongly are printed.

themis locate runs/first
themis locate runs/first --most 5 --json
"""

from contextlib import closing
from textwrap import fill
from typing import Any

from themis.cli import DONE
from themis.cli.options import CommandLine, Parser, add_option
from themis.cli.source import REPLAY_OPTIONS, add_overrides, rebuild
from themis.runs.store.reader import Reader
from themis.text import print_json, print_text

UNUSUAL_DEVIATIONS = 2.0
"""Standard deviations from ordinary tests above which a change may start in a layer."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    add_option(parser, "most", int, 20, "maximum number of groups")
    parser.add_argument("--json", action="store_true", help="print only the result, as JSON")
    add_overrides(parser, REPLAY_OPTIONS, "model and data, if not as recorded in the run")


def execute(arguments: CommandLine) -> int:
    from themis.runs.analysis.groups import group
    from themis.runs.replay import read_run
    from themis_lab.locate import learn_baseline, locate

    with closing(Reader(arguments.run)) as run:
        faults = run.faults()
        groups = group(faults, arguments.most)
        baseline = learn_baseline(read_run(rebuild(run, arguments.given))) if groups else None
        by_id = {fault.id: fault for fault in faults}
        located = [(each, locate([by_id[id] for id in each.ids], baseline)) for each in groups if baseline is not None]
    if arguments.json:
        print_json([each.as_dict() | {"located": where.as_dict()} for each, where in located])
    elif not located:
        print_text(f"{arguments.run} has no faults to locate")
    for number, (each, where) in enumerate(() if arguments.json else located, 1):
        print_text(fill(each.text, 100, initial_indent=f"{number:>3}  ", subsequent_indent="     "))
        print_text(f"     {_describe_location(where)}")
    return DONE


def _describe_location(location: Any) -> str:
    first = location.layers[0]
    if first.score < UNUSUAL_DEVIATIONS:
        score = round(first.score, 1) + 0.0  # never -0.0
        return f"no layer moves more than usual; layer {first.layer} is closest ({score:.1f} standard deviations)"
    neurons = ", ".join(f"{','.join(map(str, neuron.place))} ({neuron.times:.2g}x)" for neuron in first.neurons[:3])
    return (
        f"starts in {first.layer}: moves {first.times:.2g} times as much as expected "
        f"({first.score:.1f} standard deviations); strongest neurons {neurons}"
    )
