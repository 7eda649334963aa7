"""Groups of seeds that belong together, such as frames of a stretch of video or scans of a patient."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from themis.data.hashes import Hashes
from themis.data.seeds import Seeds
from themis.errors import DataError
from themis.reading import read_regular

MAX_GROUPS = 64 << 20
"""Bytes of a file with the group of each seed."""
Ints = NDArray[np.int64]


def read_groups(split_by: str, seeds: Seeds) -> Ints:
    """The number of the group that each seed belongs to, `[seeds]`.

    split_by: how many consecutive inputs of the data stay together, or a text file with the group of each on a line.
    """
    index = seeds.seed_id.numpy()
    if split_by.isdecimal():
        stretches: Ints = index // int(split_by)
        return stretches
    try:
        names = read_regular(split_by, MAX_GROUPS).decode("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise DataError(
            "split_by must be a number of consecutive seeds, or a text file with the group of each seed, but "
            f"{split_by} cannot be read ({reason}): check the path"
        ) from error
    n_needed, is_complete = int(index.max()) + 1, np.array_equal(index, np.arange(len(index)))
    if len(names) < n_needed or (is_complete and len(names) > n_needed):
        raise DataError(
            f"{split_by} must have one line per seed, in the order of the data, but it has {len(names):,} lines for "
            f"{n_needed:,} seeds: write one name per line, without a heading"
        )
    if "" in names:
        raise DataError(f"{split_by} must name the group of every seed, but line {names.index('') + 1:,} is empty")
    number = {name: k for k, name in enumerate(sorted(set(names)))}  # an array of texts is as wide as the longest
    numbers: Ints = np.array([number[name] for name in names], np.int64)[index]
    return numbers


def join_copies(group: Ints, hashes: Hashes) -> Ints:
    """Groups `[seeds]` such that all copies of an input are in the same one: groups that share an input become one."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    _, number = np.unique(group, return_inverse=True)
    _, content = np.unique(hashes, return_inverse=True)
    n_groups = int(number.max(initial=-1)) + 1
    edges = (np.ones(len(number), np.int8), (number, n_groups + content))
    n = n_groups + int(content.max(initial=-1)) + 1
    joined: Ints = connected_components(coo_array(edges, (n, n)), directed=False)[1][number].astype(np.int64)
    return joined
