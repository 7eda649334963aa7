"""Which detection is which object: a matching by overlap, greedy by score as in COCO, or of maximal total overlap."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Matching = Literal["greedy", "hungarian"]
UNMATCHED = -1


def match(
    overlaps: Tensor, is_pair: Tensor, is_optional: Tensor, is_crowd: Tensor, matching: Matching = "greedy"
) -> Tensor:
    """Return the object of each detection, `[tests, detections]`, or `UNMATCHED`.

    overlaps `[tests, detections, objects]`; the detections are in descending order of scores. is_pair: which pairs may
    be matched at all. is_optional `[tests, objects]`: objects that are matched only if no other is. is_crowd `[tests,
    objects]`: optional objects that any number of detections may match.
    """
    if matching == "hungarian":
        return _match_hungarian(overlaps, is_pair, is_optional, is_crowd)
    n_tests, n_detections, n_objects = overlaps.shape
    matched = torch.full((n_tests, n_detections), UNMATCHED, dtype=torch.int64, device=overlaps.device)
    if n_objects == 0:
        return matched
    is_free = torch.ones(n_tests, n_objects, dtype=torch.bool, device=overlaps.device)
    # Required objects come first whatever their overlap; a crowd comes last.
    precedence = 2.0 * (~is_optional).to(overlaps.dtype) - 2.0 * is_crowd.to(overlaps.dtype)
    rank = torch.where(is_pair, overlaps + precedence[:, None], -torch.inf).flip(2)  # of equals, COCO takes the last
    is_repeatable = is_crowd.flip(1)
    for k in range(n_detections):
        candidates = rank[:, k].masked_fill(~(is_free | is_repeatable), -torch.inf)
        best, place = candidates.max(1)
        is_found = best > -torch.inf
        matched[:, k] = torch.where(is_found, n_objects - 1 - place, UNMATCHED)
        taken = torch.zeros_like(is_free).scatter_(1, place[:, None], is_found[:, None])
        is_free &= ~taken
    return matched


def _match_hungarian(overlaps: Tensor, is_pair: Tensor, is_optional: Tensor, is_crowd: Tensor) -> Tensor:
    from scipy.optimize import linear_sum_assignment

    n_tests, n_detections, _ = overlaps.shape
    matched = torch.full((n_tests, n_detections), UNMATCHED, dtype=torch.int64)
    # Any pair is better than none, and one more required object better than any overlaps of optional ones.
    n = 1 + overlaps.shape[2]
    worth = overlaps.detach() + torch.where(is_optional, 1.0, 2.0 * n)[:, None]
    may_pair = is_pair & ~is_crowd[:, None]
    worths = torch.where(may_pair, worth, 0.0).cpu().double().numpy()
    for test in range(n_tests):
        rows, columns = linear_sum_assignment(worths[test], maximize=True)
        is_real = worths[test][rows, columns] > 0
        matched[test, torch.from_numpy(rows[is_real])] = torch.from_numpy(columns[is_real])
    matched = matched.to(overlaps.device)
    in_crowd = (is_pair & is_crowd[:, None]).to(torch.int8)
    if not in_crowd.shape[2]:
        return matched
    return torch.where((matched == UNMATCHED) & in_crowd.any(2), in_crowd.argmax(2), matched)


def are_matched(matched: Tensor, n_objects: int) -> Tensor:
    """Return which objects have a detection, `[tests, objects]`, given the object of each detection."""
    counts = torch.zeros(len(matched), n_objects + 1, dtype=torch.bool, device=matched.device)
    return counts.scatter_(1, torch.where(matched == UNMATCHED, n_objects, matched), True)[:, :n_objects]


def are_in_crowd(matched: Tensor, is_crowd: Tensor) -> Tensor:
    """Return which detections were matched with a crowd, `[tests, detections]`."""
    is_crowd = torch.cat([is_crowd, is_crowd.new_zeros(len(is_crowd), 1)], 1)  # the last is that of no object
    return is_crowd.gather(1, torch.where(matched == UNMATCHED, is_crowd.shape[1] - 1, matched))
