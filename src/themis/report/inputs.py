"""The inputs of faults as a report shows them: pictures, or the features that changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from themis.runs.display.fault import (
    MAX_SIDE,
    MAX_SIDE_WITH_BOXES,
    curves,
    data_uri,
    is_clip,
    is_picture,
    is_signal,
    side_by_side,
    stored_boxes,
    to_pixels,
    with_boxes,
)

if TYPE_CHECKING:
    from torch import Tensor

    from themis.runs.store.reader import Reader
    from themis.runs.store.tensors import Tensors

MAX_PICTURE_BYTES = 4 << 20
"""Of all pictures together; those of the most telling faults come first."""
STRIP_SIDE = 4 * MAX_SIDE
"""Pixels of the longer side of the frames of a clip, side by side."""
MAX_CHANGES = 24
"""Features listed per fault, those that changed most."""
INPUTS_PER_READ = 250
"""Faults whose inputs are read at once."""


@dataclass(frozen=True)
class FeatureChanges:
    """How many features of an input changed, and those that changed most as (name, before, after)."""

    n: int
    of: int
    rows: list[tuple[str, float | str, float | str]]


@dataclass(frozen=True)
class ShownInputs:
    """Pictures as data URIs by seed id and by fault id, or the changed features by fault id.

    The picture of a disturbed signal shows the clean one too.
    """

    kind: str = "none"
    """pictures, clips, signals, features or none."""
    shape: tuple[int, ...] | None = None
    clean: dict[int, str] = field(default_factory=dict)
    disturbed: dict[int, str] = field(default_factory=dict)
    changes: dict[int, FeatureChanges] = field(default_factory=dict)


def read_inputs(
    run: Reader, ids: Sequence[int], seed_ids: Sequence[int], max_faults: int, names: Sequence[str] | None
) -> ShownInputs:
    """The stored inputs of the first `max_faults` of the faults. `names` are the names of the features."""
    kind, shape, size = "none", None, 0
    clean: dict[int, str] = {}
    disturbed: dict[int, str] = {}
    changes: dict[int, FeatureChanges] = {}
    for first in range(0, min(len(ids), max_faults), INPUTS_PER_READ):
        batch = slice(first, min(first + INPUTS_PER_READ, max_faults))
        stored = run.tensors(ids[batch])
        for id, seed_id in zip(ids[batch], seed_ids[batch], strict=True):
            if id not in stored:
                continue
            tensors = stored[id]
            shape = tuple(tensors.inputs.shape[1:])
            if is_signal(shape):
                kind, disturbed[id] = "signals", data_uri(curves(tensors.clean_inputs[0], tensors.inputs[0]))
                size += len(disturbed[id])
                if size > MAX_PICTURE_BYTES:
                    break
                continue
            if not is_picture(shape) and not is_clip(shape):
                kind = "features"
                changes[id] = feature_changes(tensors, names, run.record)
                continue
            kind, bounds = "clips" if is_clip(shape) else "pictures", tuple(run.record["start"]["bounds"])
            boxes = None
            if tensors.clean_outputs is not None and is_picture(shape):
                boxes = stored_boxes(tensors, run.record["start"]["oracle"])
            disturbed[id] = _draw(tensors.inputs, bounds, boxes and boxes[1])
            size += len(disturbed[id])
            if seed_id not in clean:
                clean[seed_id] = _draw(tensors.clean_inputs, bounds, boxes and boxes[0])
                size += len(clean[seed_id])
            if size > MAX_PICTURE_BYTES:
                break
        if size > MAX_PICTURE_BYTES:
            break
    return ShownInputs(kind, shape, clean, disturbed, changes)


def _draw(inputs: Tensor, bounds: tuple[float, float], boxes: Tensor | None = None) -> str:
    if boxes is not None:
        height, width = inputs.shape[2:]
        return data_uri(with_boxes(to_pixels(inputs, bounds, MAX_SIDE_WITH_BOXES)[0], boxes, (height, width)))
    if not is_clip(tuple(inputs.shape[1:])):
        return data_uri(to_pixels(inputs, bounds)[0])
    return data_uri(to_pixels(side_by_side(inputs[0], bounds[1])[None], bounds, STRIP_SIDE)[0])


def feature_changes(tensors: Tensors, names: Sequence[str] | None, record: dict[str, Any]) -> FeatureChanges:
    """The changes of a table row, with categories by name and values in their original unit, as far as recorded."""
    axes = record.get("feature_axes") or {}
    categories = [column["values"] for column in (record.get("coding") or {}).get("columns", ())]
    before, after = tensors.clean_inputs[0].flatten().double(), tensors.inputs[0].flatten().double()
    distance = (after - before).abs().nan_to_num(float("inf"))
    n = int((distance > 0).sum())
    largest = distance.argsort(descending=True, stable=True)[: min(n, MAX_CHANGES)].tolist()
    known = names if names is not None and len(names) == len(before) else None
    if axes:
        low, reach = (before.new_tensor(axes[name]) for name in ("low", "reach"))
        before, after = (low + (values * reach).expm1() for values in (before, after))

    def value(k: int, number: Tensor) -> float | str:
        values = categories[k] if k < len(categories) else None
        return _number(number) if values is None else _category(values, number)

    rows = [(known[k] if known else f"feature {k}", value(k, before[k]), value(k, after[k])) for k in largest]
    return FeatureChanges(n, len(before), rows)


def _category(values: Sequence[Any], number: Tensor) -> str:
    """The name of a category."""
    value = values[min(max(round(float(number)), 0), len(values) - 1)]
    return "missing" if value is None else str(value)


def _number(value: Tensor) -> float | str:
    """Six digits; as text if it is not finite, which JSON cannot hold."""
    number = float(value)
    return float(f"{number:.6g}") if abs(number) < float("inf") else str(number)
