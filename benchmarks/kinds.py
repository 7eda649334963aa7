"""The fault rate of a model of the zoo under every picture perturbation, at its default range.

    [THEMIS_DATA=FOLDER] python benchmarks/kinds.py [--no-quick] [--zoo NAME] [--device cuda] [--tests 2000] \
        [--json FILE]

The default is the zoo's resnet56-cifar10; without a data folder it is the demo's LeNet-5 with its digits, without the
perturbations that need colours. Tests are drawn uniformly over seeds and theta, so that the rates are those of the
model and not of a search. SSIM is the median over faults: how similar they still are to their seeds. On a CPU,
`--quick` is the default: the demo's LeNet-5, and 200 tests each.
"""

from __future__ import annotations

import argparse
import os
from statistics import median
from time import perf_counter
from typing import Any

import torch
from paper import write_json
from rich.console import Console
from rich.table import Table
from searching.arguments import add_quick, complete

import themis
import themis_lab
from themis.perturb import PERTURBATIONS
from themis.text import percent
from themis_lab.cli.demo import make_data, make_model

QUICK = {"zoo": "", "tests": 200, "seeds": 200}
FULL = {"zoo": "resnet56-cifar10" if os.environ.get("THEMIS_DATA") else "", "tests": 2000, "seeds": 1000}


def measure(name: str, target: themis.Target, data: object, tests: int, seeds: int) -> dict[str, Any]:
    start = perf_counter()
    run = themis.run(
        target, data, name, policy="random", uniform_share=1.0, max_tests=tests, max_seeds=seeds, plateau=None,
        tolerance=1e-9,
    )  # fmt: skip
    ssims = [fault.ssim for fault in run.faults if fault.ssim is not None]
    rate = run.fault_rate
    assert rate is not None  # all tests are uniform
    return {
        "perturbation": name,
        "family": PERTURBATIONS[name].family,
        "fault_rate": rate.value,
        "low": rate.low,
        "high": rate.high,
        "failing_seeds": run.rounds[-1].failing_seeds,
        "seeds": run.start.n_usable,
        "ssim": median(ssims) if ssims else None,
        "tests_per_second": run.rounds[-1].tests / (perf_counter() - start),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_quick(parser)
    parser.add_argument("--zoo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tests", type=int)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--json")
    arguments = complete(parser.parse_args(), QUICK, FULL)
    device = torch.device(arguments.device)
    if arguments.zoo:
        target, data = themis_lab.zoo.load(arguments.zoo), themis_lab.zoo.data(arguments.zoo)
    else:
        target, data = themis.Target(make_model()), make_data()
    target.module.to(device)
    table = Table(title=f"{arguments.zoo or 'LeNet-5, digits'}, {arguments.tests:,} uniform tests each, default ranges")
    for head in ("perturbation", "fault rate", "95%", "failing seeds", "SSIM of faults", "tests/s"):
        table.add_column(head, justify="left" if head == "perturbation" else "right")
    results = []
    for name, perturbation in PERTURBATIONS.items():
        if perturbation.inputs in ("table", "signal") or perturbation.channels not in (None, data.shape[1]):
            continue
        tests = arguments.tests if perturbation.passes < 50 else arguments.tests // 4
        row = measure(name, target, data, tests, arguments.seeds)
        results.append(row)
        table.add_row(
            name, percent(row["fault_rate"]), f"{percent(row['low'])} to {percent(row['high'])}",
            f"{row['failing_seeds']} of {row['seeds']}", "-" if row["ssim"] is None else f"{row['ssim']:.2f}",
            f"{row['tests_per_second']:,.0f}",
        )  # fmt: skip
    Console(width=110).print(table)
    if arguments.json:
        write_json(arguments.json, device, results)


if __name__ == "__main__":
    main()
