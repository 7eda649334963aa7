"""What it costs that MKL rounds in the same way wherever arrays lie: CPU time of a pass by MKL_CBWR, and what differs.

    OMP_NUM_THREADS=1 python benchmarks/mkl.py [--no-quick] [--turns N] [--json FILE]

Each mode runs in processes of its own, in turns, because MKL reads the variable once. A pass differs if any bit of its
outputs changes when its inputs lie at one of sixteen other offsets. `--quick` is the default: two turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from time import process_time

import torch
from rich.console import Console
from rich.table import Table
from searching.arguments import add_quick, complete
from torch import Tensor, nn

MODES = {"unset": "", "AUTO,STRICT": "AUTO,STRICT", "COMPATIBLE": "COMPATIBLE"}
"""What is measured by the value of MKL_CBWR. Themis leaves an empty one as it is, and MKL does not read it."""
REPEATS = 7


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
        buffer = torch.empty(inputs.numel() + offset)
        moved = buffer[offset:].view_as(inputs).copy_(inputs)
        differs += not torch.equal(net(moved), expected)
    return {"ms": 1000 * min(seconds), "differs": differs}


def measure_mode(mode: str) -> dict[str, dict[str, float]]:
    """The measurements of all cases in a process with this value of MKL_CBWR."""
    command = [sys.executable, __file__, "--child"]
    done = subprocess.run(command, env=os.environ | {"MKL_CBWR": mode}, capture_output=True, text=True, check=True)
    result: dict[str, dict[str, float]] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_quick(parser)
    parser.add_argument("--turns", type=int, help="how often each mode is measured (2; with --no-quick, 9)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps({name: measure(*case) for name, case in cases().items()}))
        return
    complete(options, {"turns": 2}, {"turns": 9})
    turns = [{name: measure_mode(mode) for name, mode in MODES.items()} for _ in range(options.turns)]
    rows = {}
    for case in turns[0]["unset"]:
        ms = {mode: statistics.median(turn[mode][case]["ms"] for turn in turns) for mode in MODES}
        differs = {mode: max(turn[mode][case]["differs"] for turn in turns) for mode in MODES}
        rows[case] = {"ms": ms, "ratio": {mode: ms[mode] / ms["unset"] for mode in MODES}, "differs": differs}
    table = Table("pass", *(f"{mode}: ms" for mode in MODES), *(f"{mode}: differs at" for mode in MODES))
    for case, row in rows.items():
        times = [f"{row['ms'][mode]:.2f} ({row['ratio'][mode]:.2f})" for mode in MODES]
        table.add_row(case, *times, *(f"{row['differs'][mode]:.0f} of 16" for mode in MODES))
    Console(width=150).print(table)
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
        record = {"command": " ".join(sys.argv), "environment": environment, "turns": options.turns, "results": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
