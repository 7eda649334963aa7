"""Pictures per second of every perturbation, compared with libraries that have the same operation.

    python benchmarks/perturb.py [--device cuda] [--no-quick] [--sizes 32,224] [--only rain,fog] [--json FILE]

The libraries are installed with pip install "themis-dl[bench]" (kornia, albumentations); torchvision is used if it is
installed. Every picture has its own parameters, as in a campaign. kornia supports that too. torchvision has one
parameter per call and is called once per picture; its rate for a whole batch with one parameter, which a campaign
cannot use, is shown as well. albumentations processes one picture at a time, on the CPU, with its own number of
threads. All get float32 pictures. The operations are the closest ones in the libraries, at similar strength: the
rates compare the cost of similar effects, not of identical pixels. kornia's snow is left out: it lightens dark pixels
and draws no flakes. The libraries alternate in one run, and the best of several rounds counts. On a CPU, `--quick`
is the default: one size, and a fiftieth of a second per library and round.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from paper import write_json
from rich.console import Console
from rich.table import Table
from searching.arguments import add_quick, complete
from torch import Tensor

from themis.perturb import PERTURBATIONS, Context, Perturbation, perturb

ROUNDS = 3
QUICK, FULL = {"sizes": "32", "seconds": 0.02}, {"sizes": "32,224", "seconds": 0.4}
ONE_THETA = "torchvision, one theta"
Operation = Callable[[], object]


def kornia_rivals(pictures: Tensor) -> dict[str, Operation]:
    """kornia's operations, each with its own parameters for every picture."""
    try:
        import kornia.augmentation as K
    except ImportError:
        return {}
    size = pictures.shape[-1]
    sigma = 0.015 * size
    kernel = 2 * math.ceil(3 * sigma) + 1
    streak = max(3, round(0.06 * size) // 2 * 2 + 1)
    operations = {
        "gaussian": K.RandomGaussianNoise(std=0.05, p=1),
        "salt_and_pepper": K.RandomSaltAndPepperNoise(amount=(0.01, 0.05), p=1),
        "gaussian_blur": K.RandomGaussianBlur((kernel, kernel), (sigma / 2, sigma), p=1),
        "motion_blur": K.RandomMotionBlur(streak, 45.0, (-1.0, 1.0), p=1),
        "brightness": K.RandomBrightness((0.8, 1.2), p=1),
        "contrast": K.RandomContrast((0.7, 1.3), p=1),
        "saturation": K.RandomSaturation((0.5, 1.5), p=1),
        "hue": K.RandomHue((-0.1, 0.1), p=1),
        "gamma": K.RandomGamma((0.7, 1.4), p=1),
        "jpeg": K.RandomJPEG((20.0, 90.0), p=1),
        "occlusion": K.RandomErasing((0.02, 0.1), p=1),
        "rotate": K.RandomRotation(15.0, p=1),
        "shift": K.RandomTranslate((-0.1, 0.1), (-0.1, 0.1), p=1),
        "scale": K.RandomAffine(0.0, scale=(0.8, 1.2), p=1),
        "shear": K.RandomShear(15.0, p=1),
        "perspective": K.RandomPerspective(0.3, p=1),
        "elastic": K.RandomElasticTransform(p=1),
        "rain": K.RandomRain(p=1) if size > 40 else None,
        "shadow": K.RandomPlasmaShadow(p=1),
    }
    return {name: partial(op, pictures) for name, op in operations.items() if op is not None}


def albumentations_rivals(pictures: Tensor) -> dict[str, Operation]:
    """albumentations' operations, picture by picture."""
    if pictures.device.type != "cpu":
        return {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import albumentations as A
            import cv2
    except ImportError:
        return {}
    size = pictures.shape[-1]
    sigma, streak = 0.015 * size, max(3, round(0.06 * size) // 2 * 2 + 1)
    drop = max(2, size // 12)
    amount, disc = (0.05, 0.05), max(1, round(0.02 * size))
    operations = {
        "gaussian": A.GaussNoise(std_range=amount, p=1),
        "shot": A.ShotNoise(scale_range=amount, p=1),
        "speckle": A.MultiplicativeNoise((0.8, 1.2), per_channel=True, elementwise=True, p=1),
        "impulse": A.PixelDropout(0.05, drop_value=None, p=1),
        "salt_and_pepper": A.SaltAndPepper(amount=amount, p=1),
        "gaussian_blur": A.GaussianBlur(blur_limit=0, sigma_limit=(sigma, sigma), p=1),
        "motion_blur": A.MotionBlur(blur_limit=(streak, streak), p=1),
        "defocus_blur": A.Defocus(radius=(disc, disc), p=1),
        "zoom_blur": A.ZoomBlur(max_factor=(1.1, 1.1), p=1),
        "brightness": A.RandomBrightnessContrast((-0.2, 0.2), 0, p=1),
        "contrast": A.RandomBrightnessContrast(0, (-0.2, 0.2), p=1),
        "saturation": A.ColorJitter(brightness=(1, 1), contrast=(1, 1), saturation=(0.5, 1.5), hue=(0, 0), p=1),
        "hue": A.ColorJitter(brightness=(1, 1), contrast=(1, 1), saturation=(1, 1), hue=(-0.1, 0.1), p=1),
        "gamma": A.RandomGamma((70, 140), p=1),
        "jpeg": A.ImageCompression("jpeg", (20, 90), p=1),
        "pixelate": A.Downscale((0.15, 0.5), {"downscale": cv2.INTER_AREA, "upscale": cv2.INTER_NEAREST}, p=1),
        "dead_pixels": A.PixelDropout(0.02, drop_value=0, p=1),
        "occlusion": A.CoarseDropout((1, 1), (0.2, 0.3), (0.2, 0.3), p=1),
        "rotate": A.Rotate(15, border_mode=4, p=1),
        "shift": A.Affine(translate_percent=(-0.1, 0.1), border_mode=4, p=1),
        "scale": A.Affine(scale=(0.8, 1.2), border_mode=4, p=1),
        "shear": A.Affine(shear=(-15, 15), border_mode=4, p=1),
        "perspective": A.Perspective(p=1),
        "elastic": A.ElasticTransform(p=1),
        "rain": A.RandomRain(drop_length=drop, p=1),
        "snow": A.RandomSnow(method="texture", p=1),
        "fog": A.RandomFog(p=1),
        "glare": A.RandomSunFlare(p=1),
        "shadow": A.RandomShadow(p=1),
        "raindrops": A.Spatter(mode="rain", p=1),
    }
    images = [np.ascontiguousarray(picture) for picture in pictures.permute(0, 2, 3, 1).numpy()]

    def change(op: Callable[..., Any]) -> list[Any]:
        return [op(image=image)["image"] for image in images]

    return {name: partial(change, op) for name, op in operations.items()}


def torchvision_operations(size: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """torchvision's operations on a batch, with one parameter for all pictures."""
    try:
        from torchvision.transforms import v2
        from torchvision.transforms.v2 import functional as V
    except (ImportError, RuntimeError):  # it is not installed, or does not fit torch
        return {}
    sigma = 0.015 * size
    kernel = 2 * math.ceil(3 * sigma) + 1

    def moved(angle: float = 0.0, move: float = 0.0, scale: float = 1.0, shear: float = 0.0) -> Callable[..., Tensor]:
        return lambda x: V.affine(x, angle, [move, move / 2], scale, [shear, 0.0], V.InterpolationMode.BILINEAR)

    corners = [[0, 0], [size, 0], [size, size], [0, size]]
    pulled = [[size // 10, 0], [size, size // 12], [size, size], [0, size - size // 9]]
    return {
        "gaussian": lambda x: V.gaussian_noise(x, sigma=0.05),
        "gaussian_blur": lambda x: V.gaussian_blur(x, [kernel, kernel], [sigma, sigma]),
        "brightness": lambda x: V.adjust_brightness(x, 1.2),
        "contrast": lambda x: V.adjust_contrast(x, 1.3),
        "saturation": lambda x: V.adjust_saturation(x, 1.3),
        "hue": lambda x: V.adjust_hue(x, 0.1),
        "gamma": lambda x: V.adjust_gamma(x, 1.3),
        "rotate": moved(angle=10.0),
        "shift": moved(move=0.1 * size),
        "scale": moved(scale=1.1),
        "shear": moved(shear=10.0),
        "perspective": lambda x: V.perspective(x, corners, pulled),
        "elastic": v2.ElasticTransform(),
    }


def torchvision_rivals(pictures: Tensor) -> dict[str, Operation]:
    """torchvision's operations, picture by picture."""
    operations = torchvision_operations(pictures.shape[-1])
    singles = torch.split(pictures, 1)

    def change(op: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.cat([op(picture) for picture in singles])

    return {name: partial(change, op) for name, op in operations.items()}


def torchvision_batches(pictures: Tensor) -> dict[str, Operation]:
    """torchvision's operations, with one parameter for the whole batch, which a campaign cannot use."""
    operations = torchvision_operations(pictures.shape[-1])
    return {name: partial(op, pictures) for name, op in operations.items()}


def ours(name: str, pictures: Tensor) -> Operation:
    """A perturbation of Themis with theta drawn from its box and new noise in every call."""
    perturbation, n = PERTURBATIONS[name], len(pictures)
    low, high = (torch.tensor([getattr(parameter, end) for parameter in perturbation.theta]) for end in ("low", "high"))
    draw = torch.Generator().manual_seed(0)
    theta = (low + torch.rand(n, len(low), generator=draw) * (high - low)).to(pictures.device)
    seeds = torch.arange(n, device=pictures.device)
    context = Context()

    def once() -> Tensor:
        seeds.add_(n)
        return perturb(perturbation, pictures, theta, seeds, context)

    return once


def disturbs_pictures(perturbation: Perturbation) -> bool:
    """Whether it disturbs pictures, and without asking a model."""
    asks = perturbation.passes or perturbation.needs_gradient
    return perturbation.inputs not in ("table", "signal") and not asks


def rates(rivals: dict[str, Operation], n: int, is_cuda: bool, seconds: float) -> dict[str, float]:
    """Pictures per second of each library, the best of several rounds in which they alternate."""
    best = dict.fromkeys(rivals, 0.0)
    for _ in range(ROUNDS):
        for name, rival in rivals.items():
            rival()
            if is_cuda:
                torch.cuda.synchronize()
            start, times = perf_counter(), 0
            while perf_counter() - start < seconds or times < 2:
                rival()
                times += 1
                if is_cuda:
                    torch.cuda.synchronize()
            best[name] = max(best[name], n * times / (perf_counter() - start))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    add_quick(parser)
    parser.add_argument("--sizes")
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--seconds", type=float, help="per library in each round")
    parser.add_argument("--json", help="write the raw results to this file")
    arguments = complete(parser.parse_args(), QUICK, FULL)
    is_cuda = arguments.device.startswith("cuda")
    names = arguments.only.split(",") if arguments.only else list(PERTURBATIONS)
    names = [name for name in names if disturbs_pictures(PERTURBATIONS[name])]
    makers = {
        "kornia": kornia_rivals,
        "torchvision": torchvision_rivals,
        "albumentations": albumentations_rivals,
        ONE_THETA: torchvision_batches,
    }
    console = Console(width=140)
    rows: list[dict[str, Any]] = []
    warnings.simplefilter("ignore")
    torch.set_grad_enabled(False)
    torch.empty(31 << 18).fill_(0)  # glibc keeps freed memory: later arrays of up to 31 MiB need no new pages
    for size in map(int, arguments.sizes.split(",")):
        n = 256 if size <= 64 else 64
        pictures = torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(0)).to(arguments.device)
        others = {library: make(pictures) for library, make in makers.items()}
        others = {library: operations for library, operations in others.items() if operations}
        if not others:
            print('skipped: there is no library to compare with: pip install "themis-dl[bench]"')
            return
        table = Table(title=f"pictures per second, {size} x {size}, batches of {n}, {arguments.device}")
        for head in ("perturbation", "Themis", *(head for library in others for head in (library, "ratio"))):
            table.add_column(head, justify="left" if head == "perturbation" else "right")
        for name in names:
            rivals = {"themis": ours(name, pictures)}
            rivals |= {library: operations[name] for library, operations in others.items() if name in operations}
            rate = rates(rivals, n, is_cuda, arguments.seconds)
            rows.append({"perturbation": name, "size": size, **rate})
            cells = [f"{rate['themis']:,.0f}"]
            for library in others:
                has = library in rate
                cells += [f"{rate[library]:,.0f}", f"{rate['themis'] / rate[library]:.2f}"] if has else ["-", "-"]
            table.add_row(name, *cells)
        console.print(table)
    ratios = [
        row["themis"] / row[library] for row in rows for library in makers if library in row and library != ONE_THETA
    ]
    slow = sum(ratio < 0.5 for ratio in ratios)
    faster = sum(ratio > 1 for ratio in ratios)
    console.print(
        f"{faster} of {len(ratios)} comparisons are faster than the library, {slow} reach less than half its speed"
    )
    if arguments.json:
        write_json(arguments.json, torch.device(arguments.device), rows)


if __name__ == "__main__":
    main()
