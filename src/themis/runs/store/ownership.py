"""Which files and folders Themis may write to: the rule that every command follows.

A file that the user names is written if it does not exist, if it carries the mark of Themis, or if the user asked to
replace it. A folder that the user names is written if it does not exist, if it is empty, or if it certainly is one that
Themis has begun. Links are refused everywhere, see `files`.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from shlex import quote

from themis.errors import StoreError, ThemisError, UsageError
from themis.runs.store.files import LEFTOVER, SIGNATURE, explained, refuse_special, remove_leftovers, replacement
from themis.runs.store.schema import APPLICATION, DATABASE, PARTS

LOCK = "run.lock"
SIDECARS = (f"{DATABASE}-wal", f"{DATABASE}-shm", f"{DATABASE}-journal")
"""Files that SQLite writes beside the database."""
RUN_FOLDERS = ("tensors", "state")
BEGUN_FILES = (LOCK, "config.yaml", "environment.json", PARTS, DATABASE, *SIDECARS)
"""What a run writes before its first test."""
NOTE = "pytest.json"
"""The note of the pytest plugin about the test and the session of a folder, which is there before the run."""
RUN_FILES = (
    *BEGUN_FILES,
    *RUN_FOLDERS,
    "summary.json",
    "report.html",
    "shrunk.json",
    "gates.json",
    "robustness.png",
    "faults.png",
)
"""All that Themis writes in a run folder, except for `track`, where trackers write."""

COMMENT = "<!-- Written by Themis -->"
"""The mark of XML, SVG and Markdown, in the first line after an XML declaration."""
GENERATOR = '<meta name="generator" content="Themis">'
"""The mark of a report."""
SOFTWARE = "Themis"
"""The mark of PNG (Software) and PDF (Creator)."""
REMEDY = "choose another, or replace it with --force"
_START, _END = 4096, 2048
"""Bytes at the start and at the end of a file in which the mark must be."""


def has_mark(path: Path) -> bool:
    """Whether a file says that Themis wrote it; tables, arrays and weights never do, so they are never replaced."""
    with path.open("rb") as file:
        head = file.read(_START)
        file.seek(max(0, path.stat().st_size - _END))
        tail = file.read()
    if head.startswith(b"<!DOCTYPE html>"):
        return GENERATOR.encode() in head
    if head.startswith(b"<?xml"):
        return head.partition(b"?>")[2].lstrip().startswith(COMMENT.encode())
    if head.startswith(b"\x89PNG"):
        return f"tEXtSoftware\0{SOFTWARE}".encode() in head
    if head.startswith(b"%PDF"):
        return f"/Creator ({SOFTWARE})".encode() in tail
    return head.startswith(COMMENT.encode()) or head.lstrip(b"{ \r\n").startswith(b'"made_by": "themis ')


def made_by(command: str) -> dict[str, str]:
    """The mark of a JSON file, its first key."""
    from themis.version import __version__

    return {"made_by": f"themis {__version__} {command}"}


def check_free(path: Path, *, replaces: bool = False, remedy: str = REMEDY) -> None:
    """Refuse a file that must not be written; `replaces`: the user asked to replace it."""
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
def fresh_file(path: Path, *, replaces: bool = False, remedy: str = REMEDY) -> Iterator[Path]:
    """A temporary file that becomes `path` once it is written completely: an interruption leaves nothing."""
    check_free(path, replaces=replaces, remedy=remedy)
    remove_leftovers(path.parent)
    with explained(path), replacement(path) as part:
        yield part
        check_free(path, replaces=replaces, remedy=remedy)  # it may have been created in the meantime


def write_fresh(path: Path, content: bytes, *, replaces: bool = False, remedy: str = REMEDY) -> None:
    """Write a file that the user named."""
    with fresh_file(path, replaces=replaces, remedy=remedy) as part:
        part.write_bytes(content)


def list_folder(path: Path) -> list[str] | None:
    """The names in a folder that results shall be written to, without leftovers; None if it does not exist."""
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
    """The error for a folder that Themis has not begun."""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return UsageError(
        f"out must be a new or empty folder{kind}, but {path} contains other files ({shown}): choose another folder"
    )


def is_database(path: Path) -> bool:
    """Whether a file is the database of a run, from its header: SQLite does not have to open it."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return False
        with path.open("rb") as file:
            header = file.read(100)
    except OSError:
        return False
    return header.startswith(b"SQLite format 3\0") and int.from_bytes(header[68:72], "big") == APPLICATION


def was_signed(lock: Path) -> bool:
    """Whether a file is the lock of a folder that Themis has begun."""
    try:
        if not stat.S_ISREG(lock.lstat().st_mode):
            return False
        with lock.open("rb") as file:
            return file.read(len(SIGNATURE)) == SIGNATURE
    except OSError:
        return False


def check_run_folder(path: Path) -> None:
    """Refuse a folder in which a run must not begin.

    Accepted are a new folder, an empty one, one with the note of the pytest plugin, and one whose run was killed before
    its first test: it has only files that Themis writes by then, and the database of a run or a signed lock.
    """
    names = list_folder(path) or []
    if has_database := is_database(path / DATABASE):
        if _has_started(path / DATABASE):
            raise UsageError(
                f"out must be a new folder, but {path} already holds a run: choose another, or resume it with "
                f"`themis resume {quote(str(path))}`"
            )
    elif set(names) <= {NOTE}:
        return
    others = [name for name in names if name not in (*BEGUN_FILES, *RUN_FOLDERS, NOTE)]
    for folder in RUN_FOLDERS:
        if folder in names:
            others += [f"{folder}/{name}" for name in list_folder(path / folder) or ()]
    files = [name for name in names if name not in (*RUN_FOLDERS, NOTE)]
    is_begun = has_database or was_signed(path / LOCK) or (files in ([], [LOCK]) and _is_empty(path / LOCK))
    if others or not is_begun:
        raise refuse_folder(path, others or files, "")


def holds_only_run(path: Path) -> bool:
    """Whether a folder contains only what Themis writes in a run folder, so that it can be removed as a whole."""
    if path.is_symlink():
        return False
    names = list_folder(path) or []
    inside = [name for folder in RUN_FOLDERS if folder in names for name in list_folder(path / folder) or ()]
    return set(names) <= {*RUN_FILES, NOTE} and all(name.endswith(".safetensors") for name in inside)


def _has_started(database: Path) -> bool:
    """Whether a run has begun its tests."""
    uri = f"{database.resolve().as_uri()}?mode=ro"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            return connection.execute("SELECT 1 FROM run WHERE name = 'start'").fetchone() is not None
    except sqlite3.Error:
        return True  # it is damaged, or of another version: not to be replaced


def _is_empty(lock: Path) -> bool:
    """Whether a lock has no content yet: the power failed right after it was created."""
    return not lock.is_symlink() and (not lock.exists() or (lock.is_file() and lock.stat().st_size == 0))
