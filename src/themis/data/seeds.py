"""Seeds: the clean inputs that a campaign starts from, with their ids and labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset

from themis.compute.rng import mix
from themis.data.features import (
    Coding,
    DataDescription,
    Features,
    is_frame,
    is_series,
    number_labels,
    read_features,
    read_frame,
)
from themis.data.files import Numbers
from themis.data.rows import Read, Rows, as_array, held_bytes
from themis.data.several import OtherInputs, has_several_inputs, parts_of, read_several, separate, stack_items
from themis.errors import NO_TEXT, DataError, UsageError

N_REPEATED = 3
"""Items of a data set that are read twice."""
N_LISTED = 5
"""Seeds that a message lists at most."""

Labels = Tensor | Callable[[Tensor], Tensor]
"""Labels `[seeds, ...]`, or a function that reads those at given indices of the data."""


class Seeds:
    """Clean inputs `[seeds, ...]` (float32), labels `[seeds, ...]` or None, and each seed's index in the data.

    The inputs are a tensor, or `Rows` that are read when they are needed; both are indexed in the same way. The labels
    are in memory, unless they come with the items of a data set: then accessing them reads the items.
    """

    def __init__(
        self,
        inputs: Tensor | Rows,
        labels: Labels | None,
        seed_id: Tensor,
        description: DataDescription | None = None,
        others: OtherInputs | None = None,
    ) -> None:
        """others: the inputs beside the perturbed one, if there are several per example."""
        self.inputs, self._labels, self.seed_id, self.others = inputs, labels, seed_id, others
        self._description = description or DataDescription(inputs)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: Any) -> Seeds:
        inputs = self.inputs.part(rows) if isinstance(self.inputs, Rows) else self.inputs[rows]
        labels = self._labels[rows] if isinstance(self._labels, Tensor) else self._labels
        others = None if self.others is None else self.others.part(rows)
        return Seeds(inputs, labels, self.seed_id[rows].reshape(-1), self._description, others)

    @property
    def shape(self) -> tuple[int, ...]:
        """`[seeds, ...]`."""
        return tuple(self.inputs.shape)

    @property
    def has_labels(self) -> bool:
        return self._labels is not None

    @cached_property
    def labels(self) -> Tensor | None:
        return self._labels(self.seed_id) if callable(self._labels) else self._labels

    def take(self, rows: Tensor) -> Tensor:
        """The inputs of the seeds in some rows, `[rows, ...]`."""
        return self.inputs[rows]

    def in_memory(self) -> Seeds:
        """The same seeds with their inputs in memory, if they fit."""
        if isinstance(self.inputs, Tensor):
            return self
        inputs, description = self.inputs.in_memory(), self._description
        if description.inputs is self.inputs:  # avoids reading them again
            description = DataDescription(inputs, description.names, classes=description.classes)
        return Seeds(inputs, self._labels, self.seed_id, description, self.others)

    @property
    def features(self) -> Features:
        """What a table's columns may hold and how they may change: as given, or inferred from all rows of the data."""
        return self._description.features

    @property
    def coding(self) -> Coding | None:
        """How rows become those of a DataFrame, if the data is one with names, missing values or booleans."""
        return None if self._description.given is None else self._description.given.coding

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the classes in the order of their numbers, if they are known."""
        return self._description.classes

    def with_labels(self, labels: Tensor) -> Seeds:
        """The same seeds with other labels."""
        return Seeds(self.inputs, labels, self.seed_id, self._description, self.others)

    def with_channels_first(self) -> Seeds:
        """The same seeds with inputs `[channels, height, width]` instead of `[height, width, channels]`."""
        inputs = self.inputs
        moved = inputs.moved(-1, 0) if isinstance(inputs, Rows) else inputs.movedim(-1, 1).contiguous()
        description = DataDescription(moved, classes=self.classes)
        return Seeds(moved, self._labels, self.seed_id, description, self.others)

    def perturbing(self, key: str | int) -> Seeds:
        """The same seeds with another of several inputs per example as the perturbed one."""
        others = self.others
        if others is None or key == others.perturbed:
            return self
        tensors = {**others.tensors, others.perturbed: self.inputs[:]}
        seeds = _checked(tensors.pop(key).float(), self._labels, self.seed_id).with_classes(self.classes)
        seeds.others = OtherInputs(others.keys, key, tensors)
        return seeds

    def with_feature_names(self, names: Sequence[str]) -> Seeds:
        """The same seeds with names for the columns of a table."""
        description = DataDescription(self.inputs, tuple(names), classes=self.classes)
        return Seeds(self.inputs, self._labels, self.seed_id, description, self.others)

    def with_classes(self, classes: Sequence[str] | None) -> Seeds:
        """The same seeds with names for the classes."""
        names = None if classes is None else tuple(classes)
        if names is not None and (isinstance(classes, str) or not all(isinstance(name, str) for name in names)):
            raise UsageError(f"classes must be names in the order of their numbers, got {classes!r}: give a list")
        description = copy(self._description)
        description.classes = names or None
        return Seeds(self.inputs, self._labels, self.seed_id, description, self.others)

    def with_features(self, features: Features | str | Path) -> Seeds:
        """The same seeds with features, or with those that a CSV file describes; all seeds must be valid."""
        if not isinstance(features, Features):
            features = read_features(features, self.features)
        if features.coding is None and self.coding is not None:
            features = replace(features, coding=self.coding)
        features.check(self.inputs, self.seed_id)
        description = DataDescription(self.inputs, features.names, features, self.classes)
        return Seeds(self.inputs, self._labels, self.seed_id, description, self.others)


def read_seeds(data: Any, max_seeds: int | None = None) -> Seeds:
    """Seeds from `(inputs, labels)`, a tensor of inputs, a map-style Dataset or a DataLoader over one, or a DataFrame.

    Inputs may be a dict or a tuple of arrays, for several inputs per example. A DataFrame has a label column, or is
    paired with the labels or with the name of that column.
    `max_seeds` takes a random sample, since files are often sorted by class; it is always the same for the same data.
    Small data is held in memory, larger data is read when it is needed.
    """
    if isinstance(data, Seeds):
        rows = _sample(len(data), max_seeds)
        return (data if rows is None else data[rows]).in_memory()
    if isinstance(data, str):
        raise DataError(
            f"data must be (inputs, labels), a tensor, a Dataset or a DataLoader over one, got the text {data!r}: load "
            "it first, or name it in the shell: themis run --data"
        )
    frame, labels = data if isinstance(data, tuple) and len(data) == 2 else (data, None)
    if is_frame(frame):
        return read_seeds(_from_frame(frame, labels), max_seeds)
    _refuse_lists(data)
    _refuse_text(data)
    if isinstance(frame, Mapping) and len(frame) == 1:  # one named input
        data = parts_of((frame, labels)) if isinstance(data, tuple) else parts_of(frame)[0]
    several = read_several(data)
    if several is not None:
        return read_seeds(_from_several(*several), max_seeds)
    inputs: Any
    dataset = _dataset_of(data)
    if type(dataset) is TensorDataset and len(dataset.tensors) <= 2:  # already in memory
        tensors = dataset.tensors
        inputs, labels = tensors[0], tensors[1] if len(tensors) > 1 else None
    elif isinstance(data, Tensor | np.ndarray):
        inputs, labels = data, None
    elif isinstance(data, tuple) and len(data) == 2 and hasattr(data[0], "shape"):
        inputs = data[0]
        if is_series(labels):
            labels, classes = number_labels(labels)
            return read_seeds(from_arrays(inputs, labels).with_classes(classes), max_seeds)
    else:
        return _from_dataset(dataset, data, max_seeds).in_memory()
    return read_seeds(from_arrays(inputs, labels), max_seeds)


def _from_several(entries: dict[str | int, Any], labels: Any) -> Seeds:
    """Seeds from several inputs per example."""
    inputs, others = separate(entries)
    seeds = from_arrays(inputs, labels).in_memory()
    seeds.others = others
    return seeds


def _from_frame(frame: Any, labels: Any) -> Seeds:
    """Seeds from a DataFrame; labels: the name of its label column, the labels themselves, or None."""
    values, own_labels, features = read_frame(frame, labels if isinstance(labels, str) else None)
    if labels is None or isinstance(labels, str):
        labels = own_labels
    elif own_labels is not None:
        raise DataError("labels must be given once, but the DataFrame has a label column too: drop the column")
    numbers, classes = (None, None) if labels is None else number_labels(labels)
    return from_arrays(values, numbers).with_classes(classes).with_features(features)


def from_arrays(inputs: Any, labels: Any = None, *, divisor: float = 1.0) -> Seeds:
    """Seeds from arrays or tensors, divided by `divisor`; the rows of a memory-mapped array are read when needed."""
    _refuse_text(inputs)
    values = inputs if isinstance(inputs, np.ndarray) else _tensor(inputs, "inputs")
    if isinstance(values, np.ndarray) and values.dtype.kind not in "biuf":
        raise DataError(f"inputs must be numbers, got an array of {values.dtype}: convert them first")
    seed_id = torch.arange(len(values) if values.ndim else 0)
    is_ready = values.dtype in (torch.float32, np.dtype(np.float32)) and divisor == 1
    is_held = is_ready or math.prod(values.shape) * 4 <= held_bytes()
    if values.ndim >= 2 and (isinstance(values, np.memmap) or not is_held):
        return from_reader(lambda k: scaled(as_array(values[k]), divisor), values.shape[1:], len(values), labels)
    if isinstance(values, Tensor):
        return _checked(values.float() if divisor == 1 else values.float() / divisor, labels, seed_id)
    held = np.require(scaled(values, divisor), requirements=["C", "W"])  # torch supports no other
    return _checked(torch.from_numpy(held), labels, seed_id)


def scaled(values: Numbers, divisor: float) -> Numbers:
    """Numbers as float32, divided by `divisor`."""
    with np.errstate(over="ignore"):  # an infinity is refused later, with the id of its seed
        if divisor == 1:
            return np.asarray(values, np.float32)
        return np.divide(values, np.float32(divisor), dtype=np.float32, casting="same_kind")


def from_reader(read: Read, shape: tuple[int, ...], n: int, labels: Any = None) -> Seeds:
    """Seeds from a function that reads the input at an index, `[...]` of the given shape."""
    index = torch.arange(n)
    return _checked(Rows(read, index, shape), labels, index)


def list_seeds(seeds: Seeds, is_listed: NDArray[np.bool_]) -> str:
    """The ids of some of the seeds for a message, the first few of them."""
    ids = seeds.seed_id.numpy()[is_listed]
    return f"seed{'s' * (len(ids) > 1)} {', '.join(map(str, ids[:N_LISTED]))}{', ...' * (len(ids) > N_LISTED)}"


def _refuse_text(inputs: Any) -> None:
    """Refuse text at once: strings, arrays and lists of them, and what a tokeniser returns."""
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


def _refuse_lists(data: Any) -> None:
    """Refuse inputs and labels in lists with one entry per example: a list of arrays is read as several inputs."""
    if not (isinstance(data, tuple | list) and len(data) == 2):
        return
    inputs, labels = data
    is_array = isinstance(inputs, Tensor | np.ndarray) and inputs.ndim > 1
    if is_array and isinstance(data, list) and _are_labels(labels, len(inputs)):
        raise DataError("data must be a tuple (inputs, labels), got a list of the two: write (inputs, labels)")
    if not (isinstance(inputs, tuple | list) and len(inputs) and _are_labels(labels, len(inputs))):
        return
    first, n = inputs[0], len(inputs)
    if isinstance(first, tuple | list) or (isinstance(first, Tensor | np.ndarray) and first.shape[:1] != (n,)):
        stack = "torch.stack" if isinstance(first, Tensor) else "np.stack"
        raise DataError(
            f"inputs must be one array with a row per example, got a {type(inputs).__name__} with an entry per "
            f"example: write ({stack}(inputs), labels)"
        )


def _are_labels(values: Any, n: int) -> bool:
    """Whether an object has a number or a name for each of `n` examples."""
    if isinstance(values, Tensor | np.ndarray):
        return values.shape == (n,)
    of_one = (int, float, str, np.generic, Tensor, np.ndarray)
    is_long = isinstance(values, tuple | list) and len(values) == n
    return is_long and all(isinstance(each, of_one) and not np.ndim(each) for each in values)


def _tensor(values: Any, subject: str) -> Tensor:
    try:
        if isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
            # Torch supports neither the other byte order nor read-only arrays.
            values = np.require(values, values.dtype.newbyteorder("="), ["C", "W"])
        tensor = torch.as_tensor(values).detach().to_dense()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{subject} must be numbers, got {type(values).__name__}: {error}") from error
    if tensor.is_complex():
        raise DataError(
            f"{subject} must be real numbers, got {tensor.dtype}: give the real and imaginary parts as channels"
        )
    return tensor


def _sample(n: int, max_seeds: int | None) -> Tensor | None:
    """Rows of at most `max_seeds` seeds, ascending; None for all. A larger sample contains the smaller ones."""
    if max_seeds is None or n <= max_seeds:
        return None
    rank = np.argsort(mix(np.arange(n)), kind="stable")
    return torch.from_numpy(np.sort(rank[:max_seeds]))


def _from_dataset(dataset: Any, data: Any, max_seeds: int | None) -> Seeds:
    """Seeds from the items of a data set, which are read when they are needed."""
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"data must be (inputs, labels), a tensor, a Dataset or a DataLoader over one, got {type(data).__name__}: "
            "the seeds of an iterable without length or index have no ids; collect it into tensors first"
        )
    if len(dataset) == 0:
        raise DataError("the data must hold at least one seed, got none: check the path and the split")
    rows = _sample(len(dataset), max_seeds)
    several = _several_of(dataset, 0 if rows is None else int(rows[0]))
    if several is not None:
        return several if rows is None else several[rows]
    items, index = _Items(dataset), torch.arange(len(dataset))
    first = items.read(0 if rows is None else int(rows[0]))
    _check_repeats(items, range(min(N_REPEATED, len(dataset))) if rows is None else rows[:N_REPEATED].tolist())
    inputs = Rows(items.read, index, tuple(first.shape))
    seeds = _checked(inputs, items.labels if items.has_labels else None, index).with_classes(_classes_of(dataset))
    return seeds if rows is None else seeds[rows]


def _several_of(dataset: Any, sample: int) -> Seeds | None:
    """Seeds from a data set whose items have several inputs, `(inputs, label)` with a dict or a tuple; None for others.

    The item `sample` tells which; then all are read at once.
    """
    try:
        first = dataset[sample]
    except Exception:  # whatever the user's data set raises is explained where its items are read
        return None
    if not has_several_inputs(parts_of(first)):
        return None
    items = [parts_of(dataset[k]) for k in range(len(dataset))]
    labels = [item[1] for item in items] if len(items[0]) > 1 else None
    seeds = _from_several(stack_items([item[0] for item in items]), labels)
    return seeds.with_classes(_classes_of(dataset))


def _check_repeats(items: _Items, indices: Iterable[int]) -> None:
    """Refuse a data set that gives another input each time, such as one with random augmentation."""
    for k in indices:
        first, second = (np.array(as_array(items.read(k))) for _ in range(2))
        if first.shape != second.shape or not np.array_equal(first, second, equal_nan=first.dtype.kind == "f"):
            raise DataError(
                f"the data must give the same input every time, but item {k} differs between two reads: switch off "
                "random augmentation, or collect the inputs into a tensor first"
            )


def _classes_of(dataset: Any) -> list[str] | None:
    """The class names of a data set that has them, as those of torchvision do; a subset has those of the full set."""
    if getattr(dataset, "target_transform", None) is not None:  # the numbers are no longer those of the names
        return None
    names = getattr(dataset, "classes", None)
    if names is None and hasattr(dataset, "dataset"):
        return _classes_of(dataset.dataset)
    if not isinstance(names, list | tuple):
        return None
    firsts = [name[0] if isinstance(name, tuple) and name else name for name in names]  # the first of several synonyms
    return firsts if all(isinstance(name, str) for name in firsts) else None


class _Items:
    """The items of a user's data set: reading the input of an item stores its label."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._labels: dict[int, Any] = {}

    @property
    def has_labels(self) -> bool:
        return bool(self._labels)

    def read(self, k: int) -> Tensor:
        item = self._item(k)
        _refuse_text(item[:1] if isinstance(item, tuple | list) else item)
        parts = parts_of(item)
        if len(parts) > 2 and isinstance(parts[2], int | float | np.generic | np.ndarray | Tensor):
            raise DataError(
                f"an item must be (input, label), or ((input, other), label) for a model with several inputs, got "
                f"{len(parts)} entries {_describe(item)}: return one of these, or pass ((inputs, others), labels)"
            )
        try:
            inputs = torch.as_tensor(parts[0])
            if len(parts) > 1:
                label = torch.as_tensor(parts[1])
                self._labels[k] = label.clone() if label.ndim else label.item()
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            raise DataError(
                f"a Dataset must give (input tensor, class number) or (input tensor, label tensor), got "
                f"{_describe(item)} ({error}): {_remedy(item)}"
            ) from error
        return inputs

    def labels(self, index: Tensor) -> Tensor:
        """The labels at some indices; reads the items that have not been read yet."""
        for k in index.tolist():
            if k not in self._labels:
                self.read(k)
                if k not in self._labels:
                    raise DataError(
                        f"all seeds must have a label if one has, but seed {k} has none: label it or drop it"
                    )
        values = [self._labels[k] for k in index.tolist()]
        shapes = {np.shape(value) for value in values}
        if len(shapes) > 1:
            raise DataError(
                f"all labels must have the same shape, got {sorted(shapes)[:3]}: reshape them in the data set"
            )
        return _label_tensor(torch.stack(values) if isinstance(values[0], Tensor) else torch.as_tensor(values))

    def _item(self, k: int) -> Any:
        try:
            return self._dataset[k]
        except Exception as error:  # whatever the user's data set raises
            raise DataError(
                f"the data set must give each of its {len(self._dataset)} items, but item {k} raised "
                f"{type(error).__name__}: {error}"
            ) from error


def _dataset_of(data: Any) -> Any:
    """The data set of a loader: a loader may shuffle, in its data set every seed has a fixed index."""
    if not isinstance(data, DataLoader):
        return data
    if data.batch_sampler is not None and not isinstance(data.sampler, SequentialSampler | RandomSampler):
        raise DataError(
            f"a DataLoader must iterate over its whole data set, got the sampler {type(data.sampler).__name__}: pass "
            "Subset(dataset, indices) instead"
        )
    return data.dataset


def _remedy(item: Any) -> str:
    if isinstance(item, Mapping):
        return f"return a pair of its entries instead of {', '.join(map(repr, item))} in a dict"
    if isinstance(item, tuple | list) and len(item) > 1 and isinstance(item[1], str):
        return "return the index of the class instead of its name"
    return "convert them in the data set, for instance with ToTensor()"


def _describe(item: Any) -> str:
    if isinstance(item, tuple | list):
        return f"({', '.join(type(part).__name__ for part in item)})"
    return type(item).__name__


def _label_tensor(labels: Tensor) -> Tensor:
    """Whole numbers as int64, others as float32; a column `[seeds, 1]` as `[seeds]`."""
    labels = labels.squeeze(1) if labels.ndim == 2 and labels.shape[1] == 1 else labels
    return labels.float() if labels.is_floating_point() else labels.long()


def _checked(inputs: Tensor | Rows, labels: Any, seed_id: Tensor) -> Seeds:
    if len(inputs.shape) < 2 or 0 in inputs.shape:
        raise DataError(
            f"the data must hold at least one seed and have the shape [seeds, ...], got shape {list(inputs.shape)}: "
            "check the path and the split"
        )
    if labels is not None and not callable(labels):
        has_rows = isinstance(labels, list | tuple) or (isinstance(labels, np.ndarray) and labels.ndim > 0)
        if has_rows and len(labels) and isinstance(labels[0], str):
            raise DataError(
                f"labels must be numbers, got text such as {str(labels[0])!r}: give each seed the index of its class, "
                "and name the classes with classes=[...] or --classes"
            )
        labels = _label_tensor(_tensor(labels, "labels"))
        if labels.ndim == 0 or len(labels) != len(inputs) or not labels.numel():
            raise DataError(
                f"labels must be one per seed: {len(inputs)} inputs, got labels of shape {list(labels.shape)}: check "
                "the number of labels"
            )
    if isinstance(inputs, Tensor) and not all(bool(extreme.isfinite()) for extreme in inputs.aminmax()):
        bad = int((~inputs.flatten(1).isfinite().all(1)).nonzero()[0])
        raise DataError(f"inputs must be finite, but seed {int(seed_id[bad])} has a NaN or an infinity: fix or drop it")
    return Seeds(inputs, labels, seed_id.long())
