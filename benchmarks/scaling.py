"""Campaigns on Ray beside local ones: time, memory, and a simulation that is checked against both.

    [THEMIS_DATA=FOLDER] python benchmarks/scaling.py [--no-quick] [--tests 5000] [--seeds 400] [--workers 1,2,4] \
        [--repeats 3] [--json FILE]
    [THEMIS_DATA=FOLDER] python benchmarks/scaling.py --clusters [--json FILE]      # the simulation of clusters
    python benchmarks/scaling.py --page FILE      # write docs/scaling-measured.md from a JSON file

ResNet-56 on CIFAR-10 with its real weights, or with random ones if there is no data folder; every process has one
thread. Each campaign runs in a process of its own. The local one records how long its chunks take, in CPU seconds,
which other work on the machine changes little; the simulation predicts from them how long a campaign takes with any
number of workers, and what a driver has to merge. For clusters, a campaign of 200,000 tests on a small model runs with
the driver's real code in virtual workers, whose chunks take as long and whose messages are as large as those of a large
model. Two local campaigns at the
same time show what the machine allows, since its cores share caches and memory. Campaigns take turns and are repeated;
of each kind, the one with the median time is shown. `--quick` is the default: 400 tests on 64 seeds, with two workers.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from searching.arguments import add_quick, complete
from searching.files import write_results
from searching.virtual_ray import LATENCY, Cluster, VirtualRay
from torch import nn

import themis
from themis import Target
from themis.campaign import loop, series
from themis.data import Seeds
from themis.measure import chunk
from themis.measure.moments import Accumulator
from themis.measure.runner import LocalMeasurer, Portion
from themis_integrations import RayExecutor
from themis_integrations.ray import measurer as remote
from themis_integrations.ray import pool as worker_pool
from themis_lab.zoo import choose_entry, data, load, resnet56

QUICK = {"tests": 400, "seeds": 64, "workers": "2", "repeats": 1}
FULL = {"tests": 5000, "seeds": 400, "workers": "1,2,4", "repeats": 3}
WEIGHED = 20
"""Replies that are kept to count their bytes in the end."""
AIM = 0.85
"""Of the ideal, for two workers on two cores."""
BUSY = 2
"""Load per core above which something else was running: four workers on two cores and their driver have less."""
JUDGE = loop.judge
"""As Themis judges; campaigns here measure it."""
PAGE = Path(__file__).parents[1] / "docs" / "scaling-measured.md"
LONG = 200_000
"""Tests of a simulated campaign."""
CLUSTERS = {"resnet56-cifar10": ((8, 16, 64), 320, 32), "resnet50-imagenet": ((8,), 48, 8)}
"""Numbers of workers to simulate, and the tests and seeds of the campaign that shows how long a chunk takes."""


@dataclass
class Trace:
    """What a local campaign did, in CPU seconds: its chunks, by what was proposed together."""

    chunks: list[list[tuple[float, bool]]] = field(default_factory=list)
    """Seconds of each chunk, and whether its tests are uniform."""
    between: list[float] = field(default_factory=list)
    """Before the first chunk of each proposal: learning from the tests before, proposing, judging."""
    recording: float = 0.0
    """After a chunk: counting its results and recording its faults."""
    last: int = -1
    ended: float = 0.0
    judging: list[float] = field(default_factory=list)
    """Judging each round, which is a part of what lies between proposals."""
    n_bytes: list[int] = field(default_factory=list)
    """The size of what each chunk has left, as a worker would send it."""


class TracingMeasurer(LocalMeasurer):
    """The local measurer, which notes what it does."""

    trace = Trace()
    weighs = False
    """Whether the sizes of messages are noted."""

    def measure(self, pending: Portion, upcoming: Iterable[Portion], max_passes: int | None) -> Any:
        trace, tests, upcoming = self.trace, pending.tests, [*islice(upcoming, 1)]
        since = time.process_time() - trace.ended
        if int(tests.number[0]) > trace.last:
            following = [portion.tests for portion in upcoming if portion.stream == "search"]
            trace.last = int([tests, *following][-1].number[-1])
            trace.between.append(since)
            trace.chunks.append([])
        else:
            trace.recording = trace.recording or since
            trace.recording += (since - trace.recording) / 20
        began = time.process_time()
        measurement = super().measure(pending, upcoming, max_passes)
        trace.ended = time.process_time()
        trace.chunks[-1].append((trace.ended - began, pending.stream == "uniform"))
        if self.weighs:
            trace.n_bytes.append(len(pickle.dumps(measurement)))
            trace.ended = time.process_time()
        return measurement


class Watch(themis.Callback):
    """Notes when the tests begin and end, and what the processes do in the meantime, while they still exist."""

    began = ended = driver_cpu = ray_cpu = 0.0
    workers: list[dict[str, float]]
    before: dict[int, dict[str, float]]

    def __init__(self) -> None:
        self.replies: list[Any] = []
        self.bytes_per_chunk: float | None = None

    def on_start(self, start: Any) -> None:
        self.began, self.driver_cpu = time.perf_counter(), time.process_time()
        TracingMeasurer.trace.ended = self.driver_cpu
        self.before = {pid: _describe(pid) for pid in _workers()}
        self.ray_cpu = _services_cpu()

    def on_end(self, run: Any) -> None:
        self.ended, self.driver_cpu = time.perf_counter(), time.process_time() - self.driver_cpu
        self.ray_cpu = _services_cpu() - self.ray_cpu
        self.workers = []
        for pid, before in self.before.items():
            now = _describe(pid)
            worker = {name: now[name] - before[name] for name in ("cpu", "busy")}
            idle = max(0.0, 1 - worker["busy"] / (self.ended - self.began))
            self.workers.append({"peak_mib": now["peak_mib"], "cpu": worker["cpu"], "idle": idle})
        if self.replies:
            self.bytes_per_chunk = float(np.mean([len(pickle.dumps(reply)) for reply in self.replies]))
            self.replies.clear()


def _workers() -> list[int]:
    """The workers of this process: children of the raylet that it has started."""
    return [pid for raylet in _children(os.getpid()) for pid in _children(raylet) if _is_worker(pid)]


def _is_worker(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::WorkerHost")


def _children(parent: int) -> list[int]:
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):  # it has ended
            if int(_times(pid)[1]) == parent:
                found.append(pid)
    return found


def _services_cpu() -> float:
    """CPU seconds of the processes of Ray that are not workers."""
    return sum(_describe(pid)["cpu"] for pid in _children(os.getpid()))


def _times(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _describe(pid: int) -> dict[str, float]:
    """The peak memory of a process, its CPU seconds, and those in which its threads ran or waited for a core."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    times, ticks = _times(pid), os.sysconf("SC_CLK_TCK")
    threads = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return {
        "peak_mib": int(status["VmHWM"].split()[0]) / 1024,
        "cpu": (int(times[11]) + int(times[12])) / ticks,
        "busy": sum(int(ran) + int(waited) for ran, waited, _ in threads) / 1e9,
    }


def _judge(*values: Any) -> Any:
    """Judge a round, and note how long that takes."""
    began = time.process_time()
    judged = JUDGE(*values)
    TracingMeasurer.trace.judging.append(time.process_time() - began)
    return judged


def simulate_cluster(n_workers: int, cluster: Cluster, n_tests: int) -> float:
    """The share of the time of all workers in which they run chunks, in a campaign on a cluster."""
    ray, spans = VirtualRay(cluster), []

    class Span(themis.Callback):
        def on_start(self, start: Any) -> None:
            spans.append((ray.now(), ray.n_chunks))

        def on_end(self, run: Any) -> None:
            spans.append((ray.now(), ray.n_chunks))

    def judge(*values: Any) -> Any:
        judged = JUDGE(*values)
        ray.now(cluster.judging)
        return judged

    @contextmanager
    def connected(_: RayExecutor) -> Any:
        yield ray

    sys.modules["ray"] = ray  # type: ignore[assignment]
    remote.connected, loop.judge = connected, judge  # type: ignore[assignment, attr-defined]
    worker_pool.time = SimpleNamespace(monotonic=ray.now)  # type: ignore[attr-defined, assignment]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = (nn.Flatten(), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 10))
    target, inputs = Target(nn.Sequential(*layers), oracle="changed"), torch.rand(1000, 3, 4, 4)
    themis.run(
        target,
        inputs,
        "gaussian",
        max_tests=n_tests,
        coverage=None,
        plateau=None,
        callbacks=[Span()],
        executor=RayExecutor(workers=n_workers),
    )
    (began, n_before), (ended, n_after) = spans
    return (n_after - n_before) * cluster.chunk / n_workers / (ended - began)


def run_one(
    n_workers: int, n_tests: int, n_seeds: int, model: str = "resnet56-cifar10", round_size: int | None = None
) -> dict[str, Any]:
    """One campaign in this process; without workers, the local one. model: of the zoo."""
    torch.set_num_threads(1)
    inputs: Seeds | torch.Tensor
    if os.environ.get("THEMIS_DATA") or model != "resnet56-cifar10":
        target, inputs = load(model), torch.rand(n_seeds, *choose_entry(model).input_shape)
        if os.environ.get("THEMIS_DATA"):
            inputs = data(model)
    else:
        torch.manual_seed(0)
        target = Target(resnet56())
        inputs = torch.rand(n_seeds, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    watch = Watch()
    if n_workers:
        merge = remote.RemoteMeasurer._received

        def note(self: Any, sent: Any) -> Any:
            if len(watch.replies) < WEIGHED:
                watch.replies.append(sent)
            return merge(self, sent)

        remote.RemoteMeasurer._received = note  # type: ignore[method-assign]
    else:
        series.LocalMeasurer, loop.judge = TracingMeasurer, _judge  # type: ignore[assignment, attr-defined]
    began = time.perf_counter()
    run = themis.run(
        target,
        inputs,
        "gaussian",
        max_tests=n_tests,
        max_seeds=n_seeds,
        coverage=None,
        plateau=None,
        callbacks=[watch],
        round_size=round_size,
        executor=RayExecutor(workers=n_workers) if n_workers else None,
    )
    total = time.perf_counter() - began
    trace = TracingMeasurer.trace
    return {
        "workers": n_workers,
        "tests": n_tests,
        "seeds": n_seeds,
        "chunk": run.start.chunk,
        "neurons": run.start.n_neurons,
        "faults": run.summary()["distinct_faults"],
        "passes": run.summary()["passes"],
        "seconds": total,
        "test_seconds": watch.ended - watch.began,
        "driver_cpu": watch.driver_cpu,
        "worker_cpu": [worker["cpu"] for worker in watch.workers],
        "driver_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "worker_idle": [worker["idle"] for worker in watch.workers],
        "ray_cpu": watch.ray_cpu,
        "worker_mib": [worker["peak_mib"] for worker in watch.workers],
        "bytes_per_chunk": watch.bytes_per_chunk,
        "load": os.getloadavg()[0],
        "trace": None if n_workers else vars(trace),
    }


def merge_seconds(n_neurons: int) -> float:
    """What folding the sums of one chunk takes the driver: the shortest of several times, since machines are shared."""
    into = Accumulator(n_neurons)
    sums = torch.rand(2, n_neurons, generator=torch.Generator().manual_seed(0))
    times = []
    for _ in range(50):
        began = time.process_time()
        into.commit_sums(sums, 32)
        times.append(time.process_time() - began)
    return min(times)


def simulate(trace: dict[str, Any], n_workers: int, merge: float) -> float:
    """The seconds of the tests of a campaign.

    Every process has a core of its own, and the clean activations that it needs. One that is free takes the next
    chunk that was proposed, else one of the uniform tests that follow. The driver merges chunks in their order, and
    proposes the next tests once the last one is merged.
    """
    free = [0.0] * n_workers
    proposals = [deque(chunks) for chunks in trace["chunks"]]
    ends: list[list[float]] = [[] for _ in proposals]
    now: float = trace["between"][0]

    def run(number: int, since: float) -> None:
        """The worker that is free first runs the next chunk of a proposal, which was made at `since`."""
        worker = free.index(min(free))
        free[worker] = max(free[worker], since) + proposals[number].popleft()[0]
        ends[number].append(free[worker])

    for number, chunks in enumerate(proposals):
        while chunks:
            run(number, now)
        for end in ends[number]:
            now = max(now, end + LATENCY) + merge + trace["recording"]
        now += (*trace["between"], 0.0)[number + 1]
        for later in range(number + 1, len(proposals)):  # uniform tests are known ahead
            n_ahead = sum(map(len, ends[number + 2 :]))
            while (
                n_ahead < remote.SPARE * n_workers and proposals[later] and proposals[later][0][1] and min(free) < now
            ):
                run(later, min(free))
                n_ahead += 1
            if min(free) >= now:
                break
    return now


def _size(n_bytes: float) -> str:
    unit = next(unit for unit in ("kB", "MB", "GB", "TB", "PB") if n_bytes < 1000 ** (2 + "kMGTP".index(unit[0])))
    return f"{n_bytes / 1000 ** (1 + 'kMGTP'.index(unit[0])):.3g} {unit}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def measured(results: dict[str, Any]) -> str:
    """What was measured, as a table, and what it shows."""
    local, merge = results["local"], results["merge_seconds"]
    rows = []
    for row in [local, *results["ray"]]:
        n = row["workers"]
        predicted = simulate(local["trace"], n, merge) if n else None
        rows.append(
            [
                _workers_text(n) if n else "local",
                f"{row['test_seconds']:.1f} s ({row['repeats'][0]:.1f} to {row['repeats'][-1]:.1f})",
                f"{_efficiency(results, row):.0%}" if n and not _is_busy(results) else "",
                "" if predicted is None else f"{local['driver_cpu'] / predicted / n:.0%}",
                f"{row['driver_cpu']:.1f} s",
                " + ".join(f"{cpu:.1f}" for cpu in row["worker_cpu"]) + " s" * bool(n),
                f"{row['ray_cpu']:.1f} s" if n else "",
                f"{np.mean(row['worker_idle']):.0%}" if n else "",
                f"{row['driver_mib']:.0f} MiB",
                f"{np.mean(row['worker_mib']):.0f} MiB" if n else "",
                _size(row["bytes_per_chunk"]) if n else "",
                f"{row['load']:.1f}",
            ]
        )
    head = ["executor", "tests", "efficiency", "predicted", "driver's CPU", "workers' CPU", "Ray's CPU", "idle"]
    head += ["driver's peak", "a worker's peak", "per chunk", "load"]
    first = f"ResNet-56, {local['tests']:,} tests, {local['seeds']:,} seeds, chunks of {local['chunk']}, "
    first += f"{local['neurons']:,} neurons, {results['cores']} cores:"
    return "\n\n".join([first, _table(head, rows), *_remarks(results)])


def _remarks(results: dict[str, Any]) -> list[str]:
    """What the measurements show, in words."""
    local, alone = results["local"], results["local"]["test_seconds"]
    slowed = float(np.mean([row["test_seconds"] for row in results["pair"]]))
    remarks = [
        f"Two independent local campaigns at the same time take {slowed:.1f} s each, where one takes {alone:.1f} s: "
        f"{alone / slowed:.0%} is what this machine allows two processes that share nothing."
    ]
    if _is_busy(results):
        remarks = ["**The machine had other work to do**: only the CPU seconds and the memory mean something."]
    for row in results["ray"]:
        if row["workers"] == 2:
            efficiency, cpu = _efficiency(results, row), sum(row["worker_cpu"]) + row["driver_cpu"]
            verdict = "which meets the aim of" if efficiency >= AIM else "below the aim of"
            reached = (
                f"**Two workers on {results['cores']} cores reach {efficiency:.0%} of ideal**, {verdict} {AIM:.0%}. "
            )
            remarks.append(
                f"{'' if _is_busy(results) else reached}Driver and two workers compute "
                f"{cpu / local['driver_cpu'] - 1:.0%} more than the local executor, and Ray's own processes add "
                f"{row['ray_cpu'] / local['driver_cpu']:.0%}."
            )
    return remarks


def simulate_clusters() -> dict[str, Any]:
    """Campaigns on clusters, whose chunks and messages are those of large models."""
    results = {}
    for model, (numbers, n_tests, n_seeds) in CLUSTERS.items():
        large = _run_child(
            "--one", "0", "--model", model, "--tests", n_tests, "--seeds", n_seeds, "--round-size", n_tests // 4
        )
        trace, n_neurons, size = large["trace"], large["neurons"], large["chunk"]
        cluster = Cluster(
            chunk=sum(seconds for each in trace["chunks"] for seconds, _ in each) / n_tests * size,
            reply=float(np.mean(trace["n_bytes"])),
            sums=16 * n_neurons,
            add=merge_seconds(n_neurons),
            judging=float(np.median(trace["judging"])),
        )
        measured = {**asdict(cluster), "tests_per_chunk": size, "neurons": n_neurons}
        options = ("--cluster", json.dumps(asdict(cluster)), "--chunk", size)
        results[model] = {**measured, "efficiency": {n: _run_child("--one", n, *options) for n in numbers}}
        print(json.dumps({model: results[model]}), flush=True)
    return results


def _run_child(*options: Any) -> Any:
    """What a campaign in a process of its own returns."""
    words = [sys.executable, __file__, *map(str, options)]
    return json.loads(subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])


def _median(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The campaign with the median time of those that were repeated, and the times of all."""
    rows = sorted(rows, key=lambda row: float(row["test_seconds"]))
    return {**rows[(len(rows) - 1) // 2], "repeats": [row["test_seconds"] for row in rows]}


def _is_busy(results: dict[str, Any]) -> bool:
    """Whether something else was running, so that wall-clock times say little."""
    return bool(max(row["load"] for row in [results["local"], *results["ray"]]) > BUSY * results["cores"])


def _efficiency(results: dict[str, Any], row: dict[str, Any]) -> float:
    """The local time divided by that of a campaign on Ray and its number of workers."""
    return float(results["local"]["test_seconds"] / row["test_seconds"] / row["workers"])


def _workers_text(n: int) -> str:
    return f"Ray, {n} worker" + "s" * (n > 1)


def page(text: str, results: dict[str, Any]) -> str:
    """The documentation with what it says of these results, between its comments."""
    begin, end = "<!-- measured -->", "<!-- end of measured -->"
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n\n{measured(results)}\n\n{end}{rest.partition(end)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_quick(parser)
    parser.add_argument("--tests", type=int)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--workers", help="numbers of workers, separated by commas")
    parser.add_argument("--repeats", type=int, help="how often each campaign is run")
    parser.add_argument("--json", type=str)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--clusters", action="store_true", help="simulate clusters; no Ray is needed")
    for name, kind in (("one", int), ("model", str), ("chunk", int), ("round-size", int), ("cluster", str)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.page:
        PAGE.write_text(page(PAGE.read_text(), json.loads(arguments.page.read_text())["results"]))
        return
    if arguments.one is not None:
        if arguments.cluster:
            chunk.MAX_CHUNK = arguments.chunk
            print(simulate_cluster(arguments.one, Cluster(**json.loads(arguments.cluster)), arguments.tests or LONG))
            return
        TracingMeasurer.weighs = arguments.model is not None
        model = arguments.model or "resnet56-cifar10"
        print(json.dumps(run_one(arguments.one, arguments.tests, arguments.seeds, model, arguments.round_size)))
        return
    if arguments.clusters:
        simulated = simulate_clusters()
        if arguments.json:
            write_results(arguments.json, "cpu", simulated)
        return
    if find_spec("ray") is None:
        print("skipped: this benchmark needs Ray: pip install 'themis-dl[ray]'")
        return
    arguments = complete(arguments, QUICK, FULL)
    options = ["--tests", str(arguments.tests), "--seeds", str(arguments.seeds)]

    def run(*numbers: int) -> list[dict[str, Any]]:
        """Campaigns with these numbers of workers at the same time, each in a process of its own."""
        words = [[sys.executable, __file__, "--one", str(n), *options] for n in numbers]
        started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in words]
        rows = [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]
        for row in rows:
            print(json.dumps({name: value for name, value in row.items() if name != "trace"}), flush=True)
        return rows

    numbers = [0, *map(int, arguments.workers.split(","))]
    turns = [[run(n)[0] for n in numbers] for _ in range(arguments.repeats)]
    local, *ray = [_median(list(rows)) for rows in zip(*turns, strict=True)]
    pair = run(0, 0)
    for row in pair:
        del row["trace"]
    results: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "local": local, "pair": pair, "ray": ray}
    results["merge_seconds"] = merge_seconds(results["local"]["neurons"])
    if arguments.json:
        write_results(arguments.json, "cpu", results)
    print(f"\n{measured(results)}")


if __name__ == "__main__":
    main()
