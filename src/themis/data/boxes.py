"""Boxes as labels, `[pictures, objects, 5]`: left, top, right, bottom and class, and rows that are not used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from themis.data.files import Numbers

NO_CLASS = -1.0
"""The class of a row that is not used."""


def pad_boxes(objects: Sequence[Any]) -> Numbers:
    """The labels of all pictures, from the rows of each, `[objects, 5]`."""
    labels = np.zeros((len(objects), max(1, *map(len, objects)), 5), np.float32)
    labels[..., 4] = NO_CLASS
    for k, rows in enumerate(objects):
        if len(rows):
            labels[k, : len(rows)] = rows
    return labels
