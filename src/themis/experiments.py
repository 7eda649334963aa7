"""Experiments: a plan, a folder, and cells, each of which is run once and stored as soon as it ends.

An experiment that is interrupted resumes with the same call: finished cells are loaded, the others are run. A plan that
would change finished cells is refused.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from themis.errors import StoreError, UsageError, warn
from themis.reading import Form, anything, parse_json, read_json, read_regular, record
from themis.runs.environment import list_changes
from themis.runs.store.files import (
    Lock,
    explained,
    json_safe,
    list_folder,
    made_by,
    refuse_folder,
    refuse_links,
    remove_leftovers,
    was_signed,
    write_file,
)

PLAN, LOCK = "plan.json", "lock"
MAX_BYTES = 256 << 20
"""Of a JSON file in the folder of an experiment."""
STORED_PLAN = record({"environment": record({})}, {"plan": record({}), "recipe": record({})})
OPTIONS = ("plan", "recipe")
"""Groups of options in the record of a plan."""


@dataclass(frozen=True)
class ExperimentPlan:
    """All that decides the cells of an experiment: stored in its folder, and compared when it is resumed."""

    record: dict[str, Any]
    """Options under `plan` and `recipe`, and what identifies the model and the data."""
    free: tuple[str, ...] = ()
    """Options of `plan` that may differ when the experiment is resumed: they change no finished cell."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The values of options that are None, where they are chosen by the task: None and this value are the same."""

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON stores it."""
        record: dict[str, Any] = json.loads(json.dumps(json_safe(self.record)))
        return record

    def changes_since(self, stored: dict[str, Any]) -> list[str]:
        """What would change finished cells, in words; `stored` is the record of an earlier call."""
        return list_changes(self._decisive(json_safe(stored)), self._decisive(self.as_dict()))

    def _decisive(self, record: dict[str, Any]) -> dict[str, Any]:
        """The values that decide cells, with all options at the top level."""
        values = {name: value for name, value in record.items() if name not in OPTIONS}
        for group in OPTIONS:
            values |= {
                name: self.defaults.get(name) if value is None else value
                for name, value in record.get(group, {}).items()
                if name not in self.free
            }
        return values


class ExperimentFolder:
    """The folder of an experiment, with one writer at a time; without a path, nothing is stored."""

    def __init__(self, path: str | Path | None, experiment: str, plan_file: str = PLAN) -> None:
        """experiment: its name in messages, such as comparison. plan_file: where the plan is stored."""
        self.path = None if path is None else Path(path)
        self.experiment, self.plan_file = experiment, plan_file
        self._lock: Lock | None = None
        if self.path is None:
            return
        names = list_folder(self.path)
        self._is_new = names is None
        if names and not self._is_begun(self.path, names):
            article = "an" if experiment[0] in "aeiou" else "a"
            raise refuse_folder(self.path, names, f", or the folder of {article} {experiment}")
        refuse_links(self.path, LOCK, plan_file)
        with explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(self.path / LOCK)
            for folder, _, _ in os.walk(self.path):  # links are not followed
                remove_leftovers(Path(folder))

    def _is_begun(self, path: Path, names: list[str]) -> bool:
        """Whether an experiment has begun in a folder: it has a plan, or nothing but a lock."""
        above = Path(self.plan_file).parent.parent  # several experiments of one kind can share a folder
        plans = [path / PLAN] if self.plan_file == PLAN else list((path / above).glob(f"*/{PLAN}"))
        if any(map(is_plan, plans)):
            return True
        is_unwritten = names == [LOCK] and (path / LOCK).stat().st_size == 0  # the power failed
        return names == [LOCK] and (is_unwritten or was_signed(path / LOCK))

    def close(self) -> None:
        """Release the folder; if nothing was stored, what this object created is removed."""
        if self.path is None or self._lock is None:
            return
        with suppress(OSError):  # it was deleted
            if self._lock.is_new and self._lock.is_held() and os.listdir(self.path) == [LOCK]:
                (self.path / LOCK).unlink()
                if self._is_new:
                    self.path.rmdir()
        self._lock.release()

    def begin(self, plan: ExperimentPlan, environment: dict[str, Any]) -> None:
        """Store the plan, or refuse one that would change finished cells."""
        stored = self.read(self.plan_file, STORED_PLAN)
        if stored is None:
            self.write(self.plan_file, {**made_by(self.experiment), **plan.as_dict(), "environment": environment})
            return
        mark = {"made_by": stored.pop("made_by", None)}
        before = {name: value for name, value in stored.pop("environment").items() if name in environment}
        if changes := plan.changes_since(stored):
            raise UsageError(
                f"{self.path} holds another {self.experiment} ({'; '.join(changes)}): pass the same options, or choose "
                "another folder"
            )
        self.write(self.plan_file, {**mark, **plan.as_dict(), "environment": before})
        if changes := list_changes(json_safe(before), environment):
            warn(f"resumed in another environment, so the last bits may differ: {'; '.join(changes)}")

    def within(self, name: str) -> Path | None:
        """A path in the folder, free of links below it; None if nothing is stored."""
        if self.path is None:
            return None
        self._check_exists()
        refuse_links(self.path, name)
        return self.path / name

    def _check_exists(self) -> None:
        if self._lock is not None and not self._lock.is_held():
            raise StoreError(
                f"{self.path} was deleted or moved while its {self.experiment} was running: if it was deleted, all "
                "results so far are lost; if it was moved, the same command with --out and its new place continues"
            )

    def read(self, name: str, form: Form = anything) -> Any:
        """The content of a JSON file, which must have this form; None if there is no such file."""
        if self.path is None:
            return None
        problem = "cannot be read: {}; remove it to create it again"
        return read_json(self.path / name, form, problem, max_bytes=MAX_BYTES, has_nan=True)

    def write(self, name: str, content: Any) -> None:
        """Write a JSON file atomically."""
        self.write_bytes(name, f"{json.dumps(json_safe(content), indent=2)}\n".encode())

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write a file atomically."""
        if self.path is None:
            return
        self._check_exists()
        refuse_links(self.path, name)
        with explained(self.path / name):
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            write_file(self.path / name, content)


def is_plan(path: Path) -> bool:
    """Whether a file is the plan of an experiment."""
    try:
        plan = parse_json(read_regular(path, MAX_BYTES), has_nan=True)
    except (OSError, ValueError):
        return False
    return isinstance(plan, dict) and str(plan.get("made_by", "")).startswith("themis ")


class Cell(Protocol):
    """One unit of work: a frozen value that can be hashed and pickled. `str(cell)` names it in messages."""

    @property
    def file(self) -> str:
        """Where its result is stored, relative to the results of the experiment; no two cells share it."""

    @property
    def group(self) -> str:
        """Cells of one group share costly preparation, such as fitting a criterion: one worker should run them."""


@dataclass(frozen=True)
class CellEnd:
    """A cell that has just ended."""

    cell: Cell
    result: Any = field(repr=False)
    text: str
    """The cell and how it ended, in one line."""
    error: str | None
    """Why it failed; None if it has a result."""
    n_done: int
    n_cells: int


class Listener:
    """Is notified of the progress of an experiment; the methods do nothing unless they are overridden."""

    def on_note(self, text: str) -> None:
        """Something that the user should know, such as what is being prepared."""

    def on_cells(self, n_done: int, n_cells: int, noun: str) -> None:
        """Cells are about to run; `n_done` were finished by an earlier call. noun: what one cell is called."""

    def on_progress(self, text: str) -> None:
        """Something has happened within a cell, such as an epoch of a training."""

    def on_cell_end(self, end: CellEnd) -> None:
        """A cell has ended, and its result is stored."""
