"""The data sets of the zoo, each with its reader, from a folder in THEMIS_DATA or from a given path.

Pictures are in 0..1, `[seeds, channels, height, width]`; other features are left as they were recorded. Normalisation
is part of the target. Where an entry of the zoo reads its splits in another way, a function says how.
"""

from __future__ import annotations

import csv
import io
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from themis.data.features import Features
from themis.data.files import Numbers, check_memory, data_errors, existing_file, read_npy, read_npz
from themis.data.pictures import decode, picture_seeds
from themis.data.seeds import Seeds, from_arrays, from_files, scaled
from themis.errors import DataError, UsageError
from themis_integrations.data.binary import BATCHES, idx_seeds

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


def read_mnist(path: Path | None = None, *, split: str = "test") -> Seeds:
    """MNIST, 10,000 test or 60,000 training digits `[seeds, 1, 28, 28]` in 0..1, labels 0..9."""
    return idx_seeds(path or data_folder() / "mnist", split=split)


def read_cifar10(path: Path | None = None, *, split: str = "test", batches: tuple[str, ...] | None = None) -> Seeds:
    """CIFAR-10 from lossless mosaics of 100x100 tiles; `[seeds, 3, 32, 32]` in 0..1, labels 0..9."""
    _check_split(split, ("test", "train"))
    return _mosaic_seeds(path or data_folder() / "cifar10", batches or CIFAR10_SPLITS[split]).with_classes(CIFAR10)


def _mosaic_seeds(folder: Path, batches: tuple[str, ...]) -> Seeds:
    """CIFAR-10 from lossless mosaics of 100x100 tiles (`test_batch.webp`, `test_batch_labels.npy`), in 0..1."""
    pictures, labels = [], []
    for batch in batches:
        mosaic = existing_file(folder / f"{batch}.webp")
        pixels = decode(mosaic, mosaic, mode="RGB").transpose(1, 2, 0)
        if pixels.shape != (3200, 3200, 3):
            raise DataError(f"{mosaic} must be a 3200x3200 mosaic, got {pixels.shape}: download it again")
        pictures.append(pixels.reshape(100, 32, 100, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32))
        labels.append(read_npy(folder / f"{batch}_labels.npy"))
    return from_arrays(np.concatenate(pictures), np.concatenate(labels), divisor=255.0)


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

    split: `all`, `test`: every fifth block of 100 frames, or `train`: the others.
    """
    _check_split(split, ("all", "test", "train"))
    folder = (path or data_folder() / "udacity_driving").absolute()
    file = existing_file(folder / "frames_100x100.zip")
    angles = dict(_pairs(folder / "CH2_final_evaluation.csv", "frame_id", "steering_angle"))
    with data_errors(file, "a zip archive of frames"):
        archive = zipfile.ZipFile(file)
        names = sorted(name for name in archive.namelist() if name.endswith(".jpg"))
    with data_errors(folder / "CH2_final_evaluation.csv", "a table with an angle for every frame"):
        labels = [float(angles[Path(name).stem]) for name in names]

    def read(name: str) -> Numbers:
        check_memory(archive.getinfo(name).file_size, f"{file}, {name}")
        with data_errors(f"{file}, {name}", "a frame"):
            content = io.BytesIO(archive.read(name))
        return scaled(decode(content, f"{file}, {name}", mode="RGB"), 255)

    seeds = from_files(names, read, torch.tensor(labels), "download the archive again")
    is_test = torch.arange(len(seeds)) // FRAMES_PER_BLOCK % 5 == 4
    return seeds if split == "all" else seeds[is_test == (split == "test")]


def read_imagenet(path: Path | None = None) -> Seeds:
    """1,000 pictures of ImageNet, one per class, `[1000, 3, 224, 224]` in 0..1; labels in the order of torchvision."""
    folder = (path or data_folder() / "imagenet_samples").absolute()
    rows = _pairs(folder / "labels.csv", "file", "class_index")
    with data_errors(folder / "labels.csv", "a table of files and class numbers"):
        files = [folder / "images" / name for name, _ in rows]
        labels = [int(number) for _, number in rows]
    seeds = picture_seeds(files, labels, mode="rgb")
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
    form = f"a CSV table with the columns {first}, {second}"
    with data_errors(path, form), existing_file(path).open(encoding="utf-8", newline="") as file:
        table = csv.DictReader(file)
        if not {first, second} <= set(table.fieldnames or ()):
            raise DataError(f"{path} must be {form}, got {table.fieldnames}: download it again")
        return [(row[first] or "", row[second] or "") for row in table]


def _check_split(split: str, known: tuple[str, ...]) -> None:
    if split not in known:
        raise UsageError(f"split must be {' or '.join(map(repr, known))}, got {split!r}")


RAISABLE_FEATURES = tuple(
    f"count_{keyword}"
    for keyword in ("action", "endobj", "font", "javascript", "js", "objstm", "startxref", "trailer", "xref")
)
"""Features of a PDF file that may be raised.

They count keywords in the bytes of a file, and more of them can be added where no reader looks. None may be lowered:
the removed keyword might be what makes the file malicious. All other features are fixed: metadata, sizes, times and
positions, and every count that determines another feature (`count_obj` is part of `ratio_size_obj`, `count_stream` of
`count_stream_diff`, images and boxes of their sums, `count_page`, `count_eof` and `count_acroform` of `pos_...`, and
obfuscated names are counted twice).
"""


def split_pdf(folder: Path, *, split: str) -> Seeds:
    """Features of PDF files on `FeatureAxes`: Contagio's for training, those from Google and VirusTotal for testing."""
    table = read_pdf(folder).inputs[:]
    seeds = read_pdf(folder, split="contagio" if split == "train" else "other")
    axes, raw = FeatureAxes(table), Features.of(table, _feature_names(folder / "pdf_features.npz"))
    features = replace(
        raw, change=tuple("raise" if name in RAISABLE_FEATURES else "fixed" for name in raw.names), axes=axes
    )
    placed = Seeds(axes.place(seeds.inputs[:]), seeds.labels, seeds.seed_id)
    return placed.with_features(features).with_classes(seeds.classes)


def split_drebin(folder: Path, *, split: str) -> Seeds:
    """Features of Android apps; no test app has a duplicate in the training split.

    An app still works if it gets more permissions and calls, but may break if some are removed: features only rise.
    """
    seeds = read_drebin(folder, split="test")
    if split == "train":
        full = read_drebin(folder)
        seeds = full[~torch.isin(full.seed_id, seeds.seed_id)]
    features = Features.of(seeds.inputs, _feature_names(folder / "drebin215.npz"))
    return seeds.with_features(features.set("*", kind="binary", change="raise"))


def split_imagenet(folder: Path, *, split: str) -> Seeds:
    """One test picture per class; there is no training split."""
    if split == "train":
        raise DataError(
            f"{folder} must hold a training split, but it has only one test picture per class: train elsewhere"
        )
    return read_imagenet(folder)


class FeatureAxes:
    """Features of a table, each on its own logarithmic axis: 0 is its lowest value in the data, 1 its highest.

    Counts, sizes and times differ by twelve orders of magnitude, so that no single pair of bounds fits the raw values,
    and on linear axes an outlier would squeeze all other rows into one point. On logarithmic axes noise is relative to
    the value, and no test leaves the range of a feature.
    """

    def __init__(self, table: Tensor) -> None:
        self.low = table.amin(0)
        self.reach = torch.log1p(table.amax(0) - self.low)

    def place(self, raw: Tensor) -> Tensor:
        """Raw values `[rows, features]` as places in 0..1; a feature with a single value is always 0."""
        reach = torch.where(self.reach > 0, self.reach, 1).to(raw)
        return torch.log1p(raw - self.low.to(raw)) / reach

    def as_dict(self) -> dict[str, list[float]]:
        """The parameters of the formula: a raw value is low + expm1(place * reach)."""
        return {"low": self.low.tolist(), "reach": self.reach.tolist()}

    def value(self, places: Tensor) -> Tensor:
        """The raw values at `places`; differentiable."""
        return self.low.to(places) + torch.expm1(places * self.reach.to(places))


class StandardPdf:
    """Preprocessing of the PDF net: raw features, standardised by their mean and spread over Contagio's files."""

    def __init__(self, folder: Path) -> None:
        self.axes = FeatureAxes(read_pdf(folder).inputs[:])
        contagio = read_pdf(folder, split="contagio").inputs[:].double()
        spread = contagio.std(0, correction=0)
        self.mean, self.spread = contagio.mean(0), torch.where(spread > 0, spread, 1)

    def __call__(self, inputs: Tensor) -> Tensor:
        return (self.axes.value(inputs) - self.mean.to(inputs)) / self.spread.to(inputs)


def _feature_names(file: Path) -> tuple[str, ...] | None:
    names = read_npz(file, ("feature_names",)).get("feature_names")
    return None if names is None else tuple(map(str, names))
