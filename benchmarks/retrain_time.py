"""Seconds of a whole `themis.retrain` with two random seeds under Gaussian noise of 0.1, by part.

    THEMIS_DATA=FOLDER python benchmarks/retrain_time.py --no-quick [--device cuda] [--json FILE]

2,000 test seeds are searched, up to 8,000 are judged, and 8,000 training inputs are given. On a CPU, `--quick` is the
default: LeNet-5, a twentieth of the seeds, and one epoch.
"""

from __future__ import annotations

import os
from time import perf_counter
from typing import Any

import torch
from regain import load
from searching.arguments import complete, row_parser
from searching.files import write_results

import themis
from themis.experiments import CellEnd, Listener

QUICK: dict[str, Any] = {"rows": ["lenet5-mnist"], "share": 0.05}
FULL: dict[str, Any] = {"rows": ["resnet20-cifar10", "resnet56-cifar10"], "share": 1.0}
EXAMINED: dict[str, Any] = {"random_seeds": 2, "draws": 2}


class Clock(Listener):
    """The seconds of each training and examination."""

    def __init__(self) -> None:
        self.last, self.seconds = perf_counter(), dict[str, float]()

    def on_cell_end(self, end: CellEnd) -> None:
        now = perf_counter()
        self.seconds[end.text], self.last = round(now - self.last, 2), now


def measure(model: str, device: str, share: float, autocast: bool) -> dict[str, Any]:
    """Retrain one model on the faults of a short campaign."""
    loaded = load(model, device, None, 2_000)
    parts = loaded.parts(share, None, 2_000)
    search, train, judge = ((each.take(torch.arange(len(each))), each.labels) for each in vars(parts).values())
    run = themis.run(loaded.target, search, "gaussian", magnitude=0.1, max_passes=10_000, coverage=None)
    start, clock = perf_counter(), Clock()
    options: dict[str, Any] = {
        "autocast": autocast,
        "epochs": max(1, round(10 * share)),
        "passes": len(parts.judge) + 100,
    }
    result = themis.retrain(
        run, target=loaded.target, data=search, train=train, judge=judge, listener=clock, **EXAMINED, **options
    )
    seconds = {"all": round(perf_counter() - start, 2), **clock.seconds}
    change = result.outcomes[0].change
    epochs = [round(epoch.seconds, 3) for epoch in result.models[0].history]
    shifts = {
        name: (shift.before, shift.after) for name, shift in vars(change).items() if name in ("clean", "disturbed")
    }
    return {"options": options, "seconds": seconds, "epochs": epochs, "share": result.model.share, **shifts}


def main() -> None:
    parser = row_parser(__doc__)
    parser.add_argument("--share", type=float, help="share of the seeds, and of the ten epochs")
    parser.add_argument("--json", help="file for the results")
    chosen = complete(parser.parse_args(), QUICK, FULL)
    if not os.environ.get("THEMIS_DATA"):
        print("skipped: this benchmark needs the data folder: set THEMIS_DATA")
        return
    results: dict[str, Any] = {}
    for autocast in (False, True) if chosen.device != "cpu" else (False,):
        for model in chosen.rows:
            row = measure(model, chosen.device, chosen.share, autocast)
            results[f"{model}{', bfloat16' * autocast}"] = row
            print(model, row, flush=True)
            if chosen.json:
                write_results(chosen.json, chosen.device, results)


if __name__ == "__main__":
    main()
