"""Arrays in files: NumPy's own, and the idx files of MNIST and its kin."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from themis.data.files import (
    existing,
    explained,
    names_in_npz,
    needed,
    open_plain_or_gz,
    read_exactly,
    read_npy,
    read_npz,
)
from themis.data.rows import Numbers
from themis.data.seeds import Seeds, from_arrays
from themis.errors import DataError, UsageError

IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
SPLITS = {"test": "t10k", "train": "train"}


def npz_seeds(path: Path | None = None, *, inputs: str = "inputs", labels: str = "labels") -> Seeds:
    """A NumPy archive with the arrays `inputs` and, if there are any, `labels`, or so named: `?inputs=X&labels=y`."""
    path = needed(path, "npz")
    arrays = read_npz(existing(path), (inputs, labels))
    if inputs not in arrays:
        raise DataError(
            f"{path} must hold an array named {inputs!r}, got {names_in_npz(path)}: write it with np.savez(path, "
            "inputs=..., labels=...), or name it as ?inputs=NAME"
        )
    return _named(path, arrays[inputs], arrays.get(labels))


def npy_seeds(path: Path | None = None, *, labels: str | None = None) -> Seeds:
    """A NumPy array of inputs. Labels: `?labels=PATH`, or `NAME_labels.npy` beside `NAME.npy`."""
    path = existing(needed(path, "npy"))
    beside = path.with_name(f"{path.stem}_labels.npy")
    named = Path(labels) if labels else beside if beside.is_file() else None
    return _named(path, read_npy(path), None if named is None else read_npy(existing(named)))


def idx_seeds(path: Path | None = None, *, split: str = "test") -> Seeds:
    """An idx file of inputs, plain or gzipped, with the labels found beside it; or a folder that holds both.

    Bytes are pictures, and become 0..1; `[seeds, height, width]` gets a channel. Labels of `A-images-idx3-B` are in
    `A-labels-idx1-B`.
    """
    path = needed(path, "idx")
    if path.is_dir():
        path = _find_split(path, split)
    inputs = read_idx(path)
    beside = path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1").replace("idx4", "idx1"))
    other = beside.with_suffix("") if beside.suffix == ".gz" else beside.with_name(f"{beside.name}.gz")
    labels = next((read_idx(each) for each in (beside, other) if each.is_file() and each != path), None)
    if labels is not None and labels.ndim != 1:
        raise DataError(f"{beside} must hold one label a seed, got an array of {list(labels.shape)}: check the file")
    inputs = inputs[:, None] if inputs.ndim == 3 else inputs
    return _named(path, inputs, labels, divisor=255.0 if inputs.dtype == np.uint8 else 1.0)


def read_idx(path: Path) -> Numbers:
    """The array in an idx file; of a plain file it stays there until it is used."""
    what = "an idx file (two zero bytes, a type, a number of dimensions)"
    with explained(path, what), open_plain_or_gz(path) as file:
        head = file.read(4)
        if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in IDX_TYPES or not 1 <= head[3] <= 8:
            raise DataError(f"{path} must be {what}, it begins with {head.hex() or 'nothing'}: check the path")
        dtype = np.dtype(IDX_TYPES[head[2]])
        shape = struct.unpack(f">{head[3]}I", read_exactly(file, 4 * head[3], path))
        n_bytes, offset = dtype.itemsize, 4 + 4 * head[3]
        for each in shape:
            n_bytes *= each
        is_plain = not hasattr(file, "mtime")
        if is_plain:
            n_there = path.stat().st_size - offset
            if n_there != n_bytes:
                raise DataError(
                    f"{path} must hold {n_bytes:,} bytes of {list(shape)}, it has {n_there:,}: get the file again"
                )
            return np.memmap(path, dtype, "r", offset, shape) if n_bytes else np.zeros(shape, dtype)
        content = read_exactly(file, n_bytes, path)
        if file.read(1):
            raise DataError(f"{path} must end after {list(shape)}, it goes on: get the file again")
        return np.frombuffer(bytearray(content), dtype).reshape(shape)


def _find_split(folder: Path, split: str) -> Path:
    if split not in SPLITS:
        raise UsageError(f"split must be 'test' or 'train', got {split!r}")
    found = sorted(each for each in folder.iterdir() if "images" in each.name and "idx" in each.name)
    fitting = [each for each in found if each.name.startswith((SPLITS[split], split))]
    if not fitting:
        names = [each.name for each in found]
        raise DataError(f"{folder} must hold idx images of the split {split!r}, got {names}: name the file, or ?split=")
    return fitting[0]


def _named(path: Path, inputs: Numbers, labels: Numbers | None, divisor: float = 1.0) -> Seeds:
    try:
        return from_arrays(inputs, labels, divisor=divisor)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
