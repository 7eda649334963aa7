"""Readings as files, so that an examination is not repeated when an experiment is resumed."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from themis.errors import StoreError
from themis.experiments.retraining.examine import CampaignFindings, OldFaults, Reading
from themis.experiments.runner import ExperimentFolder
from themis.runs.store.tensors import deserialize, serialize

VALUES = "values"
_NESTED = {"found": CampaignFindings, "old": OldFaults}


def keep(folder: ExperimentFolder, name: str, reading: Reading) -> None:
    """Write a reading, atomically."""
    arrays: dict[str, Tensor] = {}
    values = _separate(reading, "", arrays)
    folder.write_bytes(name, serialize(arrays, {VALUES: json.dumps(values)}))


def read(folder: ExperimentFolder, name: str) -> Reading | None:
    """A stored reading; None if there is none."""
    path = folder.within(name)
    if path is None or not path.is_file():
        return None
    content = path.read_bytes()
    arrays = deserialize(content, path)
    return _restore(Reading, _values(content, path), "", arrays)  # type: ignore[no-any-return]


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


def _values(content: bytes, path: Path) -> dict[str, Any]:
    size = int.from_bytes(content[:8], "little")
    try:
        values: dict[str, Any] = json.loads(json.loads(content[8 : 8 + size])["__metadata__"][VALUES])
    except (ValueError, KeyError) as error:
        raise StoreError(f"{path} must hold a reading, it is damaged: remove it to repeat the examination") from error
    return values
