"""The table of readers, and reading data from a specification such as `csv:table.csv?label=y`."""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qsl

from themis.data.files import Numbers, existing_file, names_in_npz, read_npy, read_npz
from themis.data.pictures import image_seeds
from themis.data.seeds import Seeds, from_arrays
from themis.data.tables import csv_seeds
from themis.errors import DataError, UsageError, nearest, warn
from themis.plugins import Extensible

LABELS_NAME = "labels"
"""The default name of the labels in an archive."""


def npz_seeds(path: Path, *, inputs: str = "inputs", labels: str | None = None) -> Seeds:
    """A NumPy archive with the arrays `inputs` and, optionally, `labels`, or with names as in `?inputs=X&labels=y`."""
    path = existing_file(path)
    name = LABELS_NAME if labels is None else labels
    arrays = read_npz(path, (inputs, name))
    for needed in (inputs, *([] if labels is None else [labels])):
        if needed not in arrays:
            raise DataError(
                f"{path} must hold an array named {needed!r}, got {names_in_npz(path)}: write it with np.savez(path, "
                "inputs=..., labels=...), or give the names as ?inputs=NAME&labels=NAME"
            )
    others = [other for other in names_in_npz(path) if other not in arrays]
    if name not in arrays and others:
        warn(
            f"{path} is read without labels, because it has no array named {LABELS_NAME!r}, but "
            f"{', '.join(others[:5])}: if one of them holds the labels, give its name as in ?inputs=NAME&labels=NAME"
        )
    return named_seeds(path, arrays[inputs], arrays.get(name))


def npy_seeds(path: Path, *, labels: str | None = None) -> Seeds:
    """A NumPy array of inputs. Labels: `?labels=PATH`, or `NAME_labels.npy` beside `NAME.npy`."""
    path = existing_file(path)
    beside = path.with_name(f"{path.stem}_labels.npy")
    labels_path = Path(labels) if labels else beside if beside.is_file() else None
    return named_seeds(path, read_npy(path), None if labels_path is None else read_npy(existing_file(labels_path)))


def named_seeds(path: Path, inputs: Numbers, labels: Numbers | None, divisor: float = 1.0) -> Seeds:
    """Seeds from arrays; errors name the file from which they were read."""
    try:
        return from_arrays(inputs, labels, divisor=divisor)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


_BUILT_IN: dict[str, Callable[..., Seeds]] = {
    "images": image_seeds,
    "npz": npz_seeds,
    "npy": npy_seeds,
    "csv": csv_seeds,
}
READERS: Extensible[Callable[..., Seeds]] = Extensible("themis.readers", _BUILT_IN)


def read_data(spec: str) -> Seeds:
    """Seeds from `READER`, `READER:PATH` or `READER:PATH?option=value&option=value`."""
    name, _, rest = spec.partition(":")
    name, _, query_of_name = name.partition("?")
    if name not in READERS:
        named = Path(name)
        reader = None if rest else _reader_of(named)
        remedy = nearest(name, READERS) if reader is None else f"write {reader}:{spec}"
        if named.suffix == ".py" and os.path.isfile(named):
            remedy = f"write {named.stem}:FUNCTION"
        raise UsageError(f"the data must name a reader or a module:factory, got {spec!r}: {remedy}")
    path, _, query = (rest, "", "") if os.path.exists(rest) else rest.partition("?")
    options = dict(parse_qsl(query or query_of_name, keep_blank_values=True))
    file, *others = inspect.signature(READERS[name]).parameters.values()
    known = [option.name for option in others if "tuple" not in str(option.annotation)]
    for option in options:
        if option not in known:
            remedy = nearest(option, known) if known else "leave it out"
            raise UsageError(f"the reader {name!r} has no option {option!r}: {remedy}")
    if not path and file.default is file.empty:
        raise UsageError(f"the {name} reader needs a path: write {name}:PATH")
    return READERS[name](Path(path) if path else None, **options)


def _reader_of(path: Path) -> str | None:
    """The reader that probably fits a file or a folder."""
    if os.path.isdir(path) and path.name:
        return "images"
    ending = path.suffix.lstrip(".").lower()
    return ending if os.path.exists(path) and ending in READERS else None
