"""Compare techniques by what retraining on their choices gains. Each chooses inputs from the search seeds of a run, and
the model is retrained on each choice in the same way. The run must have been split (themis run --split 0.5,0.2,0.3), or
--judge must name other data. Writes contest.json, contest.md and contest.png. The same command with the same --out
resumes.

themis contest runs/first --techniques themis,nc,kmnc,idc,lsa,random,corners --out runs/contest
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from themis.cli import DONE, RUN_FAILED
from themis.cli.options import CommandLine, Parser, add_fields, add_option, fields_of
from themis.cli.output import AUTO, add_verbosity, new_folder, shown_cells
from themis.cli.retrain import places
from themis.cli.source import LOCATION_OPTIONS, add_executor, add_overrides, read_executor
from themis.errors import UsageError
from themis.text import print_json, print_text


def add_arguments(parser: Parser) -> None:
    from themis.retraining.recipe import Recipe
    from themis_lab.contest.plan import FRESH_SHARE, ContestPlan

    parser.add_argument("run", metavar="RUN", help="folder of the run")
    add_fields(parser.add_argument_group("what is compared"), ContestPlan)
    training = parser.add_argument_group("how the model is trained")
    shared = {field.name for field in fields(ContestPlan)}
    add_fields(
        training, Recipe, only={field.name for field in fields(Recipe)} - shared, defaults={"fresh": FRESH_SHARE}
    )
    add_option(training, "train", str | None, None, "clean data to train on instead of the train part")
    add_option(training, "judge", str | None, None, "data to judge by if the run was not split", metavar="DATA")
    add_option(training, "workers", int, 1, "number of processes; never changes the result")
    add_executor(parser, workers=None)
    add_overrides(parser, LOCATION_OPTIONS)
    output = parser.add_argument_group("output")
    text = "folder for the results, new or of the same contest; auto is runs/contest-DATE-TIME"
    add_option(output, "out", str, AUTO, text)
    add_verbosity(output)


def execute(arguments: CommandLine) -> int:
    from themis.retraining.recipe import Recipe
    from themis_lab.contest.plan import ContestPlan

    plan = fields_of(ContestPlan, arguments.given)
    recipe = {name: value for name, value in fields_of(Recipe, arguments.given).items() if name not in plan}
    Recipe.of(**recipe)  # raises for invalid options before a model is loaded
    chosen = ContestPlan.of(**plan)
    if arguments.workers < 1:
        raise UsageError(f"workers must be at least 1, got {arguments.workers}")
    executor = read_executor(arguments, shares_workers=True)
    out = new_folder("contest-") if arguments.out == AUTO else Path(arguments.out)
    from themis.report.table import table_console
    from themis_lab.contest.api import contest_run
    from themis_lab.contest.standings import show

    where = places(arguments.run, arguments)
    with shown_cells(arguments, out) as progress:
        result = contest_run(
            arguments.run,
            chosen.techniques,
            **where,
            out=out,
            listener=progress,
            executor=executor,
            workers=arguments.workers,
            **recipe,
            **{name: value for name, value in plan.items() if name != "techniques"},
        )
    if arguments.json:
        print_json({**result.as_dict(), "out": str(out)})
    elif not arguments.quiet:
        show(result, table_console())
        print_text(f"Results in {out}: contest.json, contest.md, contest.png")
    return RUN_FAILED if any(standing.errors for standing in result.standings) else DONE
