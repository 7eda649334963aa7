"""Key points: `keypoints`. Outputs are places in the picture, `[inputs, points, 2]`, or 3 with a score.

Places are in pixels from the upper left corner of the picture; the centre of the first pixel is (0.5, 0.5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from themis.errors import DataError, ModelError
from themis.oracle.motion import Motion, are_within
from themis.oracle.oracle import (
    KEPT_ANSWER,
    BaselineScores,
    Oracle,
    Verdict,
    agreement_of_numbers,
    read_number,
    wrong_outputs,
)

DEFAULT_PERCENT = 10.0
"""Default tolerance, in percent of the extent of the points: PCK@0.1."""
COUNTED, UNKNOWN, OUTSIDE = 1, 0, -1
"""Third column of a reference: the point counts, its place is unknown, or its place is outside the picture."""


@dataclass(frozen=True)
class KeyPoints(Oracle):
    """A fault is a key point whose distance from its place exceeds a tolerance.

    The place is given by the label `[seeds, points, 2]`, or 3 with a visibility, which is 0 for points without a label
    (NaN means the same); without labels, it is given by the clean answer. The outcome is the point that is furthest
    off, and the value is its distance. Points whose clean answer is beyond the tolerance do not count, nor do points
    that have left the picture. Places move with the picture.

    Args:
        tolerance: In pixels; None if it is in percent.
        percent: The tolerance in percent of the longer side of the box around the points.
    """

    is_spatial: ClassVar[bool] = True
    tolerance: float | None = None
    percent: float = DEFAULT_PERCENT

    @staticmethod
    def parse(text: str) -> KeyPoints:
        example = "keypoints:5 for pixels, or keypoints:10% for a share of the extent of the points"
        if not text:
            return KeyPoints()
        if text.endswith("%"):
            return KeyPoints(None, read_number(text.removesuffix("%"), "keypoints", example, 0))
        return KeyPoints(read_number(text, "keypoints", example, 0))

    def spec(self) -> str:
        return f"keypoints:{self.percent!r}%" if self.tolerance is None else f"keypoints:{self.tolerance!r}"

    def describe(self) -> str:
        if self.tolerance is None:
            return f"a key point that is off by more than {self.percent:g}% of the extent of all points"
        return f"a key point that is off by more than {self.tolerance:g} pixels"

    def check(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        if clean_outputs.ndim != 3 or clean_outputs.shape[2] not in (2, 3):
            rule = "key points must be [inputs, points, 2], x and y in pixels, or 3 with a score"
            raise wrong_outputs(rule, clean_outputs)
        n, n_points = clean_outputs.shape[:2]
        if labels is not None and (labels.shape[:2] != (n, n_points) or labels.shape[2:] not in ((2,), (3,))):
            raise DataError(
                f"labels must be the places of {n_points} points per seed, {[n, n_points, 2]}, or 3 with a visibility, "
                f"got shape {list(labels.shape)}: pass x and y in pixels, or leave them out to compare with the clean "
                "answer"
            )
        reference = self.reference(clean_outputs, labels)
        counts = self._counting(clean_outputs, reference)
        if not bool(self._reach(reference).any()):
            raise ModelError(
                f"the key points of some clean inputs must have an extent for a tolerance of {self.percent:g}% of it, "
                "got none: give the tolerance in pixels, such as oracle='keypoints:5'"
            )
        return self.check_some_correct(counts.any(1))

    def describe_left_out(self, has_labels: bool) -> str:
        return "none of their points is within the tolerance" if has_labels else "their points have no extent"

    def answers(self, clean_outputs: Tensor) -> Tensor:
        return clean_outputs[..., :2]

    def baseline(self, clean_outputs: Tensor, labels: Tensor) -> BaselineScores | None:
        reference = self.reference(clean_outputs, labels)
        is_known = reference[..., 2:] == COUNTED
        places = torch.where(is_known, reference[..., :2], torch.nan)
        median = places.nanmedian(0).values.nan_to_num(0)
        own, constant = (
            _distances(points, reference).double().sum(1) / is_known.sum((1, 2)).clamp(min=1)
            for points in (clean_outputs, median.expand_as(places))
        )
        gaps = [torch.where(is_known, points - median, 0).flatten(1) for points in (clean_outputs[..., :2], places)]
        errors = f"mean error {float(own.mean()):.3g} against {float(constant.mean()):.3g} pixels"
        text = f"always answering the median places: {errors}"
        return BaselineScores(-own, -constant, agreement_of_numbers(*gaps), text)

    def reference(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        """Return the places of points and their state (see `COUNTED`), `[seeds, points, 3]`."""
        known = clean_outputs[..., :2] if labels is None else labels.to(clean_outputs.dtype)
        places, visibility = known[..., :2], known[..., 2:] if known.shape[-1] == 3 else torch.ones_like(known[..., :1])
        state = torch.where(places.isfinite().all(-1, keepdim=True), visibility.sign(), UNKNOWN)
        return torch.cat([torch.where(state == UNKNOWN, 0, places), state], -1)

    def compare(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None) -> Verdict:
        reference = self.reference(clean_outputs, labels)
        reach, counts = self._reach(reference), self._counting(clean_outputs, reference)
        furthest, point = torch.where(counts, _distances(outputs, reference), -1).max(1)
        has_points = furthest >= 0
        margin = torch.where(has_points, reach - furthest, reach)
        outcome = torch.where(margin < 0, point, KEPT_ANSWER)
        value = torch.where(has_points, furthest, torch.nan)
        return Verdict(margin < 0, outcome, margin, value).mark_not_finite(outputs)

    def move(self, clean_outputs: Tensor, labels: Tensor | None, motion: Motion) -> tuple[Tensor, Tensor | None]:
        reference = self.reference(clean_outputs, labels)
        places, clean = motion.points(torch.cat([reference[..., :2], clean_outputs[..., :2]], 1)).chunk(2, 1)
        has_left = (reference[..., 2] == COUNTED) & ~are_within(places, motion.steps[-1].size)
        state = torch.where(has_left, OUTSIDE, reference[..., 2])
        return torch.cat([clean, clean_outputs[..., 2:]], -1), torch.cat([places, state[..., None]], -1)

    def move_labels(self, labels: Tensor, motion: Motion) -> Tensor:
        places = motion.points(labels[..., :2])
        is_inside = are_within(places, motion.steps[-1].size)[..., None]
        if labels.shape[-1] == 3:
            return torch.cat([places, torch.where(is_inside, labels[..., 2:], UNKNOWN)], -1)
        return torch.where(is_inside, places, torch.nan)

    def loss(self, outputs: Tensor, reference: Tensor) -> Tensor:
        """Return the mean of the distances along both axes, whose slope does not vanish where there is no error."""
        counts = reference[..., 2:] == COUNTED
        gap = torch.where(counts, outputs[..., :2].float() - reference[..., :2], 0)
        return torch.where(gap >= 0, gap, -gap).sum((1, 2)) / counts.sum((1, 2)).clamp(min=1)

    def grade(self, clean_outputs: Tensor, labels: Tensor) -> dict[str, float]:
        reference = self.reference(clean_outputs, labels)
        return {"error": float(_distances(clean_outputs, reference)[reference[..., 2] == COUNTED].double().mean())}

    def reach(self, places: Tensor) -> Tensor:
        """Return the tolerance in pixels, `[tests]`, for points at these places."""
        return self._reach(self.reference(places, None))

    def share_near(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the share of labelled points within the tolerance, `[tests]`; 1 without labelled points."""
        reference = self.reference(outputs, labels)
        counts = reference[..., 2] == COUNTED
        is_near = counts & (_distances(outputs, reference) <= self._reach(reference)[:, None])
        return torch.where(counts.any(1), is_near.double().sum(1) / counts.sum(1).clamp(min=1), 1.0)

    def _reach(self, reference: Tensor) -> Tensor:
        """Return the tolerance in pixels, `[tests]`."""
        if self.tolerance is not None:
            return torch.full_like(reference[:, 0, 0], self.tolerance)
        places, is_known = reference[..., :2], reference[..., 2:] != UNKNOWN  # also those that left the picture
        low = torch.where(is_known, places, torch.inf).amin(1)
        high = torch.where(is_known, places, -torch.inf).amax(1)
        return self.percent / 100 * (high - low).amax(1).clamp(min=0)

    def _counting(self, clean_outputs: Tensor, reference: Tensor) -> Tensor:
        """Return which points count, `[tests, points]`."""
        reach = self._reach(reference)
        is_near = _distances(clean_outputs, reference) <= reach[:, None]
        return (reference[..., 2] == COUNTED) & is_near & (reach > 0)[:, None]


def _distances(outputs: Tensor, reference: Tensor) -> Tensor:
    """Return the distances of points from their places, `[tests, points]`; 0 for points that do not count."""
    gap = torch.where(reference[..., 2:] == COUNTED, outputs[..., :2] - reference[..., :2], 0)
    distances: Tensor = torch.linalg.vector_norm(gap, dim=-1)
    return distances
