"""What criteria cost: tests a second of each on ResNet-56 beside the bare forward pass; the ratio is of one run.

    THEMIS_DATA=FOLDER python benchmarks/criteria.py [--device cuda] [--batch N] [--json FILE]

A criterion learns from 2,000 CIFAR-10 pictures, then takes in others under Gaussian noise, a batch at a time: forward
pass with its layers watched, readings, update. Bare and watched passes take turns and the ratio is that of their
medians, over the last batches of each. `held` is what a fitted criterion keeps, in MiB: what it learnt, and its state.
`--data` and `--weights` are as in paper.py.
"""

from __future__ import annotations

import statistics
import warnings
from time import perf_counter
from typing import Any

import torch
from paper import parse, read_pictures, read_target, write_json
from rich.console import Console
from rich.table import Table

from themis import Target
from themis.criteria import Criterion, choose_criterion, fit_to
from themis.criteria.view import View
from themis.data.seeds import Seeds
from themis.target.activations import OUTPUT

COVERAGE = ("nc", "kmnc", "nbc", "snac", "tknc", "tknp", "nlc", "cc", "idc", "mcdc", "tway", "scc")
SURPRISE = ("lsa", "dsa", "mdsa")
AIMS = {**dict.fromkeys(COVERAGE, 1.3), **dict.fromkeys(SURPRISE, 2.0)}
WIDE = ("nlc", "mcdc", "cc")
"""Not of elements: there are too many pairs of them, and cc would keep every test."""
TRAINING = 2_000
BATCHES, FIRST = 12, 4
"""Batches a criterion takes in, and how many of them are not timed."""


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


class Watched:
    """Forward passes whose layers a criterion is shown."""

    def __init__(self, target: Target, criterion: Criterion, example: torch.Tensor) -> None:
        self.target, self.criterion = target, criterion
        self.layers = target.find_layers(example)
        self.by_name = {layer.name: layer for layer in self.layers}
        self.view = View.of(criterion, target, self.layers, example)

    def __call__(self, inputs: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
        outputs = self._pass(inputs)
        seed = None
        if "clean" in self.criterion.needs:
            seed = torch.arange(len(inputs), device=inputs.device)
        return self.criterion.update(self.view.end(len(inputs), outputs, seed))

    def keep_clean(self, inputs: torch.Tensor) -> None:
        """Not timed: a campaign runs clean inputs once."""
        self._pass(inputs)
        self.view.keep_clean(0, len(inputs), len(inputs))

    def _pass(self, inputs: torch.Tensor) -> torch.Tensor:
        self.view.begin(len(inputs), inputs.device, torch.float32)
        outputs = self.target.forward(
            inputs, lambda name, activation: self.view.on_activation(self.by_name[name], activation), self.by_name
        )
        self.view.on_activation(self.by_name[OUTPUT], outputs)
        return outputs


def measure(target: Target, spec: str, pictures: Seeds, batch: int) -> dict[str, Any]:
    """Medians of a bare and of a watched pass over a batch, and what the criterion says at the end."""
    device = target.device
    began = perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of classes with few pictures: speed is measured here
        criterion = fit_to(choose_criterion(spec), target, pictures[torch.arange(TRAINING)])
    fitted = perf_counter() - began
    bare, watched = [], []
    generator = torch.Generator(device).manual_seed(0)
    with target.opened(), torch.no_grad():
        clean = pictures.inputs[TRAINING : TRAINING + batch].to(device)
        run = Watched(target, criterion, clean[0])
        if "clean" in criterion.needs:
            run.keep_clean(clean)
        for _ in range(BATCHES):
            noise = torch.randn(clean.shape, generator=generator, device=device)
            tests = (clean + 0.05 * noise).clamp(0, 1)
            times = [clock(device)]
            target.forward(tests)
            times.append(clock(device))
            run(tests, clean)
            times.append(clock(device))
            bare.append(times[1] - times[0])
            watched.append(times[2] - times[1])
    base, own = (statistics.median(each[FIRST:]) for each in (bare, watched))
    held = [sum(each.nbytes for each in part.values()) / 2**20 for part in (criterion.learnt, criterion.state)]
    assert criterion.layout is not None
    return {
        "criterion": str(criterion),
        "neurons": criterion.layout.n_neurons,
        "bare_tests_a_second": batch / base,
        "tests_a_second": batch / own,
        "ratio": own / base,
        "first_ratio": statistics.median(watched[1:FIRST]) / statistics.median(bare[1:FIRST]),
        "fit_seconds": fitted,
        "learnt_mib": held[0],
        "state_mib": held[1],
        "score": criterion.score(),
    }


def show(results: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title)
    for name in ("criterion", "neurons", "bare/s", "tests/s", "ratio", "at first", "aim", "fit s", "held"):
        table.add_column(name, justify="left" if name == "criterion" else "right")
    for each in results:
        aim = AIMS[each["criterion"].partition("(")[0]]
        mark = "" if each["ratio"] <= aim else " *"
        table.add_row(
            each["criterion"],
            f"{each['neurons']:,}",
            f"{each['bare_tests_a_second']:,.0f}",
            f"{each['tests_a_second']:,.0f}",
            f"{each['ratio']:.2f}{mark}",
            f"{each['first_ratio']:.2f}",
            f"{aim:.1f}",
            f"{each['fit_seconds']:.1f}",
            f"{each['learnt_mib']:.1f} + {each['state_mib']:.1f}",
        )
    return table


def main() -> None:
    arguments = parse(__doc__.splitlines()[0], batch=0, only="")
    device = torch.device(arguments.device)
    batch = arguments.batch or (1024 if device.type == "cuda" else 32)
    pictures = read_pictures(arguments.data)
    target = read_target(arguments.weights, device)
    results = []
    for neurons in ("channel", "element"):
        for name in arguments.only.split(",") if arguments.only else (*COVERAGE, *SURPRISE):
            if neurons == "channel" or name not in WIDE:
                results.append(measure(target, f"{name}(neurons={neurons})", pictures, batch))
                each = results[-1]
                print(f"{each['criterion']} {neurons}: {each['ratio']:.2f}", flush=True)
    Console(width=120).print(show(results, f"ResNet-56 on {device}, {batch} tests a pass; * misses its aim"))
    if arguments.json:
        write_json(arguments.json, device, results)


if __name__ == "__main__":
    main()
