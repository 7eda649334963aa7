"""Passes per second of whole campaigns over bare eager forward passes of the same model: what a user gets.

    [THEMIS_DATA=FOLDER] python benchmarks/throughput.py [--rows ResNet-56,suite] [--repeats 3] [--json FILE]
    python benchmarks/throughput.py --best [--rows ResNet-56,LeNet] [--json FILE]
    python benchmarks/throughput.py --table FILE [FILE]     # the tables of docs/performance.md, from JSON files

The rows have default options, the weights and data of the zoo, and few and many tests. Those of `--best` have what
suits a benchmark: a chunk of their own, random weights and so few faults, few seeds and hundreds of thousands of tests.
Campaigns and bare passes take turns, and a share is the median of their ratios: the host of a GPU is often shared.

With a GPU, seconds are those that elapse. Without one, small campaigns run instead, in seconds of CPU time, which say
more on a machine with other work; their figures do not carry over to a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from searching.files import write_results
from torch import nn

import themis
from themis import Target
from themis.data import read_seeds
from themis.target.activations import Granularity
from themis_lab.zoo import choose_entry, data, lenet5, load, resnet50, resnet56

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHUNK = 256
"""Rows of the bare passes of a GPU."""


@dataclass(frozen=True)
class Campaign:
    """A campaign with default options: a model of the zoo, how many seeds and tests it has, and the aim of its share.

    memory_gib: memory for clean activations, if it is not the default. first: whether it is the first of its process,
    and its aim is a number of seconds. suite: whether its perturbation is the name of a suite.
    """

    model: str
    perturbation: str
    n_seeds: int
    n_tests: int
    aim: float | None
    magnitude: float | None = None
    neurons: Granularity = "element"
    memory_gib: float | None = None
    first: bool = False
    suite: bool = False


def sizes(
    title: str, aims: Mapping[int, float | None], model: str, perturbation: str, n_seeds: int, **options: Any
) -> dict[str, Campaign]:
    """A row for each number of tests, with its aim."""
    return {
        f"{title}, {n:,} tests": Campaign(model, perturbation, n_seeds, n, aim, **options) for n, aim in aims.items()
    }


CIFAR, IMAGENET, MNIST = "resnet56-cifar10", "resnet50-imagenet", "lenet5-mnist"
NOISE: dict[str, Any] = {"magnitude": 0.05}
ON_GPU = {
    **sizes("ResNet-56, 1,000 seeds", {5_000: 0.6, 20_000: 0.8, 80_000: 0.9}, CIFAR, "gaussian", 1_000, **NOISE),
    **sizes("ResNet-56, 1,000 seeds, fog", {20_000: 0.8}, CIFAR, "fog", 1_000),
    **sizes("ResNet-56, 10,000 seeds", {20_000: 0.7, 80_000: 0.8}, CIFAR, "gaussian", 10_000, **NOISE),
    **sizes("ResNet-50, 512 seeds", {5_000: 0.7, 20_000: 0.8}, IMAGENET, "gaussian", 512, **NOISE),
    **sizes(
        "ResNet-50, 512 seeds, channels",
        *({5_000: 0.7, 20_000: 0.8}, IMAGENET, "gaussian", 512),
        **NOISE,
        neurons="channel",
    ),
    **sizes("ResNet-50, 4,096 seeds", {5_000: 0.6, 20_000: 0.8}, IMAGENET, "gaussian", 4_096, **NOISE),
    **sizes("suite corruptions, ResNet-56, 500 seeds", {20_000: 1.5}, CIFAR, "corruptions", 500, suite=True),
    **sizes("first of a process, ResNet-50", {2_000: 1.5}, IMAGENET, "gaussian", 512, **NOISE, first=True),
}
ON_CPU = {
    **sizes("LeNet-5, 1,000 seeds", {1_000: None, 10_000: 0.83}, MNIST, "gaussian", 1_000, magnitude=0.25),
    **sizes(
        "LeNet-5, 10,000 seeds, of which a third fit",
        *({10_000: None}, MNIST, "gaussian", 10_000),
        magnitude=0.25,
        memory_gib=0.1,
    ),
    **sizes("ResNet-56, 200 seeds", {500: None, 2_000: 0.91}, CIFAR, "gaussian", 200, **NOISE),
    **sizes("suite corruptions, LeNet-5, 500 seeds", {3_000: None}, MNIST, "corruptions", 500, suite=True),
    **sizes("first of a process, LeNet-5", {1_000: None}, MNIST, "gaussian", 500, magnitude=0.25, first=True),
}


def read(campaign: Campaign) -> tuple[Target, Any]:
    """The target and the seeds; pictures are repeated if there are fewer than the row has."""
    target = load(campaign.model, neurons=campaign.neurons)
    target.module.to(DEVICE)
    if not os.environ.get("THEMIS_DATA"):
        return target, torch.rand(campaign.n_seeds, *choose_entry(campaign.model).input_shape)
    seeds = read_seeds(data(campaign.model), campaign.n_seeds)
    if len(seeds) == campaign.n_seeds:
        return target, seeds
    rows = torch.arange(campaign.n_seeds) % len(seeds)
    assert seeds.labels is not None
    return target, (seeds.take(rows), seeds.labels[rows])


def now() -> float:
    """Seconds that have elapsed, or on a CPU those of its time."""
    return time.perf_counter() if DEVICE == "cuda" else time.process_time()


def bare(net: Callable[[torch.Tensor], Any], inputs: torch.Tensor, seconds: float = 1.0) -> float:
    """Eager forward passes per second of the model alone."""
    with torch.no_grad():
        for _ in range(2):
            net(inputs)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        began, n = now(), 0
        while now() - began < seconds:
            for _ in range(10 if DEVICE == "cuda" else 1):
                net(inputs)
                n += len(inputs)
            if DEVICE == "cuda":
                torch.cuda.synchronize()
        return n / (now() - began)


def run_campaign(campaign: Campaign, target: Target, seeds: Any) -> dict[str, float]:
    """The passes, seconds and faults of one campaign, and on a CPU the rows that the model computed per test."""
    n_rows = 0

    def count(module: nn.Module, inputs: Any) -> None:
        nonlocal n_rows
        n_rows += len(inputs[0])

    hook = target.module.register_forward_pre_hook(count) if DEVICE == "cpu" else None
    began = now()
    if campaign.suite:
        with tempfile.TemporaryDirectory() as folder:
            suite = themis.run_suite(
                target, seeds, campaign.perturbation, out=Path(folder) / "suite", max_tests=campaign.n_tests
            )
            seconds, passes, faults = now() - began, suite.passes, sum(row.faults for row in suite.rows)
    else:
        options: dict[str, Any] = {"magnitude": campaign.magnitude, "clean_memory_gib": campaign.memory_gib}
        run = themis.run(
            target, seeds, campaign.perturbation, max_tests=campaign.n_tests, coverage=None, plateau=None, **options
        )
        seconds, passes, faults = now() - began, run.rounds[-1].passes, run.rounds[-1].faults
    if hook is not None:
        hook.remove()
    computed = {} if hook is None else {"computed_per_test": n_rows / campaign.n_tests}
    return {"passes": passes, "seconds": seconds, "faults": faults, **computed}


def measure_first(name: str) -> list[dict[str, float]]:
    """The first and the second campaign of a process of their own."""
    made = subprocess.run([sys.executable, __file__, "--first", name], capture_output=True, text=True, check=True)
    rows: list[dict[str, float]] = json.loads(made.stdout.splitlines()[-1])
    return rows


def measure(name: str, campaign: Campaign, repeats: int) -> dict[str, Any]:
    """The figures of one row."""
    if campaign.first:
        pairs = [measure_first(name) for _ in range(repeats)]
        first, second = (statistics.median(pair[k]["seconds"] for pair in pairs) for k in range(2))
        return {**asdict(campaign), "seconds": first, "seconds_of_second": second}
    target, seeds = read(campaign)
    inputs = read_seeds(seeds).take(torch.arange(CHUNK if DEVICE == "cuda" else 32)).to(DEVICE)
    run_campaign(campaign, target, seeds)  # compiles the kernels
    measured, shares = [], []
    for _ in range(repeats):
        with target.opened():
            floor = bare(target.forward, inputs)
        measured.append(run_campaign(campaign, target, seeds))
        shares.append(measured[-1]["passes"] / measured[-1]["seconds"] / floor)
    figures = {key: statistics.median(each[key] for each in measured) for key in measured[0]}
    return {**asdict(campaign), **figures, "share": statistics.median(shares), "shares": shares}


COUNTED = (("faults", 0), ("computed_per_test", 2))


def table_of_use(results: dict[str, dict[str, Any]]) -> str:
    """The rows with default options as a Markdown table."""
    lines = ["| campaign | seconds | faults | rows per test | share | aim |", "|---|---|---|---|---|---|"]
    for name, row in results.items():
        seconds = f"{row['seconds']:.2f}"
        if row["first"]:
            seconds += f" (second {row['seconds_of_second']:.2f})"
        share = "" if row["first"] else f"{row['share']:.2f} ({min(row['shares']):.2f} to {max(row['shares']):.2f})"
        aim = "" if row["aim"] is None else f"{row['aim']:g}" + " s" * (row["first"] or row["suite"])
        faults, computed = (f"{row[key]:,.{digits}f}" if key in row else "" for key, digits in COUNTED)
        lines.append(f"| {name} | {seconds} | {faults} | {computed} | {share} | {aim} |")
    return "\n".join(lines)


SMALL, LARGE = (3, 32, 32), (3, 224, 224)
Row = tuple[Callable[[], nn.Module], tuple[int, ...], int, int, Granularity, int, str, float | None, str, float]
BEST: dict[str, Row] = {
    # builder, input shape, seeds, tests, neurons, chunk, perturbation, magnitude, policy, aim
    "ResNet-56, elements": (resnet56, SMALL, 1000, 400_000, "element", 256, "gaussian", 0.05, "scheduled", 0.8),
    "ResNet-56, elements, chunk 1,024": (
        *(resnet56, SMALL, 1000, 600_000, "element", 1024, "gaussian", 0.05, "scheduled", 0.8),
    ),
    "ResNet-56, policy paper": (resnet56, SMALL, 1000, 120_000, "element", 256, "gaussian", 0.05, "paper", 0.8),
    "ResNet-56, FGSM": (resnet56, SMALL, 1000, 120_000, "element", 256, "fgsm", 0.01, "scheduled", 0.8),
    "ResNet-56, channels": (resnet56, SMALL, 1000, 400_000, "channel", 256, "gaussian", 0.05, "scheduled", 0.8),
    "ResNet-50, channels": (resnet50, LARGE, 512, 60_000, "channel", 256, "gaussian", 0.05, "scheduled", 0.8),
    "ResNet-50, 9.6 M elements": (resnet50, LARGE, 128, 40_000, "element", 64, "gaussian", 0.05, "scheduled", 0.7),
    "ResNet-50, rain, channels": (resnet50, LARGE, 512, 60_000, "channel", 256, "rain", None, "scheduled", 0.8),
    "LeNet-5, elements": (lenet5, (1, 28, 28), 2000, 1_000_000, "element", 256, "gaussian", 0.25, "scheduled", 0.3),
}
BEFORE = {
    "ResNet-56, elements": 0.17,
    "ResNet-56, elements, chunk 1,024": 0.21,
    "ResNet-56, policy paper": 0.17,
    "ResNet-56, FGSM": 0.23,
    "ResNet-56, channels": 0.19,
    "ResNet-50, channels": 0.31,
    "ResNet-50, 9.6 M elements": 0.26,
    "ResNet-50, rain, channels": 0.21,
    "LeNet-5, elements": 0.04,
}
"""Shares before chunks were captured as CUDA graphs, on the same kind of machine."""


def measure_best(name: str, repeats: int) -> dict[str, Any]:
    """The figures of one row."""
    builder, shape, n_seeds, n_tests, neurons, chunk, perturbation, magnitude, policy, aim = BEST[name]
    torch.manual_seed(0)
    net = builder().cuda().eval()
    inputs = torch.rand(n_seeds, *shape, generator=torch.Generator().manual_seed(0))
    target = Target(net, neurons=neurons)
    options: dict[str, Any] = {"magnitude": magnitude, "policy": policy, "coverage": None, "plateau": None}
    options |= {"batch_size": chunk, "clean_memory_gib": 60.0}
    themis.run(target, inputs, perturbation, max_tests=5 * chunk, **options)  # compiles the kernels
    shares, rates, floors = [], [], []
    for _ in range(repeats):
        floors.append(bare(net, torch.rand(chunk, *shape, device="cuda")))
        torch.cuda.reset_peak_memory_stats()
        run = themis.run(target, inputs, perturbation, max_tests=n_tests, **options)
        rates.append(run.rounds[-1].passes / run.seconds.total)
        shares.append(rates[-1] / floors[-1])
    return {
        "chunk": chunk,
        "tests": n_tests,
        "neurons": run.start.n_neurons,
        "passes_per_second": round(statistics.median(rates)),
        "bare_per_second": round(statistics.median(floors)),
        "share": round(statistics.median(shares), 3),
        "shares": [round(share, 3) for share in shares],
        "before": BEFORE[name],
        "aim": aim,
        "seconds": {phase: round(value, 2) for phase, value in vars(run.seconds).items()},
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }


def table_of_best(results: dict[str, dict[str, Any]]) -> str:
    """The rows at their best as a Markdown table."""
    lines = [
        "| campaign | chunk | tests | passes per second | bare per second | share | before | aim | peak memory |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        least, most = min(row["shares"]), max(row["shares"])
        share = f"{row['share']:.2f}" + (f" ({least:.2f} to {most:.2f})" if len(row["shares"]) > 1 else "")
        lines.append(
            f"| {name} | {row['chunk']:,} | {row['tests']:,} | {row['passes_per_second']:,} | "
            f"{row['bare_per_second']:,} | {share} | {row['before']:.2f} | {row['aim']:.2f} | "
            f"{row['peak_gib']:.1f} GiB |"
        )
    return "\n".join(lines)


def table(results: dict[str, dict[str, Any]]) -> str:
    return table_of_best(results) if "before" in next(iter(results.values())) else table_of_use(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", default="", help="parts of the names of rows, separated by commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--best", action="store_true", help="the rows that suit a benchmark, on a GPU")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, nargs="+")
    parser.add_argument("--first", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.table:
        print("\n\n".join(table(json.loads(path.read_text())["results"]) for path in arguments.table))
        return
    if arguments.best and DEVICE == "cpu":
        print("skipped: these rows need a GPU")
        return
    campaigns = ON_GPU if DEVICE == "cuda" else ON_CPU
    if arguments.first:
        target, seeds = read(campaigns[arguments.first])
        print(json.dumps([run_campaign(campaigns[arguments.first], target, seeds) for _ in range(2)]))
        return
    results = {}
    for name in BEST if arguments.best else campaigns:
        if not any(part in name for part in arguments.rows.split(",")):
            continue
        if arguments.best:
            results[name] = measure_best(name, arguments.repeats)
        else:
            results[name] = measure(name, campaigns[name], arguments.repeats)
        print(json.dumps({name: results[name]}), flush=True)
        if arguments.json:
            write_results(arguments.json, DEVICE, results)
    print(table(results))


if __name__ == "__main__":
    main()
