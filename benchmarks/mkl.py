"""What it costs that MKL rounds in the same way wherever arrays lie: CPU time of a pass by MKL_CBWR, and what differs.

    OMP_NUM_THREADS=1 python benchmarks/mkl.py [--no-quick] [--turns N] [--json FILE]

Each mode runs in processes of its own, in turns, because MKL reads the variable once; the least time counts. A pass
differs if any bit of its outputs changes when inputs and weights lie at one of sixteen other offsets. `--quick` is the
default: two turns.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from time import process_time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from searching.arguments import add_quick, complete
from torch import Tensor, nn
from torch.nn import functional as F

MODES = {"unset": "", "AUTO,STRICT": "AUTO,STRICT", "COMPATIBLE": "COMPATIBLE"}
"""What is measured by the value of MKL_CBWR. Themis leaves an empty one as it is, and MKL does not read it."""
REPEATS = 7
LAYERS = ((1, 2, 3, 4, 7, 8, 16, 32, 33, 100, 256), (3, 16, 31, 84, 100, 784), (3, 10, 17, 64))
"""Rows, features and outputs of linear layers of which each combination is tried."""


def cases() -> dict[str, tuple[nn.Module, Tensor]]:
    """Networks with random weights, each with a batch of inputs."""
    from themis_lab.zoo.nets import lenet5, mlp, resnet56

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    nets: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
        "LeNet-5": (lenet5(), (128, 1, 28, 28)),
        "ResNet-56": (resnet56(), (32, 3, 32, 32)),
        "MLP 784-1024-1024-10": (mlp(784, (1024, 1024), 10), (128, 784)),
        "transformer encoder": (nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), (32, 64, 128)),
    }
    return {name: (net.eval(), torch.rand(shape)) for name, (net, shape) in nets.items()}


@torch.no_grad()
def measure(net: nn.Module, inputs: Tensor) -> dict[str, float]:
    """CPU milliseconds of a pass, the least of a few, and the number of offsets at which an output differs."""
    seconds, expected = [], net(inputs)
    for _ in range(REPEATS):
        began = process_time()
        net(inputs)
        seconds.append(process_time() - began)
    differs = 0
    for offset in range(1, 17):
        for parameter in net.parameters():
            parameter.data = moved(parameter.data, 5 * offset % 16)
        differs += not torch.equal(net(moved(inputs, offset)), expected)
    return {"ms": 1000 * min(seconds), "differs": differs}


def moved(tensor: Tensor, offset: int) -> Tensor:
    """The same numbers, `offset` elements after a multiple of 64 bytes."""
    return torch.empty(tensor.numel() + offset)[offset:].view_as(tensor).copy_(tensor)


def differing_layers() -> int:
    """The number of linear layers `LAYERS` of which an output differs at one of a few other offsets."""
    rng, n = torch.Generator().manual_seed(0), 0
    for rows, features, outputs in product(*LAYERS):
        inputs, weights = torch.randn(rows, features, generator=rng), torch.randn(outputs, features, generator=rng)
        results = [F.linear(moved(inputs, k), moved(weights, j)) for k, j in product((0, 1, 3), repeat=2)]
        n += not all(torch.equal(result, results[0]) for result in results)
    return n


def measure_mode(mode: str) -> dict[str, Any]:
    """The measurements of all cases in a process with this value of MKL_CBWR."""
    command = [sys.executable, __file__, "--child"]
    done = subprocess.run(command, env=os.environ | {"MKL_CBWR": mode}, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_quick(parser)
    parser.add_argument("--turns", type=int, help="how often each mode is measured (2; with --no-quick, 9)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps({name: measure(*case) for name, case in cases().items()} | {"layers": differing_layers()}))
        return
    complete(options, {"turns": 2}, {"turns": 9})
    turns = [{name: measure_mode(mode) for name, mode in MODES.items()} for _ in range(options.turns)]
    rows = {}
    for case in cases():
        ms = {mode: min(turn[mode][case]["ms"] for turn in turns) for mode in MODES}  # other work only adds to it
        differs = {mode: max(turn[mode][case]["differs"] for turn in turns) for mode in MODES}
        rows[case] = {"ms": ms, "ratio": {mode: ms[mode] / ms["unset"] for mode in MODES}, "differs": differs}
    table = Table("pass", *(f"{mode}: ms" for mode in MODES), *(f"{mode}: differs at" for mode in MODES))
    for case, row in rows.items():
        times = [f"{row['ms'][mode]:.2f} ({row['ratio'][mode]:.2f})" for mode in MODES]
        table.add_row(case, *times, *(f"{row['differs'][mode]:.0f} of 16" for mode in MODES))
    Console(width=150).print(table)
    layers, n_layers = {mode: turns[0][mode]["layers"] for mode in MODES}, math.prod(map(len, LAYERS))
    print(f"linear layers whose bits depend on where arrays lie, of {n_layers}: {layers}")
    if options.json:
        from themis.runs.environment import describe_environment

        cpu = next(
            (
                line.partition(":")[2].strip()
                for line in Path("/proc/cpuinfo").read_text().splitlines()
                if "model name" in line
            ),
            "",
        )
        environment = {**describe_environment(torch.device("cpu")), "device_name": cpu}
        record = {
            "command": " ".join(sys.argv),
            "environment": environment,
            "results": rows,
            "layers": layers,
            "turns": turns,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
