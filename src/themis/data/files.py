"""Opening data files: one that is damaged, hostile or too large is refused with a one-line message."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from themis.errors import DataError, ThemisError, UsageError
from themis.progress import advance

Numbers = NDArray[Any]
STEP_BYTES = 1 << 20
MAX_HEADER = 1 << 16


def existing_file(path: Path) -> Path:
    """The absolute path of an existing file: it may be read after the working directory has changed."""
    if not os.path.isfile(path):  # unlike Path.is_file, raises no error for invalid names
        kind = "is a folder" if os.path.isdir(path) else "is not a regular file"
        problem = kind if os.path.exists(path) else "does not"
        raise DataError(f"the data file must exist, but {str(path)[:200]} {problem}: check the path")
    return path.absolute()


def required_path(path: Path | None, reader: str) -> Path:
    """The path for a reader that cannot do without one."""
    if path is None:
        raise UsageError(f"the {reader} reader needs a path: write {reader}:PATH")
    return path


@contextmanager
def data_errors(path: Path | str, form: str) -> Iterator[None]:
    """Turn any error that a library raises on a damaged file into a one-line `DataError` that names the file."""
    try:
        yield
    except (ThemisError, NameError, AssertionError):  # the last two are bugs of ours
        raise
    except Exception as error:  # on damaged files decoders raise anything, even SyntaxError
        text = str(getattr(error, "strerror", None) or error)
        reason = (text.splitlines() or [""])[0] or type(error).__name__
        raise DataError(f"{path} must be {form}, but it cannot be read: {reason[:200]}; replace the file") from error


def read_exactly(file: io.BufferedIOBase, n_bytes: int, path: Path) -> NDArray[np.uint8]:
    """Read `n_bytes` in steps, so that memory grows with what the file holds, not with what its header declares."""
    check_memory(n_bytes, str(path))
    content, n_read = np.empty(n_bytes, np.uint8), 0  # the system gives memory only where something is written
    while n_read < n_bytes:
        n_new = file.readinto(content[n_read : n_read + STEP_BYTES].data)
        if not n_new:
            raise DataError(
                f"{path} must hold {n_bytes:,} bytes of numbers, but {n_bytes - n_read:,} are missing: download it "
                "again"
            )
        n_read += n_new
        advance(n_read, n_bytes, "bytes")
    return content


def open_plain_or_gz(path: Path) -> io.BufferedIOBase:
    """Open a file, decompressing it if its first bytes are those of a gzip file."""
    with existing_file(path).open("rb") as file:
        is_gz = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if is_gz else path.open("rb")


def read_npy(path: Path) -> Numbers:
    """The array in a .npy file, mapped into memory. Arrays of objects are refused: they would have to be unpickled."""
    with data_errors(path, "a NumPy array of numbers"):
        with existing_file(path).open("rb") as file:
            shape, is_fortran, dtype, offset = _npy_header(file)
        _check_dtype(dtype, path, "array")
        _check_declared(path.stat().st_size - offset, shape, dtype, path)
        if 0 in shape or dtype.itemsize == 0:
            return np.zeros(shape, dtype)
        return np.memmap(path, dtype, "r", offset, shape, "F" if is_fortran else "C")


def read_npz(path: Path, names: tuple[str, ...] | None = None) -> dict[str, Numbers]:
    """The arrays of an archive by name, all or only `names`; those that are not compressed are mapped into memory.

    The sizes that an archive declares are checked before anything is unpacked.
    """
    with data_errors(path, "a NumPy archive of numbers"):
        with existing_file(path).open("rb") as file:
            if file.read(6) == b"\x93NUMPY":
                raise DataError(
                    f"{path} must be a NumPy archive with an array named 'inputs', got a single array: read it with "
                    "npy:PATH"
                )
        with zipfile.ZipFile(path) as archive:
            members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
            return {
                name: _npz_array(archive, member, path)
                for name, member in members.items()
                if names is None or name in names
            }


def names_in_npz(path: Path) -> list[str]:
    """The names of the arrays in an archive."""
    with data_errors(path, "a NumPy archive of numbers"), zipfile.ZipFile(existing_file(path)) as archive:
        return sorted(name.removesuffix(".npy") for name in archive.namelist())


def _npz_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> Numbers:
    subject = f"{path}, array {member.filename.removesuffix('.npy')!r}"
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DataError(f"{subject} must be stored or deflated, as NumPy writes it: save it again with np.savez")
    with archive.open(member) as file:
        shape, is_fortran, dtype, start = _npy_header(file)
    _check_dtype(dtype, path, "archive")
    _check_declared(member.file_size - start, shape, dtype, subject)
    n_bytes, order = _n_bytes(shape, dtype), "F" if is_fortran else "C"
    if member.compress_type == zipfile.ZIP_STORED and n_bytes:
        with path.open("rb") as raw:
            raw.seek(member.header_offset + 26)
            n_name, n_extra = np.frombuffer(raw.read(4), "<u2").tolist()
        offset = member.header_offset + 30 + n_name + n_extra + start
        return np.memmap(path, dtype, "r", offset, shape, order)  # type: ignore[call-overload,no-any-return]
    with archive.open(member) as file:
        file.read(start)
        content = read_exactly(file, n_bytes, path)  # type: ignore[arg-type]
    return content.view(dtype).reshape(shape, order=order)  # type: ignore[call-overload,no-any-return]


def _npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[np.generic], int]:
    """Shape, order, type and offset of the numbers. At most `MAX_HEADER` bytes are read, whatever is declared."""
    head = io.BytesIO(file.read(MAX_HEADER))
    version = np.lib.format.read_magic(head)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return (*read(head), head.tell())


def _check_dtype(dtype: np.dtype[np.generic], subject: Path | str, kind: str) -> None:
    if dtype.hasobject or dtype.names:
        raise DataError(f"{subject} must be a NumPy {kind} of numbers, but it holds {dtype}: save plain numbers")


def _check_declared(n_actual: int, shape: tuple[int, ...], dtype: np.dtype[np.generic], subject: Path | str) -> None:
    declared = _n_bytes(shape, dtype)
    if declared > n_actual or any(side < 0 for side in shape):
        raise DataError(
            f"{subject} must be a NumPy array of {list(shape)} {dtype}, {declared:,} bytes, but it has {n_actual:,}: "
            "download it again"
        )


def _n_bytes(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> int:
    n = dtype.itemsize
    for side in shape:
        n *= side
    return n


def labelled_files(
    folder: Path, suffixes: tuple[str, ...], noun: str
) -> tuple[list[Path], list[int] | None, list[str] | None]:
    """The files with one of the suffixes, and their labels and the names of the classes if they are in class folders.

    Classes are numbered in the order of the folders' names. `noun` names the files in messages.
    """
    if not os.path.isdir(folder):
        raise DataError(f"the folder of {noun} must exist, but {folder} does not: check the path")
    with data_errors(folder, "a folder that can be listed"):
        classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        files_by_class = [_files_in(class_folder, suffixes) for class_folder in classes]
        loose = _files_in(folder, suffixes)
    if any(files_by_class) and loose:
        raise DataError(
            f"{folder} must hold either class folders or {noun}, but it has both, such as {loose[0].name}: move the "
            f"{noun} away"
        )
    if not any(files_by_class):
        return loose, None, None
    files = [file for class_files in files_by_class for file in class_files]
    labels = [k for k, class_files in enumerate(files_by_class) for _ in class_files]
    return files, labels, [path.name for path in classes]


def _files_in(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in suffixes and path.is_file())


FALLBACK_BYTES = 8 << 30
"""Assumed to be available if the system does not tell."""


def available_bytes() -> int:
    """Available memory: the least of the machine's, the container's limit and the process's limit."""
    return max(0, min(_machine(), _container(), _process()))


def check_memory(n_bytes: int, subject: str) -> None:
    """Raise an error if `subject` declares to need more than half of the available memory."""
    _check(n_bytes, available_bytes() // 2, subject, "half of the available memory")


def check_disk(n_bytes: int, subject: str) -> None:
    """Raise an error if `subject` declares to need more than half of the free disk space for temporary files."""
    _check(n_bytes, shutil.disk_usage(tempfile.gettempdir()).free // 2, subject, "half of the free disk space")


def _check(n_bytes: int, limit: int, subject: str, limit_name: str) -> None:
    if n_bytes > limit:
        raise DataError(
            f"{subject} must fit in {limit_name}, {_size(limit)}, but it declares {_size(n_bytes)}: check the file, or "
            "split it"
        )


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.0f} MiB"


def _machine() -> int:
    try:
        return int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) << 10
    except (OSError, IndexError, ValueError):
        pass  # not Linux
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (OSError, AttributeError, ValueError):
        return FALLBACK_BYTES


def _container() -> int:
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(name).read_text())
        except (OSError, ValueError):
            continue  # no container, or "max"
    return sys.maxsize


def _process() -> int:
    try:
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit == resource.RLIM_INFINITY:
            return sys.maxsize
        return limit - int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError, ValueError):
        return sys.maxsize
