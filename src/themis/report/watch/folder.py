"""The view of a run folder, read again only when the folder has changed. Nothing is written to it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Lock
from time import monotonic, thread_time
from typing import TYPE_CHECKING, Any

from themis.errors import ThemisError
from themis.runs.store.schema import DATABASE

if TYPE_CHECKING:
    from themis.runs.store.reader import Reader

Read = Callable[["Reader"], dict[str, Any]]
"""What makes a view of a run, as `read_view` does."""
REST, LONGEST_REST = 4, 30.0
"""For how many times the processor time of a reading the folder is left alone after it, and for how many seconds at
most: the campaign needs the machine too.
"""


@dataclass(frozen=True)
class Shown:
    """A view as it is sent, with a name of its content; or, without one, why there is none."""

    body: bytes = b""
    tag: str = ""
    message: str = ""


class Folder:
    """A run folder that may not exist yet, may grow, and may go."""

    def __init__(self, path: str | Path, read: Read) -> None:
        self.path, self._read = Path(path), read
        self._lock = Lock()  # one reading at a time, however many ask
        self._state: tuple[object, bool] = (None, False)
        self._shown = Shown()
        self._rests_until = 0.0

    def look(self) -> Shown:
        """The view as the folder is now, or was a moment ago."""
        with self._lock:
            if not (self.path / DATABASE).is_file():
                self._state, self._rests_until = (None, False), 0.0
                return Shown(message=f"{self.path} holds no run yet: it is shown as soon as a campaign begins there")
            if monotonic() >= self._rests_until:
                began = thread_time()
                self._refresh()
                self._rests_until = monotonic() + min(LONGEST_REST, REST * (thread_time() - began))
            return self._shown

    def _refresh(self) -> None:
        try:
            state = self._look_at_files()  # before the reading: what changes meanwhile is seen the next time
            if state == self._state:
                return
            with closing(_open(self.path)) as run:
                body = json.dumps(self._read(run), allow_nan=False, separators=(",", ":")).encode()
            self._state, self._shown = state, Shown(body, sha256(body).hexdigest()[:32])
        except Exception as error:  # whatever a damaged folder leads to; the next look tries again
            text = str(error) if isinstance(error, ThemisError) else f"unexpected {type(error).__name__}: {error}"
            self._state, self._shown = (None, False), Shown(message=f"{self.path} cannot be shown now: {text}")

    def _look_at_files(self) -> tuple[object, bool]:
        """What tells whether there is anything new: the files, and whether a campaign that ran still does.

        A campaign that is killed changes no file. One that begins does, so a run that rests is not asked.
        """
        files = _stamp(self.path)
        if files == self._state[0] and not self._state[1]:
            return self._state
        with closing(_open(self.path)) as run:
            return files, run.is_running()


def _open(path: Path) -> Reader:
    from themis.runs.store.reader import Reader

    return Reader(path, is_brief=True)


def _stamp(folder: Path) -> frozenset[tuple[str, int, int, int]]:
    """Name, time, size and number of each file; not SQLite's index of the log, and no empty log: readers make these."""
    found = []
    for name in os.listdir(folder):
        try:
            status = os.stat(folder / name)
        except FileNotFoundError:  # renamed or removed since
            continue
        if status.st_size and not name.endswith("-shm"):
            found.append((name, status.st_mtime_ns, status.st_size, status.st_ino))
    return frozenset(found)
