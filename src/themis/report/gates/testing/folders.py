"""A run folder for each robustness test, also if several processes run tests at the same time."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from themis.reading import parse_json, read_regular
from themis.runs.store.ownership import NOTE, holds_only_run

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_NAME, MAX_NOTE = 100, 1 << 20
SESSION = pytest.StashKey[str]()


def claim(item: pytest.Item, folder: Path | None, temporary: Callable[[str], Path], call: int) -> Path:
    """Create a folder for a campaign: in `folder`, named after the test, or a temporary one.

    It replaces the folder of the same test from an earlier session, unless somebody has put other files into it.
    Further campaigns of this session (another call, a test that is run again, another worker) get folders of their own.
    """
    session = session_id(item.config)
    note = {"test": node_id(item), "call": call, "session": session}
    if folder is None:
        path = temporary(folder_name(item.name))
        write_note(path, note)
        return path
    folder.mkdir(parents=True, exist_ok=True)
    name, number = folder_name(node_id(item)), call
    while True:
        path = folder / (name if number == 1 else f"{name}-{number}")
        if is_stale(path, session):
            old = path.with_name(f".{path.name}.{uuid4().hex}")
            try:
                os.rename(path, old)  # atomic: another process may be about to do the same
            except FileNotFoundError:
                continue
            shutil.rmtree(old, ignore_errors=True)
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
            continue
        write_note(path, note)
        return path


def node_id(item: pytest.Item) -> str:
    """The node id of a test without the `@group` that xdist appends, so that it is the same in other sessions."""
    name, _, group = item.nodeid.rpartition("@")
    return name if name and "]" not in group and item.get_closest_marker("xdist_group") else item.nodeid


def folder_name(nodeid: str) -> str:
    """The node id of a test as the name of a folder; only the end of a long one."""
    return re.sub(r"[^\w.]+", "-", nodeid, flags=re.ASCII).strip("-.")[-MAX_NAME:].lstrip("-.") or "test"


def session_id(config: pytest.Config) -> str:
    """An id that is the same in all workers of a test session."""
    shared = getattr(config, "workerinput", {}).get("testrunuid")
    return str(shared) if shared else config.stash.setdefault(SESSION, uuid4().hex)


def write_note(path: Path, note: dict[str, Any]) -> None:
    (path / NOTE).write_text(json.dumps(note))


def read_note(path: Path) -> dict[str, Any] | None:
    """The note in a folder; None if there is none."""
    try:
        note = parse_json(read_regular(path / NOTE, MAX_NOTE))
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) else None


def is_stale(path: Path, session: str) -> bool:
    """Whether a folder is from an earlier session, and contains nothing that somebody else has put into it."""
    note = read_note(path)
    return note is not None and note.get("session", session) != session and holds_only_run(path)
