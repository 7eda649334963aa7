"""Published files of corrupted pictures: CIFAR-10-C, CIFAR-100-C and ImageNet-C."""

from pathlib import Path

import numpy as np

from themis.data.files import Numbers, existing_file, labelled_files, parse_whole, read_npy
from themis.data.pictures import SUFFIXES, picture_seeds
from themis.data.seeds import Seeds, from_reader, scaled
from themis.errors import DataError, UsageError, nearest

CORRUPTIONS = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression"),
)
"""The 15 corruptions that the mean corruption error is over; the published files have a few more."""
SEVERITIES = 5


def cifar_c_seeds(path: Path, *, corruption: str | None = None, severity: int | str | None = None) -> Seeds:
    """A corruption of CIFAR-10-C or CIFAR-100-C as published: a `.npy` file per corruption, and `labels.npy`.

    severity: 1 to 5; by default all five, one after the other, as in the file.
    """
    folder, name, level = _options(path, corruption, severity)
    pixels, labels = _read(folder / f"{name}.npy"), read_npy(existing_file(folder / "labels.npy"))
    if labels.shape != pixels.shape[:1]:
        raise DataError(
            f"{folder / 'labels.npy'} must have {len(pixels):,} labels, got shape {list(labels.shape)}: replace it"
        )
    n = len(pixels) // SEVERITIES
    rows = slice(None) if level is None else slice((level - 1) * n, level * n)
    pixels = pixels[rows]
    side = pixels.shape[1:3]
    return from_reader(lambda k: scaled(pixels[k].transpose(2, 0, 1), 255), (3, *side), len(pixels), labels[rows])


def _read(file: Path) -> Numbers:
    pixels = read_npy(file)
    if pixels.ndim != 4 or pixels.shape[3] != 3 or pixels.dtype != np.uint8 or not len(pixels) or len(pixels) % 5:
        raise DataError(
            f"{file} must be bytes [pictures, height, width, 3] with five severities one after the other, got "
            f"{list(pixels.shape)} {pixels.dtype}: download it again"
        )
    return pixels


def imagenet_c_seeds(path: Path, *, corruption: str | None = None, severity: int | str | None = None) -> Seeds:
    """A corruption of ImageNet-C as published: a folder per corruption, in it one per severity and one per class.

    severity: 1 to 5; by default all five, one after the other.
    """
    folder, name, level = _options(path, corruption, severity)
    levels = range(1, SEVERITIES + 1) if level is None else [level]
    parts = [labelled_files(folder / name / str(each), SUFFIXES, "pictures") for each in levels]
    files = [file for part in parts for file in part[0]]
    if any(part[1] is None or part[2] != parts[0][2] or len(part[0]) != len(parts[0][0]) for part in parts):
        raise DataError(f"{folder / name} must have the same classes and pictures at each severity: download it again")
    labels = [label for part in parts for label in part[1] or ()]
    return picture_seeds(files, labels).with_classes(parts[0][2])


READERS = {"cifar10c": cifar_c_seeds, "cifar100c": cifar_c_seeds, "imagenetc": imagenet_c_seeds}
"""The readers of published corruptions."""


def corruptions_in(folder: Path) -> list[str]:
    """The corruptions that a folder of published files has."""
    return [name for name in CORRUPTIONS if (folder / name).is_dir() or (folder / f"{name}.npy").is_file()]


def _options(path: Path, corruption: str | None, severity: int | str | None) -> tuple[Path, str, int | None]:
    folder = path.absolute()
    if not folder.is_dir():
        raise DataError(f"the folder of corruptions must exist, but {folder} does not: check the path")
    if corruption is None:
        raise UsageError(f"{path} has several corruptions: choose one, as in ?corruption=fog, or grade a suite on all")
    if not (folder / corruption).is_dir() and not (folder / f"{corruption}.npy").is_file():
        raise DataError(f"{folder} must have corruption {corruption!r}: {nearest(corruption, corruptions_in(folder))}")
    return folder, corruption, parse_whole(severity, "severity", SEVERITIES, 3)
