"""The view of a run folder, read again only when the folder has changed. Nothing is written to it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from threading import Lock
from time import monotonic, thread_time
from typing import TYPE_CHECKING

from themis.errors import ThemisError, UsageError
from themis.runs.store.schema import DATABASE
from themis.suites.folder import is_running, is_suite

if TYPE_CHECKING:
    from themis.report.suite import SuiteView
    from themis.report.view import ReportView
    from themis.runs.store.reader import Reader

ReadView = Callable[["Reader"], "ReportView"]
"""Makes the view of a run, such as `read_view`."""
REST, MAX_REST = 4, 30.0
"""After reading the folder, leave it alone for `REST` times the processor time that took, and for at most `MAX_REST`
seconds: the campaign needs the machine too.
"""


@dataclass(frozen=True)
class Snapshot:
    """A view, its JSON form and a tag of that content; or, if there is no view, a message that says why."""

    view: ReportView | SuiteView | None = None
    body: bytes = b""
    tag: str = ""
    message: str = ""


class WatchedFolder:
    """A run folder that may not exist yet, may grow, and may disappear."""

    def __init__(self, path: str | Path, read: ReadView) -> None:
        self.path, self._read = Path(path), read
        self._lock = Lock()  # one thread reads at a time, however many requests wait
        self._state: tuple[object, bool] = (None, False)
        self._snapshot = Snapshot()
        self._rests_until = 0.0

    def look(self) -> Snapshot:
        """The view of the folder as it is now, or as it was a moment ago."""
        with self._lock:
            if not self._is_there():
                self._state, self._rests_until = (None, False), 0.0
                message = f"{self.path} does not contain a run yet: it is shown as soon as a campaign starts there"
                return Snapshot(message=message)
            if monotonic() >= self._rests_until:
                began = thread_time()
                self._refresh()
                self._rests_until = monotonic() + min(MAX_REST, REST * (thread_time() - began))
            return self._snapshot

    def _refresh(self) -> None:
        try:
            state = self._look_at_files()  # before reading: changes made meanwhile are noticed the next time
            if state == self._state:
                return
            view = self._view()
            body = json.dumps(view.as_json(), allow_nan=False, separators=(",", ":")).encode()
            self._state, self._snapshot = state, Snapshot(view, body, sha256(body).hexdigest()[:32])
        except Exception as error:  # whatever a damaged folder causes; the next look tries again
            text = str(error) if isinstance(error, ThemisError) else f"unexpected {type(error).__name__}: {error}"
            self._state, self._snapshot = (None, False), Snapshot(message=f"{self.path} cannot be shown now: {text}")

    def _is_there(self) -> bool:
        return (self.path / DATABASE).is_file()

    def _view(self) -> ReportView | SuiteView:
        with closing(_open(self.path)) as run:
            return self._read(run)

    def _look_at_files(self) -> tuple[object, bool]:
        """A value that changes with the folder: its files, and whether a running campaign is still running.

        A campaign that is killed changes no file. One that starts does, so a stopped run is not asked again.
        """
        files = _stamp(self.path)
        if files == self._state[0] and not self._state[1]:
            return self._state
        with closing(_open(self.path)) as run:
            return files, run.is_running()


class WatchedSuite(WatchedFolder):
    """The folder of a suite; its page has no links to the reports of members, which are not served."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, _no_run)

    def _is_there(self) -> bool:
        return is_suite(self.path)

    def _view(self) -> ReportView | SuiteView:
        from themis.report.suite import read_suite_view
        from themis.suites.result import SuiteRun

        return replace(read_suite_view(SuiteRun(self.path)), reports={})

    def _look_at_files(self) -> tuple[object, bool]:
        members = [entry for entry in sorted(os.listdir(self.path)) if (self.path / entry / DATABASE).is_file()]
        stamps = tuple(_stamp(self.path / folder) for folder in (".", *members))
        return (stamps, is_running(self.path)), False


def _no_run(run: Reader) -> ReportView:
    raise UsageError("a suite must be read as a whole, not as a run")


def _open(path: Path) -> Reader:
    from themis.runs.store.reader import Reader

    return Reader(path, is_brief=True)


def _stamp(folder: Path) -> frozenset[tuple[str, int, int, int]]:
    """Name, time, size and inode of each file, without the index of SQLite's log and empty logs: readers make those."""
    stamps = []
    for name in os.listdir(folder):
        try:
            status = os.stat(folder / name)
        except OSError:  # renamed or removed in the meantime, or a link to nowhere
            continue
        if status.st_size and not name.endswith("-shm"):
            stamps.append((name, status.st_mtime_ns, status.st_size, status.st_ino))
    return frozenset(stamps)
