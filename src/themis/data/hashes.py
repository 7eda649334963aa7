"""Hashes of the contents of inputs: the same input has the same hash in every file, order, shape, type and unit."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.data.rows import Rows, as_array
from themis.data.seeds import Seeds
from themis.progress import advance, step

STEP_BYTES = 16 << 20
"""Size of the inputs that are read and hashed at a time."""

Hashes = NDArray[np.uint64]


def seed_hashes(seeds: Seeds) -> Hashes:
    """A hash of each seed's input `[seeds]`; labels and seed ids do not count."""
    return input_hashes(seeds.inputs)


def input_hashes(inputs: Tensor | Rows) -> Hashes:
    """A hash of each input's content `[inputs]`, independent of its shape, type and device.

    An 8-bit picture has the same hash in 0..1 and in 0..255, however it was divided.
    """
    hashes = np.empty(len(inputs), np.uint64)
    with step("hashing the inputs"):
        for start, block in _blocks(inputs):
            digests = [hashlib.blake2b(content, digest_size=8).digest() for content in _contents(block)]
            hashes[start : start + len(block)] = np.frombuffer(b"".join(digests), "<u8")
            advance(start, len(inputs), "inputs")
    return hashes


def _blocks(inputs: Tensor | Rows) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """All inputs as flat rows, in blocks of about `STEP_BYTES`, each with the index of its first row."""
    n = len(inputs)
    step = max(1, STEP_BYTES * n // max(1, math.prod(inputs.shape) * 4))
    for start in range(0, n, step):
        rows = as_array(inputs[torch.arange(start, min(start + step, n))])
        yield start, np.asarray(rows, np.float32).reshape(len(rows), -1)


def _contents(block: NDArray[np.float32]) -> Iterator[bytes]:
    """The bytes to hash for each row: those of the pixels if it is an 8-bit picture, otherwise those of the floats."""
    scaled = block * np.float32(255)
    is_unit = ((block >= 0) & (block <= 1) & (np.abs(scaled - np.rint(scaled)) < 1e-3)).all(1)
    is_raw = ((block >= 0) & (block <= 255) & (block == np.rint(block))).all(1) & ~is_unit
    floats = (block + np.float32(0)).astype("<f4")  # turns -0.0 into 0.0
    for k in range(len(block)):
        if is_unit[k] or is_raw[k]:
            yield np.rint(scaled[k] if is_unit[k] else block[k]).astype(np.uint8).tobytes()
        else:
            yield floats[k].tobytes()
