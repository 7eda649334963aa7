"""The cost of criteria: tests per second of each on ResNet-56, compared with the bare forward pass in the same run.

    THEMIS_DATA=FOLDER python benchmarks/criteria.py [--device cuda] [--no-quick] [--batch N] [--captured 0] \
        [--json FILE]
    python benchmarks/criteria.py --table GPU.json CPU.json     # the table of docs/results.md, from two such files

Each criterion is fitted to 2,000 CIFAR-10 pictures and then measures others under Gaussian noise, one batch at a time:
forward pass with traced layers, readings, update. Bare and traced passes alternate, and the ratio is that of their
medians over the last batches of each. On a GPU the traced passes are replayed from a CUDA graph, as in campaigns;
`--captured 0` runs them operation by operation, like the bare ones. `held` is the memory of a fitted criterion in MiB:
fitted values and state. On a CPU, `--quick` is the default: four criteria, fitted to 200 pictures. `--data` and
`--weights` are as in paper.py.
"""

from __future__ import annotations

import json
import statistics
import sys
import warnings
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from paper import parse, read_pictures, read_target, write_json
from rich.console import Console
from rich.table import Table

from themis import Target
from themis.data.seeds import Seeds
from themis.target.activations import OUTPUT
from themis_lab.criteria import Criterion, choose_criterion, fit_to
from themis_lab.criteria.view import View

COVERAGE = ("nc", "kmnc", "nbc", "snac", "tknc", "tknp", "nlc", "cc", "idc", "mcdc", "tway", "scc")
SURPRISE = ("lsa", "dsa", "mdsa")
AIMS = {**dict.fromkeys(COVERAGE, 1.3), **dict.fromkeys(SURPRISE, 2.0)}
WIDE = ("nlc", "mcdc", "cc")
"""Not measured on elements: there are too many pairs of them, and cc would keep every test."""
QUICK: dict[str, Any] = {"only": "nc,kmnc,scc,lsa", "training": 200, "batches": 6}
FULL: dict[str, Any] = {"only": ",".join((*COVERAGE, *SURPRISE)), "training": 2_000, "batches": 12}
FIRST = 4
"""How many batches of each criterion are not timed."""


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


class TracedPasses:
    """Forward passes whose activations a criterion measures.

    On a GPU the forward pass and its readings are captured as a CUDA graph, as those of a campaign are, and the
    criterion is updated while it runs.
    """

    def __init__(self, target: Target, criterion: Criterion, example: torch.Tensor, *, is_captured: bool) -> None:
        self.target, self.criterion, self.is_captured = target, criterion, is_captured
        self.layers = target.find_layers(example)
        self.by_name = {layer.name: layer for layer in self.layers}
        self.view = View(criterion, target, self.layers, example)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs = self._outputs = torch.empty(0)

    def __call__(self, inputs: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
        outputs = self.run(inputs)
        seed = None
        if "clean" in self.criterion.needs:
            seed = torch.arange(len(inputs), device=inputs.device)
        return self.criterion.update(self.view.end(len(inputs), outputs, seed))

    def keep_clean(self, inputs: torch.Tensor) -> None:
        """Run the clean inputs; not timed, since a campaign runs them once."""
        self.run(inputs)
        self.view.keep_clean(0, len(inputs), len(inputs))

    def run(self, inputs: torch.Tensor) -> torch.Tensor:
        """Read a batch of inputs, which all have the same size; returns the outputs."""
        if not self.is_captured:
            return self._pass(inputs)
        if self._graph is None:
            self._capture(inputs)
        assert self._graph is not None
        self._inputs.copy_(inputs)
        self._graph.replay()
        return self._outputs

    def _capture(self, inputs: torch.Tensor) -> None:
        self._inputs = inputs.clone()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._pass(self._inputs)  # libraries choose their kernels and allocate their workspaces
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = self._pass(self._inputs)

    def _pass(self, inputs: torch.Tensor) -> torch.Tensor:
        self.view.begin(len(inputs), inputs.device, torch.float32)
        outputs = self.target.forward(
            inputs, lambda name, activation: self.view.on_activation(self.by_name[name], activation), self.by_name
        )
        self.view.on_activation(self.by_name[OUTPUT], outputs)
        return outputs


def measure(
    target: Target, spec: str, pictures: Seeds, n_training: int, n_batches: int, batch: int, *, is_captured: bool
) -> dict[str, Any]:
    """Median times of a bare and of a traced pass over a batch, and the final score of the criterion."""
    device = target.device
    start = perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # about classes with few pictures: only speed is measured
        criterion = fit_to(choose_criterion(spec), target, pictures[torch.arange(n_training)])
    fit_seconds = perf_counter() - start
    bare, traced = [], []
    generator = torch.Generator(device).manual_seed(0)
    with target.opened(), torch.no_grad():
        clean = pictures.inputs[n_training : n_training + batch].to(device)
        run = TracedPasses(target, criterion, clean[0], is_captured=is_captured)
        if "clean" in criterion.needs:
            run.keep_clean(clean)
        for _ in range(n_batches):
            noise = torch.randn(clean.shape, generator=generator, device=device)
            tests = (clean + 0.05 * noise).clamp(0, 1)
            times = [clock(device)]
            target.forward(tests)
            times.append(clock(device))
            run(tests, clean)
            times.append(clock(device))
            bare.append(times[1] - times[0])
            traced.append(times[2] - times[1])
    base, own = (statistics.median(times[FIRST:]) for times in (bare, traced))
    held = [sum(tensor.nbytes for tensor in part.values()) / 2**20 for part in (criterion.learnt, criterion.state)]
    assert criterion.layout is not None
    return {
        "criterion": str(criterion),
        "neurons": criterion.layout.n_neurons,
        "bare_tests_a_second": batch / base,
        "tests_a_second": batch / own,
        "ratio": own / base,
        "first_ratio": statistics.median(traced[1:FIRST]) / statistics.median(bare[1:FIRST]),
        "fit_seconds": fit_seconds,
        "learnt_mib": held[0],
        "state_mib": held[1],
        "score": criterion.score(),
    }


def show(results: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title)
    for name in ("criterion", "neurons", "bare/s", "tests/s", "ratio", "at first", "aim", "fit s", "held"):
        table.add_column(name, justify="left" if name == "criterion" else "right")
    for result in results:
        aim = AIMS[result["criterion"].partition("(")[0]]
        mark = "" if result["ratio"] <= aim else " *"
        table.add_row(
            result["criterion"],
            f"{result['neurons']:,}",
            f"{result['bare_tests_a_second']:,.0f}",
            f"{result['tests_a_second']:,.0f}",
            f"{result['ratio']:.2f}{mark}",
            f"{result['first_ratio']:.2f}",
            f"{aim:.1f}",
            f"{result['fit_seconds']:.1f}",
            f"{result['learnt_mib']:.1f} + {result['state_mib']:.1f}",
        )
    return table


def markdown(gpu: list[dict[str, Any]], cpu: list[dict[str, Any]]) -> str:
    """The results on both devices as a Markdown table, with ratios and tests per second."""

    def cells(results: list[dict[str, Any]], neurons: str) -> dict[str, str]:
        found = {}
        for result in results:
            name, _, options = result["criterion"].partition("(")
            is_element = "element" in options if options else name == "scc"  # whose neurons are elements by default
            if is_element == (neurons == "element"):
                mark = "" if result["ratio"] <= AIMS[name] else " *"
                found[name] = f"{result['ratio']:.2f}{mark} ({result['tests_a_second']:,.0f})"
        return found

    columns = [cells(results, neurons) for results in (gpu, cpu) for neurons in ("channel", "element")]
    head = ["criterion", "GPU, 2,042 channels", "GPU, 532,490 elements", "CPU, channels", "CPU, elements"]
    rows = [[f"`{name}`", *(column.get(name, "-") for column in columns)] for name in (*COVERAGE, *SURPRISE)]
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def main() -> None:
    if sys.argv[1:2] == ["--table"]:
        print(markdown(*(json.loads(Path(file).read_text())["results"] for file in sys.argv[2:4])))
        return
    arguments = parse(__doc__.splitlines()[0], QUICK, FULL, batch=0, captured=1)
    device = torch.device(arguments.device)
    batch = arguments.batch or (1024 if device.type == "cuda" else 32)
    is_captured = device.type == "cuda" and View.can_be_captured and bool(arguments.captured)
    pictures = read_pictures(arguments.data)
    target = read_target(arguments.weights, device)
    results = []
    for neurons in ("channel", "element"):
        for name in arguments.only.split(","):
            if neurons == "channel" or name not in WIDE:
                spec, sizes = f"{name}(neurons={neurons})", (arguments.training, arguments.batches, batch)
                results.append(measure(target, spec, pictures, *sizes, is_captured=is_captured))
                print(f"{results[-1]['criterion']} {neurons}: {results[-1]['ratio']:.2f}", flush=True)
    Console(width=120).print(show(results, f"ResNet-56 on {device}, {batch} tests per pass; * misses its aim"))
    if arguments.json:
        write_json(arguments.json, device, results)


if __name__ == "__main__":
    main()
