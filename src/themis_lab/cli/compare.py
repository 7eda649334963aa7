"""Compare techniques at equal cost. Each gets the same seeds, passes and random seeds, and error rates are measured on
seeds that none of them has used. Writes compare.json, table.md and figures. Ctrl-C keeps every finished campaign, and
the same command with the same --out resumes. Needs --model and --data, or --zoo, and --perturb. Exit code 3 if a
campaign failed.

themis compare --zoo lenet5-mnist --perturb gaussian --out runs/compare
themis compare --model mine:net --data mine:data --train mine:train --perturb fgsm --magnitudes paper,grid
themis compare --zoo resnet56-cifar10 --perturb rotate --techniques 'kmnc(k=100),scheduled' --campaigns 5
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from themis.cli import DONE, RUN_FAILED
from themis.cli.options import CommandLine, Parser, add_config, add_fields, add_option, as_yaml
from themis.cli.output import AUTO, add_verbosity, new_folder, shown_cells
from themis.cli.source import PERTURB_HELP, add_executor, named_origin, read_executor, require
from themis.runs.source import OPTIONS, Origin
from themis.text import print_json, print_text


def add_arguments(parser: Parser) -> None:
    from themis_lab.comparison.plan import ComparisonPlan

    add_config(parser)
    add_fields(parser.add_argument_group("model and data"), Origin, only={*OPTIONS} - {"against"})
    comparison = parser.add_argument_group("comparison")
    add_option(comparison, "perturb", str, "", PERTURB_HELP)
    add_fields(comparison, ComparisonPlan)
    add_executor(parser, workers=None)
    output = parser.add_argument_group("output")
    text = "processes that run campaigns; by default one per core, or four on a GPU; never changes the result"
    add_option(output, "workers", int | None, None, text)
    text = "folder for the results, new or of the same comparison; auto is runs/compare-DATE-TIME"
    add_option(output, "out", str, AUTO, text)
    add_verbosity(output)


def execute(arguments: CommandLine) -> int:
    from themis_lab.comparison.plan import ComparisonPlan

    options = {field.name: getattr(arguments, field.name) for field in fields(ComparisonPlan)}
    ComparisonPlan.of(**options)  # raises for invalid options before a model is loaded
    if arguments.print_config:
        print_text(as_yaml(vars(arguments)))
        return DONE
    require(arguments, "model", "data", "perturb")
    executor = read_executor(arguments, shares_workers=True)
    origin = named_origin(arguments)
    out = new_folder("compare-") if arguments.out == AUTO else Path(arguments.out)
    from themis_lab.comparison.api import compare

    with shown_cells(arguments, out) as progress:
        result = compare(
            perturbation=arguments.perturb,
            out=out,
            workers=arguments.workers,
            origin=origin,
            listener=progress,
            executor=executor,
            **options,
        )
    from themis.report.table import table_console
    from themis_lab.comparison.summary import show

    if arguments.json:
        print_json({**result.as_dict(), "out": str(out)})
    elif not arguments.quiet:
        show(result, table_console())
        figures = sorted(path.name for path in out.glob("*.png"))
        print_text(f"Results in {out}: {', '.join(['compare.json', 'table.md', *figures])}")
    return RUN_FAILED if result.failed else DONE
