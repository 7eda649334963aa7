"""The task read off the clean outputs and the labels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from themis.errors import ModelError
from themis.oracle.binary import Threshold, are_bits
from themis.oracle.classes import Changed, Wrong
from themis.oracle.multilabel import Multilabel
from themis.oracle.oracle import Oracle, Verdict
from themis.oracle.regression import Regression
from themis.oracle.segmentation import Segmentation


@dataclass(frozen=True)
class Auto(Oracle):
    """Becomes a task's oracle once the clean outputs are known.

    `[inputs, classes]`: `wrong` with labels and `changed` without; `multilabel` where labels are several a row.
    `[inputs]` or `[inputs, 1]`: `threshold` where all labels are 0 or 1, else `regression:2sd`.
    `[inputs, classes, height, width]`: `segmentation`.
    """

    def spec(self) -> str:
        return "auto"

    def describe(self) -> str:
        return "what the outputs and labels suggest"

    def settle(self, clean_outputs: Tensor, labels: Tensor | None) -> Oracle:
        return _choose(clean_outputs, labels).settle(clean_outputs, labels)

    def check(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        return self.settle(clean_outputs, labels).check(clean_outputs, labels)

    def reference(self, clean_outputs: Tensor, labels: Tensor | None) -> Tensor:
        return self.settle(clean_outputs, labels).reference(clean_outputs, labels)

    def compare(self, clean_outputs: Tensor, outputs: Tensor, labels: Tensor | None) -> Verdict:
        return self.settle(clean_outputs, labels).compare(clean_outputs, outputs, labels)


def _choose(clean_outputs: Tensor, labels: Tensor | None) -> Oracle:
    shape = clean_outputs.shape
    if len(shape) == 1 or (len(shape) == 2 and shape[1] == 1):
        return Threshold() if labels is not None and are_bits(labels) else Regression()
    if len(shape) == 2:
        if labels is None:
            return Changed()
        is_several = labels.shape == shape and are_bits(labels) and not bool((labels.sum(1) == 1).all())
        return Multilabel() if is_several else Wrong()
    if len(shape) == 4 and shape[1] > 1:
        return Segmentation()
    raise ModelError(
        "the task must be known by its outputs, [inputs, classes], [inputs] or [inputs, classes, height, width], got "
        f"{list(shape)}: pass output=... to Target to pick the scores, or a comparison of your own as "
        "oracle=Compare(function)"
    )
