"""The table of readers, and reading data from a specification such as `csv:table.csv?label=y`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qsl

from themis.data.arrays import idx_seeds, npy_seeds, npz_seeds
from themis.data.cifar import cifar_seeds
from themis.data.datasets import (
    data_folder,
    read_cifar10,
    read_digits,
    read_drebin,
    read_imagenet,
    read_mnist,
    read_pdf,
    read_udacity,
)
from themis.data.detection import coco_seeds, yolo_seeds
from themis.data.hub import hub_seeds
from themis.data.pictures import image_seeds
from themis.data.seeds import Seeds
from themis.data.sound import wav_seeds
from themis.data.tables import csv_seeds, parquet_seeds
from themis.errors import UsageError, nearest
from themis.plugins import Extensible

__all__ = ["READERS", "data_folder", "read_cifar10", "read_data", "read_digits"]

OWN_READERS: dict[str, Callable[..., Seeds]] = {
    "images": image_seeds,
    "coco": coco_seeds,
    "yolo": yolo_seeds,
    "npz": npz_seeds,
    "npy": npy_seeds,
    "csv": csv_seeds,
    "parquet": parquet_seeds,
    "idx": idx_seeds,
    "cifar": cifar_seeds,
    "wav": wav_seeds,
    "hf": hub_seeds,
    "digits": read_digits,
    "mnist": read_mnist,
    "cifar10": read_cifar10,
    "imagenet": read_imagenet,
    "pdf": read_pdf,
    "drebin": read_drebin,
    "udacity": read_udacity,
}
READERS: Extensible[Callable[..., Seeds]] = Extensible("themis.readers", OWN_READERS)


def read_data(spec: str) -> Seeds:
    """Seeds from `READER`, `READER:PATH` or `READER:PATH?option=value&option=value`."""
    name, _, rest = spec.partition(":")
    name, _, query_of_name = name.partition("?")
    if name not in READERS:
        file = Path(name)
        reader = None if rest else _reader_of(file)
        remedy = nearest(name, READERS) if reader is None else f"write {reader}:{spec}"
        if file.suffix == ".py" and os.path.isfile(file):
            remedy = f"write {file.stem}:FUNCTION"
        raise UsageError(f"the data must name a reader or a module:factory, got {spec!r}: {remedy}")
    path, _, query = (rest, "", "") if os.path.exists(rest) else rest.partition("?")
    options = dict(parse_qsl(query or query_of_name, keep_blank_values=True))
    known = [
        parameter.name
        for parameter in inspect.signature(READERS[name]).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and "tuple" not in str(parameter.annotation)
    ]
    for option in options:
        if option not in known:
            raise UsageError(
                f"the reader {name!r} has no option {option!r}: {nearest(option, known) if known else 'leave it out'}"
            )
    return READERS[name](Path(path) if path else None, **options)


def _reader_of(path: Path) -> str | None:
    """The reader that a file or a folder is probably meant for."""
    if os.path.isdir(path) and path.name:
        return "images"
    ending = path.suffix.lstrip(".").lower()
    return ending if os.path.exists(path) and ending in READERS else None
