"""Disagreements of a model with itself as it would be deployed, per 1,000 passes: the policy for it beside others.

    THEMIS_DATA=FOLDER python benchmarks/against.py [--no-quick] [--models resnet56-cifar10] [--json FILE]

The deployed models are an identical copy, dynamic int8, bfloat16 and ONNX in onnxruntime. Int8 and ONNX answer one
input at a time, since the scales of dynamic int8 depend on the batch. Every campaign has the same seeds, and a pass
runs both models once. On a CPU, `--quick` is the default: 200 seeds and 200 tests on LeNet-5.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from paper import write_json
from rich.console import Console
from rich.table import Table
from searching.arguments import add_quick, complete
from torch import nn

import themis
from themis import Against, BlackBox, Target
from themis.data.seeds import read_seeds
from themis_lab.zoo import data, load

POLICIES = ("boundary", "scheduled", "random")
QUICK: dict[str, Any] = {"models": ["lenet5-mnist"], "seeds": 200, "tests": 200, "campaigns": 1}
FULL: dict[str, Any] = {"models": ["lenet5-mnist", "resnet56-cifar10"], "seeds": 2_000, "tests": 4_000, "campaigns": 2}
ENDLESS: dict[str, Any] = {"coverage": None, "recall": None, "plateau": None}


def one_by_one(predict: Any, target: Target) -> BlackBox:
    return BlackBox(predict, bounds=target.bounds, preprocess=target.preprocess, batch_size=1)


def deployed(target: Target, example: torch.Tensor, folder: Path) -> Iterator[tuple[str, Any]]:
    """The same model in four forms."""
    net = copy.deepcopy(target.module).eval()
    yield "copy", copy.deepcopy(net)
    yield "bfloat16", copy.deepcopy(net).bfloat16()
    quantize: Any = torch.ao.quantization.quantize_dynamic
    small = quantize(copy.deepcopy(net), {nn.Linear}, dtype=torch.qint8)

    def answer(inputs: Any) -> Any:
        with torch.no_grad():
            return small(torch.from_numpy(inputs)).numpy()

    yield "int8", one_by_one(answer, target)
    file = folder / "model.onnx"
    torch.onnx.export(net, (example[None],), str(file), dynamo=False, input_names=["inputs"])
    session = import_module("onnxruntime").InferenceSession(str(file), providers=["CPUExecutionProvider"])
    yield "ONNX", one_by_one(lambda inputs: session.run(None, {"inputs": inputs})[0], target)


def measure(name: str, seeds: Any, options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Campaigns of all policies on a model beside each of its forms."""
    target = load(name)
    for form, reference in deployed(target, seeds.inputs[0].float(), folder):
        for perturbation in ("gaussian", "fog"):
            for policy in options.policies:
                counts, margins = dict.fromkeys(("passes", "faults", "distinct"), 0), []
                for number in range(options.campaigns):
                    run = themis.run(
                        Against(target, reference), seeds, perturbation,
                        policy=policy, max_tests=options.tests, random_seed=number, **ENDLESS,
                    )  # fmt: skip
                    last = run.rounds[-1]
                    counts["passes"] += last.passes
                    counts["faults"] += last.faults
                    counts["distinct"] += last.distinct_faults
                    margins += [abs(fault.margin) for fault in run.faults]
                found = {**counts, "margin": statistics.median(margins), "most": max(margins)} if margins else counts
                print(name, form, perturbation, policy, found, flush=True)
                yield {"model": name, "perturbation": perturbation, "deployed": form, "policy": policy, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_quick(parser)
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    for name in ("seeds", "tests", "campaigns"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--json", help="write the raw results to this file")
    options = complete(parser.parse_args(), QUICK, FULL)
    if not os.environ.get("THEMIS_DATA"):
        print("skipped: this benchmark needs the data folder: set THEMIS_DATA")
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            cells += measure(name, read_seeds(data(name), options.seeds), options, Path(folder))
    table = Table(title="disagreements per 1,000 passes (distinct ones)")
    for column in ("model", "perturbation", "deployed", *options.policies):
        table.add_column(column)
    for row in dict.fromkeys((cell["model"], cell["perturbation"], cell["deployed"]) for cell in cells):
        shown = [
            f"{1e3 * cell['faults'] / cell['passes']:.1f} ({1e3 * cell['distinct'] / cell['passes']:.1f})"
            for cell in cells
            if (cell["model"], cell["perturbation"], cell["deployed"]) == row
        ]
        table.add_row(*row, *shown)
    Console(width=120).print(table)
    if options.json:
        write_json(options.json, torch.device("cpu"), cells)


if __name__ == "__main__":
    main()
