"""Files that are either complete or absent, JSON for them, and the lock on a run folder."""

from __future__ import annotations

import errno
import json
import math
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import Any

from themis.errors import StoreError

PART = ".part"
"""Suffix of a file that is being written; the next writer removes what a killed process left."""


def write_file(path: Path, content: bytes) -> None:
    """Write a temporary file, sync it, rename it, sync the folder: after a crash the old or the new file exists."""
    part = path.with_name(path.name + PART)
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, durable. Windows cannot open folders and syncs names itself."""
    if os.name != "posix" and path.is_dir():
        return
    file = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def as_json(value: Any, indent: int | None = None) -> bytes:
    """Plain data as the content of a JSON file."""
    return (json.dumps(json_safe(value), indent=indent, allow_nan=False) + "\n").encode()


def json_safe(value: Any) -> Any:
    """Plain data with None for every number that JSON cannot represent."""
    if isinstance(value, dict):
        return {name: json_safe(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn disk errors into an error that says what to do."""
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
        return "free some space, or lower max_stored; everything found so far is stored, and the run can be resumed"
    if "readonly" in text or "unable to open" in text:
        return "choose a folder that you may write to"
    if "malformed" in text or "not a database" in text:
        return "the file is damaged: restore it from a copy"
    return "check the disk; everything found so far is stored, and the run can be resumed"


class Lock:
    """Allows one writer per run folder. The system releases it when the process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b")
        try:
            _lock_with_retries(self._file.fileno())
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


def _lock_with_retries(file: int) -> None:
    """Try a few times: a reader that checks whether a campaign is running holds the lock for a moment."""
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

        os.lseek(file, 1 << 20, os.SEEK_SET)  # far beyond the text, which others must be able to read
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
