"""Readers of array files: NumPy's own formats, and the idx files of MNIST and similar sets."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np

from themis.data.files import (
    Numbers,
    data_errors,
    existing_file,
    names_in_npz,
    open_plain_or_gz,
    read_exactly,
    read_npy,
    read_npz,
    required_path,
)
from themis.data.seeds import Seeds, from_arrays
from themis.errors import DataError, UsageError, warn

IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
SPLITS = {"test": "t10k", "train": "train"}
LABELS = "labels"
"""Name of the labels in an archive, if no other is given."""


def npz_seeds(path: Path | None = None, *, inputs: str = "inputs", labels: str | None = None) -> Seeds:
    """A NumPy archive with the arrays `inputs` and, optionally, `labels`; `?inputs=X&labels=y` gives other names."""
    path = existing_file(required_path(path, "npz"))
    name = LABELS if labels is None else labels
    arrays = read_npz(path, (inputs, name))
    for needed in (inputs, *([] if labels is None else [labels])):
        if needed not in arrays:
            raise DataError(
                f"{path} must hold an array named {needed!r}, got {names_in_npz(path)}: write it with np.savez(path, "
                "inputs=..., labels=...), or give the names as ?inputs=NAME&labels=NAME"
            )
    others = [other for other in names_in_npz(path) if other not in arrays]
    if name not in arrays and others:
        warn(
            f"{path} is read without labels, because it has no array named {LABELS!r}, but {', '.join(others[:5])}: if "
            "one of them holds the labels, give its name as in ?inputs=NAME&labels=NAME"
        )
    return _seeds(path, arrays[inputs], arrays.get(name))


def npy_seeds(path: Path | None = None, *, labels: str | None = None) -> Seeds:
    """A NumPy array of inputs. Labels: `?labels=PATH`, or `NAME_labels.npy` beside `NAME.npy`."""
    path = existing_file(required_path(path, "npy"))
    beside = path.with_name(f"{path.stem}_labels.npy")
    labels_path = Path(labels) if labels else beside if beside.is_file() else None
    return _seeds(path, read_npy(path), None if labels_path is None else read_npy(existing_file(labels_path)))


def idx_seeds(path: Path | None = None, *, split: str = "test") -> Seeds:
    """An idx file of inputs, plain or gzipped, with labels from the file beside it; or a folder that holds both.

    Bytes are taken for pictures and scaled to 0..1; `[seeds, height, width]` gets a channel dimension. The labels of
    `A-images-idx3-B` are in `A-labels-idx1-B`.
    """
    path = required_path(path, "idx")
    if os.path.isdir(path):
        path = _find_split(path, split)
    inputs = read_idx(path)
    beside = path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1").replace("idx4", "idx1"))
    alternative = beside.with_suffix("") if beside.suffix == ".gz" else beside.with_name(f"{beside.name}.gz")
    candidates = (file for file in (beside, alternative) if file.is_file() and file != path)
    labels = next(map(read_idx, candidates), None)
    if labels is not None and labels.ndim != 1:
        raise DataError(
            f"{beside} must hold one label per seed, got an array of shape {list(labels.shape)}: check the file"
        )
    inputs = inputs[:, None] if inputs.ndim == 3 else inputs
    return _seeds(path, inputs, labels, divisor=255.0 if inputs.dtype == np.uint8 else 1.0)


def read_idx(path: Path) -> Numbers:
    """The array in an idx file; if the file is not compressed, the array is read only where it is used."""
    form = "an idx file (two zero bytes, a type, a number of dimensions)"
    with data_errors(path, form), open_plain_or_gz(path) as file:
        head = file.read(4)
        if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in IDX_TYPES or not 1 <= head[3] <= 8:
            raise DataError(f"{path} must be {form}, but it begins with {head.hex() or 'nothing'}: check the path")
        dtype = np.dtype(IDX_TYPES[head[2]])
        shape = struct.unpack(f">{head[3]}I", read_exactly(file, 4 * head[3], path).data)
        n_bytes, offset = dtype.itemsize, 4 + 4 * head[3]
        for side in shape:
            n_bytes *= side
        is_plain = not hasattr(file, "mtime")
        if is_plain:
            n_actual = path.stat().st_size - offset
            if n_actual != n_bytes:
                raise DataError(
                    f"{path} must hold {n_bytes:,} bytes for shape {list(shape)}, but it has {n_actual:,}: download it "
                    "again"
                )
            return np.memmap(path, dtype, "r", offset, shape) if n_bytes else np.zeros(shape, dtype)
        content = read_exactly(file, n_bytes, path)
        if file.read(1):
            raise DataError(
                f"{path} must end after an array of shape {list(shape)}, but it continues: download it again"
            )
        return content.view(dtype).reshape(shape)


def _find_split(folder: Path, split: str) -> Path:
    if split not in SPLITS:
        raise UsageError(f"split must be 'test' or 'train', got {split!r}")
    files = sorted(file for file in folder.iterdir() if "images" in file.name and "idx" in file.name)
    matching = [file for file in files if file.name.startswith((SPLITS[split], split))]
    if not matching:
        names = [file.name for file in files]
        raise DataError(
            f"{folder} must hold idx images of the split {split!r}, got {names}: give the path of the file, or ?split="
        )
    return matching[0]


def _seeds(path: Path, inputs: Numbers, labels: Numbers | None, divisor: float = 1.0) -> Seeds:
    try:
        return from_arrays(inputs, labels, divisor=divisor)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
