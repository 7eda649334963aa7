"""Data sets from the Hugging Face hub, or saved by its library, with a column of inputs and a column of labels."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from themis.data.files import Numbers, data_errors, parse_whole
from themis.data.pictures import MAX_SIDE, SIZE_REMEDY, pixels_of
from themis.data.seeds import Seeds, from_files, scaled
from themis.errors import NO_TEXT, DataError, UsageError, nearest, needs_extra

INPUT_NAMES = ("image", "img", "pixel_values", "inputs", "x")
TEXT_NAMES = ("text", "sentence", "input_ids", "tokens")
LABEL_COLUMNS = ("label", "labels", "fine_label", "y", "class")


def hub_seeds(
    path: Path | None = None,
    *,
    split: str | None = None,
    config: str | None = None,
    image: str | None = None,
    label: str | None = None,
    size: int | str | None = None,
) -> Seeds:
    """`hf:NAME` or `hf:NAME[SPLIT]`, a data set on the hub, or the folder of a saved data set.

    Pictures are scaled to 0..1 and read when needed. The split is `test` by default; `test[:100]` is a part of it.
    image, label: names of the columns, if they are unusual. config: the configuration of the data set, if it has
    several. size: as for `images`.
    """
    if path is None:
        raise UsageError("the hf reader needs the name of a data set: write hf:NAME, such as hf:mnist[test]")
    name, bracket, rest = str(path).partition("[")
    if bracket and not path.exists():
        if not rest.endswith("]") or split is not None:
            raise UsageError(f"hf needs one split, got hf:{path}: write hf:NAME[SPLIT] or hf:NAME?split=SPLIT")
        path, split = Path(name), rest[:-1]
    split = split or "test"
    with needs_extra("hf", "data sets from the hub need the package datasets"):
        library = importlib.import_module("datasets")
    with data_errors(f"hf:{path}", "a data set of the hub"):
        if path.is_dir():
            data = _saved_split(library.load_from_disk(str(path)), split, path)
        else:
            data = library.load_dataset(path.as_posix(), config, split=split)
        names = list(data.column_names)
    column, label_column = _find(names, image, INPUT_NAMES, path), _find(names, label, LABEL_COLUMNS, path)
    _refuse_text(data, column or _find(names, None, TEXT_NAMES, path), path)
    if column is None:
        raise DataError(f"hf:{path} must have a column of inputs, got {names}: give its name as ?image=NAME")
    labels = None if label_column is None else list(data[label_column])
    classes = None if label_column is None else getattr(data.features[label_column], "names", None)
    side = parse_whole(size, "size", MAX_SIDE, 224)
    is_grey = len(data) > 0 and getattr(data[0][column], "mode", "RGB") in ("L", "1")

    def load(k: int) -> Numbers:
        with data_errors(f"hf:{path}, row {k}", "a picture or numbers"):
            value = data[k][column]
            if hasattr(value, "convert"):
                return scaled(pixels_of(value, "L" if is_grey else "RGB", side), 255)
            return np.asarray(value)

    return from_files(range(len(data)), load, labels, SIZE_REMEDY).with_classes(classes)


def _saved_split(loaded: Any, split: str, path: Path) -> Any:
    """The split of a saved data set, or a slice such as `test[:100]`."""
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


def _refuse_text(data: Any, column: str | None, path: Path) -> None:
    """Refuse a column of text: strings, lists of them, or token ids by their usual name."""
    value = None if column is None or len(data) == 0 else data[0][column]
    first = value[0] if isinstance(value, list) and value else value
    if column == "input_ids" or isinstance(first, str):
        raise DataError(f"inputs must be numbers, got text in the column {column!r} of hf:{path}: {NO_TEXT}")


def _find(names: list[str], requested: str | None, usual: tuple[str, ...], path: Path) -> str | None:
    """The requested column, or the first column with a usual name."""
    if requested is not None and requested not in names:
        raise UsageError(f"the column {requested!r} must be in hf:{path}: {nearest(requested, names)}")
    return requested or next((name for name in usual if name in names), None)
