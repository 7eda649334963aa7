"""Readers of published research data: the idx files of MNIST and similar sets, and CIFAR's batches.

The pickled batches of CIFAR are read without running code.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np

from themis.data.files import Numbers, check_memory, data_errors, existing_file, read_exactly
from themis.data.readers import named_seeds
from themis.data.seeds import Seeds, from_arrays
from themis.errors import DataError, UsageError

IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
IDX_SPLITS = {"test": "t10k", "train": "train"}
BATCHES = {
    "train": (*(f"data_batch_{k}" for k in range(1, 6)), "train"),
    "test": ("test_batch", "test"),
}
PIXELS = 3 * 32 * 32
LABEL_KEYS = {"fine": (b"labels", b"fine_labels"), "coarse": (b"coarse_labels",)}


def idx_seeds(path: Path, *, split: str = "test") -> Seeds:
    """An idx file of inputs, plain or gzipped, with labels from the file beside it; or a folder that holds both.

    Bytes are taken for pictures and scaled to 0..1; `[seeds, height, width]` gets a channel dimension. The labels of
    `A-images-idx3-B` are in `A-labels-idx1-B`.
    """
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
    return named_seeds(path, inputs, labels, divisor=255.0 if inputs.dtype == np.uint8 else 1.0)


def read_idx(path: Path) -> Numbers:
    """The array in an idx file; if the file is not compressed, the array is read only where it is used."""
    form = "an idx file (two zero bytes, a type, a number of dimensions)"
    with data_errors(path, form), existing_file(path).open("rb") as start:
        is_gz = start.read(2) == b"\x1f\x8b"
    with data_errors(path, form), gzip.open(path) if is_gz else path.open("rb") as file:
        head = file.read(4)
        if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in IDX_TYPES or not 1 <= head[3] <= 8:
            raise DataError(f"{path} must be {form}, but it begins with {head.hex() or 'nothing'}: check the path")
        dtype = np.dtype(IDX_TYPES[head[2]])
        shape = struct.unpack(f">{head[3]}I", read_exactly(file, 4 * head[3], path).data)
        n_bytes, offset = dtype.itemsize * math.prod(shape), 4 + 4 * head[3]
        if not is_gz:
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
    if split not in IDX_SPLITS:
        raise UsageError(f"split must be 'test' or 'train', got {split!r}")
    files = sorted(file for file in folder.iterdir() if "images" in file.name and "idx" in file.name)
    matching = [file for file in files if file.name.startswith((IDX_SPLITS[split], split))]
    if not matching:
        names = [file.name for file in files]
        raise DataError(
            f"{folder} must hold idx images of the split {split!r}, got {names}: give the path of the file, or ?split="
        )
    return matching[0]


def cifar_seeds(path: Path, *, split: str = "test", labels: str = "fine") -> Seeds:
    """CIFAR-10 or CIFAR-100 as published: a batch (pickled or `.bin`) or a folder of batches, in 0..1.

    split: `test` or `train`, for a folder. labels: `fine`, or CIFAR-100's `coarse`.
    """
    if split not in BATCHES or labels not in LABEL_KEYS:
        raise UsageError(f"split must be 'test' or 'train' and labels 'fine' or 'coarse', got {split!r} and {labels!r}")
    files = [path]
    if os.path.isdir(path):
        candidates = [path / name for batch in BATCHES[split] for name in (batch, f"{batch}.bin")]
        files = [file for file in candidates if file.is_file()]
        if not files:
            raise DataError(
                f"{path} must hold CIFAR batches, but none of {', '.join(file.name for file in candidates)} exists: "
                "check the path, or ?split="
            )
    batches = [_binary(file, labels) if file.suffix == ".bin" else _pickled(file, labels) for file in files]
    numbers = [batch_labels for _, batch_labels in batches if batch_labels is not None]
    pixels = np.concatenate([pixels for pixels, _ in batches]) if len(batches) > 1 else batches[0][0]
    has_labels = len(numbers) == len(batches)
    return from_arrays(pixels.reshape(-1, 3, 32, 32), np.concatenate(numbers) if has_labels else None, divisor=255.0)


def _binary(path: Path, labels: str) -> tuple[Numbers, Numbers | None]:
    """A binary batch: records of one label (CIFAR-100: coarse and fine) and 3,072 pixels."""
    n_bytes = existing_file(path).stat().st_size
    n_labels = 2 if path.stem in ("train", "test") and n_bytes % (PIXELS + 2) == 0 else 1
    if n_bytes == 0 or n_bytes % (PIXELS + n_labels):
        raise DataError(
            f"{path} must hold records of 3,073 or 3,074 bytes, but it has {n_bytes:,} bytes: download it again"
        )
    check_memory(n_bytes, str(path))
    records = np.fromfile(path, np.uint8).reshape(-1, PIXELS + n_labels)
    if labels == "coarse" and n_labels == 1:
        raise DataError(
            f"{path} must be a batch of CIFAR-100 to have coarse labels, but it is one of CIFAR-10: leave out ?labels="
        )
    return records[:, n_labels:], records[:, 0 if labels == "coarse" else n_labels - 1]


def _pickled(path: Path, labels: str) -> tuple[Numbers, Numbers | None]:
    form = "a pickled batch of CIFAR"
    with data_errors(path, form):
        with existing_file(path).open("rb") as file:
            content = read_exactly(file, path.stat().st_size, path)
        batch = _Batch(io.BytesIO(content.data), encoding="bytes").load()
        if not isinstance(batch, dict):
            raise DataError(f"{path} must be {form}, a dict, got {type(batch).__name__}: download it again")
        batch = {key.encode() if isinstance(key, str) else key: value for key, value in batch.items()}
        pixels = batch.get(b"data")
        pixels = pixels.array() if isinstance(pixels, _Array) else None
        if pixels is None or pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != PIXELS:
            got = "none" if pixels is None else f"{list(pixels.shape)} {pixels.dtype}"
            raise DataError(
                f"{path} must be {form} with 'data' [pictures, 3072] of bytes, got {got}: download it again"
            )
        numbers = next((batch[name] for name in LABEL_KEYS[labels] if name in batch), None)
        if numbers is not None and not all(isinstance(number, int) for number in numbers):
            raise DataError(f"{path} must be {form} whose labels are whole numbers: download it again")
        return pixels, None if numbers is None else np.array(numbers, dtype=np.int64)


class _Array:
    """Stands for a NumPy array in a pickle: it only stores the state, which is never passed to NumPy unchecked."""

    def __init__(self, *arguments: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def array(self) -> Numbers:
        _, shape, dtype, is_fortran, content = self.state
        if dtype.code != "u1" or not isinstance(content, bytes | bytearray):
            raise pickle.UnpicklingError(f"its arrays must be of bytes, got the type {dtype.code!r}")
        return np.frombuffer(bytearray(content), np.uint8).reshape(shape, order="F" if is_fortran else "C")


class _Dtype:
    """Stands for a NumPy type in a pickle."""

    def __init__(self, code: Any, *flags: Any) -> None:
        self.code = code.decode("ascii") if isinstance(code, bytes) else code

    def __setstate__(self, state: Any) -> None: ...


def _frombuffer(content: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    """Replaces the function with which newer pickles build an array."""
    array = _Array()
    array.state = (1, shape, dtype, order == "F", content)
    return array


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """Replaces the function with which Python 3 stores bytes in an old pickle."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"the encoding {encoding!r} is not allowed")
    return text.encode("latin1")


class _Batch(pickle._Unpickler):
    """Reads dicts, lists, numbers, text and arrays. No name in the pickle is imported, so none of its code can run.

    It derives from the unpickler written in Python: a forged memo index makes the one in C allocate gigabytes.
    """

    KNOWN = {  # noqa: RUF012
        **{(f"numpy.{core}.multiarray", "_reconstruct"): _Array for core in ("core", "_core")},
        **{(f"numpy.{core}.numeric", "_frombuffer"): _frombuffer for core in ("core", "_core")},
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Dtype,
        ("_codecs", "encode"): _encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not allowed")
        return self.KNOWN[module, name]
