"""Average precision as COCO defines it: over 101 recalls and the IoU thresholds 0.50, 0.55, ... 0.95."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.oracle.boxes import CLASS, SCORE, are_crowds, by_score, overlap, plain_classes, share_inside
from themis.oracle.matching import UNMATCHED, are_in_crowd, match

THRESHOLDS = tuple(round(0.5 + 0.05 * k, 2) for k in range(10))
RECALLS = np.linspace(0, 1, 101)
MAX_DETECTIONS = 100
"""Detections of a class that count per picture, those with the highest scores."""
PICTURES_AT_ONCE = 256
FOUND, IGNORED = 1, -1


@dataclass(frozen=True)
class AveragePrecision:
    """The average precision of a detector: the mean over classes; None without objects."""

    mean: float | None
    """Over all thresholds, which is COCO's AP."""
    at_50: float | None
    at_75: float | None
    by_class: dict[int, float]
    """Over all thresholds, for each class of which there are objects."""


def mean_average_precision(outputs: Tensor, labels: Tensor) -> AveragePrecision:
    """Return the average precision of detections `[pictures, n, 6]` of objects `[pictures, n, 5]`."""
    outputs = by_score(outputs)
    scores, classes = outputs[..., SCORE].double(), outputs[..., CLASS].long()
    classes = torch.where(scores > 0, classes, -1)
    parts = [slice(first, first + PICTURES_AT_ONCE) for first in range(0, len(outputs), PICTURES_AT_ONCE)]
    matched = torch.cat([_match_all(outputs[part], classes[part], labels[part]) for part in parts], 1)
    of_object = labels[..., 4].long()
    by_class = {}
    for number in torch.unique(of_object[of_object >= 0]).tolist():
        n_objects = int((of_object == number).sum())
        is_class = (classes == number) & (_rank_in_class(classes, number) < MAX_DETECTIONS)
        results = matched[:, is_class].cpu().numpy()
        order = np.argsort(-scores[is_class].cpu().numpy(), kind="mergesort")
        by_class[number] = np.array([_precision(row[order], n_objects) for row in results])
    if not by_class:
        return AveragePrecision(None, None, None, {})
    table = np.stack(list(by_class.values()))  # [classes, thresholds]
    means = table.mean(0)
    return AveragePrecision(
        float(table.mean()),
        float(means[THRESHOLDS.index(0.5)]),
        float(means[THRESHOLDS.index(0.75)]),
        {number: float(values.mean()) for number, values in by_class.items()},
    )


def _match_all(outputs: Tensor, classes: Tensor, labels: Tensor) -> Tensor:
    """Return for each threshold and detection, `[thresholds, pictures, n]`: 1 found, 0 wrong, -1 in a crowd."""
    boxes, objects = outputs[..., :4].double(), labels[..., :4].double()
    is_crowd, is_object = are_crowds(labels[..., 4]), labels[..., 4] >= 0
    overlaps = torch.where(is_crowd[:, None], share_inside(boxes, objects), overlap(boxes, objects))
    is_same = (classes[:, :, None] == plain_classes(labels[..., 4])[:, None]) & (classes >= 0)[:, :, None]
    results = []
    for threshold in THRESHOLDS:
        matched = match(overlaps, is_same & (overlaps >= threshold), ~is_object, is_crowd)
        found = (matched != UNMATCHED).to(torch.int8)
        results.append(found.masked_fill(are_in_crowd(matched, is_crowd), IGNORED))
    return torch.stack(results)


def _rank_in_class(classes: Tensor, number: int) -> Tensor:
    return (classes == number).long().cumsum(1) - 1


def _precision(found: NDArray[np.int8], n_objects: int) -> float:
    """Return the mean over recalls of the best precision at that recall or a higher one."""
    found = found[found != IGNORED]
    true = np.cumsum(found == FOUND)
    false = np.cumsum(found != FOUND)
    recall = true / n_objects
    precision = true / np.maximum(true + false, np.spacing(1))
    best = np.maximum.accumulate(precision[::-1])[::-1]
    place = np.searchsorted(recall, RECALLS, side="left")
    return float(np.where(place < len(best), np.append(best, 0.0)[np.minimum(place, len(best))], 0.0).mean())
