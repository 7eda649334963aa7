"""The cost of durability: appending faults compared with plain writes, and campaigns with and without a run folder.

    python benchmarks/store.py [--no-quick] [--device cuda] [--repeats N] [--json FILE]

Appending: the same bytes are written through the store and, for comparison, to one plain file that is synced as often;
the disk determines both. Campaigns with and without a folder alternate, and the ratio is that of their medians; timings
vary by more than the difference, so the time for which campaigns wait for the store is measured too: what its thread
writes while tests run does not count. `--quick` is the default: a tenth of the tests, once.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from floor import Parts, make, timed
from rich.console import Console
from rich.table import Table
from searching.arguments import add_quick, complete

import themis
from themis import Target
from themis.campaign import series
from themis.runs.environment import describe_environment
from themis.runs.store.tensors import Tensors
from themis.runs.store.writer import Writer
from themis_lab.cli.demo import make_data, make_model

AIM = 1.03
QUICK, FULL = {"repeats": 1, "scale": 0.1}, {"repeats": 5, "scale": 1.0}
MAGNITUDES = 0.0005, 0.02
"""Of Gaussian noise on a GPU: some tests fail, and many."""
SHAPES = {"digits": (1, 28, 28), "CIFAR": (3, 32, 32), "ImageNet": (3, 224, 224)}
RECORD: dict[str, Any] = {
    "settings": {},
    "origin": None,
    "perturbation": "noise",
    "theta": [{"name": "sigma", "low": 0.0, "high": 1.0, "unit": ""}],
    "environment": {},
}


Faults = tuple[dict[str, np.ndarray], Tensors]
"""Columns and tensors of faults."""
FLOATS = ("clean_value", "value", "confidence", "margin", "distance", "linf", "ssim")


def make_faults(first: int, n: int, shape: tuple[int, ...], rng: np.random.Generator) -> Faults:
    """Faults as a campaign passes them to the store: each with its own seed, so that all are worth keeping."""
    ids = np.arange(first, first + n)
    columns: dict[str, np.ndarray] = {
        "id": ids,
        "seed_id": ids,
        "theta": rng.random((n, 1), dtype=np.float32),
        "noise_seed": rng.integers(0, 2**62, n),
        **{name: np.full(n, 1) for name in ("round", "label", "clean_answer", "answer", "position", "chunk")},
        "stream": np.full(n, "search"),
        "kind": np.full(n, "corner"),
        **{name: rng.random(n, dtype=np.float32) for name in FLOATS},
        "signature": rng.random((n, 57), dtype=np.float32),
        "raised": np.zeros(n, dtype=bool),
    }
    inputs = torch.from_numpy(rng.random((n, *shape), dtype=np.float32))
    return columns, Tensors(torch.from_numpy(ids), inputs, inputs, torch.zeros(n, 10))


def append(folder: Path, shape: tuple[int, ...], n_flushes: int, n: int) -> tuple[float, float, int]:
    """Seconds to append through the store, seconds to write the same bytes to one file, and the number of bytes."""
    rng = np.random.default_rng(0)
    batches = [make_faults(k * n, n, shape, rng) for k in range(n_flushes)]
    store = Writer(folder / "run")
    store.create(RECORD, max_stored=n * n_flushes)
    start = perf_counter()
    for k, (columns, tensors) in enumerate(batches):
        store.add_faults((k + 1) * n, columns, tensors)
        store.flush(now=True)
        store.wait()
    ours = perf_counter() - start
    store.close()
    blocks = [tensors.inputs.numpy().tobytes() * 2 for _, tensors in batches]
    start = perf_counter()
    with (folder / "plain").open("wb") as file:
        for block in blocks:
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
    return ours, perf_counter() - start, sum(map(len, blocks))


def campaigns(device: torch.device, scale: float) -> dict[str, tuple[Target, object, dict[str, Any]]]:
    """Targets, data and options: on a CPU a small net that breaks often, and the nets of floor.py."""
    if device.type != "cpu":
        target, inputs, options = make("resnet56", device, 1.0)
        with torch.no_grad():
            usual = target.module(inputs[:256].to(device)).mean(0)
        target = Target(
            target.module, output=lambda scores: scores - usual
        )  # answers that hang on the input, and so break
        options["max_tests"] = int(500_000 * scale)
        return {f"ResNet-56, magnitude {each}": (target, inputs, {**options, "magnitude": each}) for each in MAGNITUDES}
    endless = {"tolerance": 1e-12, "plateau": None}
    digits = {"magnitude": 0.25, "max_tests": int(50_000 * scale), **endless}
    return {
        "LeNet-5 on digits": (Target(make_model()), make_data(), digits),
        "LeNet-5, random": make("lenet5", device, 2 * scale),
        "ResNet-56, random": make("resnet56", device, scale),
    }


def compare(target: Target, data: object, options: dict[str, Any], repeats: int) -> dict[str, Any]:
    """A campaign with and without a run folder, alternating; and the share of its time that it waits for the store."""
    themis.run(target, data, "gaussian", **{**options, "max_tests": options["max_tests"] // 10})  # warm up
    seconds: dict[bool, list[float]] = {False: [], True: []}
    names = ("create", "note", "add_faults", "flush", "wait", "end", "close")
    parts: Parts = {"store": [*((Writer, name) for name in names), (series, "describe_tested")]}
    with timed(parts, torch.device("cpu")) as spent:  # it has nothing to do with the device, which runs the next tests
        for k in range(2 * repeats):
            has_folder = k % 4 in (1, 2)  # neither always goes first
            with tempfile.TemporaryDirectory(dir=".") as folder:
                start = perf_counter()
                out = Path(folder) / "run" if has_folder else None
                result = themis.run(target, data, "gaussian", out=out, **options)
                seconds[has_folder].append(perf_counter() - start)
    without, with_folder = statistics.median(seconds[False]), statistics.median(seconds[True])
    return {
        "tests": result.rounds[-1].tests,
        "faults": len(result.faults),
        "without": seconds[False],
        "with_folder": seconds[True],
        "ratio": with_folder / without,
        "faults_a_second": len(result.faults) / with_folder,
        "share": spent["store"] / sum(seconds[True]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_quick(parser)
    parser.add_argument("--device", default="cpu", help="where campaigns run")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--scale", type=float, help="multiplies the number of tests")
    parser.add_argument("--json", type=Path)
    arguments = complete(parser.parse_args(), QUICK, FULL)
    console, device = Console(), torch.device(arguments.device)
    results: dict[str, dict[str, Any]] = {"append": {}, "campaign": {}}
    table = Table(
        "appending",
        "faults/s",
        "MB/s",
        "plain MB/s",
        "ratio",
        title="Store compared with plain writes, synced as often",
    )
    for name, shape in SHAPES.items():
        n_flushes, n = (20, 100) if name != "ImageNet" else (10, 30)
        with tempfile.TemporaryDirectory(dir=".") as folder:
            ours, plain, size = append(Path(folder), shape, n_flushes, n)
        rates = [n_flushes * n / ours, size / ours / 1e6, size / plain / 1e6, ours / plain]
        results["append"][name] = dict(
            zip(("faults_a_second", "mb_a_second", "plain_mb_a_second", "ratio"), rates, strict=True)
        )
        table.add_row(f"{n_flushes} x {n} {name}", *(f"{rate:,.1f}" for rate in rates))
    console.print(table)
    columns = ("campaign", "faults", "without (s)", "with folder (s)", "ratio", "waits for the store")
    table = Table(*columns, title=f"Durability; goal {AIM}")
    for name, setup in campaigns(device, arguments.scale).items():
        result = results["campaign"][name] = compare(*setup, arguments.repeats)
        medians = [f"{statistics.median(result[kind]):.2f}" for kind in ("without", "with_folder")]
        table.add_row(name, f"{result['faults']:,}", *medians, f"{result['ratio']:.3f}", f"{result['share']:.1%}")
    console.print(table)
    if arguments.json:
        command = shlex.join(["python", *sys.argv])
        content = {"command": command, "environment": describe_environment(device), "results": results}
        arguments.json.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
