"""Data sets that follow MAITE, the protocols of the JATIC tools: pictures, targets and metadata.

The protocols are structural, so objects are recognised by their attributes, without the package `maite`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from themis.data.files import Numbers
from themis.data.items import pad_boxes
from themis.data.rows import as_array
from themis.errors import DataError


@dataclass(frozen=True)
class MaiteDatums:
    """Further facts about the datums of a data set."""

    metadata: dict[str, list[Any]]
    """Metadata by field, with one value per datum; None if a datum lacks the field."""
    dtype: np.dtype[Any]
    """The type of the pictures."""
    are_tensors: bool
    """Whether the pictures are tensors rather than arrays."""

    def pictures(self, inputs: Numbers) -> list[Any]:
        """Convert inputs `[inputs, ...]` to a batch of pictures of the original type."""
        values = np.rint(inputs) if self.dtype.kind in "iu" else inputs
        typed = values.astype(self.dtype) if self.dtype.kind in "iuf" else values
        return list(torch.from_numpy(typed) if self.are_tensors else typed)


def picture_bounds(dtype: np.dtype[Any]) -> tuple[float, float]:
    """The range of pictures: that of an integer type, or 0..1."""
    return (0.0, float(np.iinfo(dtype).max)) if dtype.kind in "iu" else (0.0, 1.0)


def has_maite_metadata(value: Any) -> bool:
    """Whether an object carries metadata with an id, as every component of MAITE does."""
    metadata = None if isinstance(value, type) else getattr(value, "metadata", None)
    return isinstance(metadata, Mapping) and "id" in metadata


def is_maite_dataset(data: Any) -> bool:
    """Whether data follows MAITE's protocol of a data set."""
    return has_maite_metadata(data) and hasattr(data, "__getitem__") and hasattr(data, "__len__")


def required_dataset(data: Any, label: str) -> Any:
    """The data set itself; refuses anything else. label: how the data was named, for the message."""
    if not is_maite_dataset(data):
        raise DataError(
            f"{label} must be a data set of MAITE, but {type(data).__name__} has no items, no length or no metadata "
            "with an id: add them, or leave out maite:"
        )
    return data


def maite_classes(component: Any) -> tuple[str, ...] | None:
    """The names of the classes by number, if the metadata of a data set or a model name all of them."""
    names = component.metadata.get("index2label") or {}
    return tuple(map(str, map(names.get, range(len(names))))) if names and {*names} == {*range(len(names))} else None


class MaiteData(NamedTuple):
    """The parts of a MAITE data set."""

    read: Callable[[int], Numbers]
    """Reads the picture at an index."""
    shape: tuple[int, ...]
    labels: Numbers
    classes: tuple[str, ...] | None
    datums: MaiteDatums


def read_maite(dataset: Any) -> MaiteData:
    """Read a data set for image classification or object detection; its pictures are read when needed."""
    n = len(dataset)
    if not n:
        raise DataError("the data must hold at least one seed, got none: check the path and the split")
    targets, metadata = zip(*(_describe(dataset, k) for k in range(n)), strict=True)

    def read(k: int) -> Numbers:
        return np.asarray(as_array(dataset[k][0]))

    picture = read(0)
    labels = _boxes(targets) if hasattr(targets[0], "boxes") else _classes(targets)
    datums = MaiteDatums(_columns(metadata), picture.dtype, isinstance(dataset[0][0], Tensor))
    return MaiteData(read, picture.shape, labels, maite_classes(dataset), datums)


def _describe(dataset: Any, k: int) -> tuple[Any, Mapping[str, Any]]:
    """The target and the metadata of a datum, without reading its picture if the data set allows it."""
    if hasattr(dataset, "get_target") and hasattr(dataset, "get_metadata"):
        return dataset.get_target(k), dataset.get_metadata(k)
    datum = dataset[k]
    if not (isinstance(datum, tuple | list) and len(datum) == 3 and isinstance(datum[2], Mapping)):
        raise DataError(f"a datum must be (input, target, metadata), but datum {k} is a {type(datum).__name__}")
    return datum[1], datum[2]


def _columns(metadata: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The fields of the metadata whose values are text or numbers, except for the id and the class."""
    names = dict.fromkeys(name for each in metadata for name in each if name not in ("id", "class"))
    columns = {name: [each.get(name) for each in metadata] for name in names}
    plain = str | bool | int | float | np.generic | None
    return {str(name): values for name, values in columns.items() if all(isinstance(each, plain) for each in values)}


def _classes(targets: Sequence[Any]) -> Numbers:
    """The class of each target, which is a vector with one number per class."""
    scores = [np.asarray(as_array(target)) for target in targets]
    wrong = next((k for k, score in enumerate(scores) if score.ndim != 1 or not len(score)), None)
    if wrong is not None:
        raise DataError(
            f"a target must be a vector with one number per class, but that of datum {wrong} has the shape "
            f"{list(scores[wrong].shape)}: return one-hot targets, as MAITE defines them"
        )
    return np.array([int(score.argmax()) for score in scores])


def _boxes(targets: Sequence[Any]) -> Numbers:
    """The boxes and classes of each target."""
    objects = []
    for k, target in enumerate(targets):
        boxes = np.asarray(as_array(target.boxes), np.float32).reshape(-1, 4)
        classes = np.asarray(as_array(target.labels), np.float32).reshape(-1)
        if len(boxes) != len(classes):
            raise DataError(
                f"a target must have a label per box, but datum {k} has {len(classes)} for {len(boxes)}: correct it"
            )
        objects.append(np.column_stack([boxes, classes]))
    return pad_boxes(objects)
