"""Seeds: the clean inputs a campaign starts from, with their identity and labels."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from themis.errors import DataError
from themis.rng import mix


@dataclass(frozen=True)
class Seeds:
    """Clean inputs `[seeds, ...]` (float32), labels `[seeds]` or None, and each seed's index in the data."""

    inputs: Tensor
    labels: Tensor | None
    seed_id: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: Tensor) -> Seeds:
        labels = None if self.labels is None else self.labels[rows]
        return Seeds(self.inputs[rows], labels, self.seed_id[rows])


def read_seeds(data: Any, max_seeds: int | None = None) -> Seeds:
    """Seeds from `(inputs, labels)`, a tensor of inputs, a map-style Dataset or a DataLoader over one.

    `max_seeds` takes a random sample, always the same for the same data: files are often sorted by class.
    """
    if isinstance(data, Seeds):
        rows = _sample(len(data), max_seeds)
        return data if rows is None else data[rows]
    if isinstance(data, Tensor | np.ndarray):
        inputs, labels = _tensor(data, "inputs"), None
    elif isinstance(data, tuple) and len(data) == 2 and hasattr(data[0], "shape"):
        inputs, labels = _tensor(data[0], "inputs"), None if data[1] is None else _tensor(data[1], "labels")
    else:
        return _checked(*_stack(data, max_seeds))
    seeds = _checked(inputs, labels, torch.arange(len(inputs)))
    return read_seeds(seeds, max_seeds)


def _tensor(values: Any, what: str) -> Tensor:
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what} must be numbers, got {type(values).__name__}: {error}") from error


def _sample(n: int, max_seeds: int | None) -> Tensor | None:
    """Rows of at most `max_seeds` seeds, ascending; None for all. A smaller sample is part of a larger one."""
    if max_seeds is None or n <= max_seeds:
        return None
    rank = np.argsort(mix(np.arange(n)), kind="stable")
    return torch.from_numpy(np.sort(rank[:max_seeds]))


def _stack(data: Any, max_seeds: int | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Inputs, labels and indices of a data set."""
    dataset = _dataset_of(data)
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"data must be (inputs, labels), a tensor, a Dataset or a DataLoader over one, got {type(data).__name__}: "
            "an iterable without length or index cannot name its seeds; collect it into tensors first"
        )
    if len(dataset) == 0:
        raise DataError("the data must hold at least one seed, got none: check the path and the split")
    rows = _sample(len(dataset), max_seeds)
    rows = torch.arange(len(dataset)) if rows is None else rows
    items = [_item(dataset, k) for k in rows.tolist()]
    has_labels = isinstance(items[0], tuple | list) and len(items[0]) > 1
    try:
        pictures = [torch.as_tensor(each[0] if isinstance(each, tuple | list) else each) for each in items]
        labels = torch.as_tensor([int(each[1]) for each in items]) if has_labels else None
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"a Dataset must give (input tensor, class number), got {_describe(items[0])} ({error}): convert them in "
            "the data set, with ToTensor() or argmax()"
        ) from error
    shapes = {tuple(each.shape) for each in pictures}
    if len(shapes) > 1:
        raise DataError(f"all inputs must have one shape, got {sorted(shapes)[:3]}: resize them in the data set")
    return torch.stack(pictures), labels, rows


def _item(dataset: Any, k: int) -> Any:
    try:
        return dataset[k]
    except Exception as error:  # whatever the user's data set does
        raise DataError(
            f"the data set must give each of its {len(dataset)} items, item {k} raised {type(error).__name__}: {error}"
        ) from error


def _dataset_of(data: Any) -> Any:
    """The data set of a loader: a loader may shuffle, its data set gives each seed a lasting index."""
    if not isinstance(data, DataLoader):
        return data
    if data.batch_sampler is not None and not isinstance(data.sampler, SequentialSampler | RandomSampler):
        raise DataError(
            f"a DataLoader must go over its whole data set, got the sampler {type(data.sampler).__name__}: pass "
            "Subset(dataset, indices) instead"
        )
    return data.dataset


def _describe(item: Any) -> str:
    if isinstance(item, tuple | list):
        return f"({', '.join(type(each).__name__ for each in item)})"
    return type(item).__name__


def _checked(inputs: Tensor, labels: Tensor | None, seed_id: Tensor) -> Seeds:
    if inputs.ndim < 2 or len(inputs) == 0:
        raise DataError(
            f"the data must hold at least one seed, as [seeds, ...], got shape {list(inputs.shape)}: "
            "check the path and the split"
        )
    if labels is not None:
        if labels.shape != inputs.shape[:1]:
            raise DataError(
                f"labels must be one a seed: {len(inputs)} inputs, got labels of shape {list(labels.shape)}: "
                "give class numbers, not one-hot rows"
            )
        if labels.is_floating_point() and not bool((labels == labels.round()).all()):
            raise DataError(f"labels must be class numbers, got {labels[labels != labels.round()][0].item()}")
        labels = labels.long()
    inputs = inputs.float()
    if not bool(inputs.isfinite().all()):
        bad = int((~inputs.flatten(1).isfinite().all(1)).nonzero()[0])
        raise DataError(f"inputs must be finite, seed {int(seed_id[bad])} has a NaN or an infinity: mend or drop it")
    return Seeds(inputs, labels, seed_id.long())
