"""Choosing the oracle of a task by name, or by the clean outputs and the labels."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from themis.errors import ModelError, UsageError, nearest
from themis.oracle.classes import Changed, Top, Wrong, are_probabilities
from themis.oracle.compare import Compare
from themis.oracle.detection import Detection, are_detections
from themis.oracle.keypoints import KeyPoints
from themis.oracle.oracle import Oracle, Verdict
from themis.oracle.regression import Regression
from themis.oracle.segmentation import Segmentation
from themis.oracle.thresholds import Multilabel, Threshold, are_bits
from themis.plugins import Extensible
from themis.user_code import import_named


@dataclass(frozen=True)
class Auto(Oracle):
    """Is replaced by the oracle of a task as soon as the clean outputs are known.

    `[inputs, classes]`: `wrong` with labels, `changed` without; `multilabel` if there is a label of 0 or 1 for each
    output, and `regression` if there is another number for each output.
    `[inputs]` or `[inputs, 1]`: `threshold` if all labels are 0 or 1, otherwise `regression`.
    `[inputs, classes, height, width]`: `segmentation`. `[inputs, points, 2]` with labels of that shape: `keypoints`.
    `[inputs, n, 6]` with scores and class numbers: `detection`.
    """

    task: ClassVar[str] = "auto"
    fault: ClassVar[str] = "what the outputs and labels suggest"

    def settle(self, clean_outputs: Tensor, labels: Tensor | None) -> Oracle:
        return _choose_task(clean_outputs, labels).settle(clean_outputs, labels)

    def reference(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        return self.settle(clean_outputs, labels).reference(clean_outputs, labels)

    def compare(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None) -> Verdict:
        return self.settle(clean_outputs, labels).compare(clean_outputs, outputs, labels)


def _choose_task(clean_outputs: Tensor, labels: Tensor | None) -> Oracle:
    shape = clean_outputs.shape
    if len(shape) == 1 or (len(shape) == 2 and shape[1] == 1):
        if labels is not None and are_bits(labels):
            return Threshold()
        if (
            labels is not None
            and not labels.is_floating_point()
            and bool((clean_outputs == clean_outputs.round()).all())
        ):
            raise ModelError(
                "the task must be known, but outputs and labels are one whole number per input, which may be class "
                "numbers: return the scores of all classes, or name the task with oracle=...: 'off:0.5' if any answer "
                "but the label is a fault, or 'regression'"
            )
        return Regression()
    if len(shape) == 2:
        if labels is None:
            return Changed()
        if labels.shape != shape or are_probabilities(labels):  # `wrong` explains what is wrong with one-hot rows
            return Wrong()
        return Multilabel() if are_bits(labels) else Regression()
    if len(shape) == 4 and shape[1] > 1:
        return Segmentation()
    if len(shape) == 3 and shape[2] in (2, 3) and labels is not None and labels.shape[:-1] == shape[:2]:
        return KeyPoints()
    if are_detections(clean_outputs):
        return Detection()
    raise ModelError(
        "outputs must be [inputs, classes], [inputs], [inputs, classes, height, width] or detections [inputs, n, 6] "
        f"for the task to be known, got {list(shape)}: pass output=... to Target, such as output='yolo' for boxes of "
        "YOLO or output=lambda result: result.logits[:, -1] for the last token of a language model, or your own "
        "comparison as oracle=Compare(function)"
    )


def _without_argument(name: str, make: Callable[[], Oracle], text: str) -> Oracle:
    if text:
        raise UsageError(f"oracle {name!r} takes no argument, got {f'{name}:{text}'!r}: write {name}")
    return make()


OWN_ORACLES: dict[str, Callable[[str], Oracle]] = {
    "changed": partial(_without_argument, "changed", Changed),
    "wrong": partial(_without_argument, "wrong", Wrong),
    "top5": partial(_without_argument, "top5", Top),
    "threshold": Threshold.parse,
    "multilabel": Multilabel.parse,
    "regression": Regression.parse,
    "euclidean": partial(Regression.parse, is_euclidean=True),
    "off": partial(Regression.parse, compared_with="label"),
    "segmentation": Segmentation.parse,
    "keypoints": KeyPoints.parse,
    "detection": Detection.parse,
}
"""Functions that make an oracle from the text after the colon, which may be empty."""
ORACLES: Extensible[Callable[[str], Oracle]] = Extensible("themis.oracles", OWN_ORACLES)


TOP_K = re.compile(r"top([1-9]\d*)")


def choose_oracle(oracle: str | Oracle) -> Oracle:
    """Return an oracle by name: `NAME`, `NAME:NUMBER`, `topK`, `auto`, or `module:function` for one of the user's."""
    if isinstance(oracle, Oracle):
        return oracle
    if not isinstance(oracle, str):
        raise UsageError(f"oracle must be a name or Oracle, got {type(oracle).__name__}: wrap it as Compare(function)")
    if is_own_oracle(oracle):
        module, _, path = oracle.partition(":")
        own: Any = import_named(module, path.split("."), f"oracle {oracle!r}", nearest(module, ["auto", *ORACLES]))
        if isinstance(own, Compare):
            return replace(own, name=oracle)
        return own if isinstance(own, Oracle) else Compare(own, oracle)
    name, _, text = oracle.partition(":")
    if name == "auto":
        return _without_argument("auto", Auto, text)
    if top := TOP_K.fullmatch(name):
        return _without_argument(name, partial(Top, int(top[1])), text)
    if name in ORACLES:
        return ORACLES[name](text)
    known = nearest(name, ["auto", *ORACLES])
    raise UsageError(f"oracle must be a known name or module:function, got {oracle!r}: {known}")


def is_own_oracle(spec: str) -> bool:
    """Whether an oracle is named as a function of the user's, which has to be imported."""
    name, colon, text = spec.partition(":")
    is_known = name == "auto" or name in ORACLES or TOP_K.fullmatch(name)
    return bool(colon) and not is_known and all(map(str.isidentifier, (*name.split("."), *text.split("."))))
