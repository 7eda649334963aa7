"""`themis init`: write the files with which a project begins to test its model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from themis.cli import DONE
from themis.cli.options import Parser, add_option
from themis.cli.source import PERTURB_HELP
from themis.errors import UsageError
from themis.text import print_text

if TYPE_CHECKING:
    from argparse import Namespace

HELP = (
    "Write a commented themis.yaml for themis run and themis check, and a test file for pytest. Without --model and "
    "--data, also write model_under_test.py, a small model to replace with yours, so that everything runs at once. "
    "No file is ever overwritten."
)
EXAMPLES = """
themis init
themis init --model mine:make_net --data mine:make_data --perturb 'rain + fog'
themis init robustness --model net.onnx --data images:photos
"""
MODEL_FILE = "model_under_test.py"
FACTORY = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*):([A-Za-z_]\w*)")
"""`module:function`, without arguments."""

CONFIG = """\
# Options of `themis run --config themis.yaml`; flags override them, and `themis check` reads them too.
# All options: `themis run --help`. To let your editor complete and check this file, run
# `themis run --print-schema > themis.schema.json` and remove the first # of the next line:
# # yaml-language-server: $schema=themis.schema.json

# What is tested
model: {model}  # module:function that returns the model; or a file (.pt, .onnx, .keras)
data: {data}  # module:function that returns (inputs, labels) or a Dataset; or READER:PATH, such as images:photos
# weights: model.pt  # a state dict to load into the model
bounds: [0, 1]  # the range of a raw input; every test stays inside
# mean: [0.5]  # of the normalisation that the model expects, one number or one per channel
# std: [0.25]

# How it is disturbed
perturb: {perturb}  # `themis perturbations` lists them; combine them with +
# magnitude: 0.2  # how strongly at most

# When to stop
max_tests: 2000
# max_seconds: 600
# coverage: 1.0  # stop at this share of covered neurons, once little is left to find

# What must hold, or the exit code is 1
max_fault_rate: 0.5  # the share of random disturbances that may break the model; lower it to what you can accept
# fail_under: [coverage=0.9, clean_accuracy=0.9]

random_seed: 0  # the same seed gives the same campaign
# out: runs/first  # by default runs/DATE-TIME
"""
TEST = '''\
"""The robustness of the model, as a test of this project: run it with `pytest {file}`."""

{imports}


def test_the_model_withstands(robustness):
    """Fails if the fault rate may be above its limit, and lists the most telling faults."""
    robustness({model}(), {data}(), {perturb}, max_tests=2000, max_fault_rate=0.5)
'''
CONFIG_TEST = '''\
"""The robustness of the model, as a test of this project: run it with `pytest {file}`."""

from pathlib import Path

from themis.cli import main

CONFIG = Path(__file__).with_name("themis.yaml")


def test_the_model_withstands(tmp_path, monkeypatch):
    """Runs the campaign of themis.yaml; fails if one of its limits does not hold."""
    monkeypatch.chdir(CONFIG.parent)  # which its paths are relative to
    assert main(["run", "--config", str(CONFIG), "--out", str(tmp_path / "run")]) == 0
'''
MODEL = '''\
"""The model and the data that Themis tests: replace both functions with yours."""

import torch
from torch import nn


def make_model():
    """Return the trained model: an nn.Module, or a themis.Target with its bounds and normalisation."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4))
    inputs, labels = bright_quarters(1000, random_seed=0)
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(200):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimiser.step()
    return net


def make_data():
    """Return (inputs, labels) that the model was not trained on: raw inputs within the bounds, or a Dataset of them."""
    return bright_quarters(300, random_seed=1)


def bright_quarters(n, random_seed):
    """Pictures [n, 1, 8, 8] with one bright quarter, which is the label."""
    rng = torch.Generator().manual_seed(random_seed)
    labels = torch.randint(4, (n,), generator=rng)
    inputs = 0.5 * torch.rand(n, 1, 8, 8, generator=rng)
    for k in range(4):
        inputs[labels == k, :, 4 * (k // 2) : 4 * (k // 2) + 4, 4 * (k % 2) : 4 * (k % 2) + 4] += 0.3
    return inputs, labels
'''


def add_arguments(parser: Parser) -> None:
    text = "where to write, and where the model and the data are looked up (default: the current folder)"
    parser.add_argument("folder", metavar="FOLDER", nargs="?", help=text)
    add_option(parser, "model", str | None, None, "the model, as in themis run")
    add_option(parser, "data", str | None, None, "the data, as in themis run")
    add_option(parser, "perturb", str, "gaussian", PERTURB_HELP)


def execute(arguments: Namespace, explicit_options: set[str]) -> int:
    if (arguments.model is None) != (arguments.data is None):
        missing = "--data" if arguments.data is None else "--model"
        raise UsageError(f"--model and --data must be given together, but {missing} is missing: give both, or neither")
    folder = Path(arguments.folder or ".")
    files = project_files(arguments.model, arguments.data, arguments.perturb)
    existing = [name for name in files if (folder / name).exists()]
    if existing:
        raise UsageError(
            f"nothing is overwritten, but {' and '.join(existing)} exist{'s' * (len(existing) == 1)} in "
            f"{folder.absolute()}: choose another FOLDER, or move them away"
        )
    from themis.runs.store.files import explained

    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        with explained(folder / name), (folder / name).open("x", encoding="utf-8") as file:
            file.write(text)
    *others, last = files
    print_text(f"Wrote {', '.join(others)} and {last}{'' if arguments.folder is None else f' in {folder}'}")
    if arguments.model is None:
        print_text(f"Replace the functions in {MODEL_FILE} with those of your model and data. Then, or now:")
    if arguments.folder is not None:
        print_text(f"  cd {quote(str(folder))}")
    print_text("  themis check --config themis.yaml     # inspect the model and the data")
    print_text("  themis run --config themis.yaml       # search for faults")
    print_text("  pytest test_robustness.py             # the same as a test")
    return DONE


def project_files(model: str | None, data: str | None, perturb: str) -> dict[str, str]:
    """The text of each file by its name."""
    if model is None or data is None:
        stem = MODEL_FILE.removesuffix(".py")
        return {**project_files(f"{stem}:make_model", f"{stem}:make_data", perturb), MODEL_FILE: MODEL}
    values = {"model": model, "data": data, "perturb": perturb}
    config = CONFIG.format(**{name: _as_yaml(value) for name, value in values.items()})
    return {"themis.yaml": config, "test_robustness.py": _test_file(model, data, perturb)}


def _test_file(model: str, data: str, perturb: str) -> str:
    functions = [FACTORY.fullmatch(name) for name in (model, data)]
    (first, second) = functions
    if first is None or second is None or first[2] == second[2]:
        return CONFIG_TEST.format(file="test_robustness.py")
    if first[1] == second[1]:
        imports = f"from {first[1]} import {', '.join(sorted((first[2], second[2])))}"
    else:
        imports = "\n".join(sorted(f"from {found[1]} import {found[2]}" for found in (first, second)))
    return TEST.format(
        file="test_robustness.py", imports=imports, model=first[2], data=second[2], perturb=json.dumps(perturb)
    )


def _as_yaml(text: str) -> str:
    """Text as a YAML scalar: plain if that is safe, else in quotes."""
    return text if re.fullmatch(r"[A-Za-z_][\w.:/]*", text) and not text.endswith(":") else json.dumps(text)
