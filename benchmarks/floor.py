"""The overhead of a campaign: its time divided by that of its bare forward passes, with the same model and batches.

    python benchmarks/floor.py [--device cuda] [--no-quick] [--models lenet5,resnet56] [--json FILE]
    python benchmarks/floor.py --table FILE

Campaigns and bare passes alternate, and the ratio is that of their medians. On a CPU that other programs use too, the
ratio of the CPU times says more. The profile comes from another campaign whose parts are timed by wrapping them, in
CPU time on a CPU; it shows where the remaining time is spent. On a CPU, `--quick` is the default: a tenth of the
tests, once, in which the clean passes and the start weigh more. `--table` prints the table of stored results, and runs
nothing.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter, process_time, thread_time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from searching.arguments import add_quick, complete

import themis
from themis import Target
from themis.campaign import loop
from themis.campaign.recorder import Recorder
from themis.campaign.state import State
from themis.measure import calculator as calculator_module
from themis.measure import runner as runner_module
from themis.measure.fold import ChunkFold
from themis.measure.moments import Accumulator, Panel, Shape
from themis.runs.environment import describe_environment
from themis_lab.zoo import lenet5, resnet56

AIMS = {"lenet5": 1.2, "resnet56": 1.1}
TITLES = {"lenet5": "LeNet-5, Gaussian", "resnet56": "ResNet-56, Gaussian"}
BEFORE = {"lenet5": (1.59, 1.44, 1.39, 1.37, 1.36), "resnet56": (1.30, 1.19, 1.19, 1.18, 1.19)}
"""The ratios of CPU times of earlier versions, on one thread."""
QUICK, FULL = {"repeats": 1, "scale": 0.1}, {"repeats": 3, "scale": 1.0}
MODELS = {
    # builder, input shape, seeds, tests (about ten per seed, as in real campaigns), magnitude
    "lenet5": (lenet5, (1, 28, 28), 2000, 19_200, 0.25),
    "resnet56": (resnet56, (3, 32, 32), 320, 3_200, 0.05),
}
Parts = dict[str, list[tuple[object, str]]]
"""The functions of every part: the module or class that has each, and its name there."""
PARTS: Parts = {
    "disturb the inputs": [(calculator_module, "perturb")],
    "clean activations, differences": [(ChunkFold, "on_activation")],
    "fold into moments": [(Accumulator, "add"), (Accumulator, "commit")],
    "panel": [(Panel, "add"), (Shape, "add")],
    "details of faults": [(runner_module, "describe_faults")],
    "judge": [(loop, "judge"), (loop, "conclude")],
    "search": [(loop, "_propose")],
    "count and keep faults": [(State, "add"), (Recorder, "add_faults")],
    "forward passes, traced": [(Target, "forward")],
}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make(name: str, device: torch.device, scale: float) -> tuple[Target, torch.Tensor, dict[str, Any]]:
    builder, shape, n_seeds, n_tests, magnitude = MODELS[name]
    torch.manual_seed(0)
    inputs = torch.rand(n_seeds, *shape, generator=torch.Generator().manual_seed(0))
    model = builder()
    with torch.no_grad():
        for _ in range(
            30
        ):  # gives batch norms the statistics of real activations; otherwise activations fade to denormals
            model.train()(inputs[:64])
    endless = {"tolerance": 1e-12, "plateau": None}  # the full budget is used
    options = {"magnitude": magnitude, "max_tests": int(n_tests * scale), **endless}
    return Target(model.eval().to(device)), inputs, options


def bare(target: Target, inputs: torch.Tensor, n_passes: int, chunk: int) -> tuple[float, float]:
    """Seconds, and CPU seconds, for `n_passes` forward passes in batches of `chunk`, without anything else."""
    batches = [inputs[k : k + chunk].to(target.device) for k in range(0, len(inputs) - chunk + 1, chunk)]
    with target.opened(), torch.no_grad():
        target.module(batches[0])
        synchronize(target.device)
        start, cpu_start = perf_counter(), process_time()
        for k in range(n_passes // chunk):
            target.module(batches[k % len(batches)])
        synchronize(target.device)
        rest = n_passes / (n_passes // chunk * chunk)
        return (perf_counter() - start) * rest, (process_time() - cpu_start) * rest


@contextmanager
def timed(parts: Parts, device: torch.device) -> Iterator[dict[str, float]]:
    """Wrap the parts of a campaign; yields the seconds spent in each part, without those in nested parts."""
    spent: dict[str, float] = defaultdict(float)
    stack: list[float] = []
    originals, clock = [], perf_counter if device.type == "cuda" else thread_time

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            synchronize(device)
            start = clock()
            stack.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                synchronize(device)
                total = clock() - start
                spent[name] += total - stack.pop()
                if stack:
                    stack[-1] += total

        return call

    for name, places in parts.items():
        for owner, attribute in places:
            function = getattr(owner, attribute)
            originals.append((owner, attribute, function))
            setattr(owner, attribute, wrap(name, function))
    try:
        yield spent
    finally:
        for owner, attribute, function in originals:
            setattr(owner, attribute, function)


def measure(name: str, device: torch.device, repeats: int, scale: float) -> dict[str, Any]:
    target, inputs, options = make(name, device, scale)
    themis.run(target, inputs, "gaussian", **{**options, "max_tests": 640})  # warm up
    campaigns, floors, cpu_campaigns, cpu_floors = [], [], [], []
    for _ in range(repeats):
        start = process_time()
        result = themis.run(target, inputs, "gaussian", **options)
        cpu_campaigns.append(process_time() - start)
        campaigns.append(result.seconds.total)
        floor, cpu_floor = bare(target, inputs, result.rounds[-1].passes, result.start.chunk)
        floors.append(floor)
        cpu_floors.append(cpu_floor)
    with timed(PARTS, device) as spent:
        start = process_time()
        profiled = themis.run(target, inputs, "gaussian", **options).seconds.total
        profiled = profiled if device.type == "cuda" else process_time() - start
    traced = spent.pop("forward passes, traced")
    floor = statistics.median(floors)
    of_profile = floor if device.type == "cuda" else statistics.median(cpu_floors)
    profile = {"forward passes": min(traced, of_profile), "seeing activations": max(0.0, traced - of_profile), **spent}
    profile["everything else"] = max(0.0, profiled - sum(profile.values()))
    last = result.rounds[-1]
    return {
        "model": name,
        "neurons": result.start.n_neurons,
        "chunk": result.start.chunk,
        "tests": last.tests,
        "passes": last.passes,
        "campaign_seconds": campaigns,
        "bare_seconds": floors,
        "campaign_cpu_seconds": cpu_campaigns,
        "bare_cpu_seconds": cpu_floors,
        "ratio": statistics.median(campaigns) / floor,
        "cpu_ratio": statistics.median(cpu_campaigns) / statistics.median(cpu_floors),
        "profile_seconds": profile,
        "profile_floor": of_profile,
    }


def table_of_cpu_times(results: list[dict[str, Any]]) -> str:
    """The CPU times of campaigns and bare passes as a Markdown table."""
    lines = [
        "| campaign | tests | campaign, CPU s | bare passes, CPU s | ratio | before | aim |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        campaigns, floors = r["campaign_cpu_seconds"], r["bare_cpu_seconds"]
        ratios = [campaign / floor for campaign, floor in zip(campaigns, floors, strict=True)]
        lines.append(
            f"| {TITLES[r['model']]} | {r['tests']:,} | {statistics.median(campaigns):.2f} | "
            f"{statistics.median(floors):.2f} | {r['cpu_ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | "
            f"{', '.join(f'{ratio:.2f}' for ratio in BEFORE[r['model']])} | {AIMS[r['model']]:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--scale", type=float, help="multiplies the number of tests")
    parser.add_argument("--json", help="write the raw results to this file")
    parser.add_argument("--table", metavar="FILE", help="print the table of these results, and run nothing")
    add_quick(parser)
    arguments = parser.parse_args()
    if arguments.table:
        with open(arguments.table) as file:
            print(table_of_cpu_times(json.load(file)["results"]))
        return
    complete(arguments, QUICK, FULL)
    device, console = torch.device(arguments.device), Console(width=None if sys.stdout.isatty() else 120)
    results = [measure(name, device, arguments.repeats, arguments.scale) for name in arguments.models.split(",")]
    table = Table(title=f"Campaign over bare passes, {device}, {torch.get_num_threads()} threads")
    for column in (
        "model",
        "neurons",
        "chunk",
        "tests",
        "passes",
        "campaign s",
        "bare s",
        "ratio",
        "of CPU time",
        "aim",
    ):
        table.add_column(column, justify="left" if column == "model" else "right")
    for r in results:
        table.add_row(
            r["model"], f"{r['neurons']:,}", str(r["chunk"]), f"{r['tests']:,}", f"{r['passes']:,}",
            f"{statistics.median(r['campaign_seconds']):.2f}", f"{statistics.median(r['bare_seconds']):.2f}",
            f"{r['ratio']:.2f}", f"{r['cpu_ratio']:.2f}", f"{AIMS[r['model']]:.2f}",
        )  # fmt: skip
    console.print(table)
    for r in results:
        profile = Table(title=f"{r['model']}: where a campaign's time goes (timing the parts slows them a little)")
        profile.add_column("part")
        profile.add_column("seconds", justify="right")
        profile.add_column("of bare", justify="right")
        for part, seconds in sorted(r["profile_seconds"].items(), key=lambda item: -item[1]):
            profile.add_row(part, f"{seconds:.3f}", f"{seconds / r['profile_floor']:.1%}")
        console.print(profile)
    if arguments.json:
        command = shlex.join(["python", *sys.argv])
        with open(arguments.json, "w") as file:
            content = {"command": command, "environment": describe_environment(device), "results": results}
            json.dump(content, file, indent=2)


if __name__ == "__main__":
    main()
