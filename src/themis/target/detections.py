"""Reading detections from a detector's result, as one tensor `[inputs, n, 6]` that oracles compare."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from themis.errors import DataError, ModelError, UsageError
from themis.oracle.boxes import CLASS, PADDING, SCORE, by_score, overlap
from themis.target.output import Output

Form = Literal["auto", "torchvision", "yolo", "yolov5", "detr", "rows"]
DETECTION_FORMS = tuple(form for form in get_args(Form) if form != "auto")
MAX_CANDIDATES = 1000
"""Detections per picture that non-maximum suppression compares, those with the highest scores."""
PAIRS_AT_ONCE = 1 << 23
SOFTMAX_RESULTS = ("DetrObjectDetectionOutput", "YolosObjectDetectionOutput", "TableTransformerObjectDetectionOutput")
"""Result types of transformers whose last class means "no object"; others score each class separately."""


@dataclass(frozen=True)
class Detections:
    """Reads detections from a detector's result; pass it, or only the name of its form, as `output=` to a target.

    Args:
        form: `torchvision`, a list of dicts with `boxes`, `scores` and `labels`. `yolo`, a tensor of Ultralytics,
            `[inputs, 4 + classes, anchors]`, with boxes as centre, width and height, or rows of an end-to-end model.
            `yolov5`, `[inputs, anchors, 5 + classes]`, with the probability of an object before the classes. `detr`, a
            dict or object with `pred_boxes` and `logits` or `pred_logits`. `rows`, rows (left, top, right, bottom,
            score, class) for each picture, as a tensor or as results of Ultralytics. `auto` recognises all of these
            except for the two of YOLO.
        max_detections: Detections that are kept per picture, those with the highest scores.
        min_score: Detections with lower scores are dropped. Keep it well below the score at which the oracle counts
            detections, because the search and the average precision need the others too.
        nms: IoU above which the lower-scored of two detections of a class is dropped, for YOLO only.
        first_class: The model's number of class 0: 1 if its 0 means background and the labels start at 0.
        sigmoid: For `detr`, whether each class has its own score (RT-DETR, Deformable DETR) or the last class means "no
            object" (DETR); by default according to the type of the result.
    """

    form: Form = "auto"
    max_detections: int = 100
    min_score: float = 0.01
    nms: float = 0.7
    first_class: int = 0
    sigmoid: bool | None = None

    def __post_init__(self) -> None:
        if self.form not in get_args(Form):
            raise UsageError(f"the form of detections must be one of {', '.join(get_args(Form))}, got {self.form!r}")
        if self.max_detections < 1:
            raise UsageError(f"max_detections must be at least 1, got {self.max_detections}")
        if not (0 <= self.min_score < 1 and 0 < self.nms <= 1):
            raise UsageError(f"min_score must lie in 0..1 and nms too, got {self.min_score} and {self.nms}")

    def read(self, result: Any, given: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return the detections in a result, `[inputs, max_detections, 6]`, in descending order of scores.

        given: height and width of the pictures that the model was given, in whose pixels its boxes are. shape: that of
        the raw inputs, in whose pixels the returned boxes are.
        """
        if len(shape) != 4:
            raise DataError(f"a detector needs pictures [channels, height, width], got {list(shape[1:])}: reshape them")
        form: str | None = self.form
        if form == "auto":
            form = recognise(result) or ("rows" if _are_rows(result) else None)
        if form is None:
            raise ModelError(
                "a detector must return boxes in a form that is known: a list of dicts with 'boxes', 'scores' and "
                f"'labels', an object with 'pred_boxes', or rows [inputs, n, 6], got {describe_result(result)}: for "
                "YOLO pass output='yolo' to Target, for another form a function that returns such rows"
            )
        rows = FORM_READERS[form](result, self)
        if self.first_class:  # classes before the first are not objects
            rows = torch.cat([rows[..., :CLASS], (rows[..., CLASS:] - self.first_class).clamp_min(PADDING)], -1)
        rows = scale_boxes(rows, (1, 1) if form == "detr" else given, shape[2:])
        is_kept = (rows[..., SCORE] >= max(self.min_score, torch.finfo(torch.float32).tiny)) | rows.isnan().any(2)
        rows = by_score(torch.where(is_kept[..., None], rows, _empty(rows)))[:, : self.max_detections]
        missing = self.max_detections - rows.shape[1]
        return torch.cat([rows, _empty(rows).expand(len(rows), missing, 6)], 1) if missing else rows


def scale_boxes(rows: Tensor, given: Sequence[int], size: Sequence[int]) -> Tensor:
    """Convert boxes in pictures of height and width `given` to pixels of pictures of height and width `size`."""
    high, wide = (own / other for own, other in zip(size, given, strict=True))
    return rows if high == wide == 1 else rows * rows.new_tensor([wide, high, wide, high, 1, 1])


def choose_output(output: Any) -> Output | Detections | None:
    """Return the option `output` of a target, checked; the name of a form becomes `Detections`."""
    if isinstance(output, Detections):
        return output
    if output in DETECTION_FORMS:
        return Detections(output)
    is_valid = output is None or isinstance(output, str | int) or callable(output)
    if not is_valid or isinstance(output, bool):
        raise UsageError(f"output must be a key, an attribute, an index or a function, got {output!r}")
    return output  # type: ignore[no-any-return]


def detections_in(result: Any, output: Output | Detections | None) -> Detections | None:
    """Return the `Detections` for a result and the option `output`; None if the model is not a detector."""
    if isinstance(output, Detections):
        return output
    return Detections() if output is None and recognise(result) is not None else None


def recognise(result: Any) -> Form | None:
    """Return the form of detections in a result if it is unmistakable; otherwise None."""
    if isinstance(result, Tensor):
        return None
    if _get(result, "pred_boxes") is not None:
        return "detr"
    if not isinstance(result, list | tuple) or not result:
        return None
    if all(isinstance(item, Mapping) and {"boxes", "scores", "labels"} <= item.keys() for item in result):
        return "torchvision"
    return "rows" if all(_get(_get(item, "boxes"), "xyxy") is not None for item in result) else None


def _are_rows(result: Any) -> bool:
    if isinstance(result, Tensor):
        return result.ndim == 3 and result.shape[2] == 6
    is_list = isinstance(result, list | tuple) and len(result) > 0
    return is_list and all(getattr(item, "ndim", 0) == 2 and item.shape[1] == 6 for item in result)


def describe_result(result: Any) -> str:
    """Describe in a few words what a model returned."""
    if isinstance(result, Tensor):
        return f"a tensor {list(result.shape)}"
    if isinstance(result, list | tuple) and result:
        return f"a {type(result).__name__} of {len(result)}, the first {describe_result(result[0])}"
    if isinstance(result, Mapping):
        return f"a dict with {', '.join(map(repr, list(result)[:6]))}"
    return type(result).__name__


# One reader per form; each returns unsorted rows [inputs, n, 6], padded with scores of 0


def _read_torchvision(result: Any, options: Detections) -> Tensor:
    pictures = [(torch.as_tensor(item["boxes"]).reshape(-1, 4), item["scores"], item["labels"]) for item in result]
    return pad_sequence([_rows(*columns) for columns in pictures], batch_first=True)


def _read_rows(result: Any, options: Detections) -> Tensor:
    rows = []
    for item in result:  # an array, or a result of Ultralytics
        boxes = _get(item, "boxes")
        rows.append(torch.as_tensor(item).float() if boxes is None else _rows(boxes.xyxy, boxes.conf, boxes.cls))
        if rows[-1].ndim != 2 or rows[-1].shape[1] != 6:
            raise ModelError(
                "detections must be rows (left, top, right, bottom, score, class), [n, 6] per picture, got "
                f"{list(rows[-1].shape)}: return such rows"
            )
    return pad_sequence(rows, batch_first=True) if rows else torch.zeros(0, 0, 6)


def _read_yolo(result: Any, options: Detections) -> Tensor:
    tensor = result[0] if isinstance(result, list | tuple) and result else result
    is_v5 = options.form == "yolov5"
    if not is_v5 and isinstance(tensor, Tensor) and _are_rows(tensor):  # there are 21 anchors at least
        return _read_rows(tensor, options)
    if not isinstance(tensor, Tensor) or tensor.ndim != 3 or tensor.shape[2 if is_v5 else 1] < 5 + is_v5:
        expected = "[inputs, anchors, 5 + classes]" if is_v5 else "[inputs, 4 + classes, anchors]"
        raise ModelError(
            f"a detector of form {options.form!r} must return a tensor {expected}, got {describe_result(result)}: "
            "choose another form of Detections"
        )
    anchors = tensor.float() if is_v5 else tensor.float().movedim(1, 2)
    chances = anchors[..., 5:] * anchors[..., 4:5] if is_v5 else anchors[..., 4:]
    scores, classes = chances.max(2)
    return _suppress(anchors[..., :4], scores, classes, options)


def _read_detr(result: Any, options: Detections) -> Tensor:
    boxes, logits = _get(result, "pred_boxes"), _get(result, "pred_logits")
    logits = _get(result, "logits") if logits is None else logits
    if not isinstance(boxes, Tensor) or not isinstance(logits, Tensor) or logits.shape[:2] != boxes.shape[:2]:
        raise ModelError(
            "a detector of form 'detr' must return 'pred_boxes' [inputs, queries, 4] and 'logits' or 'pred_logits' "
            f"[inputs, queries, classes], got {describe_result(result)}: choose another form of Detections"
        )
    name, has_own_scores = type(result).__name__, options.sigmoid
    if has_own_scores is None:
        has_own_scores = name.endswith("Output") and name not in SOFTMAX_RESULTS
    chances = logits.float().sigmoid() if has_own_scores else logits.float().softmax(2)[..., :-1]
    return _rows(_corners(boxes.float()), *chances.max(2))


FORM_READERS: dict[str, Callable[[Any, Detections], Tensor]] = {
    "torchvision": _read_torchvision,
    "yolo": _read_yolo,
    "yolov5": _read_yolo,
    "detr": _read_detr,
    "rows": _read_rows,
}


# Non-maximum suppression


def _suppress(centred: Tensor, scores: Tensor, classes: Tensor, options: Detections) -> Tensor:
    """Return the candidates `[inputs, n, 6]`, with empty rows for those that repeat a better one of their class."""
    scores, place = scores.topk(min(MAX_CANDIDATES, scores.shape[1]), 1)
    boxes = _corners(centred.gather(1, place[..., None].expand(-1, -1, 4)))
    classes = classes.gather(1, place)
    step = max(1, PAIRS_AT_ONCE // max(1, scores.shape[1]) ** 2)
    with torch.no_grad():
        parts = [slice(first, first + step) for first in range(0, len(scores), step)]
        is_kept = torch.cat(
            [suppress(boxes[part], scores[part], classes[part], options.nms, options.min_score) for part in parts]
        )
    rows = _rows(boxes, scores, classes)
    return torch.where(is_kept[..., None], rows, _empty(rows))


def suppress(boxes: Tensor, scores: Tensor, classes: Tensor, nms: float, min_score: float = 0.0) -> Tensor:
    """Return which detections remain, `[inputs, n]`: those that no remaining better one of their class overlaps.

    boxes `[inputs, n, 4]`: the detections must be in descending order of scores. nms: the IoU that is an overlap.
    """
    is_same = classes[:, :, None] == classes[:, None]
    repeats = (overlap(boxes, boxes) > nms) & is_same  # [inputs, better, worse]
    repeats = repeats.triu(diagonal=1)
    is_candidate = ~(scores < min_score)  # a score that is not a number remains, so that the oracle sees it
    is_kept = is_candidate
    for _ in range(scores.shape[1]):  # the first k rows are final after k steps; in practice, a few steps are enough
        is_next = is_candidate & ~(repeats & is_kept[:, :, None]).any(1)
        if torch.equal(is_next, is_kept):
            break
        is_kept = is_next
    return is_kept


# Small parts


def _rows(boxes: Any, scores: Any, classes: Any) -> Tensor:
    """Return rows `[..., n, 6]` of boxes `[..., n, 4]`, and of their scores and classes `[..., n]`."""
    boxes, scores, classes = (torch.as_tensor(column).float() for column in (boxes, scores, classes))
    return torch.cat([boxes, scores[..., None], classes[..., None]], -1)


def _empty(like: Tensor) -> Tensor:
    """Return an empty row."""
    return like.new_tensor([0, 0, 0, 0, 0, PADDING])


def _corners(centred: Tensor) -> Tensor:
    """Return (left, top, right, bottom) of boxes (x, y, width, height) of the centre."""
    centre, half = centred[..., :2], centred[..., 2:4] / 2
    return torch.cat([centre - half, centre + half], -1)


def _get(value: Any, name: str) -> Any:
    """Return an item of a dict, an attribute of another object, or None."""
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
