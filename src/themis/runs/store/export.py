"""Exporting faults for other tools, in files with one row per fault; packages add further formats."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from themis.errors import UsageError, nearest
from themis.plugins import Extensible
from themis.runs.store.files import fresh_file, json_safe
from themis.runs.store.schema import read_signature
from themis.text import csv_cell

if TYPE_CHECKING:
    from themis.runs.store.reader import Reader, Selection
    from themis.runs.store.tensors import Tensors

Rows = list[tuple[Any, ...]]
"""A batch of faults, each with the columns of the run in order."""


def export(run: Reader, batches: Iterable[Rows], path: Path, *, replaces: bool = False) -> int:
    """Write faults to a file in the format of its suffix; return their number. replaces: overwrite an existing file."""
    write = EXPORT_FORMATS.get(path.suffix.lower())
    if write is None:
        raise UsageError(f"the file must have a known suffix, got {path.name}: {nearest(path.suffix, EXPORT_FORMATS)}")
    n = 0

    def counted() -> Iterator[Rows]:
        nonlocal n
        for rows in batches:
            n += len(rows)
            yield rows

    with fresh_file(path, replaces=replaces) as part:
        write(run, counted(), part)
    return n


def write_csv(run: Reader, batches: Iterable[Rows], path: Path) -> None:
    """Write a header and one line per fault. The signature is JSON, unknown values are empty, no cell is a formula."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(run.columns)
        at = run.columns.index("signature")
        for rows in batches:
            columns = columns_of(run, rows)
            columns[at] = map(json.dumps, columns[at])
            writer.writerows(zip(*([csv_cell(value) for value in column] for column in columns), strict=True))


def write_json(run: Reader, batches: Iterable[Rows], path: Path) -> None:
    """Write a list of objects, one per line; the signature is an object that maps layers to shares."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json_text(run, batches))


def json_text(run: Reader, batches: Iterable[Rows]) -> Iterator[str]:
    """The text of a JSON list of faults, piece by piece."""
    separator = "["
    for rows in batches:
        yield f"{separator}\n" + ",\n".join(json.dumps(as_object(run, row), allow_nan=False) for row in rows)
        separator = ","
    yield "\n]\n" if separator == "," else "[]\n"


def as_object(run: Reader, row: tuple[Any, ...]) -> dict[str, Any]:
    """A fault as plain data by column; numbers that JSON cannot represent, such as an infinite margin, become None."""
    plain: dict[str, Any] = json_safe(dict(zip(run.columns, row, strict=True)))
    return plain | {"signature": dict(zip(run.layers, read_signature(plain["signature"]), strict=True))}


def write_npz(run: Reader, batches: Iterable[Rows], path: Path) -> None:
    """Write one array per column (unknown classes are -1, other unknown numbers NaN), and the stored tensors.

    `tensors_id` is the fault of each row of `clean_inputs`, `inputs` and `outputs`.
    """
    import numpy as np

    kinds: dict[str, tuple[Any, Any]] = {"INTEGER": (np.int64, -1), "REAL": (np.float64, np.nan), "TEXT": (np.str_, "")}
    types = types_of(run)
    parts: dict[str, list[Any]] = {name: [] for name in types}
    for rows in chain(batches, [[]]):  # an empty batch, so that there are columns even without faults
        for (name, kind), values in zip(types.items(), columns_of(run, rows), strict=True):
            if name == "signature":
                part = np.array(values, dtype=np.float32).reshape(len(rows), len(run.layers))
            else:
                dtype, unknown = kinds[kind]
                part = np.array([unknown if value is None else value for value in values], dtype=dtype)
            parts[name].append(part)
    columns = {name: np.concatenate(part) for name, part in parts.items()}
    ids = columns["id"][columns.pop("tensors") != ""].tolist()
    tensors = run.tensors(ids)
    arrays: dict[str, Any] = {**columns, **_join([tensors[id] for id in ids if id in tensors])}
    with path.open("wb") as file:
        np.savez(file, **arrays)


def _join(parts: list[Tensors]) -> dict[str, Any]:
    import numpy as np

    from themis.runs.store.tensors import Tensors

    if not parts:
        blank = np.zeros(0, np.float32)
        return {"tensors_id": np.zeros(0, np.int64), "clean_inputs": blank, "inputs": blank, "outputs": blank}
    joined = {name: tensor.numpy() for name, tensor in vars(Tensors.join(parts)).items() if tensor is not None}
    return {"tensors_id": joined.pop("id"), **joined}


def columns_of(run: Reader, rows: Rows) -> list[Any]:
    """Rows as columns, with parsed signatures."""
    columns: list[Any] = list(zip(*rows, strict=True)) or [()] * len(run.columns)
    at = run.columns.index("signature")
    columns[at] = [*map(read_signature, columns[at])]
    return columns


def types_of(run: Reader) -> dict[str, str]:
    return dict(run.select("name, type", table="pragma_table_info('faults')", order="cid"))


_BUILT_IN: dict[str, Callable[[Reader, Iterable[Rows], Path], None]] = {
    ".csv": write_csv,
    ".json": write_json,
    ".npz": write_npz,
}
EXPORT_FORMATS = Extensible("themis.export_files", _BUILT_IN)
"""Writers of files, by suffix."""
EXPORT_FOLDERS: Extensible[Callable[[Reader, Selection, Path], int]] = Extensible("themis.export_folders", {})
"""Writers of folders, by the name before the colon in NAME:FOLDER; they return the number of faults written."""
