"""What durability costs: appending faults beside plain file writes, and campaigns with and without a run folder.

    python benchmarks/store.py [--models lenet5,resnet56] [--repeats N] [--json FILE]

Appending: the same bytes go through the store and, for comparison, to one plain file that is synced as often; the disk
sets both. Campaigns with and without a folder take turns, and the ratio is that of their medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from floor import MODELS, make
from rich.console import Console
from rich.table import Table

import themis
from themis.environment import describe_environment
from themis.store.tensors import Tensors
from themis.store.writer import Writer

AIM = 1.03
SHAPES = {"digits": (1, 28, 28), "CIFAR": (3, 32, 32), "ImageNet": (3, 224, 224)}
RECORD = {
    "settings": {},
    "origin": None,
    "perturbation": "noise",
    "theta": [{"name": "sigma", "low": 0.0, "high": 1.0, "unit": ""}],
    "environment": {},
}


def make_faults(first: int, n: int, shape: tuple[int, ...], rng: np.random.Generator):
    """Faults as a campaign hands them over: each of a seed of its own, so that all are worth keeping."""
    ids = np.arange(first, first + n)
    columns = {
        "id": ids,
        "seed_id": ids,
        "theta": rng.random((n, 1), dtype=np.float32),
        "noise_seed": rng.integers(0, 2**62, n),
        **{name: np.full(n, 1) for name in ("round", "label", "clean_answer", "answer", "position", "chunk")},
        "stream": np.full(n, "search"),
        "kind": np.full(n, "corner"),
        **{name: rng.random(n, dtype=np.float32) for name in ("confidence", "margin", "distance", "ssim")},
        "signature": rng.random((n, 57), dtype=np.float32),
    }
    inputs = torch.from_numpy(rng.random((n, *shape), dtype=np.float32))
    return columns, Tensors(torch.from_numpy(ids), inputs, inputs, torch.zeros(n, 10))


def append(folder: Path, shape: tuple[int, ...], n_flushes: int, n: int) -> tuple[float, float, int]:
    """Seconds to append through the store, and to write the same bytes to one file; the bytes."""
    rng = np.random.default_rng(0)
    batches = [make_faults(k * n, n, shape, rng) for k in range(n_flushes)]
    store = Writer(folder / "run")
    store.create(RECORD, max_stored=n * n_flushes)
    began = perf_counter()
    for k, (columns, tensors) in enumerate(batches):
        store.add_faults((k + 1) * n, columns, tensors)
        store.flush(now=True)
    ours = perf_counter() - began
    store.close()
    blocks = [tensors.inputs.numpy().tobytes() * 2 for _, tensors in batches]
    began = perf_counter()
    with (folder / "plain").open("wb") as file:
        for block in blocks:
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
    return ours, perf_counter() - began, sum(map(len, blocks))


def compare(name: str, repeats: int) -> dict[str, object]:
    """A campaign with and without a run folder, in turns."""
    target, inputs, options = make(name, torch.device("cpu"), 1.0)
    themis.run(target, inputs, "gaussian", **{**options, "max_tests": 640})  # warm up
    without, with_folder = [], []
    for _ in range(repeats):
        began = perf_counter()
        themis.run(target, inputs, "gaussian", **options)
        without.append(perf_counter() - began)
        with tempfile.TemporaryDirectory(dir=".") as folder:
            began = perf_counter()
            result = themis.run(target, inputs, "gaussian", out=Path(folder) / "run", **options)
            with_folder.append(perf_counter() - began)
    ratio = statistics.median(with_folder) / statistics.median(without)
    return {"faults": len(result.faults), "without": without, "with_folder": with_folder, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    console, results = Console(), {"append": {}, "campaign": {}}
    table = Table(
        "appending", "faults/s", "MB/s", "plain MB/s", "ratio", title="Store beside plain writes, synced alike"
    )
    for name, shape in SHAPES.items():
        n_flushes, n = (20, 100) if name != "ImageNet" else (10, 30)
        with tempfile.TemporaryDirectory(dir=".") as folder:
            ours, plain, size = append(Path(folder), shape, n_flushes, n)
        rates = [n_flushes * n / ours, size / ours / 1e6, size / plain / 1e6, ours / plain]
        results["append"][name] = dict(
            zip(("faults_a_second", "mb_a_second", "plain_mb_a_second", "ratio"), rates, strict=True)
        )
        table.add_row(f"{n_flushes} x {n} {name}", *(f"{each:,.1f}" for each in rates))
    console.print(table)
    table = Table("campaign", "faults", "without (s)", "with folder (s)", "ratio", title=f"Durability; aim {AIM}")
    for name in arguments.models.split(","):
        found = results["campaign"][name] = compare(name, arguments.repeats)
        medians = [f"{statistics.median(found[each]):.2f}" for each in ("without", "with_folder")]
        table.add_row(name, f"{found['faults']:,}", *medians, f"{found['ratio']:.3f}")
    console.print(table)
    if arguments.json:
        content = {"environment": describe_environment(torch.device("cpu")), "results": results}
        arguments.json.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
