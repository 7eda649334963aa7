"""A folder of long work that is gone on with: its plan, and every finished step, each a file of its own."""

from __future__ import annotations

import json
import warnings
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Any

from themis.errors import StoreError, UsageError
from themis.runs.environment import list_changes
from themis.runs.store.files import PART, Lock, explained, json_safe, write_file

PLAN, LOCK = "plan.json", "lock"


class PlannedFolder(ABC):
    """Where such work is kept; without a path, nowhere. One writer at a time."""

    work: str
    """What is kept, in a word."""

    def __init__(self, path: str | Path | None) -> None:
        self.path = None if path is None else Path(path)
        self._lock: Lock | None = None
        if self.path is None:
            return
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"out must be a folder, {self.path} is a file: name another")
        self._is_new = not self.path.exists()
        there = {each.name for each in self.path.iterdir()} if self.path.exists() else set()
        if there - {LOCK, PLAN + PART} and PLAN not in there:
            raise UsageError(f"out must be a new folder or one of a {self.work}, {self.path} holds other things")
        with explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(self.path / LOCK)

    @abstractmethod
    def decisive(self, record: dict[str, Any]) -> dict[str, Any]:
        """What of the plan's record decides the steps."""

    def close(self) -> None:
        """Let the next writer in; a new folder in which nothing was begun goes."""
        if self.path is None or self._lock is None:
            return
        self._lock.release()
        with suppress(OSError):  # another writer has come
            if self._is_new and [each.name for each in self.path.iterdir()] == [LOCK]:
                (self.path / LOCK).unlink()
                self.path.rmdir()

    def begin(self, record: dict[str, Any], environment: dict[str, Any]) -> None:
        """Write the plan, or refuse one that would change the steps that are there."""
        before, record = json_safe(self.read(PLAN)), json.loads(json.dumps(json_safe(record)))
        if before is None:
            self.write(PLAN, {**record, "environment": environment})
            return
        then = {name: value for name, value in before.items() if name != "environment"}
        if changes := list_changes(self.decisive(then), self.decisive(record)):
            raise UsageError(
                f"{self.path} holds another {self.work} ({'; '.join(changes)}): give the same options, or another "
                "folder"
            )
        self.write(PLAN, {**record, "environment": before["environment"]})
        if changes := list_changes(before["environment"], environment):
            warnings.warn(
                f"gone on with in another environment, so that last bits may differ: {'; '.join(changes)}",
                RuntimeWarning,
                stacklevel=3,
            )

    def within(self, name: str) -> Path | None:
        """A path inside; None where nothing is kept."""
        return None if self.path is None else self.path / name

    def read(self, name: str) -> Any:
        """A JSON file's content; None if there is none."""
        if self.path is None:
            return None
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise StoreError(f"{self.path / name} cannot be read: {error}; remove it to make it again") from error

    def write(self, name: str, content: Any) -> None:
        """A JSON file, there whole or not at all."""
        self.write_bytes(name, f"{json.dumps(json_safe(content), indent=2)}\n".encode())

    def write_bytes(self, name: str, content: bytes) -> None:
        """A file, there whole or not at all."""
        if self.path is None:
            return
        with explained(self.path):
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            write_file(self.path / name, content)
