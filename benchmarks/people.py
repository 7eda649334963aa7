"""How well SSIM and VIF predict what people see, and up to which theta people should still see what a picture shows.

    THEMIS_DATA=FOLDER python benchmarks/people.py [--no-quick] [--json FILE]

The people are those of Geirhos et al., Generalisation in humans and deep neural networks (NeurIPS 2018): the shares of
grey pictures of ImageNet, shown for 200 ms, that they assigned to the right one of 16 kinds, under five manipulations
at 7 or 8 strengths (`raw-accuracies` of github.com/rgeirhos/generalisation-humans-DNNs). The same manipulations are
made of other pictures of ImageNet here; SSIM and VIF compare them with the grey picture. VIF (Sheikh and Bovik 2006, in
the domain of pixels) is the share of the information of a picture that is left in the disturbed one. A quick look takes
4 pictures and no perturbations.
"""

from __future__ import annotations

import argparse
import math
import os
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from paper import write_json
from scipy.stats import spearmanr
from searching.arguments import add_quick, complete
from torch import Tensor
from visibility import ROWS, STEPS, disturbed_at

from themis.measure.distance import ssim, vif
from themis.perturb import PERTURBATIONS
from themis_lab.zoo.datasets import read_imagenet

GREY = 0.4423
"""The mean of the pictures, which surrounds a filtered one."""
LEAST = 0.1
"""The VIF above which people name at least half of the pictures under each manipulation."""
QUICK, FULL = {"n": 4}, {"n": 20}


def filtered(pictures: Tensor, sigma: float, radius: int, padding: float | None = None) -> Tensor:
    """The pictures under a Gaussian filter, without their margin unless it is padded."""
    kernel = torch.exp(-0.5 * (torch.arange(-radius, radius + 1) / sigma) ** 2)
    kernel /= kernel.sum()
    wide = pictures if padding is None else F.pad(pictures, (radius,) * 4, value=padding)
    return F.conv2d(F.conv2d(wide, kernel.view(1, 1, -1, 1)), kernel.view(1, 1, 1, -1))


def contrast(pictures: Tensor, level: float) -> Tensor:
    return (1 - level) / 2 + level * pictures


def noise(pictures: Tensor, width: float) -> Tensor:
    draws = torch.rand(pictures.shape, generator=torch.Generator().manual_seed(0))
    return (contrast(pictures, 0.3) + width * (2 * draws - 1)).clamp(0, 1)


def low_pass(pictures: Tensor, sigma: float) -> Tensor:
    return filtered(pictures, sigma, int(4 * sigma + 0.5), GREY) if sigma else pictures


def high_pass(pictures: Tensor, sigma: float) -> Tensor:
    if sigma == math.inf:
        return pictures
    rest = pictures - low_pass(pictures, sigma)
    return (rest + GREY - rest.mean((2, 3), keepdim=True)).clamp(0, 1)


def phases(pictures: Tensor, degrees: float) -> Tensor:
    """Pictures with the phase of each frequency shifted at random, by up to so many degrees."""
    spectrum = torch.fft.rfft2(pictures)
    draws = torch.rand(spectrum.shape, generator=torch.Generator().manual_seed(0))
    shifted = spectrum * torch.exp(1j * math.radians(degrees) * (2 * draws - 1))
    shifted[..., 0, 0] = spectrum[..., 0, 0]
    scrambled: Tensor = torch.fft.irfft2(shifted, pictures.shape[-2:])
    return scrambled.clamp(0, 1)


PEOPLE: dict[str, tuple[Callable[[Tensor, float], Tensor], dict[float, float]]] = {
    "contrast": (
        contrast, {1: 0.917, 0.5: 0.881, 0.3: 0.875, 0.15: 0.819, 0.1: 0.760, 0.05: 0.546, 0.03: 0.310, 0.01: 0.083}
    ),
    "uniform noise": (
        noise, {0: 0.805, 0.03: 0.796, 0.05: 0.781, 0.1: 0.751, 0.2: 0.609, 0.35: 0.456, 0.6: 0.168, 0.9: 0.060}
    ),
    "low pass": (low_pass, {0: 0.859, 1: 0.808, 3: 0.718, 5: 0.583, 7: 0.485, 10: 0.312, 15: 0.185, 40: 0.077}),
    "high pass": (
        high_pass,
        {math.inf: 0.847, 3: 0.819, 1.5: 0.731, 1: 0.662, 0.7: 0.498, 0.55: 0.319, 0.45: 0.097, 0.4: 0.069},
    ),
    "phases": (phases, {0: 0.836, 30: 0.815, 60: 0.738, 90: 0.574, 120: 0.308, 150: 0.092, 180: 0.070}),
}  # fmt: skip
"""The manipulations, and the shares of pictures that people named by strength."""


def beside_people(grey: Tensor) -> list[dict[str, Any]]:
    """The medians of SSIM and VIF for each manipulation and strength, beside the share that people named."""
    rows = []
    for name, (manipulate, shares) in PEOPLE.items():
        for strength, share in shares.items():
            disturbed = manipulate(grey, strength)
            figures = {"ssim": ssim(grey, disturbed, (0.0, 1.0)), "vif": vif(grey, disturbed, (0.0, 1.0))}
            medians = {figure: float(values.median()) for figure, values in figures.items()}
            rows.append({"manipulation": name, "strength": strength, "people": share, **medians})
            print(
                f"{name:<14} {strength:<5g} people {share:.3f}  SSIM {medians['ssim']:.3f}  VIF {medians['vif']:.3f}",
                flush=True,
            )
    return rows


def last_visible(name: str, main: str, pictures: Tensor) -> dict[str, Any]:
    """The last theta of the steps at which the median VIF is enough, found by halving, with this VIF."""
    perturbation = PERTURBATIONS[name].fitted(tuple(pictures.shape[1:]))
    theta = next(each for each in perturbation.theta if each.name == main)
    end, limit = (theta.low, theta.limits[0]) if theta.high == theta.identity else (theta.high, theta.limits[1])
    nearest = min if end > theta.identity else max
    values = list(dict.fromkeys(nearest(theta.identity + (end - theta.identity) * step, limit) for step in STEPS))
    grey, medians = pictures.mean(1, keepdim=True), {}

    def is_hidden(value: float) -> bool:
        disturbed = disturbed_at(perturbation, main, value, pictures).mean(1, keepdim=True)
        medians[value] = float(vif(grey, disturbed, (0.0, 1.0)).median())
        return medians[value] < LEAST

    last = bisect_left(values, True, key=is_hidden) - 1
    found = (
        {"theta": values[last], "vif": medians[values[last]], "is_limit": values[last] == limit} if last >= 0 else {}
    )
    return {"perturbation": name, "main": main, "default": end, "is_last": last == len(values) - 1, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_quick(parser)
    parser.add_argument("--n", type=int, help="pictures")
    parser.add_argument("--json", help="write the raw results to this file")
    options = complete(parser.parse_args(), QUICK, FULL)
    if not os.environ.get("THEMIS_DATA"):
        print("skipped: this benchmark needs the data folder: set THEMIS_DATA")
        return
    torch.set_num_threads(1)
    inputs = read_imagenet().inputs
    chosen = np.random.default_rng(0).permutation(len(inputs))[: options.n]
    pictures = torch.stack([inputs[int(k)].float() for k in chosen])
    grey = (pictures * torch.tensor([0.2125, 0.7154, 0.0721]).view(1, 3, 1, 1)).sum(1, keepdim=True)
    rows = beside_people(grey)
    people = [row["people"] for row in rows]
    ranks = {figure: float(spearmanr(people, [row[figure] for row in rows])[0]) for figure in ("ssim", "vif")}
    print(f"rank correlation with people over {len(rows)} conditions: SSIM {ranks['ssim']:.2f}, VIF {ranks['vif']:.2f}")
    named = {name: min(r["people"] for r in rows if r["manipulation"] == name and r["vif"] >= LEAST) for name in PEOPLE}
    print(f"people named at least these shares where VIF is {LEAST} or more: {named}")
    visible = []
    for name, main in () if options.n == QUICK["n"] else (*ROWS, ("fog", "density")):
        visible.append(last_visible(name, main, pictures))
        print(visible[-1], flush=True)
    if options.json:
        write_json(options.json, torch.device("cpu"), {"rows": rows, "ranks": ranks, "visible": visible})


if __name__ == "__main__":
    main()
