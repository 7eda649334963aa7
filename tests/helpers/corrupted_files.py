"""Small folders in the formats of CIFAR-10-C and ImageNet-C."""

import numpy as np
from PIL import Image

CLEAN = 12


def pictures(n=CLEAN):
    """Clean pictures `[n, 8, 8, 3]` of bytes, and their labels: the channel that is brightest."""
    draw = np.random.default_rng(0)
    pixels, labels = draw.integers(0, 60, (n, 8, 8, 3), np.uint8), np.arange(n) % 3
    pixels[np.arange(n), :, :, labels] += 70
    return pixels, labels


def darkened(pixels, severity):
    """A corruption that a classifier of the brightest channel notices: the second channel gets brighter."""
    corrupted = pixels.copy()
    corrupted[..., 1] += np.uint8(25 * severity)
    return corrupted


def write_cifar_c(folder, names=("fog", "snow")):
    """The format of CIFAR-10-C: five severities one after the other in a file per corruption."""
    folder.mkdir(exist_ok=True)
    pixels, labels = pictures()
    for name in names:
        np.save(folder / f"{name}.npy", np.concatenate([darkened(pixels, k) for k in range(1, 6)]))
    np.save(folder / "labels.npy", np.tile(labels, 5).astype(np.uint8))
    return folder


def write_imagenet_c(folder, names=("fog",)):
    """The format of ImageNet-C: a folder per corruption, severity and class."""
    pixels, labels = pictures()
    for name in names:
        for severity in range(1, 6):
            for k, (picture, label) in enumerate(zip(darkened(pixels, severity), labels, strict=True)):
                place = folder / name / str(severity) / f"n0{label}"
                place.mkdir(parents=True, exist_ok=True)
                Image.fromarray(picture).save(place / f"{k:03}.JPEG", quality=100, subsampling=0)
    return folder
