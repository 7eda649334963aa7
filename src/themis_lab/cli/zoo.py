"""List the models of the zoo. `verify` measures the accuracy of all models, or of those named, and compares it with the
published value; the exit code is 0 if all agree and 1 if one does not. `train` trains one model. Data and weights are
looked up in the folder THEMIS_DATA.

themis zoo
themis zoo verify lenet5-mnist resnet56-cifar10
themis zoo train lenet1-mnist --epochs 3 --out lenet1.pt
"""

from __future__ import annotations

import os
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from themis.cli import DONE, GATE_FAILED
from themis.cli.options import CommandLine, Parser, add_option
from themis.errors import MissingExtraError, ThemisError, UsageError, nearest
from themis.text import print_columns, print_json, print_text

if TYPE_CHECKING:
    from themis_lab.zoo import Entry, MeasuredFigure

OPTION_ACTIONS = {
    "weights": ("verify",),
    "epochs": ("train",),
    "random_seed": ("train",),
    "out": ("train",),
    "force": ("train",),
    "device": ("verify", "train"),
}
"""The actions that each option belongs to."""
EXTENSIONS = (".pt", ".pth", ".safetensors")


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "action", metavar="ACTION", nargs="?", default="list", help="list, verify or train (default: list)"
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="name of a model (default: all)")
    add_option(parser, "device", str | None, None, "cpu or cuda (default: cpu)")
    checking = parser.add_argument_group("verify")
    add_option(checking, "weights", str | None, None, "state dict to verify, instead of the weights of the zoo")
    training = parser.add_argument_group("train")
    add_option(training, "epochs", int | None, None, "epochs of training (default: as in the recipe)")
    add_option(training, "random_seed", int, 0, "the same seed gives the same weights on the same machine")
    training.add_argument("--out", metavar="FILE", help="file for the weights, .pt or .safetensors (default: NAME.pt)")
    training.add_argument("--force", action="store_true", help="replace the file if it exists")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print only the result, as JSON")


def execute(arguments: CommandLine) -> int:
    action = {"list": show, "verify": verify, "train": train}.get(arguments.action)
    if action is None:
        raise UsageError(f"ACTION must be list, verify or train, got {arguments.action!r}: see themis zoo --help")
    for name, actions in OPTION_ACTIONS.items():
        if name in arguments.given and getattr(arguments, name) and arguments.action not in actions:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} does not apply to themis zoo {arguments.action}, only to {' and '.join(actions)}")
    from themis_lab.zoo import choose_entry

    for name in arguments.names:
        choose_entry(name)
    return action(arguments)


def show(arguments: CommandLine) -> int:
    """List the models."""
    from themis_lab.zoo import ZOO

    rows = [_describe(ZOO[name]) for name in arguments.names or ZOO]
    if arguments.json:
        print_json(rows)
        return DONE
    lines = [("name", "elements", "channels", "paper", "parameters", "published", "data", "weights")]
    for row in rows:
        numbers = (row[name] for name in ("n_elements", "n_channels", "paper_neurons", "n_parameters"))
        counts = ("-" if number is None else f"{number:,}" for number in numbers)
        has = ("yes" if row[name] else "no" for name in ("data", "weights"))
        lines.append((row["name"], *counts, _format_metric(row["stated"], row["metric"]), *has))
    print_columns(lines, [True] + [False] * 7)
    print_text("\nNeurons are counted as elements, as channels, and as in the paper.")
    if folder := os.environ.get("THEMIS_DATA"):
        print_text(f"The data and the weights are in {folder}.")
    else:
        print_text("Set THEMIS_DATA to the folder with data and weights; a model without weights has random ones.")
    return DONE


def verify(arguments: CommandLine) -> int:
    """Compare models with their published values. An optional model without weights counts only if it was named."""
    from themis_lab.zoo import ZOO
    from themis_lab.zoo.datasets import data_folder

    data_folder()  # raises an error before anything runs
    if arguments.weights is not None and len(arguments.names) != 1:
        raise UsageError("--weights needs exactly one NAME: themis zoo verify NAME --weights FILE")
    names = arguments.names or list(ZOO)
    width = max(map(len, names))
    rows = []
    for name in names:
        rows.append(_verify(ZOO[name], arguments))
        if not arguments.json:
            print_text(f"{name:<{width}}  {rows[-1]['text']}", flush=True)
    can_skip = {row["name"]: not row["has_weights"] and ZOO[row["name"]].is_optional for row in rows}
    skipped = [name for name in names if can_skip[name] and name not in arguments.names]
    counted = [row for row in rows if row["name"] not in skipped]
    n_agree = sum(row["agrees"] is not False and row["measured"] is not None for row in counted)
    if arguments.json:
        print_json(rows)
    else:
        rest = f"; skipped, because they have no weights: {', '.join(skipped)}" if skipped else ""
        print_text(f"{n_agree} of {len(counted)} agree{rest}")
    return DONE if n_agree == len(counted) else GATE_FAILED


def train(arguments: CommandLine) -> int:
    """Train one model and write its weights."""
    if len(arguments.names) != 1:
        raise UsageError(f"themis zoo train needs exactly one NAME, got {len(arguments.names)}: themis zoo lists them")
    (name,) = arguments.names
    out = Path(arguments.out or f"{name}.pt")
    if out.suffix.lower() not in EXTENSIONS:
        raise UsageError(f"--out must have a known file extension, got {out}: {nearest(out.suffix, EXTENSIONS)}")
    from themis.runs.store.files import check_free, fresh_file
    from themis_lab.zoo.loading import train as train_entry

    check_free(out, replaces=arguments.force)

    def say(text: str) -> None:
        if not arguments.json:
            print_text(text, flush=True)

    module, figure = train_entry(
        name, epochs=arguments.epochs, random_seed=arguments.random_seed, device=arguments.device, log=say
    )
    with fresh_file(out, replaces=arguments.force) as part:
        _write(module.state_dict(), part, is_safe=out.suffix.lower() == ".safetensors")
    if arguments.json:
        print_json({**_as_object(figure), "out": str(out)})
    else:
        print_text(f"test {figure.entry.metric} {_compare(figure)} on {figure.n_inputs:,} inputs")
        print_text(f"Wrote {out}. Test it: themis run --zoo {name} --weights {quote(str(out))} --perturb gaussian")
    return DONE


def _write(state: dict[str, Any], part: Path, is_safe: bool) -> None:
    if is_safe:
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous() for name, tensor in state.items()}, part)
    else:
        import torch

        torch.save(state, part)


def _describe(entry: Entry) -> dict[str, Any]:
    """A model, and which of its files are available, as plain data."""
    from themis_lab.zoo import find_weights

    folder, weights = os.environ.get("THEMIS_DATA"), find_weights(entry.name)
    plain = ("name", "title", "input_shape", "n_parameters", "n_elements", "n_channels", "paper_neurons", "metric")
    return {
        **{name: getattr(entry, name) for name in plain},
        "stated": None if entry.stated is None else entry.stated.value,
        "source": entry.source,
        "data": bool(folder) and (Path(str(folder)) / entry.folder).is_dir(),
        "weights": None if weights is None else str(weights),
    }


def _verify(entry: Entry, arguments: CommandLine) -> dict[str, Any]:
    """The measured value, or why there is none."""
    from themis_lab.zoo import find_weights, verify

    row: dict[str, Any] = {"name": entry.name, "measured": None, "agrees": None, "has_weights": True}
    if arguments.weights is None and find_weights(entry.name) is None:
        return {**row, "has_weights": False, "text": f"no weights ({entry.source})"}
    try:
        figure = verify(entry.name, arguments.weights, device=arguments.device)
    except MissingExtraError as error:
        return {**row, "has_weights": False, "text": str(error)}
    except ThemisError as error:
        return {**row, "agrees": False, "text": f"cannot be verified: {error}"}
    verdict = {None: "no published value", True: "agrees", False: "DIFFERS"}[figure.agrees]
    rows = "" if entry.stated is None else f", {entry.stated.rows}"
    return {**row, **_as_object(figure), "text": f"{entry.metric} {_compare(figure)}: {verdict}{rows}"}


def _as_object(figure: MeasuredFigure) -> dict[str, Any]:
    stated = figure.entry.stated
    return {
        "name": figure.entry.name,
        "metric": figure.entry.metric,
        "measured": figure.measured,
        "stated": None if stated is None else stated.value,
        "agrees": figure.agrees,
        "n_inputs": figure.n_inputs,
    }


def _compare(figure: MeasuredFigure) -> str:
    entry = figure.entry
    stated = "" if entry.stated is None else f" (published {_format_metric(entry.stated.value, entry.metric)})"
    return f"{_format_metric(figure.measured, entry.metric)}{stated}"


def _format_metric(value: float | None, metric: str) -> str:
    if value is None:
        return "-"
    return f"{value:.2%}" if metric == "accuracy" else f"{value:.4f}"
