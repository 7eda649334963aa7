"""The boxes of a detector's answers, or squares around key points, drawn into pictures in the colours of classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from themis.oracle.boxes import CLASS, SCORE
from themis.oracle.detection import Detection
from themis.oracle.keypoints import KeyPoints

if TYPE_CHECKING:
    from torch import Tensor

    from themis.runs.store.tensors import Tensors

Pixels = NDArray[np.uint8]
COLOURS = ("#e6194b", "#3cb44b", "#4d8dff", "#ffb000", "#d05ce3", "#00c2c7", "#b5e61d", "#ff7f50")
MAX_SIDE = 160
"""Pixels of the longer side of a picture with boxes in a report."""


def colour_of(number: int) -> str:
    """The colour of a class."""
    return COLOURS[number % len(COLOURS)]


def answered_boxes(clean_outputs: Tensor, outputs: Tensor, oracle: str) -> tuple[Tensor, Tensor] | None:
    """The answers to a clean and a disturbed input, `[n, 6]`, given detections `[n, 6]`; None if it is another task.

    Key points become squares as large as the tolerance, without a score. oracle: its name as recorded, which tells the
    score from which a detection is an answer.
    """
    task, _, text = oracle.partition(":")
    if task == "keypoints":
        reach = KeyPoints.parse(text).reach(clean_outputs[None])
        return _squares(clean_outputs, reach), _squares(outputs, reach)
    if task != "detection":
        return None
    least = Detection.parse(text).least_score
    clean, disturbed = (rows[(rows[:, SCORE] >= least) & (rows[:, CLASS] >= 0)] for rows in (clean_outputs, outputs))
    return clean, disturbed


def _squares(points: Tensor, reach: Tensor) -> Tensor:
    """Squares around points `[n, 2]` that reach as far to all sides."""
    import torch

    numbers = torch.arange(len(points), dtype=points.dtype, device=points.device)[:, None]
    return torch.cat([points[:, :2] - reach, points[:, :2] + reach, torch.full_like(numbers, torch.nan), numbers], 1)


def stored_boxes(tensors: Tensors, oracle: str) -> tuple[Tensor, Tensor] | None:
    """The same for the stored tensors of one fault."""
    clean_outputs = tensors.clean_outputs
    return None if clean_outputs is None else answered_boxes(clean_outputs[0], tensors.outputs[0], oracle)


def with_boxes(pixels: Pixels, boxes: Tensor, size: tuple[int, int]) -> Pixels:
    """A picture `[height, width(, 3)]` in colour with the outlines of boxes `[n, 6]` in a picture of another size."""
    drawn = np.repeat(pixels[..., None], 3, axis=2) if pixels.ndim == 2 else pixels.copy()
    height, width = drawn.shape[:2]
    thick = max(1, round(max(height, width) / 120))
    down, across = height / size[0], width / size[1]
    for left, top, right, bottom, _, number in boxes.nan_to_num(0.0).tolist():
        x0, x1 = (min(max(round(x * across), 0), width - 1) for x in (left, right - 0.5))
        y0, y1 = (min(max(round(y * down), 0), height - 1) for y in (top, bottom - 0.5))
        colour = [int(colour_of(int(number))[k : k + 2], 16) for k in (1, 3, 5)]
        for rows, columns in (
            (slice(y0, y0 + thick), slice(x0, x1 + 1)),
            (slice(max(y1 - thick + 1, 0), y1 + 1), slice(x0, x1 + 1)),
            (slice(y0, y1 + 1), slice(x0, x0 + thick)),
            (slice(y0, y1 + 1), slice(max(x1 - thick + 1, 0), x1 + 1)),
        ):
            drawn[rows, columns] = colour
    return drawn
