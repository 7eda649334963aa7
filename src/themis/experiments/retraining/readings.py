"""Readings as files: what an examination gave, column by column, so that no step is done twice."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from themis.errors import StoreError
from themis.experiments.retraining.examine import Found, Old, Reading
from themis.experiments.retraining.folder import Folder
from themis.runs.store.tensors import deserialize, serialize

VALUES = "values"
_NESTED = {"found": Found, "old": Old}


def keep(folder: Folder, name: str, reading: Reading) -> None:
    """Write a reading, whole or not at all."""
    arrays: dict[str, Tensor] = {}
    values = _take(reading, "", arrays)
    folder.write_bytes(name, serialize(arrays, {VALUES: json.dumps(values)}))


def read(folder: Folder, name: str) -> Reading | None:
    """A reading that was kept; None if there is none."""
    path = folder.within(name)
    if path is None or not path.is_file():
        return None
    content = path.read_bytes()
    arrays = deserialize(content, path)
    return _reading(Reading, _values(content, path), "", arrays)  # type: ignore[no-any-return]


def _take(part: Any, at: str, arrays: dict[str, Tensor]) -> dict[str, Any]:
    """Plain values; arrays are put aside under their names."""
    values: dict[str, Any] = {}
    for each in fields(part):
        value = getattr(part, each.name)
        if isinstance(value, np.ndarray | Tensor):
            arrays[at + each.name] = torch.as_tensor(np.ascontiguousarray(value)).contiguous()
        else:
            values[each.name] = _take(value, f"{at}{each.name}.", arrays) if each.name in _NESTED and value else value
    return values


def _reading(kind: Any, values: dict[str, Any], at: str, arrays: dict[str, Tensor]) -> Any:
    """The other way round."""
    made: dict[str, Any] = dict(values)
    for name, value in values.items():
        if name in _NESTED and value is not None:
            made[name] = _reading(_NESTED[name], value, f"{at}{name}.", arrays)
    for each in fields(kind):
        if at + each.name in arrays:
            tensor = arrays[at + each.name]
            made[each.name] = tensor if kind is Old else tensor.numpy()
    return kind(**made)


def _values(content: bytes, path: Path) -> dict[str, Any]:
    size = int.from_bytes(content[:8], "little")
    try:
        values: dict[str, Any] = json.loads(json.loads(content[8 : 8 + size])["__metadata__"][VALUES])
    except (ValueError, KeyError) as error:
        raise StoreError(f"{path} must hold a reading, it is damaged: remove it to make it again") from error
    return values
