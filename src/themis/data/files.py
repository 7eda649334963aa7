"""Reading data files, and refusing damaged, hostile or too large files with a one-line message."""

import io
import math
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from themis.errors import DataError, ThemisError, UsageError
from themis.progress import advance

Numbers = NDArray[Any]
READ_BYTES = 1 << 20
"""Bytes that are read at a time."""
MAX_HEADER_BYTES = 1 << 16
"""Largest size of an array's header."""


def existing_file(path: Path) -> Path:
    """The absolute path of an existing file, which stays valid if the working directory changes."""
    if not os.path.isfile(path):  # unlike Path.is_file, does not raise for invalid names
        raise DataError(f"the data file must exist, but {str(path)[:200]} is not a regular file: check the path")
    return path.absolute()


@contextmanager
def data_errors(path: Path | str, form: str) -> Iterator[None]:
    """Turn any error that a library raises on a damaged file into a one-line `DataError` that names the file."""
    try:
        yield
    except (ThemisError, NameError, AssertionError):  # the last two are bugs in Themis
        raise
    except Exception as error:  # on damaged files decoders raise anything, even SyntaxError
        text = str(getattr(error, "strerror", None) or error)
        reason = (text.splitlines() or [""])[0] or type(error).__name__
        raise DataError(f"{path} must be {form}, but it cannot be read: {reason[:200]}; replace the file") from error


def read_exactly(file: io.BufferedIOBase, n_bytes: int, path: Path) -> NDArray[np.uint8]:
    """Read `n_bytes` in steps, so that memory grows with the actual content, not with the size in the header."""
    check_memory(n_bytes, str(path))
    content, n_read = np.empty(n_bytes, np.uint8), 0  # takes physical memory only where it is written
    while n_read < n_bytes:
        n_new = file.readinto(content[n_read : n_read + READ_BYTES].data)
        if not n_new:
            raise DataError(f"{path} must hold {n_bytes:,} bytes, but {n_bytes - n_read:,} are missing: replace it")
        n_read += n_new
        advance(n_read, n_bytes, "bytes")
    return content


def read_npy(path: Path) -> Numbers:
    """The array in a .npy file, memory-mapped; refuses arrays of objects, which would have to be unpickled."""
    with data_errors(path, "a NumPy array of numbers"):
        with existing_file(path).open("rb") as file:
            shape, order, dtype, offset = _npy_header(file, path.stat().st_size, str(path))
        if dtype.itemsize * math.prod(shape) == 0:
            return np.zeros(shape, dtype)
        return np.memmap(path, dtype, "r", offset, shape, order)


def read_npz(path: Path, names: tuple[str, ...]) -> dict[str, Numbers]:
    """The arrays of an archive with these names, memory-mapped unless they are compressed.

    The declared sizes are checked before anything is unpacked.
    """
    with data_errors(path, "a NumPy archive of numbers"), zipfile.ZipFile(existing_file(path)) as archive:
        members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
        return {name: _npz_array(archive, members[name], path) for name in names if name in members}


def names_in_npz(path: Path) -> list[str]:
    """The names of the arrays in an archive."""
    with data_errors(path, "a NumPy archive of numbers"), zipfile.ZipFile(existing_file(path)) as archive:
        return sorted(name.removesuffix(".npy") for name in archive.namelist())


def _npz_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> Numbers:
    subject = f"{path}, array {member.filename.removesuffix('.npy')!r}"
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DataError(f"{subject} must be stored or deflated, as NumPy writes it: save it again with np.savez")
    with archive.open(member) as file:
        shape, order, dtype, start = _npy_header(file, member.file_size, subject)
    n_bytes = dtype.itemsize * math.prod(shape)
    if member.compress_type == zipfile.ZIP_STORED and n_bytes:
        with path.open("rb") as raw:
            raw.seek(member.header_offset + 26)
            n_name, n_extra = np.frombuffer(raw.read(4), "<u2").tolist()
        return np.memmap(path, dtype, "r", member.header_offset + 30 + n_name + n_extra + start, shape, order)
    with archive.open(member) as file:
        file.read(start)
        return read_exactly(file, n_bytes, path).view(dtype).reshape(shape, order=order)  # type: ignore[arg-type]


def _npy_header(
    file: IO[bytes], n_bytes: int, subject: str
) -> tuple[tuple[int, ...], Literal["C", "F"], np.dtype[Any], int]:
    """Shape, order, type and offset of the numbers in a file of `n_bytes`.

    At most `MAX_HEADER_BYTES` are read, whatever the file declares.
    """
    head = io.BytesIO(file.read(MAX_HEADER_BYTES))
    version = np.lib.format.read_magic(head)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(head)
    if dtype.hasobject or dtype.names:
        raise DataError(f"{subject} must be a NumPy array of numbers, but it holds {dtype}: save plain numbers")
    declared, n_actual = dtype.itemsize * math.prod(shape), n_bytes - head.tell()
    if declared > n_actual or any(side < 0 for side in shape):
        raise DataError(
            f"{subject} must be a NumPy array of {list(shape)} {dtype}, {declared:,} bytes, but it has {n_actual:,}: "
            "download it again"
        )
    return shape, "F" if is_fortran else "C", dtype, head.tell()


def parse_whole(value: int | str | None, name: str, most: int, example: int) -> int | None:
    """The whole number given by an option."""
    if value is None:
        return None
    number = int(value) if str(value).isdecimal() else 0
    if not 1 <= number <= most:
        raise UsageError(f"{name} must be a whole number from 1 to {most:,}, got {value!r}: write ?{name}={example}")
    return number


def labelled_files(
    folder: Path, suffixes: tuple[str, ...], noun: str
) -> tuple[list[Path], list[int] | None, list[str] | None]:
    """The files with these suffixes and, if they are in class folders, their labels and the names of the classes.

    Classes are numbered in the order of the folders' names. noun: what messages call the files.
    """
    if not os.path.isdir(folder):
        raise DataError(f"the folder of {noun} must exist, but {folder} does not: check the path")
    with data_errors(folder, "a folder that can be listed"):
        classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        loose, *by_class = (
            sorted(path for path in each.iterdir() if path.suffix.lower() in suffixes and path.is_file())
            for each in (folder, *classes)
        )
    if any(by_class) and loose:
        raise DataError(f"{folder} must hold class folders or {noun}, not both: move {loose[0].name} away")
    if loose:
        return loose, None, None
    if not any(by_class):
        raise DataError(f"{folder} must hold {noun} ({', '.join(suffixes)}), but it has none: check the path")
    labels = [k for k, files in enumerate(by_class) for _ in files]
    return [file for files in by_class for file in files], labels, [path.name for path in classes]


FALLBACK_BYTES = 8 << 30
"""Assumed available memory if the system does not report it."""


CONTAINER_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file "),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file "),
)
"""Files with a container's memory limit, its usage and its statistics, and the entry for droppable cache in these."""


def available_bytes() -> int:
    """Available memory: the minimum over the machine, the container and the limit of the process."""
    limits, folder = [_machine()], Path("/sys/fs/cgroup")
    for most, usage, details, cache in CONTAINER_FILES:
        with suppress(OSError, ValueError, IndexError):  # no container, or "max"
            cached = (folder / details).read_text().split(cache)[1].split()[0]
            limits.append(int((folder / most).read_text()) - int((folder / usage).read_text()) + int(cached))
    with suppress(ImportError, OSError, ValueError):
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            limits.append(limit - int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize())
    return max(0, min(limits))


def check_memory(n_bytes: int, subject: str) -> None:
    """Raise an error if `subject` needs more than half of the available memory."""
    _check(n_bytes, available_bytes(), subject, "available memory")


def check_disk(n_bytes: int, subject: str) -> None:
    """Raise an error if `subject` needs more than half of the free disk space for temporary files."""
    _check(n_bytes, shutil.disk_usage(tempfile.gettempdir()).free, subject, "free disk space")


def _check(n_bytes: int, room: int, subject: str, noun: str) -> None:
    if n_bytes > room // 2:
        raise DataError(
            f"{subject} must fit in half of the {noun}, {room / 2**21:,.0f} MiB, but it declares "
            f"{n_bytes / 2**20:,.0f} MiB: check the file, or split it"
        )


def _machine() -> int:
    with suppress(OSError, IndexError, ValueError):
        return int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) << 10
    with suppress(OSError, AttributeError, ValueError):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return FALLBACK_BYTES
