"""`themis check`: look before a campaign."""

from __future__ import annotations

from dataclasses import asdict, fields
from shlex import quote
from typing import TYPE_CHECKING, Any

from themis.cli import DONE, RUN_FAILED
from themis.cli.options import Parser, add_config, add_fields, add_option, chosen
from themis.cli.run import PERTURB, check_names, home, require
from themis.cli.values import write
from themis.runs.source import Origin
from themis.settings import Settings

if TYPE_CHECKING:
    from argparse import Namespace

    from themis.campaign.preflight import Check

HELP = (
    "Run the model on a few inputs and say what Themis sees: layers, neurons, bounds, clean accuracy, what seems "
    "wrong, the memory and time a campaign will need, and the command that starts it. Exit code 3 if none can run."
)
EXAMPLES = """
themis check --model mine:make_net --data mine:make_data
themis check --model mine:make_net --weights net.pt --data images:photos --perturb gaussian
"""
N_LAYERS = 12
"""Layers listed; the others are counted."""


def add_arguments(parser: Parser) -> None:
    add_config(parser)
    add_fields(parser.add_argument_group("model and data"), Origin)
    campaign = parser.add_argument_group("campaign")
    add_option(campaign, "perturb", str, "gaussian", PERTURB)
    add_fields(campaign, Settings, only=("magnitude", "max_seeds", "max_tests", "batch_size", "clean_memory_gib"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print everything as JSON")


def execute(arguments: Namespace, said: set[str]) -> int:
    options = chosen(arguments, Settings, said)
    settings = Settings.of(**options)
    require(arguments, "model", "data")
    from themis.campaign.preflight import check

    origin = Origin.of({**vars(arguments), "folder": home(arguments.folder)})
    with origin.at_home():
        perturbation = check_names(arguments.perturb, settings)
    seen = check(origin.target(), origin.read(), perturbation, **options)
    if arguments.json:
        import json

        print(json.dumps(asdict(seen), indent=2, default=str))
    else:
        print("\n".join(describe(seen, settings)))
        print(f"\nstart it: {_command(arguments, said)}")
    return DONE if seen.problem is None else RUN_FAILED


def describe(seen: Check, settings: Settings) -> list[str]:
    """What was seen, for a person."""
    from themis.runs.run import percent

    shape = "x".join(map(str, seen.input_shape))
    rows = [
        ("model", f"{seen.model}, {seen.n_parameters:,} parameters, {seen.dtype} on {seen.device}"),
        ("inputs", f"{seen.n_seeds:,} of {shape}, {seen.least:.4g} to {seen.most:.4g} in bounds {write(seen.bounds)}"),
        ("outputs", "x".join(map(str, seen.output_shape)) or "one number"),
        ("labels", "none: a fault is a changed answer" if seen.n_classes is None else f"{seen.n_classes} different"),
    ]
    if seen.is_training:
        rows.append(("mode", "given in training mode, tested in evaluation mode"))
    if seen.accuracy is not None:
        rows.append(("accuracy", f"{percent(seen.accuracy)} of {seen.n_looked_at:,} clean inputs answered rightly"))
    if seen.start is not None:
        rows += _describe_start(seen, settings)
    lines = [f"{name:<10}  {text}" for name, text in rows]
    warnings = _warnings(seen)
    return lines + (["", *(f"! {each}" for each in warnings)] if warnings else [])


def _describe_start(seen: Check, settings: Settings) -> list[tuple[str, str]]:
    start = seen.start
    assert start is not None
    assert seen.seconds_a_test is not None
    assert seen.clean_gib is not None
    rows = [("neurons", f"{start.n_neurons:,} in {len(start.layers)} layers")]
    width = max(len(layer.name) for layer in start.layers[:N_LAYERS])
    for layer in start.layers[:N_LAYERS]:
        size = "x".join(map(str, layer.shape))
        rows.append(("", f"{layer.name:<{width}}  {size}, {layer.n_neurons:,} neurons"))
    if len(start.layers) > N_LAYERS:
        rows.append(("", f"and {len(start.layers) - N_LAYERS} more"))
    tests = settings.max_tests or 20_000
    all_tests = _duration(tests * seen.seconds_a_test)
    kept = "kept" if seen.clean_gib <= settings.clean_memory_gib else "kept in part, the others run with each test"
    rows += [
        ("memory", f"{seen.clean_gib:.2g} GiB of clean activations, {kept}"),
        (
            "time",
            f"{1 / seen.seconds_a_test:,.0f} tests a second; {tests:,} in {all_tests}",
        ),
        ("faults", f"{seen.n_faults} in the first {seen.n_tests} tests under {start.perturbation}"),
    ]
    return rows


def _warnings(seen: Check) -> list[str]:
    found = []
    if seen.problem is not None:
        found.append(seen.problem)
    if seen.is_near_chance:
        found.append("the model is right no more often than by chance: inputs, weights or labels are not as it expects")
        if not seen.suspicions:
            found.append("no other scale, normalisation or order of channels or labels helps: check the weights")
    found += [f"{each.what} ({each.accuracy:.0%} right then): {each.remedy}" for each in seen.suspicions]
    if seen.most - seen.least < 0.02 * (seen.bounds[1] - seen.bounds[0]):
        found.append(f"inputs fill less than 2% of the bounds: pass those they have, {seen.least:.4g},{seen.most:.4g}")
    return found


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


def _command(arguments: Namespace, said: set[str]) -> str:
    names = [each.name for each in (*fields(Origin), *fields(Settings)) if each.name in said and each.name != "perturb"]
    words: list[Any] = ["themis run"]
    words += [f"--{name.replace('_', '-')} {quote(write(getattr(arguments, name)))}" for name in names]
    if "config" in said:
        words.append(f"--config {quote(arguments.config)}")
    return " ".join([*words, f"--perturb {quote(arguments.perturb)}"])
