"""Examples of several inputs, such as a picture and its metadata, one of which is perturbed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from themis.data.features import LABEL_NAMES
from themis.errors import DataError, UsageError

Key = str | int
"""The name of an input, or its position."""
LABEL_ENTRIES = (*LABEL_NAMES, "labels", "targets")
"""Entries of a dict that hold the labels, in capital or small letters."""


@dataclass(frozen=True)
class OtherInputs:
    """The inputs of each example beside the perturbed one, `[seeds, ...]` each; they are passed on as they are."""

    keys: tuple[Key, ...]
    """All inputs in the order of the data, the perturbed one included."""
    perturbed: Key
    tensors: dict[Key, Tensor]

    def part(self, rows: Any) -> OtherInputs:
        """Those of some of the seeds."""
        return OtherInputs(self.keys, self.perturbed, {key: tensor[rows] for key, tensor in self.tensors.items()})

    def to(self, device: torch.device) -> OtherInputs:
        """The same, on a device."""
        return OtherInputs(self.keys, self.perturbed, {key: tensor.to(device) for key, tensor in self.tensors.items()})

    def describe(self) -> str:
        """Which input is perturbed, in words."""
        others = ", ".join(repr(key) for key in self.keys if key != self.perturbed)
        return f"input {self.perturbed!r} is perturbed, and {others} passed on unchanged"

    def find(self, key: Key) -> Key:
        """The input that a user names; a position may be written as text."""
        found = int(key) if isinstance(key, str) and key.isdecimal() and int(key) in self.keys else key
        if found not in self.keys:
            listed = ", ".join(map(repr, self.keys))
            raise UsageError(f"perturbed must name an input of the data, which has {listed}, got {key!r}")
        return found


def read_several(data: Any) -> tuple[dict[Key, Any], Any] | None:
    """The inputs by name or position and the labels of data with several inputs per example; None for other data.

    Such data is a dict of arrays, or a tuple of a dict or tuple of arrays and the labels.
    """
    inputs, labels = data if isinstance(data, tuple) and len(data) == 2 else (data, None)
    if isinstance(inputs, Mapping):
        _refuse_label_entry(inputs)
        entries: dict[Key, Any] = dict(inputs)
    elif isinstance(data, tuple) and len(data) == 2 and isinstance(inputs, tuple | list):
        entries = dict(enumerate(inputs))
    else:
        return None
    return (entries, labels) if has_several(entries) and any(map(_is_perturbable, entries.values())) else None


def _refuse_label_entry(inputs: Mapping[Key, Any]) -> None:
    """Refuse a dict that holds the labels as well: its entries are inputs, which are all passed to the model."""
    for key in inputs:
        if str(key).lower() in LABEL_ENTRIES:
            raise DataError(
                f"a dict must hold the inputs of a model that takes several, got the entry {key!r}: pass the labels "
                f"apart, as (inputs, data[{key!r}])"
            )


def parts_of(item: Any) -> tuple[Any, ...]:
    """An item of a data set, or data, as `(input, label)` or `(input,)`, if it is a dict or contains one.

    The entries of a dict are known by their names: one may be the label, and a single other one is the input itself.
    """
    parts = tuple(item) if isinstance(item, tuple | list) else (item,)
    if isinstance(item, Mapping):
        named = [key for key in item if str(key).lower() in LABEL_ENTRIES]
        if len(named) <= 1 < len(item):
            parts = ({key: value for key, value in item.items() if key not in named}, *(item[key] for key in named))
    if parts and isinstance(parts[0], Mapping) and len(parts[0]) == 1:
        parts = (*parts[0].values(), *parts[1:])
    return parts


def has_several(inputs: Any) -> bool:
    """Whether an object is a dict or a tuple of several arrays."""
    values = list(inputs.values()) if isinstance(inputs, Mapping) else inputs
    if not isinstance(values, tuple | list) or len(values) < 2:
        return False
    return all(isinstance(value, Tensor | np.ndarray) for value in values) and any(value.ndim for value in values)


def has_several_inputs(parts: tuple[Any, ...]) -> bool:
    """Whether an item `(input, label)` or `(input,)` has several inputs, one of which can be perturbed."""
    is_item = len(parts) == 2 or (len(parts) == 1 and isinstance(parts[0], Mapping))
    if not is_item or not has_several(parts[0]):
        return False
    values = parts[0].values() if isinstance(parts[0], Mapping) else parts[0]
    return any(_is_perturbable(value[None]) for value in values)


def separate(entries: dict[Key, Any]) -> tuple[Any, OtherInputs]:
    """The input to perturb, by default the first of floating-point numbers, and the others."""
    perturbed = next(key for key, value in entries.items() if _is_perturbable(value))
    lengths = {key: len(value) for key, value in entries.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"all inputs must have one row per example, got {lengths}: check their first dimension")
    others = {key: torch.as_tensor(value) for key, value in entries.items() if key != perturbed}
    return entries[perturbed], OtherInputs(tuple(entries), perturbed, others)


def stack_items(items: Sequence[Any]) -> dict[Key, Any]:
    """The inputs of all examples of a data set, by name or position; each item is a dict or a tuple."""
    first = items[0]
    keys: Sequence[Key] = list(first) if isinstance(first, Mapping) else range(len(first))
    try:
        return {key: torch.stack([torch.as_tensor(item[key]) for item in items]) for key in keys}
    except (RuntimeError, TypeError, ValueError, KeyError, IndexError) as error:
        raise DataError(
            f"all examples must have the same inputs, of the same shapes, as the first, which has {list(keys)}: {error}"
        ) from error


def _is_perturbable(values: Any) -> bool:
    kind = values.is_floating_point() if isinstance(values, Tensor) else values.dtype.kind == "f"
    return bool(kind) and values.ndim > 1
