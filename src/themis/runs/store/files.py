"""Atomic files, the lock on a folder, and the rules for files and folders that Themis may replace.

Nothing is written or deleted through a symbolic link, because a downloaded folder may contain links to other files.
"""

import errno
import json
import math
import os
import re
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from secrets import token_hex
from shlex import quote
from time import sleep
from typing import Any

from themis.errors import StoreError, ThemisError, UsageError
from themis.reading import open_regular
from themis.runs.store.schema import APPLICATION_ID, DATABASE, PARTS_FILE

LEFTOVER = re.compile(r"\.themis-[0-9a-f]{16}\.part(-wal|-shm|-journal)?")
"""Names of temporary files, and of the files that SQLite writes beside them."""
LOCK_SIGNATURE = b"Themis, process "
"""The beginning of a lock file; the number of the process follows."""
_NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
_FLAGS: int = os.O_RDWR | _NOFOLLOW | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def is_locked(path: Path) -> bool | None:
    """Whether a process holds the lock of a folder; None if the system cannot tell."""
    try:
        import fcntl

        with open_regular(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except (ImportError, OSError):
        return None
    return False


def write_file(path: Path, *content: bytes | memoryview) -> None:
    """Write a file from pieces of content, so that after a crash either the old or the new file is complete."""
    with replacement(path) as part, part.open("wb") as file:
        for piece in content:
            file.write(piece)


@contextmanager
def replacement(path: Path) -> Iterator[Path]:
    """A temporary file that replaces `path` at the end of the block; after an error, it is removed.

    The file is synced and renamed, then the folder is synced. The temporary name is random and created exclusively, so
    that it is neither a link nor the temporary file of another process.
    """
    refuse_special(path)
    part, file = _create_part(path.parent)
    is_done = False
    try:
        yield part
        os.fsync(file)
        refuse_special(path)
        if os.name != "posix":  # Windows does not rename open files
            os.close(file)
            file = -1
        os.replace(part, path)
        is_done = True
        sync(path.parent)
    finally:
        if file >= 0:
            os.close(file)
        if not is_done:
            with suppress(OSError):
                part.unlink()


def _create_part(folder: Path) -> tuple[Path, int]:
    """A new temporary file, which is locked while it is open so that `remove_leftovers` does not remove it."""
    while True:
        part = folder / f".themis-{token_hex(8)}.part"
        file = os.open(part, _FLAGS | os.O_CREAT | os.O_EXCL, 0o666)
        with suppress(OSError):  # without locks, as on some network file systems, leftovers are not removed either
            _lock(file)
        if _is_at(file, part):
            return part, file
        os.close(file)  # another process removed it before it was locked


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files that killed processes left in a folder, but no links and no files of running processes."""
    try:
        with os.scandir(folder) as entries:
            files = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    except OSError:
        return
    for name in sorted(filter(LEFTOVER.fullmatch, files), key=len):  # a database before the files beside it
        path = folder / name
        if not name.endswith(".part") and (folder / f"{name.rpartition('-')[0]}").exists():
            continue
        with suppress(OSError):
            file = os.open(path, _FLAGS)
            try:
                _lock(file)
                if os.name == "posix":
                    path.unlink()
            finally:
                os.close(file)
            if os.name != "posix":
                path.unlink()


def refuse_special(path: Path) -> None:
    """Refuse to write to a path that exists and is not a regular file."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        raise UsageError(f"{path} must not be a symbolic link: remove it, or name the file it points to")
    if stat.S_ISDIR(mode):
        raise UsageError(f"{path} must be a file, but it is a folder: name a file in it")
    if not stat.S_ISREG(mode):
        raise UsageError(f"{path} must be a regular file, but it is a device or a pipe: choose another path")


def refuse_links(root: Path, *names: str) -> None:
    """Refuse a folder if one of these paths in it, or a parent of one, is a symbolic link."""
    for name in names:
        path = root
        for part in Path(name).parts:
            path = path / part
            if path.is_symlink():
                raise UsageError(
                    f"{path} must not be a symbolic link, because Themis writes to {root} and never through a link: "
                    "replace the link by a copy of what it points to"
                )


def sync(path: Path) -> None:
    """Make a file's content or a folder's entries durable. Windows cannot open folders, and syncs entries itself."""
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
    """Plain data from containers and dataclasses, with None for every number that JSON cannot represent."""
    if is_dataclass(value):
        return {each.name: json_safe(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, dict):
        return {str(name): json_safe(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def explained(path: Path, *, is_run: bool = False) -> Iterator[None]:
    """Turn disk errors into a `StoreError` with a remedy; `is_run`: what the campaign has stored so far is safe."""
    try:
        yield
    except StoreError:
        raise
    except (OSError, sqlite3.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise StoreError(f"{path} cannot be written: {reason}; {_remedy(error, is_run)}") from error


def _remedy(error: OSError | sqlite3.Error, is_run: bool) -> str:
    safe = "; what was written before is safe, and themis resume runs the rest again" if is_run else ""
    number, text = getattr(error, "errno", None), str(error) if isinstance(error, sqlite3.Error) else ""
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "full" in text:
        return f"free some space{', or lower max_stored' if is_run else ''}{safe}"
    if number in (errno.EROFS, errno.EACCES, errno.EPERM) or "readonly" in text or "unable to open" in text:
        return "choose a folder that you may write to"
    if number in (errno.ENOENT, errno.ENOTDIR) and not is_run:
        return "choose another path"
    return f"check the disk{safe}"


class Lock:
    """Allows one writer per folder. The system releases the lock when the process ends, even if it is killed."""

    def __init__(self, path: Path) -> None:
        """Create the file if it does not exist (`is_new`), and write the number of this process into it."""
        self.path, self.is_new = path, False
        while True:
            self._file = self._open()
            try:
                self._acquire()
            except OSError as error:
                owner = re.sub(rb"\D", b"", _read(self._file)).decode() or "unknown"
                os.close(self._file)
                raise StoreError(
                    f"{path.parent} must have one writer, but process {owner} writes to it: wait, or stop it"
                ) from error
            if self.is_held():
                break
            os.close(self._file)  # the last owner has removed the file
        if not re.fullmatch(rb"(" + LOCK_SIGNATURE + rb")?\s*\d*\s*", _read(self._file)):
            os.close(self._file)
            raise UsageError(f"{path} must be a lock of Themis, but it holds something else: move it elsewhere")
        self._before, self._stat = _read(self._file), os.fstat(self._file)
        try:
            self._write(LOCK_SIGNATURE + f"{os.getpid():<10}\n".encode())  # always the same length
            if self.is_new:  # made durable, because it marks the folder as one of Themis
                os.fsync(self._file)
                sync(self.path.parent)
        except OSError:
            if self.is_new:
                with suppress(OSError):
                    path.unlink()
            os.close(self._file)
            raise

    def _open(self) -> int:
        while True:
            refuse_special(self.path)
            try:
                file = os.open(self.path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o666)
                self.is_new = True
                return file
            except FileExistsError:
                with suppress(FileNotFoundError):
                    file = os.open(self.path, _FLAGS)
                    self.is_new = False
                    return file

    def _acquire(self) -> None:
        """Lock the file; retries because a reader that checks for a running campaign holds the lock for a moment."""
        for _ in range(4):
            with suppress(OSError):
                return _lock(self._file)
            sleep(0.05)
        _lock(self._file)

    def _write(self, content: bytes) -> None:
        os.lseek(self._file, 0, os.SEEK_SET)
        os.write(self._file, content)
        if os.fstat(self._file).st_size > len(content):
            os.ftruncate(self._file, len(content))

    def restore(self) -> None:
        """Restore the file's content and time, because nothing else has changed in the folder."""
        self._write(self._before)
        with suppress(OSError):
            os.utime(self.path, ns=(self._stat.st_atime_ns, self._stat.st_mtime_ns), follow_symlinks=False)

    def is_held(self) -> bool:
        """Whether the locked file is still at its path, so that the folder was neither deleted nor moved."""
        return _is_at(self._file, self.path)

    def release(self) -> None:
        """Let the next writer in."""
        os.close(self._file)


class Claim:
    """A folder that only this process writes to. What the process created is removed again unless the run has begun."""

    def __init__(self, path: Path, folders: Sequence[str], lock: str = "run.lock") -> None:
        """Create the folder with these `folders` if they do not exist, and lock it."""
        self.path, self.is_begun = path, False
        self.created: list[Path] = []  # in order
        self._lock: Lock | None = None
        try:
            with explained(path):
                self._make_folder(path)
                self._lock = Lock(path / lock)
                if self._lock.is_new:
                    self.created.append(path / lock)
                for name in folders:
                    self._make_folder(path / name)
        except BaseException:
            self.release()
            raise

    @property
    def is_held(self) -> bool:
        """Whether the folder was neither deleted nor moved."""
        return self._lock is not None and self._lock.is_held()

    def _make_folder(self, path: Path) -> None:
        if not path.is_dir():
            path.mkdir(parents=True)
            self.created.append(path)

    def write(self, name: str, content: bytes) -> None:
        """Create a file."""
        write_file(self.path / name, content)
        self.created.append(self.path / name)

    def release(self) -> None:
        """Let others write to the folder."""
        for path in [] if self.is_begun else reversed(self.created):
            with suppress(OSError):  # it does not exist, or is a folder with other files
                path.rmdir() if path.is_dir() else path.unlink()
        if self._lock is not None:
            if not (self.is_begun or self._lock.is_new):
                self._lock.restore()
            self._lock.release()


def _read(file: int) -> bytes:
    os.lseek(file, 0, os.SEEK_SET)
    return os.read(file, 64)


def _is_at(file: int, path: Path) -> bool:
    """Whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except OSError:
        return False


if os.name == "posix":
    import fcntl

    def _lock(file: int) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

else:

    def _lock(file: int) -> None:
        import msvcrt

        os.lseek(file, 1 << 20, os.SEEK_SET)  # far beyond the text, which other processes must be able to read
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]


LOCK = "run.lock"
SIDECARS = (f"{DATABASE}-wal", f"{DATABASE}-shm", f"{DATABASE}-journal")
"""Files that SQLite writes beside the database."""
RUN_FOLDERS = ("tensors", "state")
FILES_BEFORE_TESTS = (LOCK, "config.yaml", "environment.json", PARTS_FILE, DATABASE, *SIDECARS)
"""Files that a run writes before its first test."""
PYTEST_NOTE = "pytest.json"
"""A file about the test and its session, which the pytest plugin writes into a folder before the run."""
RUN_FILES = (
    *FILES_BEFORE_TESTS,
    *RUN_FOLDERS,
    "summary.json",
    "report.html",
    "shrunk.json",
    "gates.json",
    "robustness.png",
    "faults.png",
)
"""Everything that Themis writes into a run folder, except for the folder `track` of the trackers."""

TEXT_MARK = "<!-- Written by Themis -->"
"""Marks XML, SVG and Markdown files, in the first line after an XML declaration."""
HTML_MARK = '<meta name="generator" content="Themis">'
"""Marks reports."""
SOFTWARE_MARK = "Themis"
"""Marks PNG files (as Software) and PDF files (as Creator)."""
REPLACE_REMEDY = "choose another, or replace it with --force"
_HEAD_BYTES, _TAIL_BYTES = 4096, 2048
"""Bytes at the start and at the end of a file in which a mark is searched for."""


def has_mark(path: Path) -> bool:
    """Whether a file is marked as written by Themis; tables, arrays and weights never are, so they are not replaced."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        tail = file.read()
    if head.startswith(b"<!DOCTYPE html>"):
        return HTML_MARK.encode() in head
    if head.startswith(b"<?xml"):
        return head.partition(b"?>")[2].lstrip().startswith(TEXT_MARK.encode())
    if head.startswith(b"\x89PNG"):
        return f"tEXtSoftware\0{SOFTWARE_MARK}".encode() in head
    if head.startswith(b"%PDF"):
        return f"/Creator ({SOFTWARE_MARK})".encode() in tail
    return head.startswith(TEXT_MARK.encode()) or head.lstrip(b"{ \r\n").startswith(b'"made_by": "themis ')


def made_by(command: str) -> dict[str, str]:
    """The first entry of a JSON file, which marks it as written by Themis."""
    from themis.version import __version__

    return {"made_by": f"themis {__version__} {command}"}


def check_free(path: Path, *, replaces: bool = False, remedy: str = REPLACE_REMEDY) -> None:
    """Refuse to write a file over one that Themis did not write; `replaces`: the user asked to replace it."""
    try:
        refuse_special(path)
        if not replaces and path.exists() and not has_mark(path):
            raise UsageError(f"the file must be new, but {path} exists: {remedy}")
    except ThemisError:
        raise
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}; choose another file") from error
    if not path.parent.is_dir():
        raise UsageError(f"the file must be in an existing folder, but {path.parent} does not exist: create it first")


@contextmanager
def fresh_file(path: Path, *, replaces: bool = False, remedy: str = REPLACE_REMEDY) -> Iterator[Path]:
    """A temporary file that becomes `path` once it is complete; an interruption leaves nothing."""
    check_free(path, replaces=replaces, remedy=remedy)
    remove_leftovers(path.parent)
    with explained(path), replacement(path) as part:
        yield part
        check_free(path, replaces=replaces, remedy=remedy)  # it may have been created in the meantime


def write_fresh(path: Path, content: bytes, *, replaces: bool = False, remedy: str = REPLACE_REMEDY) -> None:
    """Write a file that the user named."""
    with fresh_file(path, replaces=replaces, remedy=remedy) as part:
        part.write_bytes(content)


def list_folder(path: Path) -> list[str] | None:
    """The names in an output folder, without leftovers; None if the folder does not exist."""
    try:
        return sorted(name for name in os.listdir(path) if not LEFTOVER.fullmatch(name))
    except FileNotFoundError:
        if path.is_symlink():
            raise UsageError(f"out must be a folder, but {path} is a link to nothing: remove it") from None
        return None
    except NotADirectoryError:
        if path.exists():
            raise UsageError(f"out must be a folder, but {path} is a file: choose another path") from None
        return None


def refuse_folder(path: Path, names: Sequence[str], kind: str) -> UsageError:
    """The error for an output folder with files that are not from Themis."""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return UsageError(
        f"out must be a new or empty folder{kind}, but {path} contains other files ({shown}): choose another folder"
    )


def is_database(path: Path) -> bool:
    """Whether a file is the database of a run, judging by its header, without opening it in SQLite."""
    header = _head(path, 100)
    return header.startswith(b"SQLite format 3\0") and int.from_bytes(header[68:72], "big") == APPLICATION_ID


def was_signed(lock: Path) -> bool:
    """Whether a file is a lock that Themis has written."""
    return _head(lock, len(LOCK_SIGNATURE)) == LOCK_SIGNATURE


def _head(path: Path, n: int) -> bytes:
    """The first bytes of a regular file; empty for anything else, and if the file cannot be read."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return b""
        with path.open("rb") as file:
            return file.read(n)
    except OSError:
        return b""


def check_run_folder(path: Path) -> None:
    """Refuse a folder in which a run must not begin.

    A folder is accepted if it is new or empty, if it only has the note of the pytest plugin, or if its run was killed
    before its first test: it then has only the files written by that time, including a database or a signed lock.
    """
    names = list_folder(path) or []
    if has_database := is_database(path / DATABASE):
        if _has_started(path / DATABASE):
            raise UsageError(
                f"out must be a new folder, but {path} already holds a run: choose another, or resume it with "
                f"`themis resume {quote(str(path))}`"
            )
    elif set(names) <= {PYTEST_NOTE}:
        return
    others = [name for name in names if name not in (*FILES_BEFORE_TESTS, *RUN_FOLDERS, PYTEST_NOTE)] + tensors_in(path)
    files = [name for name in names if name not in (*RUN_FOLDERS, PYTEST_NOTE)]
    lock = path / LOCK
    is_empty = not lock.is_symlink() and (not lock.exists() or (lock.is_file() and lock.stat().st_size == 0))
    # The lock is empty if the power failed right after it was created.
    is_begun = has_database or was_signed(lock) or (files in ([], [LOCK]) and is_empty)
    if others or not is_begun:
        raise refuse_folder(path, others or files, "")


def tensors_in(path: Path) -> list[str]:
    return [f"{folder}/{name}" for folder in RUN_FOLDERS for name in list_folder(path / folder) or ()]


def _has_started(database: Path) -> bool:
    """Whether a run has begun its tests; True if the database cannot be read, so that it is not replaced."""
    uri = f"{database.resolve().as_uri()}?mode=ro"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            return connection.execute("SELECT 1 FROM run WHERE name = 'start'").fetchone() is not None
    except sqlite3.Error:
        return True
