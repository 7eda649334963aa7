"""Passes per second of whole campaigns on a GPU over bare eager forward passes of the same chunk, row by row."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

import themis
from themis import Target
from themis.zoo import lenet5, resnet50, resnet56

ROWS = {
    # builder, input shape, seeds, tests, neurons, chunk, perturbation, magnitude, policy
    "ResNet-56 elements 256": (resnet56, (3, 32, 32), 1000, 60_000, "element", 256, "gaussian", 0.05, "scheduled"),
    "ResNet-56 elements 1024": (resnet56, (3, 32, 32), 1000, 120_000, "element", 1024, "gaussian", 0.05, "scheduled"),
    "ResNet-56 paper 256": (resnet56, (3, 32, 32), 1000, 20_000, "element", 256, "gaussian", 0.05, "paper"),
    "ResNet-56 FGSM 256": (resnet56, (3, 32, 32), 1000, 20_000, "element", 256, "fgsm", 0.01, "scheduled"),
    "ResNet-56 channels 256": (resnet56, (3, 32, 32), 1000, 60_000, "channel", 256, "gaussian", 0.05, "scheduled"),
    "ResNet-50 channels 256": (resnet50, (3, 224, 224), 512, 20_000, "channel", 256, "gaussian", 0.05, "scheduled"),
    "ResNet-50 elements 64": (resnet50, (3, 224, 224), 128, 8_000, "element", 64, "gaussian", 0.05, "scheduled"),
    "ResNet-50 rain channels 256": (resnet50, (3, 224, 224), 512, 15_000, "channel", 256, "rain", None, "scheduled"),
    "LeNet-5 elements 256": (lenet5, (1, 28, 28), 2000, 60_000, "element", 256, "gaussian", 0.25, "scheduled"),
}


def bare(net: torch.nn.Module, shape: tuple[int, ...], chunk: int, seconds: float = 1.0) -> float:
    """Forward passes per second of the model alone, eager."""
    inputs = torch.rand(chunk, *shape, device="cuda")
    with torch.no_grad():
        for _ in range(5):
            net(inputs)
        torch.cuda.synchronize()
        began, n = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            for _ in range(10):
                net(inputs)
            torch.cuda.synchronize()
            n += 10
    return n * chunk / (time.perf_counter() - began)


def campaign(name: str, repeats: int) -> dict[str, object]:
    builder, shape, n_seeds, n_tests, neurons, chunk, perturbation, magnitude, policy = ROWS[name]
    torch.manual_seed(0)
    net = builder().cuda().eval()
    inputs = torch.rand(n_seeds, *shape, generator=torch.Generator().manual_seed(0))
    target = Target(net, neurons=neurons)
    options = {"magnitude": magnitude, "policy": policy, "coverage": None, "plateau": None, "batch_size": chunk}
    options |= {"clean_memory_gib": 60.0}
    themis.run(target, inputs, perturbation, max_tests=5 * chunk, **options)  # compiles kernels
    shares, rates, bares, parts = [], [], [], []
    for _ in range(repeats):
        floor = bare(net, shape, chunk)
        torch.cuda.reset_peak_memory_stats()
        run = themis.run(target, inputs, perturbation, max_tests=n_tests, **options)
        seconds = run.seconds
        rates.append(run.rounds[-1].passes / seconds.total)
        bares.append(floor)
        shares.append(rates[-1] / floor)
        parts.append(
            [round(seconds.measure, 3), round(seconds.judge, 3), round(seconds.search, 3), round(seconds.total, 3)]
        )
    middle = statistics.median
    return {
        "row": name,
        "passes_per_second": round(middle(rates)),
        "bare_per_second": round(middle(bares)),
        "share": round(middle(shares), 3),
        "shares": [round(share, 3) for share in shares],
        "seconds": parts[-1],
        "gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "faults": len(run.faults),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = []
    for name in ROWS:
        if arguments.rows and not any(part in name for part in arguments.rows.split(",")):
            continue
        results.append(campaign(name, arguments.repeats))
        print(json.dumps(results[-1]), flush=True)
        torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
