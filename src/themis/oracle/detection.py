"""Objects in pictures: `detection`. Outputs are detections `[inputs, n, 6]`, as described in `boxes`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, get_args

import torch
from torch import Tensor

from themis.errors import DataError, ModelError, UsageError
from themis.oracle.boxes import (
    CLASS,
    MIN_AREA,
    PADDING,
    SCORE,
    UNMATCHED,
    Matching,
    are_crowds,
    are_in_crowd,
    are_matched,
    average_precision,
    by_score,
    match,
    overlap,
    plain_classes,
    share_inside,
)
from themis.oracle.motion import Motion
from themis.oracle.oracle import KEPT_ANSWER, Oracle, Verdict, read_number

DEFAULT_IOU, DEFAULT_SCORE = 0.5, 0.5
MIN_MOVED_IOU = 0.1
"""IoU above which a lost object counts as moved."""
MIN_LOSS = 1e-6
MIN_SHARE_SEEN = 0.5
"""Share of a moved object that must be in the picture for it to be required, and share of a detection that must show
the clean picture, rather than its mirror image beyond the edges, for it to count."""
MIN_SIDE = 4.0
"""Shorter side, in pixels, below which a moved object need not be found."""
MAX_DEFORMATION = 0.2
"""Largest relative deviation of a moved object from an affine map; torn or folded objects need not be found."""
GRID_POINTS, OBJECT_POINTS = 16, 5
"""Points across a detection and across an object, in both directions, at which visibility is checked."""
LOST, MISTAKEN, MOVED, SPURIOUS = range(4)
"""What can happen to an object."""
CLASS_BITS = 14
CLASS_NUMBERS = 1 << CLASS_BITS
SPEC_EXAMPLE = "detection:0.5 or detection:0.5,score=0.3,match=hungarian"


def _outcome_of(kind: Tensor | int, class_number: Tensor, mistaken_for: Tensor | int = 0) -> Tensor:
    """Return the outcome as a number, which `describe_outcome` puts into words."""
    return kind + 4 * (class_number.clamp_min(0) + CLASS_NUMBERS * mistaken_for)


def describe_outcome(outcome: int, classes: Sequence[str] | None = None) -> str:
    """Return an outcome of at least 0 as a phrase, such as `cat taken for dog`."""

    def name(number: int) -> str:
        return classes[number] if classes is not None and number < len(classes) else f"class {number}"

    classes_of_both, kind = divmod(outcome, 4)
    mistaken_for, own = divmod(classes_of_both, CLASS_NUMBERS)
    if kind == MISTAKEN:
        return f"{name(own)} taken for {name(mistaken_for)}"
    return f"spurious {name(own)}" if kind == SPURIOUS else f"{name(own)} {'moved' if kind == MOVED else 'lost'}"


class Objects(NamedTuple):
    """The objects that tests are compared with, `[tests, n, ...]`; some must be found, others may be."""

    boxes: Tensor
    inner: Tensor
    """The bounds of the ellipses in the boxes; the bounds of a rotated object lie between `inner` and `boxes`."""
    classes: Tensor
    """`PADDING` if there is no object."""
    is_required: Tensor
    is_crowd: Tensor
    is_true: Tensor
    """Whether finding the object counts as correct."""

    def as_reference(self) -> Tensor:
        """Return the objects as `[tests, n, 6]`: box, class, and 1 if the object must be found, otherwise 0."""
        columns = (self.classes, self.is_required)
        return torch.cat([self.boxes, *(column[..., None].to(self.boxes) for column in columns)], 2)


class ScoredBoxes(NamedTuple):
    """Detections of tests, trimmed to the largest number in a test."""

    boxes: Tensor
    visible: Tensor
    """The part of each box that shows the clean picture."""
    classes: Tensor
    scores: Tensor
    is_answer: Tensor
    """Whether the score is high enough for an answer."""
    is_excused: Tensor
    """Whether the detection does not count as a fault if it matches no object."""


@dataclass(frozen=True)
class Detection(Oracle):
    """A fault is an object that is lost, moved or taken for another class, or one that appears.

    A detection counts if its score is at least `least_score`. It matches an object of the same class if their IoU is at
    least `least_overlap`. With labels, the objects are those that were found on the clean input; wrong detections on
    the clean input do not count against a test. Seeds without anything to test are left out. Without labels, the
    objects are the clean answers. The outcome is what happened to which class, for the object with the smallest margin.
    Objects move with the picture; an object that has mostly left it, or has become very small, need not be found.
    """

    is_spatial: ClassVar[bool] = True
    least_overlap: float = DEFAULT_IOU
    least_score: float = DEFAULT_SCORE
    matching: Matching = "greedy"

    @staticmethod
    def parse(text: str) -> Detection:
        oracle = Detection()
        for k, part in enumerate(text.split(",") if text else ()):
            name, equals, value = part.partition("=")
            if not equals and k == 0:
                oracle = replace(oracle, least_overlap=read_number(part, "detection", SPEC_EXAMPLE, 0, 1))
            elif name == "score":
                oracle = replace(oracle, least_score=read_number(value, "detection:score=", SPEC_EXAMPLE, 0, 1))
            elif name == "match" and value in get_args(Matching):
                oracle = replace(oracle, matching=value)  # type: ignore[arg-type]
            else:
                raise UsageError(
                    "oracle 'detection' takes an IoU, score=NUMBER, and match=greedy or match=hungarian, "
                    f"got {part!r}: write {SPEC_EXAMPLE}"
                )
        return oracle

    def spec(self) -> str:
        matching = "" if self.matching == "greedy" else f",match={self.matching}"
        return f"detection:{self.least_overlap!r},score={self.least_score!r}{matching}"

    def describe(self) -> str:
        return (
            f"an object that is lost, moved (IoU below {self.least_overlap:g}), taken for another class or spurious, "
            f"at scores of {self.least_score:g} and more"
        )

    def check(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        if not are_detections(clean_outputs):
            raise ModelError(
                "a detector must return detections [inputs, n, 6], each (left, top, right, bottom, score, class) with "
                "a score in 0..1 and a class number of at least 0, or -1 for none, got "
                f"{_describe(clean_outputs)}: pass output=themis.Detections(...) to Target to read them from the "
                "model's result"
            )
        if labels is not None:
            _check_objects(labels, len(clean_outputs))
        objects = self._objects(clean_outputs, labels)
        usable = objects.is_required.any(1)
        if labels is not None:  # pictures that are labelled as empty can be tested too
            has_answers = self._answers(clean_outputs).is_answer.any(1)
            usable |= ~objects.is_true.any(1) & ~has_answers
        if not bool(objects.is_required.any()):
            self._refuse_if_nothing_is_found(clean_outputs, labels)
        return usable

    def describe_left_out(self, has_labels: bool) -> str:
        if has_labels:
            return "none of their objects is found"
        return f"nothing is found on them at scores of {self.least_score:g} and more"

    def answers(self, clean_outputs: Tensor) -> Tensor:
        found = self.reference(clean_outputs, None)
        return torch.where(found[..., 5:] > 0, found, PADDING)

    def reference(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        return self._objects(clean_outputs, labels).as_reference()

    def moved_reference(self, clean_outputs: Tensor, labels: Tensor | None, motion: Motion) -> Tensor:
        objects = self._objects(clean_outputs, labels)
        return _moved_objects(objects, motion, *moved_boxes(objects.boxes, motion)).as_reference()

    def compare(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None) -> Verdict:
        return self.verdict(clean_outputs, outputs, labels, None)

    def verdict(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None, motion: Motion | None) -> Verdict:
        objects, answers = self._objects(clean_outputs, labels), self._answers(outputs)
        if motion:
            boxes, is_visible = moved_boxes(objects.boxes, motion)
            answers = _seen_through(answers, motion, objects, is_visible)
            objects = _moved_objects(objects, motion, boxes, is_visible)
        return self._judge(objects, answers).mark_not_finite(outputs)

    def move_labels(self, labels: Tensor, motion: Motion) -> Tensor:
        boxes, is_visible = moved_boxes(labels[..., :4], motion)
        classes = labels[..., 4]
        classes = torch.where((classes >= 0) & ~is_visible, -2 - classes, classes)
        return torch.cat([boxes, classes[..., None]], 2)

    def loss(self, outputs: Tensor, reference: Tensor) -> Tensor:
        """Return how far objects are from being found, and how close other detections are to being answers.

        Both are cross-entropies: of the best detection of each required object, whose score is reduced if they overlap
        too little, and of the best detection that matches no object.
        """
        boxes, classes, scores = outputs[..., :4].float(), outputs[..., CLASS], outputs[..., SCORE].float()
        overlaps = overlap(boxes, reference[..., :4].float())
        is_same = (classes[:, :, None] == plain_classes(reference[:, None, :, 4])) & (classes[:, :, None] >= 0)
        found = scores[:, :, None] * (overlaps / self.least_overlap).clamp_max(1)
        found = _highest(torch.where(is_same, found, 0.0), 1)
        is_required = reference[..., 5] > 0
        losses = torch.where(is_required, -found.clamp_min(MIN_LOSS).log(), 0.0)
        is_object = (is_same & (overlaps >= self.least_overlap)).any(2) | (classes < 0)
        other = _highest(torch.where(is_object, 0.0, scores), 1)
        return losses.sum(1) / is_required.sum(1).clamp_min(1) - (1 - other).clamp_min(MIN_LOSS).log()

    def grade(self, clean_outputs: Tensor, labels: Tensor) -> dict[str, float]:
        precision = average_precision(clean_outputs, labels)
        return {"map": float(precision.mean())} if len(precision) else {}

    def _judge(self, objects: Objects, answers: ScoredBoxes) -> Verdict:
        n_tests, n_objects = objects.classes.shape
        overlaps = _overlaps(answers, objects)
        is_same = answers.classes[:, :, None] == objects.classes[:, None]
        is_near = overlaps >= self.least_overlap
        is_pair = is_same & is_near & answers.is_answer[:, :, None]
        matched = match(overlaps, is_pair, ~objects.is_required, objects.is_crowd, self.matching)
        is_found = are_matched(matched, n_objects)
        is_broken = objects.is_required & ~is_found
        is_left = answers.is_answer & (matched == UNMATCHED)
        # What has become of broken objects: each remaining detection explains at most one of them.
        explains = is_left[:, :, None] & is_broken[:, None]
        as_other = match(overlaps, explains & ~is_same & is_near, ~is_broken, objects.is_crowd)
        is_mistaken = are_matched(as_other, n_objects)
        explains &= (as_other == UNMATCHED)[:, :, None] & ~is_mistaken[:, None]
        as_moved = match(overlaps, explains & is_same & (overlaps >= MIN_MOVED_IOU), ~is_broken, objects.is_crowd)
        has_moved = are_matched(as_moved, n_objects)
        is_spurious = is_left & (as_other == UNMATCHED) & (as_moved == UNMATCHED) & ~answers.is_excused
        # The margin of an object is the slack of its best detection; that of other detections the slack of their score.
        slack = torch.minimum(answers.scores[:, :, None] - self.least_score, overlaps - self.least_overlap)
        of_objects = _highest(torch.where(is_same, slack, -self.least_score), 1, -self.least_score)
        of_objects = torch.where(is_broken, of_objects.clamp_max(-MIN_LOSS), of_objects)
        of_objects = torch.where(objects.is_required, of_objects, torch.inf)
        is_excused = answers.is_excused | (answers.classes == PADDING) | (answers.is_answer & ~is_spurious)
        is_excused |= (is_same & is_near).any(2)
        of_others = torch.where(is_excused & ~is_spurious, torch.inf, self.least_score - answers.scores)
        of_others = torch.where(is_spurious, of_others.clamp_max(-MIN_LOSS), of_others)
        margins = torch.cat([of_objects, of_others, of_objects.new_full((n_tests, 1), self.least_score)], 1)
        # The outcome is that of the broken object or spurious detection with the smallest margin.
        kind = torch.where(is_mistaken, MISTAKEN, torch.where(has_moved, MOVED, LOST))
        place = torch.where(as_other == UNMATCHED, n_objects, as_other)
        mistaken_for = matched.new_zeros(n_tests, n_objects + 1).scatter_(1, place, answers.classes)[:, :n_objects]
        outcomes = _outcome_of(kind, objects.classes, torch.where(is_mistaken, mistaken_for, 0))
        of_spurious = _outcome_of(SPURIOUS, answers.classes)
        kept = outcomes.new_full((n_tests, 1), KEPT_ANSWER)
        is_wrong = torch.cat([is_broken, is_spurious, torch.zeros_like(kept, dtype=torch.bool)], 1)
        is_fault = is_wrong.any(1)
        worst = torch.where(is_wrong, margins.detach(), torch.inf).argmin(1, keepdim=True)
        outcome = torch.cat([outcomes, of_spurious, kept], 1).gather(1, worst).squeeze(1)
        margin = torch.where(is_fault[:, None] & ~is_wrong, torch.inf, margins).amin(1)
        # The value is the F1 score of the answers, 1 if all objects were found and nothing else.
        n_found = (is_found & objects.is_true).sum(1)
        n_answers = (answers.is_answer & ~are_in_crowd(matched, objects.is_crowd)).sum(1)
        total = objects.is_true.sum(1) + n_answers
        value = torch.where(total > 0, 2 * n_found / total.clamp_min(1), 1.0).float()
        return Verdict(is_fault, torch.where(is_fault, outcome, KEPT_ANSWER), margin, value)

    def _answers(self, outputs: Tensor) -> ScoredBoxes:
        """Return the detections of tests; detections that are not finite become empty."""
        outputs = by_score(torch.where(outputs.isfinite(), outputs, 0.0))
        classes = outputs[..., CLASS].long()
        classes = torch.where(outputs[..., SCORE] > 0, classes, PADDING)
        n = int((classes >= 0).sum(1).amax()) if classes.numel() else 0
        scores = outputs[:, :n, SCORE].float()
        is_answer = (scores >= self.least_score) & (classes[:, :n] >= 0)
        boxes = outputs[:, :n, :4].float()
        return ScoredBoxes(boxes, boxes, classes[:, :n], scores, is_answer, torch.zeros_like(is_answer))

    def _objects(self, clean_outputs: Tensor, labels: Tensor | None) -> Objects:
        """Return the objects that tests of these seeds are compared with."""
        clean = self._answers(clean_outputs)
        n = int(clean.is_answer.sum(1).amax()) if clean.is_answer.numel() else 0
        clean = ScoredBoxes(*(column[:, :n] for column in clean))
        answered = torch.where(clean.is_answer, clean.classes, PADDING)
        none = torch.zeros_like(clean.is_answer)
        if labels is None:
            return Objects(clean.boxes, clean.boxes, answered, clean.is_answer, none, clean.is_answer)
        labels = labels.to(clean.boxes)
        is_crowd, is_object = are_crowds(labels[..., 4]), labels[..., 4] >= 0
        classes = plain_classes(labels[..., 4]).long()
        boxes = labels[..., :4]
        overlaps = _overlaps(clean, Objects(boxes, boxes, classes, is_object, is_crowd, is_object))
        is_pair = (answered[:, :, None] == classes[:, None]) & (answered >= 0)[:, :, None]
        is_pair &= overlaps >= self.least_overlap
        matched = match(overlaps, is_pair, ~is_object, is_crowd, self.matching)
        is_found = are_matched(matched, classes.shape[1]) & is_object
        extra = torch.where(matched == UNMATCHED, answered, PADDING)  # found wrongly on the clean input
        boxes = torch.cat([boxes, clean.boxes], 1)
        return Objects(
            boxes,
            boxes,
            torch.cat([classes, extra], 1),
            torch.cat([is_found, none], 1),
            torch.cat([is_crowd, none], 1),
            torch.cat([is_object, none], 1),
        )

    def _refuse_if_nothing_is_found(self, clean_outputs: Tensor, labels: Tensor | None) -> None:
        """Refuse a model that finds none of the objects, if there are any, and give the most likely reason."""
        if labels is not None and not bool((labels[..., 4] >= 0).any()):
            return
        clean, rule = self._answers(clean_outputs), "the model must find some of the objects on clean inputs, but"
        if not bool(clean.is_answer.any()):
            highest = float(clean.scores.amax()) if clean.scores.numel() else 0.0
            raise DataError(
                f"{rule} no detection has a score of {self.least_score:g} or more, the highest is {highest:.3g}: lower "
                f"it with oracle='detection:{self.least_overlap:g},score=...', or check the preprocessing and weights"
            )
        assert labels is not None  # without labels, the answers are the objects
        overlaps = overlap(clean.boxes, labels[..., :4].to(clean.boxes))
        is_near = (overlaps >= self.least_overlap) & clean.is_answer[:, :, None] & (labels[:, None, :, 4] >= 0)
        if bool(is_near.any()):
            test, detection, label = is_near.nonzero()[0].tolist()
            raise DataError(
                f"{rule} where its boxes fit, the classes differ, such as class {int(clean.classes[test, detection])} "
                f"for a label of class {int(labels[test, label, 4])}: number the classes of the data as the model "
                "does, with Detections(first_class=1) or ?numbers=index"
            )
        raise DataError(
            f"{rule} no detection has an IoU of {self.least_overlap:g} with a label: check that both are in pixels, "
            "(left, top, right, bottom), and the preprocessing"
        )


def _overlaps(answers: ScoredBoxes, objects: Objects) -> Tensor:
    """Return the IoU with each object, maximised over its possible bounds; for a crowd, the share inside it."""
    overlaps = overlap(answers.boxes, objects.boxes)
    if objects.inner is not objects.boxes:
        between = (objects.boxes + objects.inner) / 2
        for boxes in (answers.boxes, answers.visible):
            for bounds in (objects.boxes, between, objects.inner):
                overlaps = torch.maximum(overlaps, overlap(boxes, bounds))
    if not bool(objects.is_crowd.any()):
        return overlaps
    return torch.where(objects.is_crowd[:, None], share_inside(answers.visible, objects.boxes), overlaps)


def moved_boxes(boxes: Tensor, motion: Motion) -> tuple[Tensor, Tensor]:
    """Return moved boxes, and which are expected to be found: large enough, inside, and not torn or folded."""
    moved, share = motion.boxes(boxes)
    sides = moved[..., 2:] - moved[..., :2]
    n, n_boxes = boxes.shape[:2]
    points, places = _points_inside(boxes.detach(), OBJECT_POINTS)
    flat = motion.points(points.reshape(n, -1, 2)).detach()
    _, is_seen = motion.sources(flat)  # parts that left the picture in an earlier step do not come back
    is_there = is_seen.view(n, n_boxes, len(places)).float().mean(2) >= MIN_SHARE_SEEN
    is_whole = _deformation(flat.view(n, n_boxes, len(places), 2), places) <= MAX_DEFORMATION
    return moved, (share >= MIN_SHARE_SEEN) & (sides.amin(-1) >= MIN_SIDE) & is_there & is_whole


def _deformation(moved: Tensor, places: Tensor) -> Tensor:
    """Return the deviation of points in moved boxes from the best affine map, as a share of their extent."""
    terms = torch.cat([places, torch.ones_like(places[:, :1])], 1).double()
    fitted = terms @ torch.linalg.pinv(terms) @ moved.double()
    residual = (moved - fitted).square().sum(-1).mean(-1)
    extent = (moved - moved.mean(2, keepdim=True)).square().sum(-1).mean(-1)
    return torch.where(extent > 0, residual / extent.clamp_min(MIN_AREA), 0.0).sqrt()


def _points_inside(boxes: Tensor, n_across: int) -> tuple[Tensor, Tensor]:
    """Return a grid of points in each box `[..., points, 2]`, and the points as shares of its sides `[points, 2]`."""
    steps = (torch.arange(n_across, dtype=boxes.dtype, device=boxes.device) + 0.5) / n_across
    places = torch.cartesian_prod(steps, steps)
    return boxes[..., None, :2] + places * (boxes[..., 2:4] - boxes[..., :2])[..., None, :], places


def _moved_objects(objects: Objects, motion: Motion, boxes: Tensor, is_visible: Tensor) -> Objects:
    is_optional = (objects.classes != PADDING) & ~is_visible  # may be found in one piece or in several
    around = boxes.new_tensor([-1, -1, 1, 1]) * MIN_SIDE / 2
    return objects._replace(
        boxes=torch.where(is_optional[..., None], boxes + around, boxes),
        inner=motion.boxes(objects.inner, "ellipse")[0],
        is_required=objects.is_required & is_visible,
        is_crowd=objects.is_crowd | is_optional,
        is_true=objects.is_true & is_visible,
    )


def _seen_through(answers: ScoredBoxes, motion: Motion, objects: Objects, is_visible: Tensor) -> ScoredBoxes:
    """Return detections with the part of each that shows the clean picture, and whether it is excused.

    A detection is excused if it mostly shows a mirror image, or an object of its class that need not be found because
    of the motion and may be seen in several pieces.
    """
    boxes = answers.boxes.detach()
    points, _ = _points_inside(boxes, GRID_POINTS)
    source, is_inside = motion.sources(points.flatten(1, 2))
    source, is_inside = source.view(points.shape), is_inside.view(points.shape[:-1])
    half = (boxes[..., 2:] - boxes[..., :2]) / (2 * GRID_POINTS)
    least = torch.where(is_inside[..., None], points, torch.inf).amin(2) - half
    most = torch.where(is_inside[..., None], points, -torch.inf).amax(2) + half
    visible = torch.cat([least, most], 2)
    visible = torch.where(visible.isfinite(), visible, boxes)
    is_excused = is_inside.to(boxes.dtype).mean(2) < MIN_SHARE_SEEN
    is_lost = (objects.classes != PADDING) & ~is_visible
    if bool(is_lost.any()):
        source, bounds = source[:, :, None], objects.boxes[:, None, :, None]
        is_from = ((source >= bounds[..., :2]) & (source <= bounds[..., 2:])).all(-1).to(boxes.dtype).mean(-1)
        is_same = answers.classes[:, :, None] == objects.classes[:, None]
        is_excused |= ((is_from >= MIN_SHARE_SEEN) & is_same & is_lost[:, None]).any(2)
    return answers._replace(visible=visible, is_excused=is_excused)


def _highest(values: Tensor, dim: int, otherwise: float = 0.0) -> Tensor:
    """Return the maximum over a dimension, or `otherwise` if it has no elements."""
    if values.shape[dim]:
        return values.amax(dim)
    return values.sum(dim) + otherwise


def are_detections(outputs: Tensor) -> bool:
    """Return whether outputs have the form of detections: `[inputs, n, 6]` with scores in 0..1 and class numbers."""
    if outputs.ndim != 3 or outputs.shape[2] != 6:
        return False
    scores, classes = outputs[..., SCORE], outputs[..., CLASS]
    is_class = (classes == classes.round()) & (classes >= PADDING) & (classes < CLASS_NUMBERS)
    return bool((is_class & (scores >= 0) & (scores <= 1)).all())


def _check_objects(labels: Tensor, n_seeds: int) -> None:
    if labels.ndim != 3 or labels.shape[2] != 5 or len(labels) != n_seeds:
        raise DataError(
            f"labels of a detector must be [{n_seeds}, objects, 5], each (left, top, right, bottom, class), with class "
            f"-1 in empty rows, got shape {list(labels.shape)}: fill shorter rows, or leave the labels out to compare "
            "with the clean answers"
        )
    classes = labels[..., 4]
    is_class = (classes == classes.round()) & (classes.abs() < CLASS_NUMBERS)
    is_box = (labels[..., 2] >= labels[..., 0]) & (labels[..., 3] >= labels[..., 1])
    is_wrong = ~(is_class & labels.isfinite().all(2)) | (~is_box & (classes != PADDING))
    if bool(is_wrong.any()):
        tested, row = is_wrong.nonzero()[0].tolist()
        raise DataError(
            "labels must be boxes (left, top, right, bottom) with left <= right and top <= bottom and a class number, "
            f"got {[round(number, 3) for number in labels[tested, row].tolist()]} in row {row} of the labels of input "
            f"{tested}, counting those that are tested: correct the label"
        )


def _describe(outputs: Tensor) -> str:
    if outputs.ndim == 3 and outputs.shape[2] == 6:
        scores, classes = outputs[..., SCORE], outputs[..., CLASS]
        return (
            f"scores {float(scores.min()):.3g} to {float(scores.max()):.3g} and classes {float(classes.min()):g} to "
            f"{float(classes.max()):g}"
        )
    return f"shape {list(outputs.shape)}"
