"""How the cost of a campaign grows with neurons, tests and seeds, and whether large models and data sets fit.

    python benchmarks/scale.py [--device cuda] [--no-quick] [--repeats 3] [--json FILE] [--plot FILE]
    python benchmarks/scale.py --device cuda --parts large,stream --seconds 10 --json FILE
    python benchmarks/scale.py --table FILE      # the tables of docs/performance.md, from a JSON file

The curves are campaigns on a net whose neurons grow with its channels; each exponent is the slope of a straight line
through the logarithms, by least squares, with its 95% interval. `large` are campaigns on ViT-B/16, ConvNeXt and
DenseNet-121 with element neurons. `stream` is a campaign on pictures that are made when they are read: a million of
them would take 12 GB. Peak memory is that of the device, and on a CPU what the process takes beyond what it had before.
On a CPU, `--quick` is the default: a quarter of the sizes, once each.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from searching.arguments import add_quick, complete
from searching.files import write_results
from torch import nn
from torch.utils.data import Dataset

import themis
from themis import Target
from themis_lab.zoo import densenet121

SIDE, CLASSES = 32, 10
CURVES = {
    # what grows, its values on a CPU and on a GPU
    "neurons": ([8, 16, 32, 64, 128, 256], [16, 64, 256, 1024, 4096]),  # in channels of 1,024 neurons each
    "tests": ([1_280, 2_560, 5_120, 10_240, 20_480], [20_480, 40_960, 81_920, 163_840]),
    "seeds": ([1_000, 2_000, 4_000, 8_000, 16_000], [4_000, 16_000, 64_000]),
}
FIXED = {
    # channels, tests and seeds of a curve where they do not grow
    "cpu": {"neurons": 8, "tests": 1_280, "seeds": 200},
    "cuda": {"neurons": 16, "tests": 20_480, "seeds": 400},
}
STREAMS = {"cpu": [100_000, 200_000, 400_000], "cuda": [62_500, 250_000, 1_000_000]}
QUICK: dict[str, Any] = {"repeats": 1, "scale": 0.25, "stream": [10_000, 20_000]}
FULL: dict[str, Any] = {"repeats": 3, "scale": 1.0}
LARGE = ("vit_b_16", "convnext_tiny", "densenet121")
BANK = 1 << 20
"""Random numbers that the pictures of a stream are cut from."""


class Streamed(Dataset[torch.Tensor]):
    """Pictures `[3, side, side]` that are made when they are read, each a part of the same random numbers."""

    def __init__(self, n: int, side: int = SIDE) -> None:
        self.n, self.shape = n, (3, side, side)
        size = math.prod(self.shape)
        self.bank = torch.rand(BANK + size, generator=torch.Generator().manual_seed(0))
        self.size = size

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, k: int) -> torch.Tensor:
        first = k * 7919 % BANK
        return self.bank[first : first + self.size].view(self.shape)


def wide_net(channels: int) -> nn.Module:
    """A net with 1,024 neurons per channel, whose cost grows with their number."""
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * channels, CLASSES)]
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.ReLU(), *head)


def large_net(name: str) -> tuple[nn.Module, int, int]:
    """A model with random weights, the side of its pictures, and its chunk on a GPU."""
    torch.manual_seed(0)
    if name == "densenet121":
        return densenet121(), SIDE, 64
    from torchvision import models

    return getattr(models, name)(weights=None), 224, 64


class PeakMemory:
    """The most memory that was in use since it was created, in MiB beyond what was in use then."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # gives back what earlier campaigns have freed
        self.start = self._host("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak, VmHWM
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)

    @staticmethod
    def _host(field: str) -> float:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) / 1024

    def read(self) -> dict[str, float]:
        peak = {"host_mib": round(self._host("VmHWM") - self.start, 1)}
        if self.device.type == "cuda":
            peak["device_mib"] = round(torch.cuda.max_memory_allocated(self.device) / 2**20, 1)
        return peak


def campaign(net: nn.Module, data: Any, device: torch.device, **options: Any) -> dict[str, Any]:
    """The figures of one campaign that spends its whole budget."""
    target = Target(net.to(device).eval())
    memory, cpu = PeakMemory(device), time.process_time()
    run = themis.run(target, data, "gaussian", **{"magnitude": 0.1, "coverage": None, "plateau": None, **options})
    last = run.rounds[-1]
    return {
        "neurons": run.start.n_neurons,
        "tests": last.tests,
        "seeds": run.start.n_seeds,
        "passes": last.passes,
        "chunk": run.start.chunk,
        "seconds": round(run.seconds.total, 4),
        "cpu_seconds": round(time.process_time() - cpu, 4),
        **memory.read(),
    }


def fit(values: list[float], costs: list[float]) -> dict[str, float]:
    """The exponent of a power law by least squares of the logarithms, with its 95% interval."""
    from scipy.stats import linregress, t

    line = linregress(np.log(values), np.log(costs))
    half = float(t.ppf(0.975, len(values) - 2) * line.stderr) if len(values) > 2 else math.inf
    return {"exponent": float(line.slope), "low": line.slope - half, "high": line.slope + half}


def curve(subject: str, device: torch.device, repeats: int, scale: float) -> dict[str, Any]:
    """Campaigns along one curve, in turns so that a busy machine slows all points alike; medians of their repeats."""
    values = [*dict.fromkeys(max(8, round(value * scale)) for value in CURVES[subject][device.type == "cuda"])]
    fixed = dict(FIXED[device.type])
    runs: dict[int, list[dict[str, Any]]] = {value: [] for value in values}
    for repeat in range(repeats + 1):
        for value in values:
            settings = {**fixed, subject: value}
            inputs = torch.rand(settings["seeds"], 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
            net = wide_net(settings["neurons"])
            record = campaign(net, inputs, device, max_tests=settings["tests"] if repeat else 320)
            if repeat:  # the first turn only warms up
                runs[value].append(record)
    points = [
        {
            **records[-1],
            **{name: statistics.median(record[name] for record in records) for name in ("seconds", "cpu_seconds")},
            "all_seconds": [record["seconds"] for record in records],
        }
        for records in runs.values()
    ]
    size = [point[subject] for point in points]
    memory = "device_mib" if device.type == "cuda" else "host_mib"
    fits = {"seconds": fit(size, [point["seconds"] for point in points])}
    fits["cpu_seconds"] = fit(size, [point["cpu_seconds"] for point in points])
    fits["memory"] = fit(size, [max(point[memory], 0.1) for point in points])
    return {"points": points, "fits": fits}


def bare(net: nn.Module, side: int, chunk: int, device: torch.device) -> float:
    """Eager forward passes per second of the model alone."""
    inputs = torch.rand(chunk, 3, side, side, device=device)

    def run(n: int) -> float:
        began = time.perf_counter()
        for _ in range(n):
            net(inputs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    with torch.no_grad():
        run(2)
        n = max(2, round(1 / max(run(1), 1e-3)))
        return n * chunk / run(n)


def large(name: str, device: torch.device, seconds: float, n_seeds: int, max_tests: int | None) -> dict[str, Any]:
    """A campaign on a large model with element neurons, beside its bare passes."""
    net, side, chunk = large_net(name)
    options = {"batch_size": chunk, "clean_memory_gib": 40.0, "max_seconds": seconds, "max_tests": max_tests}
    data = Streamed(n_seeds, side)
    campaign(net, data, device, **{**options, "max_tests": 2 * chunk if max_tests is None else max_tests})
    record = campaign(net, data, device, **options)
    floor = bare(net, side, record["chunk"], device)
    rate = record["passes"] / record["seconds"]
    figures = {"passes_per_second": round(rate, 1), "bare_per_second": round(floor, 1), "share": round(rate / floor, 3)}
    return {"model": name, **record, **figures}


def stream(n: int, device: torch.device, n_tests: int) -> dict[str, Any]:
    """A campaign on `n` pictures that are never in memory together."""
    picture_mib = n * 3 * SIDE * SIDE * 4 / 2**20
    options = {"max_tests": n_tests, "clean_memory_gib": 0.25, "batch_size": 1024}
    record = campaign(wide_net(16), Streamed(n), device, **options)
    return {**record, "pictures_mib": round(picture_mib, 1)}


def tables(results: dict[str, Any]) -> str:
    """The results as Markdown tables."""
    lines = []
    if "curves" in results:
        lines += ["| cost against | from | to | exponent of the time | of the CPU time | of the peak memory |"]
        lines += ["|---|---|---|---|---|---|"]
        for subject, part in results["curves"].items():
            cells = [
                f"{part['fits'][name]['exponent']:.2f} "
                f"({part['fits'][name]['low']:.2f} to {part['fits'][name]['high']:.2f})"
                for name in ("seconds", "cpu_seconds", "memory")
            ]
            first, last = part["points"][0][subject], part["points"][-1][subject]
            lines.append(f"| {subject} | {first:,} | {last:,} | {' | '.join(cells)} |")
    if "large" in results:
        lines += ["", "| model | neurons | chunk | passes per second | bare passes per second | share | peak memory |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for row in results["large"]:
            peak = row.get("device_mib", row["host_mib"]) / 1024
            lines.append(
                f"| {row['model']} | {row['neurons']:,} | {row['chunk']} | {row['passes_per_second']:,.0f} | "
                f"{row['bare_per_second']:,.0f} | {row['share']:.2f} | {peak:.1f} GiB |"
            )
    if "stream" in results:
        lines += ["", "| pictures | size of the pictures | tests | passes per second | peak memory beyond the start |"]
        lines += ["|---|---|---|---|---|"]
        for row in results["stream"]:
            peak = f"{row['host_mib']:,.0f} MiB"
            if "device_mib" in row:
                peak += f", GPU {row['device_mib']:,.0f} MiB"
            lines.append(
                f"| {row['seeds']:,} | {row['pictures_mib']:,.0f} MiB | {row['tests']:,} | "
                f"{row['passes'] / row['seconds']:,.0f} | {peak} |"
            )
    return "\n".join(lines)


def plot(results: dict[str, Any], path: str) -> None:
    """Draw the curves with their fitted lines."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(results["curves"]), figsize=(4 * len(results["curves"]), 3.4))
    for axis, (subject, part) in zip(np.atleast_1d(axes), results["curves"].items(), strict=True):
        size = np.array([point[subject] for point in part["points"]], dtype=float)
        for name, unit in (("cpu_seconds", "CPU time (s)"), ("seconds", "time (s)")):
            cost = np.array([point[name] for point in part["points"]])
            slope = part["fits"][name]["exponent"]
            line = np.exp(np.log(cost).mean() + slope * (np.log(size) - np.log(size).mean()))
            points = axis.loglog(size, cost, "o", label=f"{unit}, exponent {slope:.2f}")
            axis.loglog(size, line, color=points[0].get_color())
        axis.set_xlabel(subject)
        axis.xaxis.set_minor_formatter("")
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    add_quick(parser)
    parser.add_argument("--parts", default="curves,stream", help="of curves, large, stream; separated by commas")
    parser.add_argument("--repeats", type=int, help="campaigns per point of a curve")
    parser.add_argument("--scale", type=float, help="multiplies the values of the curves")
    parser.add_argument("--models", default=",".join(LARGE), help="large models")
    parser.add_argument("--seconds", type=float, default=15.0, help="time of a campaign on a large model")
    parser.add_argument("--large-tests", type=int, help="its tests, if not limited by time alone")
    parser.add_argument("--large-seeds", type=int, default=128)
    parser.add_argument("--stream", type=int, nargs="*", help="numbers of pictures")
    parser.add_argument("--stream-tests", type=int, default=2_560)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", help="draw the curves into this file")
    parser.add_argument("--table", type=Path, help="print the tables of a JSON file")
    arguments = parser.parse_args()
    if arguments.table:
        print(tables(json.loads(arguments.table.read_text())["results"]))
        return
    arguments = complete(arguments, QUICK, FULL)
    device, parts = torch.device(arguments.device), arguments.parts.split(",")
    results: dict[str, Any] = {}

    def add(part: str, name: str | None, measure: Callable[[], Any]) -> None:
        value = measure()
        print(json.dumps({name or part: value}), flush=True)
        if name is None:
            results.setdefault(part, []).append(value)
        else:
            results.setdefault(part, {})[name] = value
        if arguments.json:
            write_results(str(arguments.json), arguments.device, results)

    if "large" in parts:
        for name in arguments.models.split(","):
            limits = (arguments.seconds, arguments.large_seeds, arguments.large_tests)
            add("large", None, partial(large, name, device, *limits))
    if "stream" in parts:
        for n in arguments.stream or STREAMS[device.type]:
            add("stream", None, partial(stream, n, device, arguments.stream_tests))
    if "curves" in parts:
        for subject in CURVES:
            add("curves", subject, partial(curve, subject, device, arguments.repeats, arguments.scale))
    print(tables(results))
    if arguments.plot and "curves" in results:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
