"""The paper's experiment: tests until all sampled neurons of ResNet-56 have converged under Gaussian noise of 0.05.

    THEMIS_DATA=FOLDER python benchmarks/paper.py [--device cuda] [--no-quick] [--json FILE]

The seeds are 2,000 correctly classified pictures of the CIFAR-10 test set. On a machine without Pillow or without the
data folder, `--data` is a NumPy archive of all test pictures (`inputs`, uint8 `[10000, 3, 32, 32]`, and `labels`),
and `--weights` is the model's state dict. On a CPU, `--quick` is the default: 200 seeds and 400 tests, which do
not reach the goal.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from searching.arguments import add_quick, complete

import themis
from themis import Normalize, Run, Target
from themis.data.seeds import Seeds, read_seeds
from themis.runs.environment import describe_environment
from themis.target.activations import Granularity
from themis_lab.zoo import resnet56
from themis_lab.zoo.datasets import data_folder, read_cifar10

N_SEEDS = 2_000
MAGNITUDE = 0.05
PROTOTYPE_TESTS = 23_000
"""Tests that a prototype of the method needed; the paper's average over its models is 21,399."""
TOLERATED = 0.2
QUICK: dict[str, Any] = {"pictures": 400, "seeds": 200, "max_tests": 400}
FULL: dict[str, Any] = {"pictures": 10_000, "seeds": N_SEEDS, "max_tests": None}


def read_target(weights: Path | None, device: torch.device, neurons: Granularity = "element") -> Target:
    """ResNet-56 with the published weights, which lack the counters of batch normalisation."""
    path = weights or data_folder() / "cifar10" / "weights" / "resnet56_akamaster.pt"
    model = resnet56()
    missing, unexpected = model.load_state_dict(torch.load(path, weights_only=True), strict=False)
    if unexpected or any(not name.endswith("num_batches_tracked") for name in missing):
        sys.exit(f"{path} does not fit ResNet-56: missing {missing}, unexpected {unexpected}")
    normalize = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    return Target(model.eval().to(device), preprocess=normalize, neurons=neurons)


def read_pictures(archive: Path | None) -> Seeds:
    """The test set, in 0..1."""
    if archive is None:
        return read_cifar10()
    with np.load(archive) as arrays:
        return read_seeds((torch.from_numpy(arrays["inputs"]).float() / 255, torch.from_numpy(arrays["labels"])))


def correct_seeds(target: Target, pictures: Seeds, n: int = N_SEEDS) -> Seeds:
    """A fixed random sample of the pictures that the model classifies correctly."""
    assert pictures.labels is not None
    inputs = pictures.inputs
    assert isinstance(inputs, torch.Tensor)
    with target.opened(), torch.no_grad():
        batches = torch.split(inputs, 256)
        answers = torch.cat([target.forward(batch.to(target.device)).argmax(1).cpu() for batch in batches])
    return read_seeds(pictures[(answers == pictures.labels).nonzero().squeeze(1)], n)


def run_paper(target: Target, seeds: Seeds, **options: Any) -> Run:
    """The campaign of the paper's experiment."""
    return themis.run(target, seeds, "gaussian", magnitude=MAGNITUDE, preset="paper", **options)


def is_within(tests: int) -> bool:
    """Whether the number of tests is close enough to that of the prototype."""
    return abs(tests / PROTOTYPE_TESTS - 1) <= TOLERATED


def show(result: Run, console: Console) -> None:
    last = result.rounds[-1]
    table = Table(title=f"ResNet-56, {result.start.n_usable:,} seeds, Gaussian {MAGNITUDE}, preset paper")
    for column in ("round", "tests", "coverage, sampled", "coverage, all", "distinct faults", "seconds"):
        table.add_column(column, justify="right")
    for round in result.rounds:
        coverage = round.coverage
        table.add_row(
            str(round.number), f"{round.tests:,}", f"{coverage.sampled:.3f}", f"{coverage.all:.5f}",
            f"{round.distinct_faults:,}", f"{round.seconds:.1f}",
        )  # fmt: skip
    console.print(table)
    verdict = "met" if is_within(last.tests) and result.stop_reason == "coverage" else "missed"
    console.print(result.stop)
    console.print(
        f"{last.tests:,} tests to stop, aim {PROTOTYPE_TESTS:,} within {TOLERATED:.0%}: {verdict}; "
        f"{last.distinct_faults:,} distinct faults on {last.failing_seeds:,} seeds, {result.seconds.total:.1f} s"
    )


def write_json(path: str, device: torch.device, results: Any) -> None:
    """Write raw results together with the command that produced them."""
    command = shlex.join(["python", *sys.argv])
    with open(path, "w") as file:
        json.dump({"command": command, "environment": describe_environment(device), "results": results}, file, indent=1)


def parse(
    description: str, quick: dict[str, Any] | None = None, full: dict[str, Any] | None = None, **defaults: Any
) -> argparse.Namespace:
    """Parse the options that benchmarks on CIFAR-10 share; exits if there is no data.

    quick, full: options of their own that differ between a quick and a full run, with their values.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", type=Path, help="NumPy archive of the test set, instead of the data folder")
    parser.add_argument("--weights", type=Path, help="state dict, instead of that in the data folder")
    parser.add_argument("--json", help="write the raw results to this file")
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    for name, value in (quick or {}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value))
    if quick:
        add_quick(parser)
    arguments = parser.parse_args()
    if not os.environ.get("THEMIS_DATA") and not (arguments.data and arguments.weights):
        print(
            "skipped: this benchmark needs CIFAR-10; set THEMIS_DATA to the data folder, or pass --data and --weights"
        )
        sys.exit(0)
    return complete(arguments, quick, full) if quick and full else arguments


def main() -> None:
    arguments = parse(__doc__.splitlines()[0], QUICK, FULL, random_seed=0)
    device = torch.device(arguments.device)
    target = read_target(arguments.weights, device)
    pictures = read_pictures(arguments.data)[torch.arange(arguments.pictures)]
    seeds = correct_seeds(target, pictures, arguments.seeds)
    result = run_paper(target, seeds, random_seed=arguments.random_seed, max_tests=arguments.max_tests)
    show(result, Console())
    if arguments.json:
        rounds = [asdict(round) for round in result.rounds]
        for record in rounds:
            del record["coverage"]["by_layer"]
        write_json(arguments.json, device, {"summary": result.summary(), "rounds": rounds})


if __name__ == "__main__":
    main()
