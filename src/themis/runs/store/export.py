"""Exporting faults for other tools: files with one row per fault, and folders of pictures."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from themis.errors import UsageError, nearest, needs_extra
from themis.runs.fault import name_answer, name_outcome
from themis.runs.store.files import explained, fresh_file, json_safe, list_folder
from themis.runs.store.schema import read_signature
from themis.text import csv_cell

if TYPE_CHECKING:
    from torch import Tensor

    from themis.runs.store.reader import Reader, Selection
    from themis.runs.store.tensors import Tensors

Rows = list[tuple[Any, ...]]
"""A batch of faults, each with the columns of the run in order."""


def export(run: Reader, batches: Iterable[Rows], path: Path, *, replaces: bool = False) -> int:
    """Write faults to a file in the format of its suffix; return their number. `replaces`: overwrite a file."""
    write = FORMATS.get(path.suffix.lower())
    if write is None:
        raise UsageError(f"the file must have a known suffix, got {path.name}: {nearest(path.suffix, FORMATS)}")
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
    """A header and one line per fault; the signature is JSON, unknown values are empty. No cell is a formula."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(run.columns)
        at = run.columns.index("signature")
        for rows in batches:
            columns = _columns(run, rows)
            columns[at] = map(json.dumps, columns[at])
            writer.writerows(zip(*([csv_cell(value) for value in column] for column in columns), strict=True))


def write_json(run: Reader, batches: Iterable[Rows], path: Path) -> None:
    """A list of objects, one per line; the signature is an object from layers to shares."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json_text(run, batches))


def json_text(run: Reader, batches: Iterable[Rows]) -> Iterator[str]:
    """The text of such a list, piece by piece."""
    separator = "["
    for rows in batches:
        yield f"{separator}\n" + ",\n".join(json.dumps(as_object(run, row), allow_nan=False) for row in rows)
        separator = ","
    yield "\n]\n" if separator == "," else "[]\n"


def as_object(run: Reader, row: tuple[Any, ...]) -> dict[str, Any]:
    """A fault as plain data by column; numbers that JSON cannot represent, such as an infinite margin, are None."""
    plain: dict[str, Any] = json_safe(dict(zip(run.columns, row, strict=True)))
    return plain | {"signature": dict(zip(run.layers, read_signature(plain["signature"]), strict=True))}


def write_parquet(run: Reader, batches: Iterable[Rows], path: Path) -> None:
    """Typed columns; the signature is a list of floats whose layers are named in the metadata of the field."""
    with needs_extra("tables", "Parquet needs pyarrow"):
        import pyarrow as pa  # type: ignore[import-untyped]
        from pyarrow import parquet
    types = {"INTEGER": pa.int64(), "REAL": pa.float64(), "TEXT": pa.string()}
    shares = pa.field("signature", pa.list_(pa.float32()), metadata={"layers": json.dumps(run.layers)})
    schema = pa.schema([shares if name == "signature" else (name, types[kind]) for name, kind in _types(run).items()])
    with parquet.ParquetWriter(path, schema) as writer:
        for rows in batches:
            columns = zip(schema.types, _columns(run, rows), strict=True)
            writer.write_batch(pa.record_batch([pa.array(values, kind) for kind, values in columns], schema=schema))


def write_npz(run: Reader, batches: Iterable[Rows], path: Path) -> None:
    """One array per column (unknown classes are -1, other unknown numbers NaN), and the stored tensors.

    `tensors_id` has the faults that the rows of `clean_inputs`, `inputs` and `outputs` belong to.
    """
    import numpy as np

    kinds: dict[str, tuple[Any, Any]] = {
        "INTEGER": (np.int64, -1),
        "REAL": (np.float64, np.nan),
        "TEXT": (np.str_, ""),
    }
    types = _types(run)
    parts: dict[str, list[Any]] = {name: [] for name in types}
    for rows in chain(batches, [[]]):  # an empty one, so that there are columns even without faults
        for (name, kind), values in zip(types.items(), _columns(run, rows), strict=True):
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


def _columns(run: Reader, rows: Rows) -> list[Any]:
    """Rows as columns, with parsed signatures."""
    columns: list[Any] = list(zip(*rows, strict=True)) or [()] * len(run.columns)
    at = run.columns.index("signature")
    columns[at] = [*map(read_signature, columns[at])]
    return columns


def _types(run: Reader) -> dict[str, str]:
    return dict(run.select("name, type", table="pragma_table_info('faults')", order="cid"))


FORMATS: dict[str, Callable[[Reader, Iterable[Rows], Path], None]] = {
    ".parquet": write_parquet,
    ".csv": write_csv,
    ".json": write_json,
    ".npz": write_npz,
}
"""The writer of each format by suffix."""


LEFT_OUT = ("id", "label", "clean_answer", "answer", "confidence", "tensors", "signature", "position", "chunk", "kind")
"""Columns that the labels of FiftyOne hold elsewhere, or that matter only to a replay."""
AT_ONCE = 64
"""Faults whose tensors are in memory at a time."""


def write_pictures(run: Reader, selection: Selection, folder: Path) -> int:
    """Write `faults.csv` and both pictures of each fault whose inputs were kept; returns the number of these."""
    n, names = 0, ("picture", "clean_picture", "answer_name", "clean_answer_name", "label_name", *run.columns)
    with (
        _new_folder(folder, "faults", "clean"),
        (folder / "faults.csv").open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for values, tensors in _kept(run, selection):
            paths = {"picture": f"faults/{values['id']}.png", "clean_picture": f"clean/{values['id']}.png"}
            _save(folder / paths["picture"], tensors.inputs, run)
            _save(folder / paths["clean_picture"], tensors.clean_inputs, run)
            cells = {**paths, **_in_words(run, values), **values, "signature": json.dumps(values["signature"])}
            writer.writerow({name: csv_cell(value) for name, value in cells.items()})
            n += 1
    return n


def write_fiftyone(run: Reader, selection: Selection, folder: Path) -> int:
    """Write disturbed pictures as a `FiftyOneImageClassificationDataset` whose labels are the wrong answers."""
    labels = {}
    with _new_folder(folder, "data"):
        for values, tensors in _kept(run, selection):
            _save(folder / "data" / f"{values['id']}.png", tensors.inputs, run)
            words = _in_words(run, values)
            answer = words.pop("answer_name")
            known = {name: value for name, value in values.items() if name not in LEFT_OUT and value is not None}
            attributes = {"fault": values["id"], **words, **known}
            label = {"label": answer, "confidence": values["confidence"], "attributes": attributes}
            labels[str(values["id"])] = label
        content = {"classes": sorted({label["label"] for label in labels.values()}), "labels": labels}
        (folder / "labels.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    return len(labels)


@contextmanager
def _new_folder(folder: Path, *parts: str) -> Iterator[None]:
    """Make a folder for pictures and the folders in it; one that holds anything is refused."""
    if found := list_folder(folder):
        raise UsageError(f"--export needs a new or empty folder, but {folder} holds {found[0]}: choose another name")
    with explained(folder):
        for part in parts:
            (folder / part).mkdir(parents=True, exist_ok=True)
        yield


def _kept(run: Reader, selection: Selection) -> Iterator[tuple[dict[str, Any], Tensors]]:
    """The columns and the tensors of the selected faults whose inputs were kept."""
    kept = replace(selection, conditions=[*selection.conditions, "tensors IS NOT NULL"])
    for rows in kept.rows(run):
        for first in range(0, len(rows), AT_ONCE):
            objects = [as_object(run, row) for row in rows[first : first + AT_ONCE]]
            tensors = run.tensors([values["id"] for values in objects])
            yield from ((values, tensors[values["id"]]) for values in objects if values["id"] in tensors)


def _save(path: Path, inputs: Tensor, run: Reader) -> None:
    """Write an input `[1, channels, height, width]` as a PNG file."""
    from themis.runs.display.fault import is_picture, png, to_pixels

    if not is_picture(tuple(inputs.shape[1:])):
        raise UsageError(
            f"a folder of pictures needs pictures [channels, height, width], but the inputs are "
            f"{list(inputs.shape[1:])}: export to .csv, .parquet or .npz"
        )
    path.write_bytes(png(to_pixels(inputs, tuple(run.record["start"]["bounds"]), None)[0]))


def _in_words(run: Reader, values: dict[str, Any]) -> dict[str, str]:
    """The label, if there is one, and the answers of a fault in words."""
    task, classes = run.task, run.classes
    words = {"answer_name": name_outcome(task, values["answer"], classes)}
    numbers = {"clean_answer_name": values["clean_answer"], "label_name": values["label"]}
    known = {name: number for name, number in numbers.items() if number is not None and number >= 0}
    return words | {name: name_answer(task, number, classes) for name, number in known.items()}


FOLDERS = {"pictures": write_pictures, "fiftyone": write_fiftyone}
"""The writers of folders by the name that stands before a colon."""
