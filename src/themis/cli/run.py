"""`themis run`: a campaign on the user's model and data."""

from __future__ import annotations

import importlib
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any, get_type_hints

from themis.errors import DataError, ModelError, UsageError
from themis.settings import Settings

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from themis.result import Run
    from themis.target import Target

HELP = "test a model: find faults until coverage, a budget or a plateau stops it"


def make_parser() -> ArgumentParser:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(description="Test a model. Every option can also stand in a YAML file given with --config.")
    parser.add_argument("--config", action="config", help="YAML file with options; flags override it")
    parser.add_argument("--model", type=str, required=True, help="module:factory that makes an nn.Module or a Target")
    parser.add_argument("--weights", type=str | None, default=None, help="state dict to load into the model")
    parser.add_argument(
        "--data", type=str, required=True, help="READER, READER:PATH (digits, cifar10, npz) or module:factory"
    )
    parser.add_argument("--perturb", type=str, required=True, help="name of the perturbation: gaussian, fgsm")
    parser.add_argument("--out", type=str | None, default=None, help="new folder for the results")
    parser.add_argument("--bounds", type=tuple[float, float], default=(0.0, 1.0), help="range of a raw input, [0,255]")
    parser.add_argument("--mean", type=float | list[float] | None, default=None, help="normalisation mean by channel")
    parser.add_argument("--std", type=float | list[float] | None, default=None, help="normalisation spread by channel")
    parser.add_argument("--layers", type=str | list[str], default="auto", help="auto, or globs over layer names")
    parser.add_argument("--neurons", type=str, default="element", help="element or channel")
    parser.add_argument("--oracle", type=str, default="auto", help="wrong, changed, or auto: wrong if there are labels")
    parser.add_argument("--device", type=str | None, default=None, help="cpu or cuda; by default where the model is")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON and nothing else")
    add_settings(parser)
    return parser


def add_settings(parser: ArgumentParser) -> None:
    """A flag for every option of a campaign."""
    hints = get_type_hints(Settings)
    for each in fields(Settings):
        kind = str if each.name == "policy" else hints[each.name]
        flag = f"--{each.name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, default=each.default, help=each.metadata["help"])


def execute(arguments: Namespace, said: set[str]) -> int:
    from themis.campaign import run

    target = load_target(arguments)
    data = load_data(arguments.data)
    callbacks = [] if arguments.quiet or arguments.json else [show_progress()]
    options = {each.name: arguments[each.name] for each in fields(Settings) if each.name in said}
    result = run(target, data, arguments.perturb, out=arguments.out, callbacks=callbacks, **options)
    return report(result, arguments)


def show_progress() -> Any:
    from themis.progress import ShowProgress

    return ShowProgress()


def report(result: Run, arguments: Namespace) -> int:
    """Say where the results are; the exit code of a campaign that has ended."""
    import json

    from themis.cli import DONE, INTERRUPTED

    if arguments.json:
        print(json.dumps(result.summary(), indent=2))
    elif arguments.out and not arguments.quiet:
        print(f"Results in {arguments.out}")
    return INTERRUPTED if result.stop_reason == "user" else DONE


def load_target(arguments: Namespace) -> Target:
    import torch

    from themis.target import Normalize, Target

    made = _call(arguments.model, "model")
    if isinstance(made, Target):
        target = made
    else:
        if (arguments.mean is None) != (arguments.std is None):
            raise UsageError("--mean and --std must be given together, got one of them")
        preprocess = None if arguments.mean is None else Normalize(arguments.mean, arguments.std)
        target = Target(
            made,
            tuple(arguments.bounds),
            preprocess,
            arguments.layers,
            neurons=arguments.neurons,
            oracle=arguments.oracle,
        )
    if arguments.weights is not None:
        _load_weights(target.module, arguments.weights)
    if arguments.device is not None:
        try:
            target.module.to(torch.device(arguments.device))
        except (RuntimeError, AssertionError) as error:
            raise UsageError(f"--device must be usable here, {arguments.device!r} is not: {error}") from error
    return target


def load_data(spec: str) -> Any:
    from themis.data.readers import READERS, read_data

    name, _, rest = spec.partition(":")
    return read_data(spec) if name in READERS or not rest else _call(spec, "data")


def _load_weights(module: Any, path: str) -> None:
    import pickle

    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise DataError(f"the weights file must exist, {path} does not") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise DataError(f"{path} must be a state dict that torch.load(weights_only=True) reads: {error}") from error
    try:
        missing, unexpected = module.load_state_dict(state, strict=False)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ModelError(f"the weights in {path} must fit the model: {error}") from error
    missing = [key for key in missing if not key.endswith("num_batches_tracked")]  # older files have none
    if missing or unexpected:
        raise ModelError(
            f"the weights in {path} must fit the model, missing {missing[:3] or 'none'}, "
            f"unexpected {unexpected[:3] or 'none'}"
        )


def _call(spec: str, what: str) -> Any:
    """What `module:factory` makes; modules are looked up in the working directory too."""
    name, _, attribute = spec.partition(":")
    if not attribute:
        raise UsageError(f"--{what} must be module:factory, got {spec!r}: write for instance mymodels:make_net")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        made = getattr(importlib.import_module(name), attribute)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--{what} {spec!r}: {error}; modules are looked up in the working directory and the environment"
        ) from error
    except AttributeError as error:
        raise UsageError(f"--{what} {spec!r}: {error}") from error
    import torch

    if isinstance(made, torch.nn.Module) or not callable(made):
        return made
    try:
        return made()
    except Exception as error:
        failure = ModelError if what == "model" else DataError
        raise failure(f"--{what} {spec!r} raised {type(error).__name__}: {error}") from error
