"""Boxes as tensors: detections `[inputs, n, 6]`, objects `[seeds, n, 5]`, and how much two boxes overlap.

A detection is `(left, top, right, bottom, score, class)`, in pixels of the picture and in descending order of scores.
An object, which is a label, is `(left, top, right, bottom, class)`. Rows of class `PADDING` are empty. A label of class
`-2 - c` is a crowd of class c: a region in which nobody has counted, so that nothing found in it is wrong.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCORE, CLASS = 4, 5
PADDING = -1
TINY = 1e-9
"""Smallest area that is divided by."""


def overlap(boxes: Tensor, others: Tensor) -> Tensor:
    """Return the IoU of each of the boxes `[..., n, 4]` with each of the others `[..., m, 4]`, `[..., n, m]`."""
    shared = _shared_area(boxes, others)
    either = area(boxes)[..., :, None] + area(others)[..., None, :] - shared
    return shared / either.clamp_min(TINY)


def share_inside(boxes: Tensor, others: Tensor) -> Tensor:
    """Return the share of each of the boxes `[..., n, 4]` that lies inside each of the others, `[..., n, m]`."""
    return _shared_area(boxes, others) / area(boxes)[..., :, None].clamp_min(TINY)


def area(boxes: Tensor) -> Tensor:
    """Return the areas of boxes `[..., 4]`; 0 for boxes without extent."""
    return ((boxes[..., 2] - boxes[..., 0]).clamp_min(0)) * ((boxes[..., 3] - boxes[..., 1]).clamp_min(0))


def _shared_area(boxes: Tensor, others: Tensor) -> Tensor:
    least = torch.minimum(boxes[..., :, None, 2:4], others[..., None, :, 2:4])
    most = torch.maximum(boxes[..., :, None, :2], others[..., None, :, :2])
    sides = (least - most).clamp_min(0)
    return sides[..., 0] * sides[..., 1]


def are_crowds(classes: Tensor) -> Tensor:
    """Return which classes of labels mean a crowd."""
    return classes < PADDING


def plain_classes(classes: Tensor) -> Tensor:
    """Return the classes of labels, with that of its members for a crowd."""
    return torch.where(are_crowds(classes), -2 - classes, classes)


def by_score(detections: Tensor) -> Tensor:
    """Return detections `[inputs, n, 6]` in descending order of scores."""
    order = detections[..., SCORE].argsort(dim=1, descending=True, stable=True)
    return detections.gather(1, order[..., None].expand_as(detections))
