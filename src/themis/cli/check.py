"""`themis check`: inspect a model and its data before a campaign."""

from __future__ import annotations

from dataclasses import asdict, fields
from shlex import quote
from typing import TYPE_CHECKING

from themis.cli import DONE, RUN_FAILED
from themis.cli.options import Parser, add_config, add_fields, add_option, as_yaml, explicit_fields, format_value
from themis.cli.source import PERTURB_HELP, check_names, named_origin, require
from themis.runs.source import Origin
from themis.settings import Settings
from themis.text import print_json, print_text

if TYPE_CHECKING:
    from argparse import Namespace

    from themis.campaign.preflight import Check

HELP = (
    "Run the model on a few inputs and print what Themis finds: layers, neurons, bounds, clean accuracy, likely "
    "mistakes, the memory and the time that a campaign will need, and the command that starts it. The exit code is 3 "
    "if no campaign can run."
)
EXAMPLES = """
themis check --model mine:make_net --data mine:make_data
themis check --model mine:make_net --weights net.pt --data images:photos --perturb gaussian
"""
N_LAYERS = 12
"""Layers to list; the others are only counted."""


def add_arguments(parser: Parser) -> None:
    add_config(parser)
    add_fields(parser.add_argument_group("model and data"), Origin)
    campaign = parser.add_argument_group("campaign")
    add_option(campaign, "perturb", str, "gaussian", PERTURB_HELP)
    add_fields(campaign, Settings, only=("magnitude", "max_seeds", "max_tests", "batch_size", "clean_memory_gib"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print everything as JSON")
    from themis.cli import run

    of_run = Parser()
    run.add_arguments(of_run)
    parser.ignored = frozenset(action.dest for action in of_run._actions)  # one file serves both


def execute(arguments: Namespace, explicit_options: set[str]) -> int:
    options = explicit_fields(arguments, Settings, explicit_options)
    settings = Settings.of(**options)
    if arguments.print_config:
        print_text(as_yaml(vars(arguments)))
        return DONE
    require(arguments, "model", "data")
    from themis.campaign.preflight import check

    origin = named_origin(arguments)
    with origin.in_folder():
        perturbation = check_names(arguments.perturb, settings)
    result = check(origin.target(), origin.read(), perturbation, **options)
    if arguments.json:
        import json

        print_json(json.dumps(asdict(result), indent=2, default=str))
    else:
        print_text("\n".join(describe(result, settings)))
        is_ready = result.problem is None and not result.is_near_chance
        start = "Start the campaign" if is_ready else "Once this is fixed, start the campaign"
        print_text(f"\n{start}: {_run_command(arguments, explicit_options)}")
    return DONE if result.problem is None else RUN_FAILED


def describe(check: Check, settings: Settings) -> list[str]:
    """The result as lines of text."""
    from themis.measure.inputs import ROUNDING
    from themis.text import counted, percent

    n = check.n_classes
    shape = "x".join(map(str, check.input_shape))
    low, high = check.bounds
    slack = ROUNDING * (high - low)
    place = "within" if low - slack <= check.least and check.most <= high + slack else "outside"
    value_range = f"{check.least:.4g} to {check.most:.4g}"
    rows = [
        ("model", f"{check.model}, {_size(check)}, {check.dtype} on {check.device}"),
        (
            "inputs",
            f"{check.n_seeds:,} of shape {shape}, {value_range}, {place} the bounds {format_value(check.bounds)}",
        ),
        ("outputs", _outputs(check)),
        ("labels", _labels(check) if n is None else counted(n, "different value")),
    ]
    if check.start is not None and check.start.perturbed is not None:
        rows.append(("perturbed", check.start.perturbed))
    if check.is_training:
        rows.append(("mode", "passed in training mode, tested in evaluation mode"))
    if check.accuracy is not None:
        rows.append(("accuracy", f"{percent(check.accuracy)} of {check.n_examined:,} clean inputs answered correctly"))
    if check.start is not None:
        rows += _describe_start(check, settings)
    lines = [f"{name:<10}  {text}" for name, text in rows]
    warnings = _warnings(check)
    return lines + (["", *(f"! {warning}" for warning in warnings)] if warnings else [])


def _size(check: Check) -> str:
    return "a black box" if check.n_parameters is None else f"{check.n_parameters:,} parameters"


def _labels(check: Check) -> str:
    """Labels that are not class numbers: places in the picture, or none."""
    start = check.start
    if start is not None and start.clean_map is not None:
        return f"boxes; the clean answers have a mean average precision of {start.clean_map:.3g}"
    if start is not None and start.clean_iou is not None:
        return f"maps; the clean answers have a mean IoU of {start.clean_iou:.3g}"
    return "none: a fault is a changed answer"


def _outputs(check: Check) -> str:
    entry = None if check.start is None else check.start.entry
    shape = "x".join(map(str, check.output_shape)) or "one number"
    return shape if entry is None else f"{shape}, {entry}"


def _describe_start(check: Check, settings: Settings) -> list[tuple[str, str]]:
    from themis.text import counted, duration

    start = check.start
    assert start is not None
    assert check.seconds_per_test is not None
    assert check.clean_gib is not None
    n_layers = len(start.layers)
    rows = [("neurons", f"{start.n_neurons:,} in {counted(n_layers, 'layer')}")]
    if not start.covers_neurons:
        rows = [("neurons", "none: the model has no hidden layers, so there is no coverage goal")]
    width = max(len(layer.name) for layer in start.layers[:N_LAYERS])
    for layer in start.layers[:N_LAYERS] if start.covers_neurons else ():
        size = "x".join(map(str, layer.shape))
        rows.append(("", f"{layer.name:<{width}}  {size}, {counted(layer.n_neurons, 'neuron')}"))
    if n_layers > N_LAYERS:
        rows.append(("", f"and {n_layers - N_LAYERS} more"))
    tests = settings.max_tests or 20_000
    all_tests = duration(tests * check.seconds_per_test)
    fits = check.clean_gib <= settings.clean_memory_gib
    kept = "kept in memory" if fits else "kept in part; the others are computed again with each test"
    if start.covers_neurons:
        size = f"{check.clean_gib:.2g} GiB" if check.clean_gib >= 0.1 else f"{check.clean_gib * 1024:.2g} MiB"
        rows.append(("memory", f"{size} of clean activations, {kept}"))
    rows += [
        ("time", f"{1 / check.seconds_per_test:,.0f} tests per second; {counted(tests, 'test')} in {all_tests}"),
        ("faults", f"{check.n_faults} in the first {counted(check.n_tests, 'test')} under {start.perturbation}"),
    ]
    return rows


def _warnings(check: Check) -> list[str]:
    warnings = []
    if check.problem is not None:
        warnings.append(check.problem)
    if check.is_near_chance:
        warnings.append(
            "the model is correct no more often than by chance: its inputs, weights or labels are not what it expects"
        )
        if not check.suspicions:
            warnings.append("no other scale, normalisation, or order of channels or labels helps: check the weights")
    warnings += check.warnings
    warnings += [
        f"{suspicion.what} ({suspicion.accuracy:.0%} correct then): {suspicion.remedy}"
        for suspicion in check.suspicions
    ]
    if check.most - check.least < 0.02 * (check.bounds[1] - check.bounds[0]):
        warnings.append(
            f"the inputs fill less than 2% of the bounds: pass their own range, {check.least:.4g},{check.most:.4g}"
        )
    return warnings


def _run_command(arguments: Namespace, explicit_options: set[str]) -> str:
    """The command that starts the campaign; options that the configuration file sets are not repeated."""
    known = [field.name for field in (*fields(Origin), *fields(Settings))]
    names = [name for name in known if name in explicit_options - arguments.from_config]
    words = ["themis run"]
    if "config" in explicit_options:
        words.append(f"--config {quote(arguments.config)}")
    words += [f"--{name.replace('_', '-')} {quote(format_value(getattr(arguments, name)))}" for name in names]
    if "perturb" not in arguments.from_config:
        words.append(f"--perturb {quote(arguments.perturb)}")
    return " ".join(words)
