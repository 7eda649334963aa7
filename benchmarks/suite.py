"""What a suite of 20 perturbations costs beside 20 single runs: passes, time and distinct faults, as ratios.

    python benchmarks/suite.py [--no-quick] [--seeds 2000] [--tests 500] [--repeats 3] [--json FILE]

LeNet-5 on MNIST, in THEMIS_DATA. Three ways to run the same 20 perturbations with the same number of tests take turns:
single runs; a suite in which every perturbation has its share, which finds exactly the same faults; and a suite in
which half of the tests goes where faults and uncertainty are. Every one starts from the model and writes its folders,
but no report. A ratio is the median over the repeats, of the suite over the single runs. `--quick` is the default:
200 seeds, 50 tests per perturbation, once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from searching.arguments import add_quick, complete
from searching.files import write_results

import themis
from themis.data.seeds import read_seeds
from themis.runs.source import Origin

PERTURBATIONS = (
    *("gaussian", "shot", "speckle", "impulse", "salt_and_pepper"),
    *("gaussian_blur", "motion_blur", "defocus_blur", "zoom_blur", "brightness", "contrast", "jpeg", "pixelate"),
    *("rain", "snow", "fog", "frost", "low_light", "rotate", "shift"),
)
UNIFORM_SHARE = 0.5
QUICK, FULL = {"seeds": 200, "tests": 50, "repeats": 1}, {"seeds": 2000, "tests": 500, "repeats": 3}
FIGURES = ("passes", "seconds", "distinct_faults")


def single_runs(origin: Origin, seeds: Any, tests: int, out: Path) -> dict[str, Any]:
    """Twenty calls of `themis.run`, each with a target of its own."""
    passes, by_name, found = 0, {}, {}
    began = time.perf_counter()
    for name in PERTURBATIONS:
        run = themis.run(
            origin.target(), seeds, name, out=out / name, max_tests=tests, uniform_share=UNIFORM_SHARE, max_stored=100
        )
        passes += run.rounds[-1].passes
        by_name[name] = run.rounds[-1].distinct_faults
        found[name] = faults_of(run)
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "passes": passes,
        "distinct_faults": sum(by_name.values()),
        "by_name": by_name,
        "found": found,
    }


def faults_of(run: themis.Run) -> list[tuple[Any, ...]]:
    """What each fault of a run is: its seed, theta, noise and answer, in the order in which they were found."""
    return [(fault.seed_id, *fault.theta.values(), fault.noise_seed, fault.answer) for fault in run.faults]


def suite(origin: Origin, seeds: Any, tests: int, out: Path, share: float) -> dict[str, Any]:
    """One call of `themis.run_suite`."""
    began = time.perf_counter()
    result = themis.run_suite(
        origin.target(),
        seeds,
        list(PERTURBATIONS),
        out=out / "suite",
        max_tests=tests * len(PERTURBATIONS),
        share=share,
    )
    seconds = time.perf_counter() - began
    by_name = {row.name: row.distinct_faults for row in result.rows}
    return {
        "seconds": seconds,
        "passes": result.passes,
        "distinct_faults": sum(by_name.values()),
        "tests": result.tests,
        "by_name": by_name,
        "found": {name: faults_of(result[name]) for name in result},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_quick(parser)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--tests", type=int, help="tests per perturbation")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    if not os.environ.get("THEMIS_DATA"):
        print("skipped: this benchmark needs MNIST and the weights of LeNet-5; set THEMIS_DATA to the data folder")
        return
    arguments = complete(arguments, QUICK, FULL)
    torch.set_num_threads(1)
    origin = Origin(zoo="lenet5-mnist")
    seeds = read_seeds(origin.read(), arguments.seeds)
    ways: dict[str, Callable[[Path], dict[str, Any]]] = {
        "single runs": lambda out: single_runs(origin, seeds, arguments.tests, out),
        "suite, equal shares": lambda out: suite(origin, seeds, arguments.tests, out, 1.0),
        "suite, adaptive": lambda out: suite(origin, seeds, arguments.tests, out, 0.5),
    }
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as warm:
        themis.run(origin.target(), seeds, "gaussian", out=Path(warm) / "run", max_tests=100)  # imports
    for _ in range(arguments.repeats):
        for name, run in ways.items():
            with tempfile.TemporaryDirectory() as folder:
                measured[name].append(run(Path(folder)))
    single, equal = (measured[name][0]["found"] for name in ("single runs", "suite, equal shares"))
    if single != equal:
        differing = [name for name in PERTURBATIONS if single[name] != equal[name]]
        raise SystemExit(f"a suite with equal shares must find exactly the faults of single runs: {differing}")
    print(f"single runs and equal shares: the same {sum(map(len, single.values())):,} faults, one by one")
    rows = []
    print(f"{len(PERTURBATIONS)} perturbations, {arguments.seeds:,} seeds, {arguments.tests:,} tests each")
    print(f"{'':<22}{'passes':>10}{'ratio':>8}{'seconds':>10}{'ratio':>8}{'distinct faults':>18}{'ratio':>8}")
    base = measured["single runs"]
    for name, results in measured.items():
        figures = {key: statistics.median(result[key] for result in results) for key in FIGURES}
        ratios = {
            key: statistics.median(result[key] / single[key] for result, single in zip(results, base, strict=True))
            for key in FIGURES
        }
        rows.append({"way": name, **figures, "ratios": ratios, "by_name": results[0]["by_name"]})
        print(
            f"{name:<22}{figures['passes']:>10,.0f}{ratios['passes']:>8.2f}{figures['seconds']:>10.1f}"
            f"{ratios['seconds']:>8.2f}{figures['distinct_faults']:>18,.0f}{ratios['distinct_faults']:>8.2f}"
        )
    if arguments.json is not None:
        options = {"seeds": arguments.seeds, "tests": arguments.tests, "repeats": arguments.repeats}
        write_results(arguments.json, "cpu", {"settings": options, "rows": rows})


if __name__ == "__main__":
    main()
