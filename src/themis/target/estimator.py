"""Models of other libraries as functions for a black box: estimators, files such as ONNX, and MAITE models."""

import hashlib
import pickle
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from themis.data.maite import MaiteDatums, has_maite_metadata, maite_classes
from themis.data.rows import as_array
from themis.errors import ModelError

SCORE_METHODS = ("predict_proba", "decision_function", "inplace_predict", "predict")
"""Methods that return scores, in order of preference; the third is that of XGBoost's boosters."""


def is_estimator(model: Any) -> bool:
    """Whether an object predicts like a scikit-learn estimator, without importing a library."""
    return not isinstance(model, type) and callable(getattr(model, "predict", None))


class Estimator:
    """A function for `BlackBox` that maps `inputs [inputs, features]`, or a DataFrame, to the scores of an estimator.

    Probabilities are preferred, then the decision function, then predictions: one column per class for a classifier, or
    the numbers of a regressor.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.method = next(name for name in SCORE_METHODS if callable(getattr(model, name, None)))
        values = getattr(model, "classes_", None)
        if isinstance(values, list):
            raise ModelError(
                f"the estimator must predict one label per input, but it predicts {len(values)}: test each of its "
                "outputs with a function of your own as themis.BlackBox(function)"
            )
        self._classes = None if values is None else np.asarray(values)
        self.classes: tuple[str, ...] | None = None
        """The names of the classes in the order of the scores; None for a regressor."""
        if self._classes is not None:
            numbered = self._classes.astype(np.int64) if self._classes.dtype.kind == "b" else self._classes
            self.classes = tuple(map(str, numbered.tolist()))
        names = getattr(model, "feature_names_in_", None)
        self.names = None if names is None else [str(name) for name in names]
        self.entry = f"what {self.method} returns"
        """A description of the scores."""

    @property
    def version(self) -> str:
        """The hash of the pickled estimator, or the name of its class if it cannot be pickled."""
        try:
            content = pickle.dumps(pickle.loads(pickle.dumps(self.model)))  # twice, as copies share strings differently
        except Exception:  # an estimator may hold anything
            return f"{type(self.model).__module__}:{type(self.model).__qualname__}"
        return hashlib.sha256(content).hexdigest()

    def __call__(self, inputs: Any) -> NDArray[Any]:
        given = inputs if self.names is None else self._columns(inputs, self.names)
        scores: NDArray[Any] = np.asarray(getattr(self.model, self.method)(given))
        if self.method == "predict" and self._classes is not None:
            scores = np.equal(scores.reshape(-1, 1), self._classes.reshape(1, -1)).astype(np.float32)
        if self.method == "decision_function" and scores.ndim == 1:  # of the second class
            return np.stack([-scores, scores], 1)
        return scores

    def _columns(self, inputs: Any, names: list[str]) -> Any:
        """The inputs as a DataFrame with the columns that the estimator was fitted to, in the same order."""
        if isinstance(inputs, np.ndarray):
            import pandas  # type: ignore[import-untyped, unused-ignore]

            return pandas.DataFrame(inputs, columns=names)
        missing, more = sorted(set(names).difference(inputs.columns)), sorted(set(inputs.columns).difference(names))
        if missing or more:
            raise ModelError(
                f"the columns must be those that the estimator was fitted to, missing {missing}, unexpected {more}: "
                "drop a column, or name it if it holds the labels"
            )
        return inputs[names]


class FileModel(ABC):
    """A function for `BlackBox` that runs a model file of another library; it takes one array of numbers.

    Loaders of `themis.model_files` return it for files that cannot be converted to a PyTorch module.
    """

    keeps_padding: ClassVar[bool] = True
    """Whether it gets batches of a fixed shape, because the last bits of results depend on the shape."""
    version: str
    """The hash of the file."""

    @abstractmethod
    def __call__(self, inputs: NDArray[Any]) -> Any:
        """The scores, or a pair of the scores and a dict of activations by layer."""

    @abstractmethod
    def choose(self, output: str | None) -> Self:
        """Return a copy that takes the scores from this output, given by name or index; None keeps the default."""


def is_maite_model(model: Any) -> bool:
    """Whether an object follows MAITE's protocol of a model, without the package `maite`."""
    return has_maite_metadata(model) and callable(model)


class MaiteModel:
    """A function for `BlackBox` that maps `inputs [inputs, channels, height, width]` to the answers of a MAITE model.

    The model gets a list of pictures, with the type of those in `datums`, or of float32 arrays without `datums`.
    """

    def __init__(self, model: Any, datums: MaiteDatums | None = None) -> None:
        self.model, self.datums = model, datums
        self.classes = maite_classes(model)
        """The names of the classes in the order of the scores, if the metadata name them."""
        self.version = f"{type(model).__module__}:{type(model).__qualname__}:{model.metadata['id']}"

    def __call__(self, inputs: NDArray[Any]) -> Any:
        """Return scores `[inputs, classes]`, or a dict with boxes, scores and labels for each picture."""
        answers = self.model(list(inputs) if self.datums is None else self.datums.pictures(inputs))
        if hasattr(answers[0], "boxes"):
            return [_detections(answer) for answer in answers]
        return np.stack([np.asarray(as_array(answer)) for answer in answers])


def _detections(answer: Any) -> dict[str, Any]:
    boxes, scores, labels = (np.array(as_array(getattr(answer, name))) for name in ("boxes", "scores", "labels"))
    best = scores.max(1, initial=0) if scores.ndim == 2 else scores  # the highest, if there is one per class
    return {"boxes": boxes, "scores": best, "labels": labels}
