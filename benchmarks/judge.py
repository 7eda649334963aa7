"""Phase 2: the time to judge neurons with the paper's method and with the judges of this package, in one run.

    python benchmarks/judge.py [--no-quick] [--paper-neurons 5] [--skip-large] [--json FILE]

The paper's method is one PyMC model per neuron: a normal likelihood over all its sensitivities, `pm.sample` with its
defaults (4 chains of 1,000 draws), and `arviz.summary`. A few neurons are timed after a first one that is not counted
(compilation), and the time for 1,000 neurons is extrapolated from their median; this needs the extra `bayes`. The
judges of this package are timed in full. `--quick` is the default: one neuron by the paper's method, and no
large model.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import os
import statistics
import warnings
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from searching.arguments import add_quick, complete

from themis.judge import JUDGES
from themis.measure.moments import Accumulator, Moments
from themis.runs.environment import describe_environment

TESTS = 2_000
NEURONS = 1_000
LARGE = 532_490  # ResNet-56 on 32x32
QUICK: dict[str, Any] = {"paper_neurons": 1, "repeats": 2, "skip_large": True}
FULL: dict[str, Any] = {"paper_neurons": 5, "repeats": 5, "skip_large": False}
AIMS = {
    "gibbs over paper": 1_000,
    "exact large seconds": 0.1,
    "gibbs large seconds": 300,
}


def seconds(action: Callable[[], object], repeats: int) -> list[float]:
    """Times of several repeats, after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        start = perf_counter()
        action()
        times.append(perf_counter() - start)
    return times[1:]


def time_paper(sensitivity: torch.Tensor) -> list[float]:
    """Seconds per neuron with the paper's method; the first neuron, which compiles, is not counted.

    sensitivity: `[tests, neurons]`.
    """
    import arviz
    import pymc

    logging.getLogger("pymc").setLevel(logging.ERROR)
    times = []
    for observed in sensitivity.double().numpy().T:
        start = perf_counter()
        with pymc.Model():
            samples = pymc.Data("samples", observed)
            mu = pymc.Normal("mu", 0, 1)
            sigma = pymc.HalfNormal("sigma", 1)
            pymc.Normal("sensitivity", mu, sigma, observed=samples)
            trace = pymc.sample(progressbar=False)
        arviz.summary(trace)
        times.append(perf_counter() - start)
    return times[1:]


def large_moments(n: int = LARGE) -> Moments:
    """Moments of `n` neurons, spread over six orders of magnitude."""
    rng = torch.Generator().manual_seed(0)
    mean = 10 ** torch.empty(n, dtype=torch.float64).uniform_(-5, 1, generator=rng)
    return Moments(torch.tensor(TESTS), mean, mean.square() * TESTS)


def measure(n_paper: int, repeats: int, skip_large: bool) -> dict[str, Any]:
    sensitivity = torch.randn(TESTS, NEURONS, generator=torch.Generator().manual_seed(0)).abs()
    into = Accumulator(NEURONS)
    into.add(sensitivity.clone(), 0, NEURONS)
    into.commit(TESTS)
    moments = into.moments()
    results: dict[str, Any] = {name: seconds(partial(judge, moments), repeats)
                               for name, judge in JUDGES.items() if name != "pymc"}  # fmt: skip
    if not skip_large:
        large = large_moments()
        results["exact large"] = seconds(lambda: JUDGES["exact"](large), repeats)
        start = perf_counter()
        JUDGES["gibbs"](large)
        results["gibbs large"] = [perf_counter() - start]
    if n_paper:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results["paper a neuron"] = time_paper(sensitivity[:, : n_paper + 1])
    return results


def show(results: dict[str, Any], console: Console) -> None:
    median = {name: statistics.median(times) for name, times in results.items()}
    has_paper = "paper a neuron" in median
    paper = NEURONS * median["paper a neuron"] if has_paper else None

    table = Table(title=f"Judging neurons after {TESTS:,} tests, 4,000 draws, {torch.get_num_threads()} threads")
    for column in ("judge", "neurons", "seconds", "faster than the paper's method", "aim", ""):
        table.add_column(column, justify="left" if column in ("judge", "aim", "") else "right")

    def add(judge: str, neurons: int, elapsed: float, aim: str = "", is_met: bool | None = None) -> None:
        ratio = f"{paper / elapsed:,.0f} x" if paper and neurons == NEURONS and elapsed != paper else ""
        verdict = "" if is_met is None else "met" if is_met else "missed"
        table.add_row(
            judge, f"{neurons:,}", f"{elapsed:,.1f}" if elapsed >= 10 else f"{elapsed:.2g}", ratio, aim, verdict
        )

    if paper:
        add("paper's method (extrapolated)", NEURONS, paper)
    least = AIMS["gibbs over paper"]
    is_met = paper / median["gibbs"] >= least if paper else None
    add("gibbs, all diagnostics", NEURONS, median["gibbs"], f"{least:,} x or more", is_met)
    add("exact", NEURONS, median["exact"])
    for judge, label in (("gibbs", "gibbs, all diagnostics"), ("exact", "exact")):
        if f"{judge} large" in median:
            most, elapsed = AIMS[f"{judge} large seconds"], median[f"{judge} large"]
            add(label, LARGE, elapsed, f"under {most:g} s", elapsed < most)
    console.print(table)
    if paper:
        times = results["paper a neuron"]
        console.print(
            f"The paper's method was not run for {NEURONS:,} neurons: {len(times)} were timed after a warm-up "
            f"({min(times):.2f} to {max(times):.2f} s each), and {NEURONS:,} times their median is shown."
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_quick(parser)
    parser.add_argument("--paper-neurons", type=int, help="neurons timed with the paper's method; 0 skips it")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--skip-large", action="store_true", default=None, help=f"leave out the {LARGE:,} neurons")
    parser.add_argument("--json", help="write the raw results to this file")
    arguments = complete(parser.parse_args(), QUICK, FULL)
    results = measure(arguments.paper_neurons, arguments.repeats, arguments.skip_large)
    show(results, Console())
    if arguments.json:
        environment = describe_environment(torch.device("cpu")) | {"processors": os.cpu_count()}
        for package in ("pymc", "arviz", "scipy") if arguments.paper_neurons else ():
            environment[package] = importlib.metadata.version(package)
        with open(arguments.json, "w") as file:
            json.dump({"environment": environment, "seconds": results, "aims": AIMS}, file, indent=2)


if __name__ == "__main__":
    main()
