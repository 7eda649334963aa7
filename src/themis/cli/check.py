"""Run the model on a few inputs and print what Themis finds: layers, neurons, bounds, clean accuracy, likely mistakes,
the memory and the time that a campaign will need, and the command that starts it. The exit code is 3 if no campaign can
run.

themis check --model mine:make_net --data mine:make_data
themis check --model mine:make_net --weights net.pt --data images:photos --perturb gaussian
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields
from shlex import quote
from typing import TYPE_CHECKING

from themis.cli import DONE, RUN_FAILED
from themis.cli.options import CommandLine, Parser, add_config, add_fields, add_option, as_yaml, fields_of, format_value
from themis.cli.source import PERTURB_HELP, check_names, named_origin, require
from themis.runs.source import OPTIONS, Origin
from themis.settings import Settings
from themis.text import counted, duration, memory_size, percent, print_json, print_text

if TYPE_CHECKING:
    from themis.campaign.preflight import Check
    from themis.runs.run import Start

N_LAYERS = 12
"""Layers that are listed; the others are only counted."""


def add_arguments(parser: Parser) -> None:
    add_config(parser)
    add_fields(parser.add_argument_group("model and data"), Origin, only={*OPTIONS} - {"against"})
    campaign = parser.add_argument_group("campaign")
    add_option(campaign, "perturb", str, "gaussian", PERTURB_HELP)
    add_fields(campaign, Settings, only=("magnitude", "max_seeds", "max_tests", "batch_size", "clean_memory_gib"))
    parser.add_argument_group("output").add_argument("--json", action="store_true", help="print everything as JSON")
    from themis.cli import run

    of_run = Parser()
    run.add_arguments(of_run)
    parser.ignored = frozenset(action.dest for action in of_run._actions)  # both commands can use the same file


def execute(arguments: CommandLine) -> int:
    options = fields_of(Settings, arguments.given)
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
        print_json(asdict(result))
    else:
        print_text("\n".join(describe(result, settings)))
        is_ready = result.problem is None and not result.is_near_chance
        start = "Start the campaign" if is_ready else "Once this is fixed, start the campaign"
        print_text(f"\n{start}: {_run_command(arguments)}")
    return DONE if result.problem is None else RUN_FAILED


def describe(check: Check, settings: Settings) -> list[str]:
    """The result as lines of text."""
    from themis.runs.display.text import describe_clean

    start = check.start
    clean = "" if start is None else describe_clean(start.clean)
    values = f"{check.least:.4g} to {check.most:.4g}, with bounds {format_value(check.bounds)}"
    size = "a black box" if check.n_parameters is None else f"{check.n_parameters:,} parameters"
    outputs = _shape(check.output_shape) or "one number"
    labels = "none: a fault is a changed answer"
    if check.n_classes is not None:
        labels = counted(check.n_classes, "different value")
    elif clean:
        labels = f"boxes, maps or points; {clean} on clean inputs"
    rows = [
        ("model", f"{check.model}, {size}, {check.dtype} on {check.device}"),
        ("inputs", f"{check.n_seeds:,} of shape {_shape(check.input_shape)}, {values}"),
        ("outputs", outputs if start is None or start.entry is None else f"{outputs}, {start.entry}"),
        ("labels", labels),
    ]
    if start is not None and start.perturbed is not None:
        rows.append(("perturbed", start.perturbed))
    if check.accuracy is not None:
        rows.append(("accuracy", f"{percent(check.accuracy)} of {check.n_examined:,} clean inputs answered correctly"))
    if start is not None:
        rows += _describe_start(check, start, settings)
    lines = [f"{name:<10}  {text}" for name, text in rows]
    warnings = _warnings(check)
    return lines + (["", *(f"! {warning}" for warning in warnings)] if warnings else [])


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape))


def _describe_start(check: Check, start: Start, settings: Settings) -> list[tuple[str, str]]:
    """The neurons, and the memory and time of a campaign."""
    assert check.seconds_per_test is not None
    assert check.clean_gib is not None
    rows = [("neurons", "none: the model has no hidden layers, so there is no coverage goal")]
    if start.covers_neurons:
        n_layers, shown = len(start.layers), start.layers[:N_LAYERS]
        width = max(len(layer.name) for layer in shown)
        rows = [("neurons", f"{start.n_neurons:,} in {counted(n_layers, 'layer')}")]
        for layer in shown:
            rows.append(("", f"{layer.name:<{width}}  {_shape(layer.shape)}, {counted(layer.n_neurons, 'neuron')}"))
        rows += [("", f"and {n_layers - N_LAYERS} more")] * (n_layers > N_LAYERS)
        kept = (
            "kept in memory" if check.clean_fits else "kept in part; the others are computed again when tests need them"
        )
        rows.append(("memory", f"{memory_size(check.clean_gib * 2**30)} of clean activations, {kept}"))
    tests = settings.max_tests or 20_000
    speed, time = f"{1 / check.seconds_per_test:,.0f} tests per second", duration(tests * check.seconds_per_test)
    return [
        *rows,
        ("time", f"{speed}; {counted(tests, 'test')} in {time}"),
        ("faults", f"{check.n_faults} in the first {counted(check.n_tests, 'test')} under {start.perturbation}"),
    ]


def _warnings(check: Check) -> list[str]:
    warnings = [] if check.problem is None else [check.problem]
    if check.is_near_chance:
        warnings.append("the model is correct no more often than by chance: check inputs, weights and labels")
        if not check.suspicions:
            warnings.append("no other scale, normalisation, or order of channels or labels helps: check the weights")
    warnings += check.warnings
    for suspicion in check.suspicions:
        warnings.append(f"{suspicion.what} ({suspicion.accuracy:.0%} correct then): {suspicion.remedy}")
    if check.most - check.least < 0.02 * (check.bounds[1] - check.bounds[0]):
        own = f"{check.least:.4g},{check.most:.4g}"
        warnings.append(f"the inputs fill less than 2% of the bounds: pass their own range, {own}")
    return warnings


def _run_command(arguments: CommandLine) -> str:
    """The command that starts the campaign; options that the configuration file sets are not repeated."""
    known = [field.name for field in (*fields(Origin), *fields(Settings))]
    names = [name for name in known if name in arguments.given.keys() - arguments.from_config]
    words = ["themis run"]
    if "config" in arguments.given:
        words.append(f"--config {quote(arguments.config)}")
    words += [f"--{name.replace('_', '-')} {quote(format_value(getattr(arguments, name)))}" for name in names]
    if "perturb" not in arguments.from_config:
        words.append(f"--perturb {quote(arguments.perturb)}")
    return " ".join(words)
