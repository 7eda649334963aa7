"""CIFAR-10 and CIFAR-100: pickled batches (read without running code), binary batches and lossless mosaics."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from themis.data.files import Numbers, check_memory, data_errors, existing_file, read_exactly, read_npy, required_path
from themis.data.pictures import decode
from themis.data.seeds import Seeds, from_arrays
from themis.errors import DataError, UsageError

BATCHES = {
    "train": (*(f"data_batch_{k}" for k in range(1, 6)), "train"),
    "test": ("test_batch", "test"),
}
PIXELS = 3 * 32 * 32
LABELS = {"fine": (b"labels", b"fine_labels"), "coarse": (b"coarse_labels",)}


def cifar_seeds(path: Path | None = None, *, split: str = "test", labels: str = "fine") -> Seeds:
    """CIFAR-10 or CIFAR-100 as published: a batch (pickled or `.bin`) or a folder of batches, in 0..1.

    split: `test` or `train`, for a folder. labels: `fine`, or CIFAR-100's `coarse`.
    """
    path = required_path(path, "cifar")
    if split not in BATCHES or labels not in LABELS:
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


def mosaic_seeds(folder: Path, batches: tuple[str, ...]) -> Seeds:
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
        numbers = next((batch[name] for name in LABELS[labels] if name in batch), None)
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
