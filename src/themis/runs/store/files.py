"""Files that are there whole or not at all, and the lock on a run folder."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep

from themis.errors import StoreError

PART = ".part"
"""Ending of a file that is being written; whatever a killed process left of it is removed by the next writer."""


def write_file(path: Path, content: bytes) -> None:
    """Write a temporary file, sync it, rename it, sync the folder: after a crash the old or the new file is there."""
    part = path.with_name(path.name + PART)
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, durable. Windows cannot open folders and keeps names itself."""
    if os.name != "posix" and path.is_dir():
        return
    file = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn what goes wrong on the disk into an error that says what to do."""
    try:
        yield
    except sqlite3.Error as error:
        raise StoreError(f"{path} cannot be written: {error}; {_remedy(str(error))}") from error
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{path} cannot be written: {error.strerror or error}; {_remedy_for(error)}") from error


def _remedy_for(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return _remedy("full")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return _remedy("readonly")
    return _remedy("")


def _remedy(text: str) -> str:
    if "full" in text:
        return "free some space, or lower max_stored; what was found is kept, resume goes on from there"
    if "readonly" in text or "unable to open" in text:
        return "choose a folder that you may write to"
    if "malformed" in text or "not a database" in text:
        return "the file is damaged: restore it from a copy"
    return "check the disk; what was found is kept, resume goes on from there"


class Lock:
    """One writer a run folder. The system gives it back when the process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b")
        try:
            _lock_soon(self._file.fileno())
        except OSError as error:
            self._file.seek(0)
            owner = self._file.read(20).decode(errors="replace").strip() or "unknown"
            self._file.close()
            raise StoreError(
                f"{path.parent} must have one writer, process {owner} is running a campaign in it: wait for it, or "
                "stop it"
            ) from error
        self._file.truncate(0)
        self._file.write(str(os.getpid()).encode())
        self._file.flush()

    def release(self) -> None:
        """Let the next writer in."""
        self._file.close()


def _lock_soon(file: int) -> None:
    """A reader that asks whether a campaign runs holds the lock for an instant: try a few times."""
    for _ in range(4):
        try:
            return _lock(file)
        except OSError:
            sleep(0.05)
    _lock(file)


if os.name == "posix":
    import fcntl

    def _lock(file: int) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

else:

    def _lock(file: int) -> None:
        import msvcrt

        os.lseek(file, 1 << 20, os.SEEK_SET)  # far behind the text, which others must be able to read
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
