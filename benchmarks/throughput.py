"""Passes per second of whole campaigns on a GPU over bare eager forward passes of the same chunk, row by row.

    python benchmarks/throughput.py [--rows ResNet-56,LeNet] [--repeats 3] [--json FILE]
    python benchmarks/throughput.py --table FILE      # the table of docs/performance.md, from a JSON file

Campaigns and bare passes take turns, and a share is the median of their ratios: the host of a GPU is often shared. The
weights are random, so that there are few faults and the search spends a fifth of its passes on gradient ascents.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from searching.files import write_results
from torch import nn

import themis
from themis import Target
from themis.target.activations import Granularity
from themis_lab.zoo import lenet5, resnet50, resnet56

SMALL, LARGE = (3, 32, 32), (3, 224, 224)
Row = tuple[Callable[[], nn.Module], tuple[int, ...], int, int, Granularity, int, str, float | None, str, float]
ROWS: dict[str, Row] = {
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


def bare(net: nn.Module, shape: tuple[int, ...], chunk: int, seconds: float = 1.0) -> float:
    """Eager forward passes per second of the model alone."""
    inputs = torch.rand(chunk, *shape, device="cuda")
    with torch.no_grad():
        for _ in range(5):
            net(inputs)
        torch.cuda.synchronize()
        began, n = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            for _ in range(10):
                net(inputs)
            torch.cuda.synchronize()
            n += 10
    return n * chunk / (time.perf_counter() - began)


def measure(name: str, repeats: int) -> dict[str, Any]:
    """The figures of one row."""
    builder, shape, n_seeds, n_tests, neurons, chunk, perturbation, magnitude, policy, aim = ROWS[name]
    torch.manual_seed(0)
    net = builder().cuda().eval()
    inputs = torch.rand(n_seeds, *shape, generator=torch.Generator().manual_seed(0))
    target = Target(net, neurons=neurons)
    options: dict[str, Any] = {"magnitude": magnitude, "policy": policy, "coverage": None, "plateau": None}
    options |= {"batch_size": chunk, "clean_memory_gib": 60.0}
    themis.run(target, inputs, perturbation, max_tests=5 * chunk, **options)  # compiles the kernels
    shares, rates, floors = [], [], []
    for _ in range(repeats):
        floors.append(bare(net, shape, chunk))
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


def table(results: dict[str, dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", default="", help="parts of the names of rows, separated by commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(arguments.table.read_text())["results"]))
        return
    if not torch.cuda.is_available():
        print("skipped: this benchmark needs a GPU")
        return
    names = [name for name in ROWS if any(part in name for part in arguments.rows.split(","))]
    results = {}
    for name in names:
        results[name] = measure(name, arguments.repeats)
        print(json.dumps({name: results[name]}), flush=True)
        torch.cuda.empty_cache()
        if arguments.json:
            write_results(arguments.json, "cuda", results)
    print(table(results))


if __name__ == "__main__":
    main()
