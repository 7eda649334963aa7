"""The parts of a user's data: one or several inputs per example, labels, and the items of a data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from themis.data.features import LABEL_NAMES
from themis.data.files import Numbers
from themis.data.rows import as_array
from themis.errors import NO_TEXT, DataError, UsageError

Key = str | int
"""The name of an input, or its position."""
LABEL_ENTRIES = (*LABEL_NAMES, "labels", "targets")
"""Keys of a dict that hold the labels, in upper or lower case."""


@dataclass(frozen=True)
class OtherInputs:
    """The inputs of each example besides the perturbed one, `[seeds, ...]` each, which are passed on unchanged."""

    keys: tuple[Key, ...]
    """All inputs in the order of the data, including the perturbed one."""
    perturbed: Key
    tensors: dict[Key, Tensor]

    def part(self, rows: Any) -> OtherInputs:
        """The inputs of some of the seeds."""
        return OtherInputs(self.keys, self.perturbed, {key: tensor[rows] for key, tensor in self.tensors.items()})

    def to(self, device: torch.device) -> OtherInputs:
        """The inputs on a device."""
        return OtherInputs(self.keys, self.perturbed, {key: tensor.to(device) for key, tensor in self.tensors.items()})

    def describe(self) -> str:
        """Which input is perturbed, in words."""
        others = ", ".join(repr(key) for key in self.keys if key != self.perturbed)
        return f"input {self.perturbed!r} is perturbed, and {others} passed on unchanged"

    def find(self, key: Key) -> Key:
        """The key of the input that a user names; a position may be written as text."""
        found = int(key) if isinstance(key, str) and key.isdecimal() and int(key) in self.keys else key
        if found not in self.keys:
            listed = ", ".join(map(repr, self.keys))
            raise UsageError(f"perturbed must name an input of the data, which has {listed}, got {key!r}")
        return found


def entries_of(inputs: Any) -> dict[Key, Any]:
    """The entries of a dict or a tuple of several arrays, by name or position; empty for anything else."""
    entries = dict(enumerate(inputs)) if isinstance(inputs, tuple | list) else inputs
    if not isinstance(entries, Mapping) or len(entries) < 2:
        return {}
    is_array = [isinstance(value, Tensor | np.ndarray) for value in entries.values()]
    return dict(entries) if all(is_array) and any(value.ndim for value in entries.values()) else {}


def separate(entries: dict[Key, Any]) -> tuple[Any, OtherInputs]:
    """The input to perturb, which is the first one that can be perturbed, and the others."""
    perturbed = next(key for key, value in entries.items() if is_perturbable(value))
    lengths = {key: len(value) for key, value in entries.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"all inputs must have one row per example, got {lengths}: check their first dimension")
    others = {key: torch.as_tensor(value) for key, value in entries.items() if key != perturbed}
    return entries[perturbed], OtherInputs(tuple(entries), perturbed, others)


def is_perturbable(values: Any) -> bool:
    """Whether an input has several floating-point numbers per example."""
    kind = values.is_floating_point() if isinstance(values, Tensor) else values.dtype.kind == "f"
    return bool(kind) and values.ndim > 1


N_REPEATED_ITEMS = 3
"""Items of a data set that are read twice."""


def dataset_of(data: Any) -> Any:
    """The data set of a loader, in which every seed has a fixed index even if the loader shuffles."""
    if not isinstance(data, DataLoader):
        return data
    if data.batch_sampler is not None and not isinstance(data.sampler, SequentialSampler | RandomSampler):
        raise DataError(
            f"a DataLoader must iterate over its whole data set, got the sampler {type(data.sampler).__name__}: pass "
            "Subset(dataset, indices) instead"
        )
    return data.dataset


def classes_of(dataset: Any) -> list[str] | None:
    """The class names of a data set such as one of torchvision, or of a subset of one; None if it has none."""
    if getattr(dataset, "target_transform", None) is not None:  # may have changed the class numbers
        return None
    names = getattr(dataset, "classes", None)
    if names is None and hasattr(dataset, "dataset"):
        return classes_of(dataset.dataset)
    if not isinstance(names, list | tuple):
        return None
    firsts = [name[0] if isinstance(name, tuple) and name else name for name in names]  # the first synonym
    return firsts if all(isinstance(name, str) for name in firsts) else None


class Items:
    """The items of a user's data set; reading the input of an item stores its label."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._labels: dict[int, Any] = {}

    @property
    def has_labels(self) -> bool:
        return bool(self._labels)

    def read(self, k: int) -> Tensor:
        item = self._item(k)
        refuse_text(item[:1] if isinstance(item, tuple | list) else item)
        parts = parts_of(item)
        try:
            if len(parts) > 2 and isinstance(parts[2], int | float | np.generic | np.ndarray | Tensor):
                raise ValueError("it has 3 entries, of which the second may be an input or the label")
            inputs = torch.as_tensor(parts[0])
            if len(parts) > 1:
                label = torch.as_tensor(parts[1])
                self._labels[k] = label.clone() if label.ndim else label.item()
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            names = ", ".join(type(part).__name__ for part in item) if isinstance(item, tuple | list) else None
            raise DataError(
                "an item of a Dataset must be (input, label), or ((input, other), label) for a model with several "
                f"inputs, with tensors or numbers, got {type(item).__name__ if names is None else f'({names})'} "
                f"({error}): convert what it gives, for instance with ToTensor()"
            ) from error
        return inputs

    def labels(self, index: Tensor) -> Tensor:
        """The labels at some indices; reads the items that have not been read yet."""
        for k in index.tolist():
            if k not in self._labels:
                self.read(k)
                if k not in self._labels:
                    raise DataError(f"all seeds must have a label if one has, but seed {k} has none: label or drop it")
        values = [self._labels[k] for k in index.tolist()]
        shapes = {np.shape(value) for value in values}
        if len(shapes) > 1:
            raise DataError(f"all labels must have the same shape, got {sorted(shapes)[:3]}: reshape them")
        return label_tensor(torch.stack(values) if isinstance(values[0], Tensor) else torch.as_tensor(values))

    def _item(self, k: int) -> Any:
        try:
            return self._dataset[k]
        except Exception as error:  # whatever the user's data set raises
            raise DataError(
                f"the data set must give all its items, but item {k} raised {type(error).__name__}: {error}"
            ) from error


def check_repeats(items: Items, indices: Sequence[int]) -> None:
    """Refuse a data set whose inputs differ between two reads, such as one with random augmentation."""
    for k in indices[:N_REPEATED_ITEMS]:
        first, second = (np.array(as_array(items.read(k))) for _ in range(2))
        if first.shape != second.shape or not np.array_equal(first, second, equal_nan=first.dtype.kind == "f"):
            raise DataError(
                f"the data must give the same input every time, but item {k} differs between two reads: switch off "
                "random augmentation, or collect the inputs into a tensor first"
            )


def refuse_text(inputs: Any) -> None:
    """Refuse text: strings, arrays and lists of strings, and the output of a tokeniser."""
    first = inputs[0] if isinstance(inputs, list | tuple) and len(inputs) else inputs
    kind = None
    if isinstance(first, str):
        kind = "strings"
    elif isinstance(first, Mapping) and "input_ids" in first:
        kind = "token ids (input_ids)"
    elif isinstance(first, np.ndarray) and first.dtype.kind in "US":
        kind = f"an array of {first.dtype}"
    if kind is not None:
        raise DataError(f"inputs must be numbers, got {kind}: {NO_TEXT}")


def parts_of(item: Any) -> tuple[Any, ...]:
    """Split an item of a data set, or data, into `(input, label)` or `(input,)`, if it is a dict or contains one.

    One entry of a dict may be the label, which is known by its name; a single other entry is the input itself.
    """
    parts = tuple(item) if isinstance(item, tuple | list) else (item,)
    if isinstance(item, Mapping):
        named = [key for key in item if str(key).lower() in LABEL_ENTRIES]
        if len(named) <= 1 < len(item):
            parts = ({key: value for key, value in item.items() if key not in named}, *(item[key] for key in named))
    if parts and isinstance(parts[0], Mapping) and len(parts[0]) == 1:
        parts = (*parts[0].values(), *parts[1:])
    return parts


def read_several_items(dataset: Any, sample: int) -> tuple[dict[Key, Any], list[Any] | None] | None:
    """The inputs by name or position and the labels of a data set whose items have several inputs; otherwise None.

    The item `sample` decides whether they do; if so, all items are read.
    """
    try:
        first = dataset[sample]
    except Exception:  # whatever the user's data set raises is explained where its items are read
        return None
    parts = parts_of(first)
    is_item = len(parts) == 2 or (len(parts) == 1 and isinstance(parts[0], Mapping))
    if not (is_item and any(is_perturbable(value[None]) for value in entries_of(parts[0]).values())):
        return None
    items = [parts_of(dataset[k]) for k in range(len(dataset))]
    keys: Sequence[Key] = list(parts[0]) if isinstance(parts[0], Mapping) else range(len(parts[0]))
    try:
        inputs = {key: torch.stack([torch.as_tensor(item[0][key]) for item in items]) for key in keys}
    except (RuntimeError, TypeError, ValueError, KeyError, IndexError) as error:
        raise DataError(
            f"all examples must have the same inputs, of the same shapes, as the first, which has {list(keys)}: {error}"
        ) from error
    return inputs, [item[1] for item in items] if len(parts) > 1 else None


def label_tensor(labels: Tensor) -> Tensor:
    """Convert labels to int64 or float32, and a column `[seeds, 1]` to `[seeds]`."""
    labels = labels.squeeze(1) if labels.ndim == 2 and labels.shape[1] == 1 else labels
    return labels.float() if labels.is_floating_point() else labels.long()


NO_CLASS = -1.0
"""The class of a row that is not used."""


def pad_boxes(objects: Sequence[Any]) -> Numbers:
    """Join the boxes of each picture, `[objects, 5]`, to the labels of all pictures, padded with empty rows."""
    labels = np.zeros((len(objects), max(1, *map(len, objects)), 5), np.float32)
    labels[..., 4] = NO_CLASS
    for k, rows in enumerate(objects):
        if len(rows):
            labels[k, : len(rows)] = rows
    return labels
