"""Up to which theta SSIM still tells which picture was disturbed: beyond it, there is little left to see.

    THEMIS_DATA=FOLDER python benchmarks/visibility.py [--no-quick]

A disturbed picture is recognised if its SSIM to its own clean picture is higher than to each of the 99 others. One
theta of a perturbation grows in steps beyond its default range, the others are drawn uniformly. Printed is the last
theta at which at least 90% of the pictures are recognised, with the median SSIM there. A quick look takes 20 pictures.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from themis.measure.distance import ssim
from themis.perturb import PERTURBATIONS, Perturbation, disturb
from themis.perturb.perturbation import Theta
from themis_lab.zoo import data

STEPS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1, 1.5, 2, 3, 4, 6, 8, 12)
LEAST = 0.9
ROWS = (
    *(
        ("gaussian", "sigma"),
        ("shot", "sigma"),
        ("speckle", "sigma"),
        ("impulse", "share"),
        ("salt_and_pepper", "share"),
    ),
    *(("gaussian_blur", "sigma"), ("motion_blur", "length"), ("defocus_blur", "radius"), ("zoom_blur", "amount")),
    *(("pixelate", "block"), ("dead_pixels", "share"), ("stripes", "strength"), ("occlusion", "size")),
    *(("jpeg", "quality"), ("rain", "density"), ("snow", "density"), ("raindrops", "count"), ("frost", "amount")),
)


def recognised(clean: Tensor, disturbed: Tensor) -> tuple[float, float]:
    """The share of pictures that SSIM recognises, and the median SSIM to their own clean picture."""
    n = len(clean)
    pairs = ssim(clean.repeat(n, 1, 1, 1), disturbed.repeat_interleave(n, 0), (0.0, 1.0)).view(n, n)
    own, others = pairs.diagonal().clone(), pairs.fill_diagonal_(-1.0)
    return float((own > others.amax(1)).float().mean()), float(own.median())


def disturbed_at(perturbation: Perturbation, name: str, value: float, clean: Tensor) -> Tensor:
    """The pictures with one theta at a value, and the others drawn uniformly from their ranges."""
    rng = np.random.default_rng(0)
    theta: dict[str, float | Tensor] = {
        each.name: torch.from_numpy(rng.uniform(each.low, each.high, len(clean))).float() for each in perturbation.theta
    }

    def widened(each: Theta) -> Theta:
        return replace(each, low=min(each.low, value), high=max(each.high, value)) if each.name == name else each

    wide = replace(perturbation, theta=tuple(map(widened, perturbation.theta)), parts=())
    return disturb(wide, clean, {**theta, name: value})


def last_recognised(name: str, main: str, clean: Tensor) -> str:
    """The last theta of the steps at which enough pictures are recognised, and the SSIM there."""
    perturbation = PERTURBATIONS[name].fitted(tuple(clean.shape[1:]))
    theta = next(each for each in perturbation.theta if each.name == main)
    end, limit = (theta.low, theta.limits[0]) if theta.high == theta.identity else (theta.high, theta.limits[1])
    found = "none"
    for step in STEPS:
        value = theta.identity + (end - theta.identity) * step
        is_last = (value >= limit) if end > theta.identity else (value <= limit)
        share, median = recognised(clean, disturbed_at(perturbation, main, limit if is_last else value, clean))
        if share < LEAST:
            return found
        found = f"{limit if is_last else value:.2g} ({median:.2f})"
        if is_last:
            return f"{found}, the limit"
    return f"{found} or more"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-quick", action="store_true", help="100 pictures instead of 20")
    n = 100 if parser.parse_args().no_quick else 20
    if not os.environ.get("THEMIS_DATA"):
        print("skipped: this benchmark needs the data folder: set THEMIS_DATA")
        return
    sets = [data(name).inputs[:n].float() for name in ("lenet5-mnist", "resnet56-cifar10")]
    print("| perturbation | theta | MNIST | CIFAR-10 |\n|---|---|---|---|")
    for name, theta in ROWS:
        cells = [last_recognised(name, theta, clean) for clean in sets]
        print(f"| `{name}` | `{theta}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
