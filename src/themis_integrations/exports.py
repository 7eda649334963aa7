"""Faults for other tools: Parquet files, and folders of pictures, also in the form of FiftyOne."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from themis.errors import UsageError, needs_extra
from themis.runs.fault import name_answer, name_outcome
from themis.runs.store.export import Rows, as_object, columns_of, types_of
from themis.runs.store.files import explained, list_folder
from themis.text import csv_cell

if TYPE_CHECKING:
    from torch import Tensor

    from themis.runs.store.reader import Reader, Selection
    from themis.runs.store.tensors import Tensors


def write_parquet(run: Reader, batches: Iterable[Rows], path: Path) -> None:
    """Typed columns; the signature is a list of floats whose layers are named in the metadata of the field."""
    with needs_extra("tables", "Parquet needs pyarrow"):
        import pyarrow as pa  # type: ignore[import-untyped]
        from pyarrow import parquet
    types = {"INTEGER": pa.int64(), "REAL": pa.float64(), "TEXT": pa.string()}
    shares = pa.field("signature", pa.list_(pa.float32()), metadata={"layers": json.dumps(run.layers)})
    schema = pa.schema([shares if name == "signature" else (name, types[kind]) for name, kind in types_of(run).items()])
    with parquet.ParquetWriter(path, schema) as writer:
        for rows in batches:
            columns = zip(schema.types, columns_of(run, rows), strict=True)
            writer.write_batch(pa.record_batch([pa.array(values, kind) for kind, values in columns], schema=schema))


OMITTED = ("id", "label", "clean_answer", "answer", "confidence", "tensors", "signature", "position", "chunk", "kind")
"""Columns that the labels of FiftyOne hold elsewhere, or that matter only to a replay."""
FAULTS_AT_ONCE = 64
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
            known = {name: value for name, value in values.items() if name not in OMITTED and value is not None}
            attributes = {"fault": values["id"], **words, **known}
            label = {"label": answer, "confidence": values["confidence"], "attributes": attributes}
            labels[str(values["id"])] = label
        content = {"classes": sorted({label["label"] for label in labels.values()}), "labels": labels}
        (folder / "labels.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    return len(labels)


@contextmanager
def _new_folder(folder: Path, *parts: str) -> Iterator[None]:
    """Create a folder for pictures, with subfolders; refuse one that is not empty."""
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
        for first in range(0, len(rows), FAULTS_AT_ONCE):
            objects = [as_object(run, row) for row in rows[first : first + FAULTS_AT_ONCE]]
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
