"""Adapting a model and its data to each other: the bounds of a table, the order of classes, and of channels."""

import math
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from typing import Any

import torch

from themis.data.features import Coding
from themis.data.maite import picture_bounds
from themis.data.seeds import Seeds
from themis.errors import DataError, UsageError
from themis.target.against import Against
from themis.target.blackbox import BlackBox
from themis.target.estimator import Estimator, FileModel, MaiteModel
from themis.target.target import UNBOUNDED, AnyTarget, Target
from themis.target.traits import has_channels_last

MAX_LISTED_CLASSES = 10


def align_seeds(target: AnyTarget, seeds: Seeds) -> Seeds:
    """Convert seeds to what the target expects: channels first, and labels in the order of its classes."""
    seeds = _perturbing(target, seeds)
    if getattr(target, "channels", "first") == "last":
        expected = getattr(getattr(target, "module", None), "input_shape", None)
        seeds = seeds.with_channels_first() if has_channels_last(seeds.shape[1:], expected) else seeds
    classes: tuple[str, ...] | None = getattr(target, "classes", None)
    if classes is None or not seeds.has_labels:
        return seeds
    if seeds.classes is None and isinstance(getattr(target, "predict", None), MaiteModel):
        # The labels of data for a MAITE model are numbers already, which its class names only describe.
        return seeds.with_classes(classes)
    return _in_class_order(seeds, classes)


def align_target(target: AnyTarget, seeds: Seeds) -> AnyTarget:
    """The target with the bounds of the data, unless it has its own, and with the coding of the data's rows."""
    target = with_datums(coded(target, seeds.coding), lambda: seeds)
    return target if target.bounds != UNBOUNDED else bound(target, _bounds_of(seeds))


def with_datums(target: AnyTarget, read: Callable[[], Seeds]) -> AnyTarget:
    """The target, whose MAITE model, if it is one, gets pictures of the same type as in the data."""
    if isinstance(target, Against):
        return target.each(lambda each: with_datums(each, read))
    if not isinstance(target, BlackBox) or not isinstance(target.predict, MaiteModel):
        return target
    return replace(target, predict=MaiteModel(target.predict.model, read().datums))


def coded(target: AnyTarget, coding: Coding | None) -> AnyTarget:
    """The target, which gets DataFrames if the data is a DataFrame with names or missing values."""
    if coding is None:
        return target
    if isinstance(target, Against):
        return target.each(lambda each: coded(each, coding))
    column = coding.odd_column
    if not isinstance(target, BlackBox) or isinstance(target.predict, FileModel):
        if column is None:
            return target
        holds = "missing values" if column.values is None else f"names such as {column.values[0]!r}"
        raise DataError(
            f"column {column.name!r} must be numbers for a model that takes tensors, but it holds {holds}: name it if "
            "it is the label, encode or fill it, or test a function of a DataFrame as themis.BlackBox(function)"
        )
    has_names = isinstance(target.predict, Estimator) and target.predict.names is not None
    return replace(target, coding=coding) if column is not None or has_names else target


def bound(target: AnyTarget, bounds: tuple[float, float]) -> AnyTarget:
    """The target with these bounds, unless it has its own."""
    if isinstance(target, Against):
        return target.each(lambda each: bound(each, bounds))
    if target.bounds != UNBOUNDED:
        return target
    if not is_dataclass(target):
        raise UsageError(f"the bounds of {type(target).__name__} must be finite, got {target.bounds}: set them there")
    return replace(target, bounds=bounds)  # type: ignore[type-var, unused-ignore]


def _perturbing(target: AnyTarget, seeds: Seeds) -> Seeds:
    """The seeds with the input to perturb that the target names, if there are several per example."""
    key: str | int | None = getattr(target, "perturbed", None)
    if seeds.others is None:
        if key is not None:
            raise UsageError(f"perturbed names one of several inputs, but the data has one, got {key!r}: leave it out")
        return seeds
    takes_one = isinstance(target, BlackBox) and isinstance(target.predict, Estimator | FileModel)
    if takes_one or not isinstance(target, Target | BlackBox):
        model = target.predict if isinstance(target, BlackBox) else target
        raise UsageError(
            f"several inputs per example need an nn.Module or a function, got {type(model).__name__}, which takes one: "
            "test a function that takes them and calls it, as themis.BlackBox(function)"
        )
    return seeds if key is None else seeds.perturbing(seeds.others.find(key))


def _bounds_of(seeds: Seeds) -> tuple[float, float]:
    """The smallest and largest valid value of the features of a table, or of the pictures of a MAITE data set."""
    if seeds.datums is not None:
        return picture_bounds(seeds.datums.dtype)
    if len(seeds.shape) != 2:
        raise UsageError(
            f"bounds must be given for inputs of shape {list(seeds.shape[1:])}, which are no table: pass the range of "
            "a raw input, such as bounds=(0, 1)"
        )
    features = seeds.features
    ends = torch.stack([features.place(features.low.double()), features.place(features.high.double())])
    low, high = float(ends.min()), float(ends.max())
    return (low, high) if low < high else (low, low + 1)


def _in_class_order(seeds: Seeds, classes: tuple[str, ...]) -> Seeds:
    """The same seeds with labels numbered in the order of `classes`, which are names, or numbers as text."""
    labels = seeds.labels
    if labels is not None and labels.ndim == 3 and seeds.classes is not None:
        _check_numbering(seeds.classes, classes)
    if labels is None or labels.ndim != 1:
        return seeds
    names = [_name(value, seeds.classes) for value in labels.tolist()]
    numbers = {name: k for k, name in enumerate(classes)}
    unknown = sorted(set(names) - set(numbers))
    if unknown:
        raise DataError(
            f"labels must be classes that the model was trained on, {_listed(classes)}, got {_listed(unknown)}: name "
            "the column with the labels that it was trained on, or number them as they were then"
        )
    is_numbered = all(name == str(k) for k, name in enumerate(classes))
    numbered = seeds.with_labels(torch.tensor([numbers[name] for name in names]))
    return numbered if is_numbered and seeds.classes is None else numbered.with_classes(classes)


def _check_numbering(of_data: tuple[str, ...], of_model: tuple[str, ...]) -> None:
    """Refuse boxes whose classes are numbered differently than those of the model."""
    for k, (in_data, in_model) in enumerate(zip(of_data, of_model, strict=False)):
        if in_data != in_model:
            raise DataError(
                f"classes must have the same numbers in the data and in the model, but {k} is {in_data!r} in the data "
                f"and {in_model!r} in the model: number the labels of the data as the model does"
            )


def _name(value: Any, names: tuple[str, ...] | None) -> str:
    if names is not None:
        return names[int(value)]
    is_whole = isinstance(value, float) and math.isfinite(value) and value == int(value)
    return str(int(value) if is_whole else value)


def _listed(names: Any) -> str:
    names = list(names)
    return ", ".join(map(repr, names[:MAX_LISTED_CLASSES])) + ", ..." * (len(names) > MAX_LISTED_CLASSES)
