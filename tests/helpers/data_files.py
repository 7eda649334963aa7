"""Files of data for the tests of readers, and what the readers must make of them."""

import struct

import numpy as np
import torch
from PIL import Image

from themis.data import read_seeds
from themis.data.readers import read_data

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (6, 3, 10, 12), dtype=np.uint8)
FEATURES = np.array([[0.5, -1], [2, 1e-3], [3, 4]])


def assert_reads(spec, expected, labels=None):
    """Whether a reader gives these inputs and labels, lazily and in memory."""
    seeds = read_data(spec)
    assert seeds.shape == expected.shape
    np.testing.assert_array_equal(seeds.take(torch.arange(len(seeds))), expected.astype(np.float32))
    np.testing.assert_array_equal(read_seeds(seeds).inputs, expected.astype(np.float32))
    assert seeds.labels is None if labels is None else seeds.labels.tolist() == list(labels)
    return seeds


def save_pictures(folder, pixels=PIXELS, suffix="png", **options):
    folder.mkdir(parents=True, exist_ok=True)
    for k, each in enumerate(pixels):
        Image.fromarray(each[0] if len(each) == 1 else each.transpose(1, 2, 0)).save(
            folder / f"{k:02}.{suffix}", **options
        )


def idx(values):
    code = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}[values.dtype.str[1:]]
    head = bytes([0, 0, code, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return head + values.astype(values.dtype.newbyteorder(">")).tobytes()
