"""Data sets from the Hugging Face hub, or saved by its library: a column of pictures or numbers, and one of labels."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from themis.data.files import Numbers, data_errors
from themis.data.pictures import Mode, parse_side, pixels_of
from themis.data.seeds import Seeds, from_reader, scaled
from themis.errors import NO_TEXT, DataError, MissingExtraError, UsageError, nearest

INPUT_NAMES = ("image", "img", "pixel_values", "inputs", "x")
TEXT_NAMES = ("text", "sentence", "input_ids", "tokens")
LABEL_NAMES = ("label", "labels", "fine_label", "y", "class")


def hub_seeds(
    path: Path | None = None,
    *,
    split: str | None = None,
    config: str | None = None,
    image: str | None = None,
    label: str | None = None,
    size: int | str | None = None,
) -> Seeds:
    """`hf:NAME` or `hf:NAME[SPLIT]`, a data set of the hub, or the folder of a saved one.

    Pictures are scaled to 0..1 and read when needed. The split is `test` by default; `test[:100]` is a part of it.
    image, label: names of the columns, if they are unusual. config: the configuration of the data set, if it has
    several. size: as for `images`.
    """
    if path is None:
        raise UsageError("the hf reader needs the name of a data set: write hf:NAME, such as hf:mnist[test]")
    name, bracket, rest = str(path).partition("[")
    if bracket and not path.exists():
        if not rest.endswith("]") or split is not None:
            raise UsageError(
                f"the hf reader needs one split, got hf:{path}: write hf:NAME[SPLIT] or hf:NAME?split=SPLIT"
            )
        path, split = Path(name), rest[:-1]
    split = split or "test"
    try:
        library = importlib.import_module("datasets")
    except ImportError as error:
        raise MissingExtraError(
            'reading data sets from the hub needs the package datasets: pip install "themis-dl[hf]"'
        ) from error
    with data_errors(f"hf:{path}", "a data set of the hub"):
        if path.is_dir():
            data = _saved_split(library.load_from_disk(str(path)), split, path)
        else:
            data = library.load_dataset(path.as_posix(), config, split=split)
        names = list(data.column_names)
    if image is None and not any(name in names for name in INPUT_NAMES):
        _refuse_text(data, next((name for name in TEXT_NAMES if name in names), None), path)
    column = _column(names, image, INPUT_NAMES, "a column of inputs", "image", path)
    has_labels = label is not None or any(name in names for name in LABEL_NAMES)
    label_column = _column(names, label, LABEL_NAMES, "a column of labels", "label", path) if has_labels else None
    labels = None if label_column is None else list(data[label_column])
    classes = None if label_column is None else getattr(data.features[label_column], "names", None)
    return _seeds(data, column, labels, path, parse_side(size, "size")).with_classes(classes)


def _saved_split(loaded: Any, split: str, path: Path) -> Any:
    """The split of a saved data set; a slice such as `test[:100]` is taken of it."""
    name, bracket, rest = split.partition("[")
    if not isinstance(loaded, dict):
        data = loaded
    elif name in loaded:
        data = loaded[name]
    else:
        raise UsageError(f"the split {name!r} must be in hf:{path}: {nearest(name, list(loaded))}")
    if not bracket:
        return data
    try:
        first, last = (int(end) if end else None for end in rest.removesuffix("]").split(":"))
    except ValueError:
        raise UsageError(f"a slice of a split must be like test[:100], got {split!r}") from None
    return data.select(range(*slice(first, last).indices(len(data))))


def _seeds(data: Any, column: str, labels: Any, path: Path, size: int | None) -> Seeds:
    if len(data) == 0:
        raise DataError(f"hf:{path} must hold at least one seed, got none: check ?split=")
    _refuse_text(data, column, path)
    first = data[0][column]
    mode: Mode = "L" if getattr(first, "mode", "RGB") in ("L", "1") else "RGB"

    def load(k: int) -> Numbers:
        name = f"hf:{path}, row {k}"
        with data_errors(name, "a picture or numbers"):
            value = data[k][column]
            if not hasattr(value, "convert"):
                return np.asarray(value)
            return scaled(pixels_of(value, mode, size), 255)

    shape = tuple(load(0).shape)
    return from_reader(load, shape, len(data), labels)


def _refuse_text(data: Any, column: str | None, path: Path) -> None:
    """Refuse a column of text: strings, lists of them, or token ids by their usual name."""
    value = None if column is None or len(data) == 0 else data[0][column]
    first = value[0] if isinstance(value, list) and value else value
    if column == "input_ids" or isinstance(first, str):
        raise DataError(f"inputs must be numbers, got text in the column {column!r} of hf:{path}: {NO_TEXT}")


def _column(names: list[str], requested: str | None, usual: tuple[str, ...], noun: str, option: str, path: Path) -> str:
    if requested is not None:
        if requested not in names:
            raise UsageError(f"the column {requested!r} must be in hf:{path}: {nearest(requested, names)}")
        return requested
    candidates = [name for name in usual if name in names]
    if not candidates:
        raise DataError(f"hf:{path} must have {noun}, got {names}: give its name as ?{option}=NAME")
    return candidates[0]
