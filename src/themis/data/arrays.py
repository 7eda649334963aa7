"""Readers of NumPy's own array files."""

from __future__ import annotations

from pathlib import Path

from themis.data.files import Numbers, existing_file, names_in_npz, read_npy, read_npz
from themis.data.seeds import Seeds, from_arrays
from themis.errors import DataError, warn

LABELS_NAME = "labels"
"""Name of the labels in an archive, if no other is given."""


def npz_seeds(path: Path, *, inputs: str = "inputs", labels: str | None = None) -> Seeds:
    """A NumPy archive with the arrays `inputs` and, optionally, `labels`; `?inputs=X&labels=y` gives other names."""
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
    """Seeds from arrays; an error names the file that they are from."""
    try:
        return from_arrays(inputs, labels, divisor=divisor)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
