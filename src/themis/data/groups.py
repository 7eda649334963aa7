"""Which seeds belong together: groups, such as frames of a video or scans of a patient, and copies of one input."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from themis.data.rows import Rows, blocks
from themis.data.seeds import Seeds
from themis.errors import DataError
from themis.progress import advance, step
from themis.reading import read_regular

MAX_GROUPS_BYTES = 64 << 20
"""Largest size of a file with the group of each seed."""
Ints = NDArray[np.int64]


def read_groups(split_by: str, seeds: Seeds) -> Ints:
    """The number of each seed's group, `[seeds]`.

    split_by: how many consecutive inputs form a group, or a text file with the group of one input per line.
    """
    index = seeds.seed_id.numpy()
    if split_by.isdecimal():
        stretches: Ints = index // int(split_by)
        return stretches
    try:
        names = read_regular(split_by, MAX_GROUPS_BYTES).decode("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise DataError(
            "split_by must be a number of consecutive seeds, or a text file with the group of each seed, but "
            f"{split_by} cannot be read ({reason}): check the path"
        ) from error
    n_needed, is_complete = int(index.max()) + 1, np.array_equal(index, np.arange(len(index)))
    if len(names) < n_needed or (is_complete and len(names) > n_needed) or "" in names:
        raise DataError(
            f"{split_by} must name the group of every seed, one per line in the order of the data, without a heading, "
            f"but it has {len(names):,} lines, {names.count(''):,} of them empty, for {n_needed:,} seeds: correct it"
        )
    number = {name: k for k, name in enumerate(sorted(set(names)))}  # np.unique would pad all names to the longest
    numbers: Ints = np.array([number[name] for name in names], np.int64)[index]
    return numbers


def join_copies(group: Ints, hashes: Hashes) -> Ints:
    """Merge groups `[seeds]` that share copies of an input."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    _, number = np.unique(group, return_inverse=True)
    _, content = np.unique(hashes, return_inverse=True)
    n_groups = int(number.max(initial=-1)) + 1
    edges = (np.ones(len(number), np.int8), (number, n_groups + content))
    n = n_groups + int(content.max(initial=-1)) + 1
    joined: Ints = connected_components(coo_array(edges, (n, n)), directed=False)[1][number].astype(np.int64)
    return joined


Hashes = NDArray[np.uint64]


def seed_hashes(seeds: Seeds) -> Hashes:
    """A hash of each seed's input `[seeds]`, without its label and id."""
    return input_hashes(seeds.inputs)


def input_hashes(inputs: Tensor | Rows) -> Hashes:
    """A hash of each input's content `[inputs]`, independent of its shape, type and device.

    An 8-bit picture has the same hash in 0..1 and in 0..255, however it was divided.
    """
    hashes = np.empty(len(inputs), np.uint64)
    with step("hashing the inputs"):
        for start, block in blocks(inputs):
            contents = _contents(block.flatten(1).numpy())
            digests = [hashlib.blake2b(content, digest_size=8).digest() for content in contents]
            hashes[start : start + len(block)] = np.frombuffer(b"".join(digests), "<u8")
            advance(start, len(inputs), "inputs")
    return hashes


def _contents(block: NDArray[np.float32]) -> Iterator[bytes]:
    """The bytes to hash for each row: 8-bit pixels if it is such a picture, otherwise floats."""
    scaled = block * np.float32(255)
    is_unit = ((block >= 0) & (block <= 1) & (np.abs(scaled - np.rint(scaled)) < 1e-3)).all(1)
    is_raw = ((block >= 0) & (block <= 255) & (block == np.rint(block))).all(1) & ~is_unit
    floats = (block + np.float32(0)).astype("<f4")  # turns -0.0 into 0.0
    for k in range(len(block)):
        if is_unit[k] or is_raw[k]:
            yield np.rint(scaled[k] if is_unit[k] else block[k]).astype(np.uint8).tobytes()
        else:
            yield floats[k].tobytes()
