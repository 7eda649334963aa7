"""Boxes: their overlap, matching detections with objects, and average precision.

Detections are `[inputs, n, 6]`, objects `[seeds, n, 5]`.

A detection is `(left, top, right, bottom, score, class)`, in pixels and in descending order of scores. An object, which
is a label, is `(left, top, right, bottom, class)`. Rows of class `PADDING` are empty. A label of class `-2 - c` is a
crowd of class c, a region in which objects were not labelled one by one, so that nothing found in it is wrong.
"""

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SCORE, CLASS = 4, 5
PADDING = -1
MIN_AREA = 1e-9
"""Smallest area in a denominator."""


def overlap(boxes: Tensor, others: Tensor) -> Tensor:
    """Return the IoU of each of the boxes `[..., n, 4]` with each of the others `[..., m, 4]`, `[..., n, m]`."""
    shared = _shared_area(boxes, others)
    either = area(boxes)[..., :, None] + area(others)[..., None, :] - shared
    return shared / either.clamp_min(MIN_AREA)


def share_inside(boxes: Tensor, others: Tensor) -> Tensor:
    """Return the share of each of the boxes `[..., n, 4]` that lies inside each of the others, `[..., n, m]`."""
    return _shared_area(boxes, others) / area(boxes)[..., :, None].clamp_min(MIN_AREA)


def area(boxes: Tensor) -> Tensor:
    """Return the areas of boxes `[..., 4]`; 0 for boxes without extent."""
    return ((boxes[..., 2] - boxes[..., 0]).clamp_min(0)) * ((boxes[..., 3] - boxes[..., 1]).clamp_min(0))


def _shared_area(boxes: Tensor, others: Tensor) -> Tensor:
    least = torch.minimum(boxes[..., :, None, 2:4], others[..., None, :, 2:4])
    most = torch.maximum(boxes[..., :, None, :2], others[..., None, :, :2])
    sides = (least - most).clamp_min(0)
    return sides[..., 0] * sides[..., 1]


def are_crowds(classes: Tensor) -> Tensor:
    """Return which classes of labels are crowds."""
    return classes < PADDING


def plain_classes(classes: Tensor) -> Tensor:
    """Return the classes of labels; for a crowd, the class of its members."""
    return torch.where(are_crowds(classes), -2 - classes, classes)


def by_score(detections: Tensor) -> Tensor:
    """Return detections `[inputs, n, 6]` in descending order of scores."""
    order = detections[..., SCORE].argsort(dim=1, descending=True, stable=True)
    return detections.gather(1, order[..., None].expand_as(detections))


Matching = Literal["greedy", "hungarian"]
UNMATCHED = -1


def match(
    overlaps: Tensor, is_pair: Tensor, is_optional: Tensor, is_crowd: Tensor, matching: Matching = "greedy"
) -> Tensor:
    """Return the object of each detection, `[tests, detections]`, or `UNMATCHED`.

    overlaps: `[tests, detections, objects]`, with detections in descending order of scores. is_pair: which pairs may be
    matched. is_optional `[tests, objects]`: objects that are matched only if no required object is. is_crowd `[tests,
    objects]`: optional objects that any number of detections may match.
    """
    n_objects = overlaps.shape[2]
    if n_objects == 0:
        return torch.full(overlaps.shape[:2], UNMATCHED, device=overlaps.device)
    assign = _assign_hungarian if matching == "hungarian" else _assign_greedily
    matched = assign(overlaps, is_pair & ~is_crowd[:, None], is_optional)
    share, place = torch.where(is_pair & is_crowd[:, None], overlaps, -torch.inf).flip(2).max(2)
    return torch.where((matched == UNMATCHED) & (share > -torch.inf), n_objects - 1 - place, matched)


def _assign_greedily(overlaps: Tensor, is_pair: Tensor, is_optional: Tensor) -> Tensor:
    """The object of each detection if the detection with the highest score chooses first."""
    n_tests, n_detections, n_objects = overlaps.shape
    matched = torch.full((n_tests, n_detections), UNMATCHED, device=overlaps.device)
    is_free = torch.ones(n_tests, n_objects, dtype=torch.bool, device=overlaps.device)
    # Required objects come first whatever their overlap; of equal ones, COCO takes the last.
    worth = overlaps + 2.0 * (~is_optional).to(overlaps.dtype)[:, None]
    rank = torch.where(is_pair, worth, -torch.inf).flip(2)
    for k in range(n_detections):
        best, place = rank[:, k].masked_fill(~is_free, -torch.inf).max(1)
        is_found = best > -torch.inf
        matched[:, k] = torch.where(is_found, n_objects - 1 - place, UNMATCHED)
        is_free &= ~torch.zeros_like(is_free).scatter_(1, place[:, None], is_found[:, None])
    return matched


def _assign_hungarian(overlaps: Tensor, is_pair: Tensor, is_optional: Tensor) -> Tensor:
    """The object of each detection if the total overlap is to be as large as possible."""
    from scipy.optimize import linear_sum_assignment

    matched = torch.full(overlaps.shape[:2], UNMATCHED)
    # Any pair is better than none, and one more required object better than any overlaps of optional ones.
    worth = overlaps.detach() + torch.where(is_optional, 1.0, 2.0 * (1 + overlaps.shape[2]))[:, None]
    worths = torch.where(is_pair, worth, 0.0).cpu().double().numpy()
    for test, of_test in enumerate(worths):
        rows, columns = linear_sum_assignment(of_test, maximize=True)
        is_real = of_test[rows, columns] > 0
        matched[test, torch.from_numpy(rows[is_real])] = torch.from_numpy(columns[is_real])
    return matched.to(overlaps.device)


def are_matched(matched: Tensor, n_objects: int) -> Tensor:
    """Return which objects have a detection, `[tests, objects]`, given the object of each detection."""
    counts = torch.zeros(len(matched), n_objects + 1, dtype=torch.bool, device=matched.device)
    return counts.scatter_(1, torch.where(matched == UNMATCHED, n_objects, matched), True)[:, :n_objects]


def are_in_crowd(matched: Tensor, is_crowd: Tensor) -> Tensor:
    """Return which detections were matched with a crowd, `[tests, detections]`."""
    is_crowd = torch.cat([is_crowd, is_crowd.new_zeros(len(is_crowd), 1)], 1)  # the last column is for no object
    return is_crowd.gather(1, torch.where(matched == UNMATCHED, is_crowd.shape[1] - 1, matched))


IOU_THRESHOLDS = tuple(round(0.5 + 0.05 * k, 2) for k in range(10))
RECALLS = np.linspace(0, 1, 101)
MAX_DETECTIONS = 100
"""Detections per class and picture that count, those with the highest scores."""
PICTURES_AT_ONCE = 256
FOUND, IGNORED_BOX = 1, -1


def average_precision(outputs: Tensor, labels: Tensor) -> NDArray[np.float64]:
    """Return the average precision of detections `[pictures, n, 6]` of objects `[pictures, n, 5]`.

    There is a row for each class with objects and a column for each threshold. The mean is COCO's AP.
    """
    outputs = by_score(outputs)
    scores, classes = outputs[..., SCORE].double(), outputs[..., CLASS].long()
    classes = torch.where(scores > 0, classes, -1)
    parts = [slice(first, first + PICTURES_AT_ONCE) for first in range(0, len(outputs), PICTURES_AT_ONCE)]
    matched = torch.cat([_match_all(outputs[part], classes[part], labels[part]) for part in parts], 1)
    of_object = labels[..., 4].long()
    rows = []
    for number in torch.unique(of_object[of_object >= 0]).tolist():
        n_objects = int((of_object == number).sum())
        is_class = classes == number
        is_class &= is_class.long().cumsum(1) <= MAX_DETECTIONS
        results = matched[:, is_class].cpu().numpy()
        order = np.argsort(-scores[is_class].cpu().numpy(), kind="mergesort")
        rows.append([_precision(row[order], n_objects) for row in results])
    return np.array(rows).reshape(-1, len(IOU_THRESHOLDS))


def _match_all(outputs: Tensor, classes: Tensor, labels: Tensor) -> Tensor:
    """Return 1 for found, 0 for wrong and -1 for crowds by threshold and detection, `[thresholds, pictures, n]`."""
    boxes, objects = outputs[..., :4].double(), labels[..., :4].double()
    is_crowd, is_object = are_crowds(labels[..., 4]), labels[..., 4] >= 0
    overlaps = torch.where(is_crowd[:, None], share_inside(boxes, objects), overlap(boxes, objects))
    is_same = (classes[:, :, None] == plain_classes(labels[..., 4])[:, None]) & (classes >= 0)[:, :, None]
    results = []
    for threshold in IOU_THRESHOLDS:
        matched = match(overlaps, is_same & (overlaps >= threshold), ~is_object, is_crowd)
        found = (matched != UNMATCHED).to(torch.int8)
        results.append(found.masked_fill(are_in_crowd(matched, is_crowd), IGNORED_BOX))
    return torch.stack(results)


def _precision(found: NDArray[np.int8], n_objects: int) -> float:
    """Return the mean over recalls of the best precision at each recall or a higher one."""
    found = found[found != IGNORED_BOX]
    true = np.cumsum(found == FOUND)
    false = np.cumsum(found != FOUND)
    recall = true / n_objects
    precision = true / np.maximum(true + false, np.spacing(1))
    best = np.maximum.accumulate(precision[::-1])[::-1]
    place = np.searchsorted(recall, RECALLS, side="left")
    return float(np.append(best, 0.0)[place].mean())
