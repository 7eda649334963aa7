"""Models of MAITE as functions for a black box."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from themis.data.maite import MaiteDatums, has_maite_metadata, maite_classes
from themis.data.rows import as_array


def is_maite_model(model: Any) -> bool:
    """Whether an object follows MAITE's protocol of a model; the package `maite` is not needed to tell."""
    return has_maite_metadata(model) and callable(model)


class MaiteModel:
    """A function for `BlackBox` that maps `inputs [inputs, channels, height, width]` to what a model of MAITE answers.

    The model gets a list of pictures, of the type of those in `datums`: float32 arrays without one.
    """

    def __init__(self, model: Any, datums: MaiteDatums | None = None) -> None:
        self.model, self.datums = model, datums
        self.classes = maite_classes(model)
        """The names of the classes in the order of the scores, if the metadata name them."""
        self.version = f"{type(model).__module__}:{type(model).__qualname__}:{model.metadata['id']}"

    def __call__(self, inputs: NDArray[Any]) -> Any:
        """Scores `[inputs, classes]`, or for each picture a dict with boxes, scores and labels."""
        answers = self.model(list(inputs) if self.datums is None else self.datums.pictures(inputs))
        if hasattr(answers[0], "boxes"):
            return [_detections(answer) for answer in answers]
        return np.stack([np.asarray(as_array(answer)) for answer in answers])


def _detections(answer: Any) -> dict[str, Any]:
    boxes, scores, labels = (np.array(as_array(getattr(answer, name))) for name in ("boxes", "scores", "labels"))
    best = scores.max(1, initial=0) if scores.ndim == 2 else scores  # the highest, if there is one per class
    return {"boxes": boxes, "scores": best, "labels": labels}
