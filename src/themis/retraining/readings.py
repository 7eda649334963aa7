"""Readings as files, so that an examination is not repeated when an experiment is resumed."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from themis.errors import StoreError, first_line
from themis.experiments import ExperimentFolder
from themis.reading import check_form, number, optional, parse_json, record, text, whole
from themis.retraining.examine import CampaignFindings, OldFaults, Reading
from themis.runs.store.tensors import content_of, deserialize, read_header, read_tensor_file

VALUES = "values"
_NESTED = {"found": CampaignFindings, "old": OldFaults}
_VALUES = record(
    {"perturbation": text(), "random_seed": whole(), "draws": whole(1)},
    {
        "found": optional(
            record(
                {
                    **dict.fromkeys(("passes", "tests", "usable", "distinct_faults", "failing_seeds"), whole()),
                    "fault_rate": optional(number()),
                }
            )
        ),
        "old": optional(record({})),
    },
)


def keep(folder: ExperimentFolder, name: str, reading: Reading) -> None:
    """Write a reading, atomically."""
    arrays: dict[str, Tensor] = {}
    values = _separate(reading, "", arrays)
    folder.write_bytes(name, b"".join(content_of(arrays, {VALUES: json.dumps(values)})))


def read(folder: ExperimentFolder, name: str) -> Reading | None:
    """A stored reading; None if there is none."""
    path = folder.within(name)
    if path is None or not path.is_file():
        return None
    content = read_tensor_file(path)
    arrays = deserialize(content, path)
    try:
        reading: Reading = _restore(Reading, _values(content), "", arrays)
        _check(reading)
    except (TypeError, ValueError, AttributeError) as error:
        raise StoreError(
            f"{path} must hold a reading, but it is damaged ({first_line(error)}): remove it to repeat the examination"
        ) from error
    return reading


def _separate(part: Any, prefix: str, arrays: dict[str, Tensor]) -> dict[str, Any]:
    """The plain values of a dataclass; its arrays are added to `arrays` under their prefixed names."""
    values: dict[str, Any] = {}
    for field in fields(part):
        name, value = field.name, getattr(part, field.name)
        if isinstance(value, np.ndarray | Tensor):
            arrays[prefix + name] = torch.as_tensor(np.ascontiguousarray(value)).contiguous()
        else:
            values[name] = _separate(value, f"{prefix}{name}.", arrays) if name in _NESTED and value else value
    return values


def _restore(kind: Any, values: dict[str, Any], prefix: str, arrays: dict[str, Tensor]) -> Any:
    """The inverse of `_separate`."""
    arguments: dict[str, Any] = dict(values)
    for name, value in values.items():
        if name in _NESTED and value is not None:
            arguments[name] = _restore(_NESTED[name], value, f"{prefix}{name}.", arrays)
    for field in fields(kind):
        if prefix + field.name in arrays:
            tensor = arrays[prefix + field.name]
            arguments[field.name] = tensor if kind is OldFaults else tensor.numpy()
    return kind(**arguments)


def _values(content: bytes) -> dict[str, Any]:
    values: dict[str, Any] = check_form(parse_json(read_header(content).get(VALUES, ""), has_nan=True), _VALUES)
    return values


def _check(reading: Reading) -> None:
    """Raise ValueError if the columns do not belong together."""
    seeds, found, old = reading.seed_id, reading.found, reading.old
    per_seed = [reading.clean, reading.disturbed, reading.clean_error, reading.disturbed_error, reading.strength]
    per_seed += [] if found is None else [found.distinct, found.held]
    for column in per_seed:
        if column is not None and column.shape != seeds.shape:
            raise ValueError("its columns have different lengths")
    if seeds.ndim != 1 or (reading.mended is not None and reading.mended.ndim != 1):
        raise ValueError("its columns have the wrong shape")
    if old is not None and len({len(column) for column in vars(old).values() if column is not None}) > 1:
        raise ValueError("its old faults have columns of different lengths")
