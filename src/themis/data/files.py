"""Opening data files: what is damaged, hostile or too large becomes one line that says so."""

from __future__ import annotations

import gzip
import io
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from themis.data.memory import check_room
from themis.data.rows import Numbers
from themis.errors import DataError, ThemisError, UsageError

STEP_BYTES = 1 << 20
MAX_HEADER = 1 << 16


def existing(path: Path) -> Path:
    """A file that exists; absolute, for it may be read when the working directory is another."""
    if not os.path.isfile(path):  # no error for names that the system cannot have
        why = "is a folder" if os.path.isdir(path) else "does not"
        raise DataError(f"the data file must exist, {str(path)[:200]} {why}: check the path")
    return path.absolute()


def needed(path: Path | None, reader: str) -> Path:
    """The path that a reader cannot do without."""
    if path is None:
        raise UsageError(f"the {reader} reader needs a path: write {reader}:PATH")
    return path


@contextmanager
def explained(path: Path | str, what: str) -> Iterator[None]:
    """Whatever a damaged file makes a library raise, as one line that names the file."""
    try:
        yield
    except (ThemisError, NameError, AssertionError):  # the last two are faults of our own
        raise
    except Exception as error:  # decoders raise anything on damaged files, SyntaxError too
        why = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise DataError(f"{path} must be {what}, it cannot be read: {why[:200]}; get the file again") from error


def read_exactly(file: IO[bytes], n_bytes: int, path: Path) -> bytes:
    """So many bytes, in steps: memory grows with what is there, not with what a header declares."""
    check_room(n_bytes, str(path))
    parts, left = [], n_bytes
    while left:
        part = file.read(min(left, STEP_BYTES))
        if not part:
            raise DataError(f"{path} must hold {n_bytes:,} bytes of numbers, {left:,} are missing: get the file again")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def open_plain_or_gz(path: Path) -> IO[bytes]:
    """A file as it is, or what is in a gzip file; by its first bytes."""
    with existing(path).open("rb") as file:
        is_gz = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if is_gz else path.open("rb")  # type: ignore[return-value]


def read_npy(path: Path) -> Numbers:
    """The array in a .npy file; it stays in the file until it is used. Objects are refused, they would be pickles."""
    with explained(path, "a NumPy array of numbers"):
        with existing(path).open("rb") as file:
            shape, is_fortran, dtype, offset = _npy_header(file)
        _check_dtype(dtype, path, "array")
        _check_declared(path.stat().st_size - offset, shape, dtype, path)
        if 0 in shape or dtype.itemsize == 0:
            return np.zeros(shape, dtype)
        return np.memmap(path, dtype, "r", offset, shape, "F" if is_fortran else "C")


def read_npz(path: Path, names: tuple[str, ...] | None = None) -> dict[str, Numbers]:
    """Arrays of an archive by name, all or those named; one that is not compressed stays in the file.

    What an archive declares is checked before anything is unpacked.
    """
    with explained(path, "a NumPy archive of numbers"):
        with existing(path).open("rb") as file:
            if file.read(6) == b"\x93NUMPY":
                raise DataError(
                    f"{path} must be a NumPy archive with an array named 'inputs', got one array: read it with npy:PATH"
                )
        with zipfile.ZipFile(path) as archive:
            members = {each.filename.removesuffix(".npy"): each for each in archive.infolist()}
            return {
                name: _npz_array(archive, member, path)
                for name, member in members.items()
                if names is None or name in names
            }


def names_in_npz(path: Path) -> list[str]:
    """The names of the arrays in an archive."""
    with explained(path, "a NumPy archive of numbers"), zipfile.ZipFile(existing(path)) as archive:
        return sorted(each.removesuffix(".npy") for each in archive.namelist())


def _npz_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> Numbers:
    what = f"{path}, array {member.filename.removesuffix('.npy')!r}"
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DataError(f"{what} must be plain or deflated, as NumPy writes it: save it again with np.savez")
    with archive.open(member) as file:
        shape, is_fortran, dtype, begins = _npy_header(file)
    _check_dtype(dtype, path, "archive")
    _check_declared(member.file_size - begins, shape, dtype, what)
    n_bytes, order = _n_bytes(shape, dtype), "F" if is_fortran else "C"
    if member.compress_type == zipfile.ZIP_STORED and n_bytes:
        with path.open("rb") as raw:
            raw.seek(member.header_offset + 26)
            n_name, n_extra = np.frombuffer(raw.read(4), "<u2").tolist()
        offset = member.header_offset + 30 + n_name + n_extra + begins
        return np.memmap(path, dtype, "r", offset, shape, order)  # type: ignore[call-overload,no-any-return]
    with archive.open(member) as file:
        file.read(begins)
        content = read_exactly(file, n_bytes, path)
    return np.frombuffer(bytearray(content), dtype).reshape(shape, order=order)  # type: ignore[call-overload,no-any-return]


def _npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[np.generic], int]:
    """Shape, order, type, and where the numbers begin. A header that claims to be long is not waited for."""
    head = io.BytesIO(file.read(MAX_HEADER))
    version = np.lib.format.read_magic(head)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return (*read(head), head.tell())


def _check_dtype(dtype: np.dtype[np.generic], what: Path | str, kind: str) -> None:
    if dtype.hasobject or dtype.names:
        raise DataError(f"{what} must be a NumPy {kind} of numbers, it holds {dtype}: save plain numbers")


def _check_declared(n_there: int, shape: tuple[int, ...], dtype: np.dtype[np.generic], what: Path | str) -> None:
    declared = _n_bytes(shape, dtype)
    if declared > n_there or any(each < 0 for each in shape):
        raise DataError(
            f"{what} must be a NumPy array of {list(shape)} {dtype}, {declared:,} bytes, it has {n_there:,}: get the "
            "file again"
        )


def _n_bytes(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> int:
    n = dtype.itemsize
    for each in shape:
        n *= each
    return n
