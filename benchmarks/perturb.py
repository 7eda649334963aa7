"""Pictures a second of every perturbation, beside the libraries that have the same operation.

    python benchmarks/perturb.py [--device cuda] [--sizes 32,224] [--only rain,fog] [--json FILE]

Needs what it compares with: pip install "themis-dl[bench]" (kornia, albumentations); torchvision is used where it is
installed. Every picture has parameters of its own, as in a campaign: kornia has that too; torchvision has one parameter
a call and is called once a picture; its figure for a whole batch at one parameter stands beside it, as what a campaign
cannot use. albumentations takes one picture at a time, on the CPU, at its own number of threads. All get float32
pictures. The operations are the nearest that the libraries have, at a like strength: the figures say what the same
wish costs, not that pixels agree. kornia's snow is left out: it lightens dark pixels and draws no flakes. Rivals take
turns in one run, each timed at its best of several rounds.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable
from time import perf_counter

import numpy as np
import torch
from paper import write_json
from rich.console import Console
from rich.table import Table
from torch import Tensor

from themis.perturb import PERTURBATIONS, Context, perturb

ROUNDS = 3
ONE_THETA = "torchvision, one theta"
Rival = Callable[[], object]


def kornia_rivals(pictures: Tensor) -> dict[str, Rival]:
    """kornia's operations, each with its own parameters for every picture."""
    try:
        import kornia.augmentation as K
    except ImportError:
        return {}
    size = pictures.shape[-1]
    sigma = 0.015 * size
    kernel = 2 * math.ceil(3 * sigma) + 1
    streak = max(3, round(0.06 * size) // 2 * 2 + 1)
    made = {
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
    return {name: lambda op=op: op(pictures) for name, op in made.items() if op is not None}


def albumentations_rivals(pictures: Tensor) -> dict[str, Rival]:
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
    one, disc = (0.05, 0.05), max(1, round(0.02 * size))
    made = {
        "gaussian": A.GaussNoise(std_range=one, p=1),
        "shot": A.ShotNoise(scale_range=one, p=1),
        "speckle": A.MultiplicativeNoise((0.8, 1.2), per_channel=True, elementwise=True, p=1),
        "impulse": A.PixelDropout(0.05, drop_value=None, p=1),
        "salt_and_pepper": A.SaltAndPepper(amount=one, p=1),
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
    images = [np.ascontiguousarray(each) for each in pictures.permute(0, 2, 3, 1).numpy()]
    return {name: lambda op=op: [op(image=each)["image"] for each in images] for name, op in made.items()}


def torchvision_operations(size: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """torchvision's operations on a batch, all of it at one parameter."""
    try:
        from torchvision.transforms import v2
        from torchvision.transforms.v2 import functional as V
    except ImportError:
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


def torchvision_rivals(pictures: Tensor) -> dict[str, Rival]:
    """torchvision's operations, picture by picture."""
    operations = torchvision_operations(pictures.shape[-1])
    ones = pictures.split(1)
    return {name: lambda op=op: torch.cat([op(each) for each in ones]) for name, op in operations.items()}


def torchvision_batches(pictures: Tensor) -> dict[str, Rival]:
    """torchvision's operations, one parameter for the whole batch: what a campaign cannot use."""
    operations = torchvision_operations(pictures.shape[-1])
    return {name: lambda op=op: op(pictures) for name, op in operations.items()}


def ours(name: str, pictures: Tensor) -> Rival:
    """One of ours, theta drawn from its box and noise anew each time."""
    perturbation, n = PERTURBATIONS[name], len(pictures)
    low, high = (torch.tensor([getattr(each, end) for each in perturbation.theta]) for end in ("low", "high"))
    draw = torch.Generator().manual_seed(0)
    theta = (low + torch.rand(n, len(low), generator=draw) * (high - low)).to(pictures.device)
    seeds = torch.arange(n, device=pictures.device)
    context = Context()

    def once() -> Tensor:
        seeds.add_(n)
        return perturb(perturbation, pictures, theta, seeds, context)

    return once


def rates(rivals: dict[str, Rival], n: int, is_cuda: bool, seconds: float) -> dict[str, float]:
    """Pictures a second of each, at its best of the rounds that they take in turns."""
    best = dict.fromkeys(rivals, 0.0)
    for _ in range(ROUNDS):
        for name, rival in rivals.items():
            rival()
            if is_cuda:
                torch.cuda.synchronize()
            began, times = perf_counter(), 0
            while perf_counter() - began < seconds or times < 2:
                rival()
                times += 1
                if is_cuda:
                    torch.cuda.synchronize()
            best[name] = max(best[name], n * times / (perf_counter() - began))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", default="32,224")
    parser.add_argument("--only", default="", help="names, with commas between them")
    parser.add_argument("--seconds", type=float, default=0.4, help="given to each rival in each of the rounds")
    parser.add_argument("--json", help="write the raw figures to this file")
    arguments = parser.parse_args()
    is_cuda = arguments.device.startswith("cuda")
    names = arguments.only.split(",") if arguments.only else list(PERTURBATIONS)
    names = [name for name in names if PERTURBATIONS[name].inputs != "table" and not PERTURBATIONS[name].needs_gradient]
    makers = {
        "kornia": kornia_rivals,
        "torchvision": torchvision_rivals,
        "albumentations": albumentations_rivals,
        ONE_THETA: torchvision_batches,
    }
    console, rows = Console(width=140), []
    warnings.simplefilter("ignore")
    torch.set_grad_enabled(False)
    torch.empty(31 << 18).fill_(0)  # what glibc has freed once it keeps: later arrays of up to 31 MiB cost no new pages
    for size in map(int, arguments.sizes.split(",")):
        n = 256 if size <= 64 else 64
        pictures = torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(0)).to(arguments.device)
        others = {library: make(pictures) for library, make in makers.items()}
        others = {library: operations for library, operations in others.items() if operations}
        if not others:
            raise SystemExit('nothing to compare with: pip install "themis-dl[bench]"')
        table = Table(title=f"pictures a second, {size} x {size}, batches of {n}, {arguments.device}")
        for head in ("perturbation", "Themis", *(head for each in others for head in (each, "ratio"))):
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
    ratios = [row["themis"] / row[each] for row in rows for each in makers if each in row and each != ONE_THETA]
    slow = sum(ratio < 0.5 for ratio in ratios)
    faster = sum(ratio > 1 for ratio in ratios)
    console.print(f"{faster} of {len(ratios)} comparisons faster than the library, {slow} slower than half of it")
    if arguments.json:
        write_json(arguments.json, torch.device(arguments.device), rows)


if __name__ == "__main__":
    main()
