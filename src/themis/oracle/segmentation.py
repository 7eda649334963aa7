"""One class per pixel: `segmentation`. Outputs are scores `[inputs, classes, height, width]`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from themis.errors import DataError
from themis.oracle.classes import IGNORED_PIXEL, are_probabilities, class_loss
from themis.oracle.motion import Motion
from themis.oracle.oracle import KEPT_ANSWER, BaselineScores, Oracle, Verdict, read_number, wrong_outputs

DEFAULT_TOLERANCE = 0.1
VOID_LABEL = 255
"""The label of a pixel that does not count, as in PASCAL VOC and Cityscapes."""


@dataclass(frozen=True)
class Segmentation(Oracle):
    """A fault is a map of classes whose mean IoU falls by more than a tolerance.

    The outcome is the class whose IoU falls most. The IoU is computed with the label map `[seeds, height, width]` or,
    without labels, with the clean answer, and averaged over the classes in either map. Pixels labelled 255 do not
    count, unless the model has that many classes. Maps move with the picture; pixels that show nothing of the clean
    picture, or lie between pixels of different classes, do not count.
    """

    is_spatial: ClassVar[bool] = True
    tolerance: float = DEFAULT_TOLERANCE
    n_classes: int | None = field(default=None, kw_only=True)
    """The number of classes of the model; set by `settle`."""

    @staticmethod
    def parse(text: str) -> Segmentation:
        return Segmentation(read_number(text, "segmentation", "segmentation:0.1", 0, 1) if text else DEFAULT_TOLERANCE)

    def spec(self) -> str:
        return f"segmentation:{self.tolerance!r}"

    def describe(self) -> str:
        return f"a mean IoU that falls by more than {self.tolerance:g}"

    def settle(self, clean_outputs: Tensor, labels: Tensor | None) -> Oracle:
        if clean_outputs.ndim != 4 or clean_outputs.shape[1] < 2:
            rule = "a segmentation must return scores [inputs, classes, height, width] with 2 classes or more"
            raise wrong_outputs(rule, clean_outputs)
        return replace(self, is_probability=are_probabilities(clean_outputs), n_classes=clean_outputs.shape[1])

    def check(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        n, n_classes, *size = clean_outputs.shape
        if labels is None:
            return super().check(clean_outputs, labels)
        if list(labels.shape) != [n, *size]:
            raise DataError(
                f"labels must be one class per pixel, {[n, *size]}, got shape {list(labels.shape)}: pass class "
                "numbers at the size of the output, or leave them out to compare with the clean answer"
            )
        outside = ((labels < 0) | (labels >= n_classes) | (labels != labels.round())) & (labels != VOID_LABEL)
        if bool(outside.any()):
            raise DataError(
                f"labels must lie in 0..{n_classes - 1} since the model has {n_classes} scores, or be {VOID_LABEL} for "
                f"pixels that do not count, got {float(labels[outside][0]):g}: check the label maps"
            )
        overlap = self._overlap(clean_outputs, clean_outputs, labels)[0]
        return self.check_some_correct(overlap > self.tolerance)

    def describe_left_out(self, has_labels: bool) -> str:
        return f"their mean IoU is not above {self.tolerance:g}, by which it must fall"

    def reference(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        if labels is None:
            return clean_outputs.argmax(1)
        is_void = (labels == VOID_LABEL) & (clean_outputs.shape[1] <= VOID_LABEL)
        return torch.where(is_void, IGNORED_PIXEL, labels.long())

    def compare(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None) -> Verdict:
        before, of_class_before = self._overlap(clean_outputs, clean_outputs, labels)
        after, of_class_after = self._overlap(clean_outputs, outputs, labels)
        margin = self.tolerance - (before - after).nan_to_num(0)  # no pixel counts if everything has left the picture
        lost = (of_class_before - of_class_after).nan_to_num(-torch.inf)
        outcome = torch.where(margin < 0, lost.argmax(1), KEPT_ANSWER)
        return Verdict(margin < 0, outcome, margin, after).mark_not_finite(outputs)

    def move(self, clean_outputs: Tensor, labels: Tensor | None, motion: Motion) -> tuple[Tensor, Tensor | None]:
        answer = clean_outputs.argmax(1)
        maps = torch.stack([answer, self.reference(clean_outputs, labels)], 1)
        answer, reference = motion.maps(maps, IGNORED_PIXEL).unbind(1)
        reference = torch.where(answer == IGNORED_PIXEL, IGNORED_PIXEL, reference)
        scores = torch.zeros_like(clean_outputs).scatter_(1, answer.clamp(min=0)[:, None], 1.0)
        return scores, reference

    def move_labels(self, labels: Tensor, motion: Motion) -> Tensor:
        if self.n_classes is not None and self.n_classes > VOID_LABEL:
            return motion.maps(labels.long(), IGNORED_PIXEL)
        return motion.maps(labels, VOID_LABEL)

    def loss(self, outputs: Tensor, reference: Tensor) -> Tensor:
        return class_loss(outputs, reference, self.is_probability)

    def grade(self, clean_outputs: Tensor, labels: Tensor) -> dict[str, float]:
        mean = self._overlap(clean_outputs, clean_outputs, labels)[0]
        return {"iou": float(mean.nanmean())}

    def baseline(self, clean_outputs: Tensor, labels: Tensor) -> BaselineScores | None:
        reference = self.reference(clean_outputs, labels)
        commonest = int(reference[reference != IGNORED_PIXEL].mode().values)
        scores = torch.zeros_like(clean_outputs[:1])
        scores[:, commonest] = 1
        own = self._overlap(clean_outputs, clean_outputs, labels)[0]
        constant = self._overlap(clean_outputs, scores.expand_as(clean_outputs), labels)[0]
        means = " against ".join(f"{float(part.nanmean()):.3g}" for part in (own, constant))
        return BaselineScores(own, constant, 0.0, f"always answering class {commonest}: mean IoU {means}")

    def _overlap(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the mean IoU `[tests]`, and the IoU by class `[tests, classes]`, NaN if the reference lacks it."""
        n_classes = outputs.shape[1]
        reference, answer = self.reference(clean_outputs, labels).flatten(1), outputs.argmax(1).flatten(1)
        counts = reference != IGNORED_PIXEL
        reference = torch.where(counts, reference, 0)

        def count(classes: Tensor, counts: Tensor) -> Tensor:
            zeros = torch.zeros(len(outputs), n_classes, dtype=torch.int64, device=outputs.device)
            return zeros.scatter_add_(1, classes, counts.long())

        of_reference, both = count(reference, counts), count(reference, counts & (reference == answer))
        either = of_reference + count(answer, counts) - both
        iou = both.double() / either  # NaN if neither map has the class
        return iou.nanmean(1), torch.where(of_reference > 0, iou, torch.nan)
