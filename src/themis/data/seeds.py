"""Seeds: the clean inputs of a campaign, with their ids and labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from themis.compute.rng import mix
from themis.data.features import Coding, Features, are_names, is_frame, number_labels, read_features, read_frame
from themis.data.files import Numbers, check_memory
from themis.data.items import (
    Items,
    OtherInputs,
    check_repeats,
    classes_of,
    dataset_of,
    entries_of,
    is_perturbable,
    label_tensor,
    parts_of,
    read_several_items,
    refuse_text,
    separate,
)
from themis.data.maite import MaiteDatums, is_maite_dataset, read_maite
from themis.data.rows import Read, Rows, as_array, held_bytes
from themis.errors import DataError, UsageError

LISTED_SEEDS = 5
"""Seeds that a message lists."""
BYTES_PER_SEED = 64
"""Memory per seed, in addition to its input, for listing seeds and drawing a sample."""
NO_SEEDS = "the data must hold at least one seed, got none: check the path and the split"

Labels = Tensor | Callable[[Tensor], Tensor]
"""Labels `[seeds, ...]`, or a function that reads those at given indices of the data."""


@dataclass(frozen=True, eq=False, repr=False)
class Seeds:
    """Clean inputs `[seeds, ...]` (float32), labels `[seeds, ...]` or None, and each seed's index in the data.

    The inputs are a tensor, or `Rows` that are read when needed; both are indexed in the same way. The labels are in
    memory, unless they come with the items of a data set, which are then read to access them.
    """

    inputs: Tensor | Rows
    given_labels: Labels | None
    seed_id: Tensor
    given_features: Features | InferredFeatures | None = None
    classes: tuple[str, ...] | None = None
    """The names of the classes by number."""
    others: OtherInputs | None = None
    """The inputs besides the perturbed one, if there are several per example."""
    datums: MaiteDatums | None = None
    """Further facts about the inputs of a MAITE data set."""

    def __post_init__(self) -> None:
        if self.given_features is None and len(self.inputs.shape) == 2:  # only for tables, to free other inputs
            object.__setattr__(self, "given_features", InferredFeatures(self.inputs))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: Any) -> Seeds:
        return replace(
            self,
            inputs=self.inputs.part(rows) if isinstance(self.inputs, Rows) else self.inputs[rows],
            given_labels=self.given_labels[rows] if isinstance(self.given_labels, Tensor) else self.given_labels,
            seed_id=self.seed_id[rows].reshape(-1),
            others=None if self.others is None else self.others.part(rows),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """`[seeds, ...]`."""
        return tuple(self.inputs.shape)

    @property
    def has_labels(self) -> bool:
        return self.given_labels is not None

    @cached_property
    def labels(self) -> Tensor | None:
        return self.given_labels(self.seed_id) if callable(self.given_labels) else self.given_labels

    def take(self, rows: Tensor) -> Tensor:
        """The inputs of the seeds in some rows, `[rows, ...]`."""
        return self.inputs[rows]

    def in_memory(self) -> Seeds:
        """The same seeds with their inputs in memory, if they fit."""
        if isinstance(self.inputs, Tensor):
            return self
        inputs, features = self.inputs.in_memory(), self.given_features
        if isinstance(features, InferredFeatures) and features.inputs is self.inputs:  # avoids reading them again
            features = InferredFeatures(inputs, features.names)
        return replace(self, inputs=inputs, given_features=features)

    @property
    def features(self) -> Features:
        """The features of a table, as given or inferred from all rows of the data."""
        if isinstance(self.given_features, InferredFeatures):
            return self.given_features.features
        return self.given_features or Features.of(self.inputs)  # raises an error, because this is not a table

    @property
    def coding(self) -> Coding | None:
        """How to convert rows to those of a DataFrame, if the data is one with names, missing values or booleans."""
        return self.given_features.coding if isinstance(self.given_features, Features) else None

    def with_labels(self, labels: Tensor) -> Seeds:
        """The same seeds with other labels."""
        return replace(self, given_labels=labels)

    def with_channels_first(self) -> Seeds:
        """The same seeds with inputs `[channels, height, width]` instead of `[height, width, channels]`."""
        inputs = self.inputs
        moved = inputs.with_channels_first() if isinstance(inputs, Rows) else inputs.movedim(-1, 1).contiguous()
        return replace(self, inputs=moved, given_features=None)

    def perturbing(self, key: str | int) -> Seeds:
        """The same seeds, with another of several inputs per example to perturb."""
        others = self.others
        if others is None or key == others.perturbed:
            return self
        tensors = {**others.tensors, others.perturbed: self.inputs[:]}
        seeds = _checked(tensors.pop(key).float(), self.given_labels, self.seed_id)
        return replace(seeds, classes=self.classes, others=OtherInputs(others.keys, key, tensors))

    def with_feature_names(self, names: Sequence[str]) -> Seeds:
        """The same seeds with names for the columns of a table."""
        return replace(self, given_features=InferredFeatures(self.inputs, tuple(names)))

    def with_classes(self, classes: Sequence[str] | None) -> Seeds:
        """The same seeds with names for the classes, if any are given."""
        if classes is None:
            return self
        names = tuple(classes)
        if isinstance(classes, str) or not all(isinstance(name, str) for name in names):
            raise UsageError(f"classes must be names in the order of their numbers, got {classes!r}: give a list")
        return replace(self, classes=names or None)

    def with_features(self, features: Features | str | Path) -> Seeds:
        """The same seeds with other features, which may be described in a CSV file; all seeds must be valid."""
        if not isinstance(features, Features):
            features = read_features(features, self.features)
        if features.coding is None and self.coding is not None:
            features = replace(features, coding=self.coding)
        features.check(self.inputs, self.seed_id)
        return replace(self, given_features=features)


class InferredFeatures:
    """The features of a table, inferred from all its rows on first use, and shared by all parts of the data."""

    def __init__(self, inputs: Tensor | Rows, names: Sequence[str] | None = None) -> None:
        self.inputs: Tensor | Rows | None = inputs
        self.names = names

    @cached_property
    def features(self) -> Features:
        features, self.inputs = Features.of(self.inputs, self.names), None
        return features


def read_seeds(data: Any, max_seeds: int | None = None) -> Seeds:
    """Seeds from `(inputs, labels)`, a tensor of inputs, a map-style Dataset or a DataLoader over one, or a DataFrame.

    For several inputs per example, inputs are a dict or a tuple of arrays; an entry of a dict may be the labels. A
    DataFrame has a label column, or is paired with the labels or with the name of that column. Labels that are names
    become class numbers, in sorted order.
    `max_seeds` takes a random sample, since files are often sorted by class; it is always the same for the same data.
    Small data is held in memory, larger data is read when needed.
    """
    if isinstance(data, Seeds):
        rows = _sample(len(data), max_seeds)
        return (data if rows is None else data[rows]).in_memory()
    if is_maite_dataset(dataset := dataset_of(data)):
        return read_seeds(_from_maite(dataset), max_seeds)
    if isinstance(data, str):
        raise DataError(
            f"data must be (inputs, labels), a tensor, a Dataset or a DataLoader over one, got the text {data!r}: load "
            "it first, or name it in the shell: themis run --data"
        )
    is_pair = isinstance(data, tuple) and len(data) == 2
    inputs, labels = data if is_pair else (data, None)
    if is_frame(inputs):
        return read_seeds(_from_frame(inputs, labels), max_seeds)
    _refuse_lists(data)
    refuse_text(data)
    if isinstance(inputs, Mapping):
        (inputs, labels), is_pair = (*parts_of(data), None)[:2], True
    entries = entries_of(inputs) if is_pair else {}
    if any(map(is_perturbable, entries.values())):
        return read_seeds(_from_several(entries, labels), max_seeds)
    if type(dataset) is TensorDataset and len(dataset.tensors) <= 2:  # already in memory
        inputs, labels = (*dataset.tensors, None)[:2]
    elif not (isinstance(inputs, Tensor | np.ndarray) or (is_pair and hasattr(inputs, "shape"))):
        return _from_dataset(dataset, data, max_seeds).in_memory()
    return read_seeds(from_arrays(inputs, labels), max_seeds)


def _from_maite(dataset: Any) -> Seeds:
    data = read_maite(dataset)
    seeds = from_reader(data.read, data.shape, len(dataset), data.labels)
    return replace(seeds, classes=data.classes, datums=data.datums)


def _from_several(entries: dict[str | int, Any], labels: Any) -> Seeds:
    """Seeds from several inputs per example."""
    inputs, others = separate(entries)
    return replace(from_arrays(inputs, labels).in_memory(), others=others)


def _from_frame(frame: Any, labels: Any) -> Seeds:
    """Seeds from a DataFrame; labels: the name of its label column, the labels themselves, or None."""
    values, own_labels, features = read_frame(frame, labels if isinstance(labels, str) else None)
    if labels is None or isinstance(labels, str):
        labels = own_labels
    elif own_labels is not None:
        raise DataError("labels must be given once, but the DataFrame has a label column too: drop the column")
    return from_arrays(values, labels).with_features(features)


def from_arrays(inputs: Any, labels: Any = None, *, divisor: float = 1.0) -> Seeds:
    """Seeds from arrays or tensors, divided by `divisor`; the rows of a memory-mapped array are read when needed."""
    refuse_text(inputs)
    values = inputs if isinstance(inputs, np.ndarray) else _tensor(inputs, "inputs")
    if isinstance(values, np.ndarray) and values.dtype.kind not in "biuf":
        raise DataError(f"inputs must be numbers, got an array of {values.dtype}: convert them first")
    is_ready = values.dtype in (torch.float32, np.dtype(np.float32)) and divisor == 1
    is_held = is_ready or math.prod(values.shape) * 4 <= held_bytes()
    if values.ndim >= 2 and (isinstance(values, np.memmap) or not is_held):
        return from_reader(lambda k: scaled(as_array(values[k]), divisor), values.shape[1:], len(values), labels)
    seed_id = torch.arange(len(values) if values.ndim else 0)
    if isinstance(values, Tensor):
        return _checked(values.float() if divisor == 1 else values.float() / divisor, labels, seed_id)
    held = np.require(scaled(values, divisor), requirements=["C", "W"])  # torch supports no other arrays
    return _checked(torch.from_numpy(held), labels, seed_id)


def scaled(values: Numbers, divisor: float) -> Numbers:
    """Numbers as float32, divided by `divisor`."""
    with np.errstate(over="ignore"):  # an infinity is refused later, with the id of its seed
        if divisor == 1:
            return np.asarray(values, np.float32)
        return np.divide(values, np.float32(divisor), dtype=np.float32, casting="same_kind")


def from_reader(read: Read, shape: tuple[int, ...], n: int, labels: Any = None) -> Seeds:
    """Seeds from a function that reads the input at an index, `[...]` of the given shape."""
    check_memory(BYTES_PER_SEED * n, f"the list of {n:,} seeds")
    index = torch.arange(n)
    return _checked(Rows(read, index, shape), labels, index)


def from_files(files: Sequence[Any], read: Callable[[Any], Numbers], labels: Any, remedy: str) -> Seeds:
    """Seeds that `read` reads from files; `remedy`: what to do if their shapes differ."""
    if not len(files):
        raise DataError(NO_SEEDS)
    shape = read(files[0]).shape

    def read_same(k: int) -> Numbers:
        values = read(files[k])
        if values.shape != shape:
            raise DataError(
                f"all inputs must have the same shape, but {files[k]} is {list(values.shape)} and the first is "
                f"{list(shape)}: {remedy}"
            )
        return values

    return from_reader(read_same, shape, len(files), labels)


def list_seeds(seeds: Seeds, is_listed: NDArray[np.bool_]) -> str:
    """The ids of the first few of the selected seeds, for a message."""
    ids = seeds.seed_id.numpy()[is_listed]
    return f"seed{'s' * (len(ids) > 1)} {', '.join(map(str, ids[:LISTED_SEEDS]))}{', ...' * (len(ids) > LISTED_SEEDS)}"


def _refuse_lists(data: Any) -> None:
    """Refuse a list with one entry per example, because a list of arrays means several inputs per example."""
    if not (isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[0], tuple | list) and data[0]):
        return
    inputs, labels = data
    n, shape = len(inputs), getattr(inputs[0], "shape", np.shape(inputs[0]))
    has_labels = isinstance(labels, tuple | list) or getattr(labels, "shape", ()) == (n,)
    if has_labels and len(labels) == n and not any(map(np.ndim, labels)) and shape and shape[:1] != (n,):
        raise DataError(
            f"inputs must be one array with a row per example, got a {type(inputs).__name__} with an entry per "
            "example: write (torch.stack(inputs), labels)"
        )


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
    """The ascending rows of a sample of `max_seeds` seeds; None for all. Larger samples contain smaller ones."""
    if max_seeds is None or n <= max_seeds:
        return None
    rank = np.argsort(mix(np.arange(n)), kind="stable")
    return torch.from_numpy(np.sort(rank[:max_seeds]))


def _from_dataset(dataset: Any, data: Any, max_seeds: int | None) -> Seeds:
    """Seeds from the items of a data set, which are read when needed."""
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"data must be (inputs, labels), a tensor, a Dataset or a DataLoader over one, got {type(data).__name__}: "
            "the seeds of an iterable without length or index have no ids; collect it into tensors first"
        )
    if len(dataset) == 0:
        raise DataError(NO_SEEDS)
    rows = _sample(len(dataset), max_seeds)
    sample = 0 if rows is None else int(rows[0])
    several = read_several_items(dataset, sample)
    if several is not None:
        seeds = _from_several(*several).with_classes(classes_of(dataset))
        return seeds if rows is None else seeds[rows]
    items, index = Items(dataset), torch.arange(len(dataset))
    first = items.read(sample)
    check_repeats(items, range(len(dataset)) if rows is None else rows.tolist())
    inputs = Rows(items.read, index, tuple(first.shape))
    seeds = _checked(inputs, items.labels if items.has_labels else None, index).with_classes(classes_of(dataset))
    return seeds if rows is None else seeds[rows]


def _checked(inputs: Tensor | Rows, labels: Any, seed_id: Tensor) -> Seeds:
    classes = None
    if len(inputs.shape) < 2 or 0 in inputs.shape:
        raise DataError(
            f"the data must hold at least one seed and have the shape [seeds, ...], got shape {list(inputs.shape)}: "
            "check the path and the split"
        )
    if labels is not None and not callable(labels):
        if are_names(labels):
            labels, classes = number_labels(labels)
        labels = label_tensor(_tensor(labels, "labels"))
        if labels.ndim == 0 or len(labels) != len(inputs) or not labels.numel():
            raise DataError(f"labels must be one per seed: {len(inputs)} inputs, got shape {list(labels.shape)}")
    if isinstance(inputs, Tensor) and not all(bool(extreme.isfinite()) for extreme in inputs.aminmax()):
        bad = int((~inputs.flatten(1).isfinite().all(1)).nonzero()[0])
        raise DataError(f"inputs must be finite, but seed {int(seed_id[bad])} has a NaN or an infinity: fix or drop it")
    return Seeds(inputs, labels, seed_id.long()).with_classes(classes)


def class_numbers(labels: Tensor | None, n: int) -> NDArray[np.int64]:
    """Each seed's label if it is a class number, else -1."""
    if labels is None or labels.ndim != 1:
        return np.full(n, -1)
    is_class = (labels >= 0) & (labels == labels.round())
    return torch.where(is_class, labels, -1).long().numpy()
