"""The suite `corruptions` compared with the published corruptions: a model's accuracy on the same pictures.

    THEMIS_DATA=FOLDER python benchmarks/corruptions.py [--model resnet56-224] [--no-quick] [--n 1000] [--draws 5]
        [--only fog,snow] [--json FILE]

The published corruptions are those of the package imagecorruptions (`pip install --no-deps imagecorruptions`, with
scikit-image and opencv-python-headless), whose code is mended here at run time for today's NumPy and scikit-image.
ResNet-56 gets CIFAR-10's pictures and the parameters published for CIFAR-10-C, which the package does not have. With
`resnet56-224`, the pictures are enlarged to 224 pixels, corrupted with the parameters of ImageNet-C, and averaged
down to 32 pixels for the same model; `efficientnet` gets pictures of ImageNet with 224 pixels. The elastic transform
is always the published one: the package replaced it with another warp. Pictures are rounded
down to 8 bits, as in the published files. Random corruptions are drawn `--draws` times per picture on both sides, so
that chance moves a cell less than the aim: `noise` is the standard error of the difference on these pictures, and
`interval` has 95% of its values on other pictures as well. Results are stored cell by cell.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from paper import read_pictures, read_target, write_json
from PIL import Image
from rich.console import Console
from rich.table import Table
from searching.arguments import add_quick, complete

from themis import Target
from themis.compute.rng import mix
from themis.perturb import Context, perturb
from themis.suites.definition import SuiteMember, choose_suite

AIM, LIMIT, N_NEAR = 1.0, 3.0, 60
"""Points of accuracy that a cell may differ in most cells and in all of them, and how many most are."""
FIXED = ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression")
"""Corruptions without chance."""
BATCH = 128
SIDE, LARGE = 32, 224
"""Pixels of a picture of CIFAR-10, and of ImageNet."""
QUICK: dict[str, Any] = {"n": 100, "draws": 1}
FULL: dict[str, Any] = {"n": 1000, "draws": 5}
Picture = Any
"""An array `[height, width, 3]`, or several."""
Model = tuple[Target, Picture, torch.Tensor]
"""A model, and pictures with their labels."""

SMALL: dict[str, list[Any]] = {
    "gaussian_noise": [0.04, 0.06, 0.08, 0.09, 0.10],
    "shot_noise": [500, 250, 100, 75, 50],
    "impulse_noise": [0.01, 0.02, 0.03, 0.05, 0.07],
    "defocus_blur": [(0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)],
    "glass_blur": [(0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2)],
    "motion_blur": [(6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)],
    "zoom_blur": [1.06, 1.11, 1.16, 1.21, 1.26],
    "snow": [
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95), (0.1, 0.2, 1, 0.5, 10, 4, 0.9), (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85), (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ],
    "frost": [(1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)],
    "fog": [(0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)],
    "brightness": [0.05, 0.1, 0.15, 0.2, 0.3],
    "contrast": [0.75, 0.5, 0.4, 0.3, 0.15],
    "elastic_transform": [(0, 1, 2.56), (1.6, 6.4, 2.24), (2.56, 1.92, 1.92), (3.2, 1.28, 1.6), (3.2, 0.96, 0.96)],
    "pixelate": [0.95, 0.9, 0.85, 0.75, 0.65],
    "jpeg_compression": [80, 65, 58, 50, 40],
}  # fmt: skip
"""The parameters of CIFAR-10-C at severities 1 to 5."""
LARGE_ELASTIC = (
    (488, 170.8, 24.4), (488, 19.52, 48.8), (12.2, 2.44, 4.88), (17.08, 2.44, 4.88), (29.28, 2.44, 4.88),
)  # fmt: skip
"""The parameters of the elastic transform of ImageNet-C."""
FROST: list[Picture] = []
"""The five photographs of frost, at the size at which CIFAR-10-C uses them."""


def load_package() -> Any:
    """The corruptions of the package, mended for today's NumPy, SciPy, scikit-image and setuptools."""
    import scipy.ndimage

    filters = importlib.import_module("skimage.filters")
    setattr(np, "float_", np.float64)  # noqa: B010
    sys.modules["scipy.ndimage.interpolation"] = scipy.ndimage
    resources: Any = types.ModuleType("pkg_resources")
    resources.resource_filename = lambda name, path: str(Path(str(sys.modules[name].__file__)).parent / path)
    sys.modules.setdefault("pkg_resources", resources)
    package: Any = importlib.import_module("imagecorruptions.corruptions")

    def gaussian(image: Picture, sigma: Any, multichannel: bool = False, **options: Any) -> Picture:
        return filters.gaussian(image, sigma, channel_axis=-1 if multichannel else None, **options)

    def glass_blur(image: Any, severity: int) -> Picture:
        sigma, reach, passes = [(0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)][severity - 1]
        x: Picture = np.uint8(gaussian(np.array(image) / 255.0, sigma, multichannel=True) * 255)
        height, width = x.shape[:2]
        rows, columns = np.arange(height - reach, reach, -1)[:, None], np.arange(width - reach, reach, -1)
        here, at, size = (rows * width + columns).ravel(), np.arange(height * width), height * width
        turn = np.full(size, size)
        turn[here] = np.arange(len(here))
        for dx, dy in np.random.randint(-reach, reach, (passes, len(here), 2)).transpose(0, 2, 1):
            there = here + dy * width + dx
            # As published: the views alias, so that a pixel is copied instead of swapped, after those before it.
            source = size + np.arange(2 * size) % size
            source[here] = np.where(turn[there] < turn[here], there, size + there)
            while (source[source] != source).any():
                source = source[source]
            at = at[source[:size] - size]
        return gaussian(x.reshape(-1, 3)[at].reshape(x.shape) / 255.0, sigma, multichannel=True) * 255

    package.gaussian = gaussian
    package.glass_blur = glass_blur  # the same in a hundredth of the time
    return package


def small_corruption(package: Any, name: str, picture: Picture, severity: int) -> Any:
    """A picture of 32 pixels with the parameters of CIFAR-10-C."""
    return globals()[f"small_{name}"](package, picture / 255.0, SMALL[name][severity])


def small_gaussian_noise(package: Any, x: Picture, sigma: float) -> Picture:
    return (x + np.random.normal(0, sigma, x.shape)) * 255


def small_shot_noise(package: Any, x: Picture, photons: float) -> Picture:
    return np.random.poisson(x * photons) / photons * 255


def small_impulse_noise(package: Any, x: Picture, share: float) -> Picture:
    return package.sk.util.random_noise(x, mode="s&p", amount=share) * 255


def small_defocus_blur(package: Any, x: Picture, c: Any) -> Any:
    import cv2

    return cv2.filter2D(x, -1, package.disk(radius=c[0], alias_blur=c[1])) * 255


def small_glass_blur(package: Any, x: Picture, c: Any) -> Picture:
    sigma, passes = c
    x = (package.gaussian(x, sigma, multichannel=True) * 255).astype(np.uint8)
    for _ in range(passes):
        for row in range(SIDE - 1, 1, -1):
            for column in range(SIDE - 1, 1, -1):
                dx, dy = np.random.randint(-1, 1, size=2)
                there = row + dy, column + dx
                # As published: the views alias, so that a pixel is copied instead of swapped.
                x[row, column], x[there] = x[there], x[row, column]
    return package.gaussian(x / 255.0, sigma, multichannel=True) * 255


def small_motion_blur(package: Any, x: Picture, c: Any) -> Any:
    return package._motion_blur(x * 255, radius=c[0], sigma=c[1], angle=np.random.uniform(-45, 45))


def small_zoom_blur(package: Any, x: Picture, end: float) -> Picture:
    factors, x = np.arange(1, end, 0.01), x.astype(np.float32)
    return (x + sum(clipped_zoom(package, x, factor) for factor in factors)) / (len(factors) + 1) * 255


def small_snow(package: Any, x: Picture, c: Any) -> Picture:
    import cv2

    mean, deviation, zoom, threshold, radius, sigma, share = c
    x = x.astype(np.float32)
    flakes = clipped_zoom(package, np.random.normal(mean, deviation, (SIDE, SIDE, 1)), zoom)[..., 0]
    flakes = np.uint8(np.clip(np.where(flakes < threshold, 0, flakes), 0, 1) * 255)
    flakes = package._motion_blur(flakes, radius=radius, sigma=sigma, angle=np.random.uniform(-135, -45))
    flakes = np.round(flakes).astype(np.uint8)[..., None] / 255.0
    grey = cv2.cvtColor(x, cv2.COLOR_RGB2GRAY)[..., None]
    x = share * x + (1 - share) * np.maximum(x, grey * 1.5 + 0.5)
    return (x + flakes + np.rot90(flakes, k=2)) * 255


def small_frost(package: Any, x: Picture, c: Any) -> Picture:
    photograph = FROST[np.random.randint(5)]
    top, left = (np.random.randint(0, length - SIDE) for length in photograph.shape[:2])
    return c[0] * 255 * x + c[1] * photograph[top : top + SIDE, left : left + SIDE]


def small_fog(package: Any, x: Picture, c: Any) -> Any:
    clouds = package.plasma_fractal(mapsize=SIDE, wibbledecay=c[1])[..., None]
    return (x + c[0] * clouds) * x.max() / (x.max() + c[0]) * 255


def small_brightness(package: Any, x: Picture, shift: float) -> Any:
    hsv = package.sk.color.rgb2hsv(x)
    hsv[..., 2] = np.clip(hsv[..., 2] + shift, 0, 1)
    return package.sk.color.hsv2rgb(hsv) * 255


def small_contrast(package: Any, x: Picture, share: float) -> Picture:
    means = x.mean((0, 1), keepdims=True)
    return ((x - means) * share + means) * 255


def small_pixelate(package: Any, x: Picture, size: float) -> Any:
    image = Image.fromarray(np.uint8(np.round(x * 255))).resize((int(SIDE * size),) * 2, Image.Resampling.BOX)
    return image.resize((SIDE, SIDE), Image.Resampling.BOX)


def small_jpeg_compression(package: Any, x: Picture, quality: int) -> Any:
    file = io.BytesIO()
    Image.fromarray(np.uint8(np.round(x * 255))).save(file, "JPEG", quality=quality)
    return Image.open(file)


def small_elastic_transform(package: Any, x: Picture, c: Any) -> Picture:
    return elastic_transform(x, *c)


def elastic_transform(x: Picture, amount: float, sigma: float, corner: float) -> Picture:
    """The published warp; the package has another one for large pictures, without the affine map."""
    import cv2
    import scipy.ndimage

    x, side = x.astype(np.float32), len(x)
    middle, third = side // 2, side // 3
    here = np.array([[middle + third] * 2, [middle + third, middle - third], [middle - third] * 2], np.float32)
    there = here + np.random.uniform(-corner, corner, here.shape).astype(np.float32)
    x = cv2.warpAffine(x, cv2.getAffineTransform(here, there), (side, side), borderMode=cv2.BORDER_REFLECT_101)
    smooth: Picture = np.eye(side)
    if sigma:
        smooth = scipy.ndimage.gaussian_filter1d(smooth, sigma, axis=0, mode="reflect", truncate=3)
    down, across = (smooth @ np.random.uniform(-1, 1, (side, side)) @ smooth.T * amount for _ in range(2))
    rows, columns = np.mgrid[:side, :side]
    at = rows + down, columns + across
    return np.stack([scipy.ndimage.map_coordinates(x[..., k], at, order=1, mode="reflect") for k in range(3)], -1) * 255


def clipped_zoom(package: Any, picture: Picture, factor: float) -> Picture:
    """The middle of a picture, enlarged to its size; unlike the package, CIFAR-10-C trims both ends alike."""
    side = len(picture)
    enlarged = package.clipped_zoom(picture, factor)
    trim = (len(enlarged) - side) // 2
    return enlarged[trim : trim + side, trim : trim + side]


def load_frost(package: Any) -> None:
    import cv2

    folder = Path(package.__file__).parent / "frost"
    for name in ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg"):
        photograph = cv2.imread(str(folder / name))
        FROST.append(cv2.resize(photograph, (0, 0), fx=0.2, fy=0.2)[..., ::-1])


def large_corruption(package: Any, name: str, picture: Picture, severity: int) -> Any:
    """A picture of 224 pixels, as the package corrupts it with the parameters of ImageNet-C."""
    if name == "elastic_transform":
        return elastic_transform(picture / 255.0, *LARGE_ELASTIC[severity])
    return getattr(package, name)(Image.fromarray(picture), severity + 1)


Corrupt = Callable[[Any, str, Picture, int], Any]


def published(package: Any, corrupt: Corrupt, name: str, severity: int, pictures: Picture, draw: int) -> Picture:
    """Pictures `[n, height, width, 3]` with a published corruption, as bytes."""
    corrupted = []
    for k, picture in enumerate(pictures):
        np.random.seed(mix(1, draw, k) % 2**32)
        result = np.asarray(corrupt(package, name, picture.copy(), severity), dtype=np.float64)
        corrupted.append(np.uint8(np.clip(result, 0, 255)))
    return np.stack(corrupted)


def ours(member: SuiteMember, severity: int, pictures: Picture, draw: int) -> Iterator[torch.Tensor]:
    """Batches of pictures at a level of our suite."""
    perturbation = member.perturbation.fitted((3, *pictures.shape[1:3]))
    seed_id = np.arange(len(pictures)) + 10**6 * draw
    theta = torch.from_numpy(member.levels[severity].draw(perturbation, seed_id, 0))
    noise_seed = torch.from_numpy(seed_id)
    for k, inputs in enumerate(batches(pictures)):
        part = slice(k * BATCH, (k + 1) * BATCH)
        yield perturb(perturbation, inputs, theta[part], noise_seed[part], Context())


def hits(target: Target, inputs: Iterable[torch.Tensor], labels: torch.Tensor, averages: bool = False) -> Picture:
    """Which pictures the model answers correctly, 1 or 0; it may get them averaged down to 32 pixels."""
    pool = torch.nn.functional.adaptive_avg_pool2d
    with torch.no_grad():
        answers = [target.forward(pool(batch, SIDE) if averages else batch).argmax(1) for batch in inputs]
    return (torch.cat(answers) == labels).numpy().astype(np.float64)


def batches(pictures: Picture) -> Iterator[torch.Tensor]:
    for k in range(0, len(pictures), BATCH):
        yield torch.from_numpy(pictures[k : k + BATCH]).permute(0, 3, 1, 2).float() / 255


def read_efficientnet() -> Model:
    """EfficientNet-Lite0 and the 1,000 pictures of ImageNet, which are 224 pixels wide and high."""
    from themis_lab import zoo

    target, seeds = zoo.load("efficientnet-lite0-imagenet"), zoo.data("efficientnet-lite0-imagenet")
    pictures = (seeds.inputs[:] * 255).round().byte().permute(0, 2, 3, 1).numpy()
    assert seeds.labels is not None
    return target, pictures, seeds.labels


def read_resnet() -> Model:
    """ResNet-56 and the test set of CIFAR-10."""
    seeds, target = read_pictures(None), read_target(None, torch.device("cpu"))
    assert seeds.labels is not None
    return target, (seeds.inputs[:] * 255).round().byte().permute(0, 2, 3, 1).numpy(), seeds.labels


def enlarged(pictures: Picture) -> Picture:
    """Pictures with 224 pixels."""
    return np.stack([np.asarray(Image.fromarray(each).resize((LARGE, LARGE))) for each in pictures])


def compare(
    member: SuiteMember,
    model: Model,
    package: Any,
    corrupt: Corrupt,
    draws: int,
    kept: Path | None,
    averages: bool,
) -> Iterator[dict[str, Any]]:
    """The accuracy on both sides at each severity of a corruption. kept: a folder for the answers."""
    target, pictures, labels = model
    n = 1 if member.name in FIXED else draws

    def corrupted(side: str, severity: int, draw: int) -> Iterator[torch.Tensor]:
        if side == "ours":
            return ours(member, severity, pictures, draw)
        return batches(published(package, corrupt, member.name, severity, pictures, draw))

    def found(side: str, severity: int, draw: int) -> Picture:
        file = None if kept is None else kept / f"{member.name}_{severity}_{draw}_{side}.npy"
        if file is not None and file.exists():
            return np.load(file)
        right = hits(target, corrupted(side, severity, draw), labels, averages)
        if file is not None:
            np.save(file, right)
        return right

    for severity in range(len(member.levels)):
        sides = np.array([[100 * found(side, severity, k) for k in range(n)] for side in ("ours", "published")])
        spread = sides.var(1, ddof=1).sum(0) / n if n > 1 else np.zeros(len(labels))
        accuracy, gaps = sides.mean((1, 2)), sides[0].mean(0) - sides[1].mean(0)
        reach = 1.96 * gaps.std(ddof=1) / np.sqrt(len(labels))
        yield {
            "corruption": member.name,
            "severity": severity + 1,
            "draws": n,
            "ours": float(accuracy[0]),
            "published": float(accuracy[1]),
            "noise": float(np.sqrt(spread.sum()) / len(labels)),
            "interval": [float(gaps.mean() - reach), float(gaps.mean() + reach)],
        }


def show(cells: list[dict[str, Any]], clean: float, console: Console) -> None:
    """The differences, ours minus published, in a table."""
    table = Table(title=f"Accuracy in %, ours / published (difference); {clean:.1f} on clean pictures")
    for column in ("corruption", *map(str, range(1, 6))):
        table.add_column(column)
    for name in dict.fromkeys(cell["corruption"] for cell in cells):
        row = [cell for cell in cells if cell["corruption"] == name]
        shown = (f"{c['ours']:.1f} / {c['published']:.1f} ({c['ours'] - c['published']:+.1f})" for c in row)
        table.add_row(name, *shown)
    console.print(table)
    gaps = np.array([abs(cell["ours"] - cell["published"]) for cell in cells])
    console.print(
        f"{(gaps <= AIM).sum()} of {len(gaps)} cells within {AIM:g} point (aim: {N_NEAR} of 75), "
        f"{(gaps <= LIMIT).sum()} within {LIMIT:g} (aim: all); at most {gaps.max():.1f}; standard error of a "
        f"difference at most {max(cell['noise'] for cell in cells):.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_quick(parser)
    parser.add_argument("--model", choices=("resnet56", "resnet56-224", "efficientnet"), default="resnet56")
    parser.add_argument("--n", type=int, help="pictures")
    parser.add_argument("--draws", type=int, help="times that random corruptions are drawn per picture")
    parser.add_argument("--only", help="corruptions, separated by commas")
    text = "folder for the answers, to be used again: of one model and version of ours, with the same --n"
    parser.add_argument("--kept", type=Path, help=text)
    parser.add_argument("--json", help="write the raw results to this file")
    arguments = complete(parser.parse_args(), QUICK, FULL)
    if not os.environ.get("THEMIS_DATA"):
        print("skipped: this benchmark needs the data folder: set THEMIS_DATA")
        return
    try:
        package = load_package()
    except ImportError as error:
        print(
            f"skipped: this benchmark needs the published corruptions ({error}): pip install --no-deps imagecorruptions"
        )
        return
    load_frost(package)
    is_small, averages = arguments.model == "resnet56", arguments.model == "resnet56-224"
    target, pictures, labels = read_efficientnet() if arguments.model == "efficientnet" else read_resnet()
    target.module.eval()
    rows = np.random.default_rng(0).permutation(len(pictures))[: arguments.n]
    pictures, labels = pictures[rows], labels[torch.from_numpy(rows)]
    pictures = enlarged(pictures) if averages else pictures
    suite = choose_suite("corruptions", (3, *pictures.shape[1:3]))
    members = [member for member in suite.members if not arguments.only or member.name in arguments.only.split(",")]
    clean = float(100 * hits(target, batches(pictures), labels, averages).mean())
    corrupt = small_corruption if is_small else large_corruption
    cells: list[dict[str, Any]] = []
    for member in members:
        for cell in compare(
            member, (target, pictures, labels), package, corrupt, arguments.draws, arguments.kept, averages
        ):
            cells.append(cell)
            if arguments.json:
                write_json(
                    arguments.json, torch.device("cpu"), {"clean": clean, "pictures": len(pictures), "cells": cells}
                )
        print(member.name, [f"{c['ours'] - c['published']:+.1f}" for c in cells[-5:]], flush=True)
    show(cells, clean, Console(width=None if sys.stdout.isatty() else 160))


if __name__ == "__main__":
    main()
