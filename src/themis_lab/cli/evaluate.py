"""Run the paper's evaluation over many models and perturbations. It measures fault detection capability, faults, time,
the effect of parameters, the theory and known faults. PLAN is a YAML file, by default the plan for the ten models of
the paper, which --print-plan prints. Writes evaluation.json, evaluation.md and figures. Every finished cell is stored
and never run again: the same command with the same --out resumes. Exit code 3 if a cell failed.

themis evaluate --smoke
themis evaluate --data ~/data --models lenet5-mnist --perturbations gaussian --out runs/evaluation
themis evaluate --print-plan > plan.yaml && themis evaluate plan.yaml --data ~/data --out runs/evaluation --workers 8
themis evaluate plan.yaml --data ~/data --out runs/evaluation --executor ray --address auto --workers 64
"""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from themis.cli import DONE, RUN_FAILED
from themis.cli.options import CommandLine, Parser, add_option, as_yaml
from themis.cli.output import AUTO, add_verbosity, new_folder, shown_cells
from themis.cli.source import add_executor, read_executor
from themis.errors import UsageError
from themis.text import print_json, print_text, wrapped

if TYPE_CHECKING:
    from themis_lab.evaluation.plan import EvaluationPlan


def add_arguments(parser: Parser) -> None:
    parser.add_argument("plan", metavar="PLAN", nargs="?", help="YAML file with the plan (default: that of the paper)")
    plan = parser.add_argument_group("evaluation")
    add_option(plan, "data", str | None, None, "folder with the data and weights of the zoo (default: THEMIS_DATA)")
    add_option(plan, "models", list[str] | None, None, "only these models of the plan")
    add_option(plan, "perturbations", list[str] | None, None, "only these perturbations of the plan")
    text = "run every part on digits that come with a package, in seconds, instead of a plan"
    plan.add_argument("--smoke", action="store_true", help=text)
    plan.add_argument("--print-plan", action="store_true", help="print the plan as YAML to edit, and exit")
    text = "run nothing, and write the page from the cells that are finished"
    plan.add_argument("--summarise", action="store_true", help=text)
    add_executor(parser, workers=None)
    output = parser.add_argument_group("output")
    add_option(output, "workers", int, 1, "processes that run cells; never changes the result")
    text = "folder for the results, new or of an evaluation; auto is runs/evaluate-DATE-TIME"
    add_option(output, "out", str, AUTO, text)
    add_verbosity(output)


def execute(arguments: CommandLine) -> int:
    if arguments.data is not None:
        os.environ["THEMIS_DATA"] = str(Path(arguments.data).expanduser().absolute())
    plan = _plan(arguments)
    if arguments.print_plan:
        print_text(as_yaml(plan.as_dict()))
        return DONE
    if arguments.summarise and arguments.out == AUTO:
        raise UsageError("--summarise needs the folder of an evaluation: pass it as --out")
    executor = read_executor(arguments, shares_workers=True)
    out = new_folder("evaluate-") if arguments.out == AUTO else Path(arguments.out)
    from themis.report.table import table_console
    from themis_lab.evaluation.api import evaluate
    from themis_lab.evaluation.claims import claims_table
    from themis_lab.evaluation.page import SUMMARIES, list_tables, opening

    with shown_cells(arguments, out) as progress:
        result = evaluate(
            plan,
            out=out,
            workers=arguments.workers,
            runs_cells=not arguments.summarise,
            listener=progress,
            executor=executor,
        )
    if arguments.json:
        print_json({**result.content, "out": str(out)})
    elif not arguments.quiet:
        console = table_console()
        for line in opening(result):
            print_text(line)
        claims = claims_table(result)
        if arguments.smoke:  # a look at whether everything works
            for claim, _, measured, verdict, *_ in () if claims is None else claims.rows:
                print_text(wrapped(f"{verdict:<13}  {claim}: {measured}", 15))
        else:
            for table in [*([claims] if claims else []), *chain.from_iterable(list_tables(result, SUMMARIES).values())]:
                console.print()
                table.show(console)
        print_text(f"Results in {out}: evaluation.json, figures, evaluation.md, and all cells in evaluation-cells.md")
    return RUN_FAILED if result.n_failed else DONE


def _plan(arguments: CommandLine) -> EvaluationPlan:
    from themis_lab.evaluation.plan import EvaluationPlan
    from themis_lab.evaluation.plans import paper_plan, smoke_plan

    if arguments.smoke and arguments.plan is not None:
        raise UsageError(f"--smoke has its own plan, got {arguments.plan!r} as well: leave one of them out")
    if arguments.smoke:
        plan = smoke_plan()
    else:
        plan = paper_plan() if arguments.plan is None else EvaluationPlan.read(arguments.plan)
    return plan.restricted(arguments.models or [], arguments.perturbations or [])
