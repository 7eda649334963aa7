"""Test a model: find inputs that break its answer, until coverage, a budget or a plateau stops the search. Ctrl-C stops
it as well, and keeps everything. Needs --perturb, and either --model and --data or --zoo. Every option can also be set
in a YAML file given with --config.

themis run --model mine:make_net --data mine:make_data --perturb gaussian
themis run --config campaign.yaml --max-seconds 60 --out runs/short
themis run --zoo resnet56-cifar10 --perturb gaussian
themis run --config campaign.yaml --decide "fault_rate<=0.02"
themis run --zoo lenet5-mnist --perturb fog --against lenet5.onnx
themis run --config campaign.yaml --executor ray --workers 4
"""

from dataclasses import asdict, fields

from themis.cli import DONE
from themis.cli.gate import add_gates, read_gates
from themis.cli.options import CommandLine, Parser, add_config, add_fields, add_option, as_yaml, fields_of
from themis.cli.output import (
    AUTO,
    add_campaign_output,
    add_track,
    finish,
    new_folder,
    point_to_results,
    progress_callbacks,
)
from themis.cli.source import PERTURB_HELP, add_executor, check_names, named_origin, read_executor, require
from themis.report.tracking import choose_trackers
from themis.runs.source import Origin
from themis.settings import Settings
from themis.text import print_text

LIMIT_OPTIONS = ("coverage", "recall", "max_tests", "max_passes", "max_seconds", "plateau")


def add_arguments(parser: Parser) -> None:
    add_config(parser)
    add_fields(parser.add_argument_group("model and data"), Origin)
    campaign = parser.add_argument_group("campaign")
    add_option(campaign, "perturb", str, "", PERTURB_HELP)
    add_fields(campaign, Settings, only={field.name for field in fields(Settings)} - {"decide", *LIMIT_OPTIONS})
    add_fields(parser.add_argument_group("when to stop"), Settings, only=("decide", *LIMIT_OPTIONS))
    add_gates(parser)
    add_executor(parser)
    output = parser.add_argument_group("output")
    text = "new folder for the results; auto is runs/DATE-TIME, none writes nothing to disk"
    add_option(output, "out", str | None, AUTO, text)
    add_campaign_output(output)
    add_track(output)


def execute(arguments: CommandLine) -> int:
    options = fields_of(Settings, arguments.given)
    settings = Settings.of(**options)
    if arguments.print_config:
        print_text(as_yaml({**vars(arguments), **asdict(settings)}))
        return DONE
    require(arguments, "model", "data", "perturb")
    executor = read_executor(arguments)
    gates = read_gates(arguments)
    origin = named_origin(arguments)
    with origin.in_folder():
        perturbation = check_names(arguments.perturb, settings)
    gates.check_ahead(settings.uniform_share, perturbation.code)
    choose_trackers(arguments.track or (), arguments.out)  # rejects unknown trackers before the model is loaded
    from themis.campaign.api import run

    target, data = origin.target(), origin.read()
    train = None if settings.criterion is None and origin.train is None else origin.read_train()
    out = str(new_folder()) if arguments.out == AUTO else arguments.out
    with point_to_results(out, has_report=not arguments.no_report):
        trackers = choose_trackers(arguments.track or (), out)
        result = run(
            target,
            data,
            perturbation,
            out=out,
            origin=origin,
            callbacks=[*progress_callbacks(arguments), *trackers],
            train=train,
            rivals=origin.read_rivals(),
            executor=executor,
            **options,
        )
    return finish(result, arguments, out=out, trackers=trackers, gates=gates)
